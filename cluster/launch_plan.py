"""What a launch starts: names and settings of every worker and of the gateway. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from actors.worker_settings import (
    AttentionServiceSettings,
    ComputeSettings,
    ExpertServiceSettings,
    SnapshotSettings,
)
from cluster.api.gateway_settings import (
    AccessSettings,
    ConnectionSettings,
    GatewaySettings,
    TlsSettings,
)
from cluster.api.topology import ModelView
from cluster.state_store import server_name
from configs.errors import ConfigError
from configs.ids import ClusterId, GatewayId, WorkerId
from configs.resolve import ResolvedConfig
from configs.schema import TlsConfig
from model.dims import ModelDims
from router.placement import Placement, plan_initial_placement
from router.settings import RouterSettings
from router.transport.connect import TransportKind

LOOPBACK = "127.0.0.1"
GATEWAY = GatewayId("gw0")


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """What the gateway's replica is told. Crosses process boundaries."""

    cluster: ClusterId
    version: str
    settings: GatewaySettings
    model: ModelView
    attention_workers: tuple[WorkerId, ...]
    expert_workers: tuple[WorkerId, ...]
    state_url: str
    config_json: str
    start_timeout_s: float
    """How long it waits for the attention workers."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything a launch starts but the state server and Ray."""

    cluster: ClusterId
    attention: tuple[AttentionServiceSettings, ...]
    experts: tuple[ExpertServiceSettings, ...]
    placement: Placement
    config_json: str
    """The resolved configuration, secrets left out."""

    @property
    def attention_workers(self) -> tuple[WorkerId, ...]:
        """Names, in order."""
        return tuple(settings.worker for settings in self.attention)

    @property
    def expert_workers(self) -> tuple[WorkerId, ...]:
        """Names, in order."""
        return tuple(settings.worker for settings in self.experts)


def plan_launch(
    resolved: ResolvedConfig, dims: ModelDims, *, cluster: ClusterId, sockets: Path, host: str
) -> LaunchPlan:
    """Name and configure the workers.

    Args:
        resolved: What runs.
        dims: Shape of the checkpoint.
        cluster: Name of this launch.
        sockets: Folder of this launch's sockets.
        host: Address that workers bind: loopback for a cluster on one machine.

    Raises:
        ConfigError: The transport is not built.
    """
    serving = resolved.serving
    transport = serving.router.transport
    if transport == "nccl":
        raise ConfigError("router.transport nccl is not built; use auto, shm or tcp")
    transports: tuple[TransportKind, ...] = ("shm", "tcp") if transport == "auto" else (transport,)
    router = RouterSettings(
        latent_size=dims.moe.latent_size,
        wire_dtype=serving.router.wire_dtype,
        combine=resolved.combine,
        dispatch_timeout_s=serving.router.dispatch_timeout_s,
        connect_timeout_s=serving.router.connect_timeout_s,
        shm_bytes=serving.router.shm_bytes,
        spin_s=serving.router.spin_s,
        transport=transport,
    )
    attention = tuple(
        AttentionServiceSettings(
            worker=WorkerId(f"attention-{number}"),
            compute=_compute(resolved, num_threads=resolved.attention_threads),
            router=router,
            context_tokens=resolved.context_tokens,
            num_blocks=resolved.num_blocks,
            block_tokens=serving.attention_pool.block_tokens,
            num_state_slots=serving.attention_pool.num_state_slots,
            max_step_tokens=serving.attention_pool.max_step_tokens,
            max_queued_requests=serving.attention_pool.max_queued_requests,
            host=None if host == LOOPBACK else host,
            sockets=sockets,
            snapshots=_snapshots(resolved),
            load_window_steps=serving.router.load_window_steps,
        )
        for number in range(serving.attention_pool.num_workers)
    )
    memory = serving.expert_pool.memory_bytes
    experts = tuple(
        ExpertServiceSettings(
            worker=WorkerId(f"expert-{number}"),
            compute=_compute(resolved, num_threads=resolved.expert_threads),
            memory_bytes=None if memory == "auto" else memory,
            merge_window_s=serving.expert_pool.merge_window_s,
            spin_s=serving.router.spin_s,
            transports=transports,
            host=host,
            sockets=sockets,
        )
        for number in range(serving.expert_pool.num_workers)
    )
    placement = plan_initial_placement(
        moe_layers=dims.moe_layers,
        num_experts=dims.moe.num_experts,
        workers=[settings.worker for settings in experts],
    )
    return LaunchPlan(
        cluster=cluster,
        attention=attention,
        experts=experts,
        placement=placement,
        config_json=describe_config(resolved),
    )


def plan_gateway(
    plan: LaunchPlan,
    resolved: ResolvedConfig,
    dims: ModelDims,
    *,
    version: str,
    state_url: str,
    tokenizer_folder: Path | None,
    start_timeout_s: float,
) -> GatewayPlan:
    """Configure the gateway of a launch."""
    api = resolved.serving.api
    return GatewayPlan(
        cluster=plan.cluster,
        version=version,
        settings=GatewaySettings(
            gateway=GATEWAY,
            host=api.host,
            grpc_port=api.grpc_port,
            http_port=api.http_port,
            model_name=api.model_name,
            max_message_bytes=api.max_message_bytes,
            max_running_requests=api.max_running_requests,
            drain_timeout_s=api.drain_timeout_s,
            move_timeout_s=api.move_timeout_s,
            vocab_size=dims.vocab_size,
            context_tokens=resolved.context_tokens,
            eos_token_ids=dims.eos_token_ids,
            tokenizer_folder=tokenizer_folder,
            trace_exporter=resolved.serving.observability.trace_exporter,
            access=AccessSettings(
                needs_key=resolved.access.needs_key,
                key_file=None if api.auth.key_file is None else api.auth.key_file.absolute(),
                state_url=state_url,
                cache_s=api.auth.cache_s,
                requests_per_minute=api.auth.requests_per_minute,
                max_concurrent_requests=api.auth.max_concurrent_requests,
            ),
            tls=tls_settings(api.tls),
            connections=ConnectionSettings(**api.connections.model_dump()),
        ),
        model=ModelView(
            name=api.model_name,
            context_tokens=resolved.context_tokens,
            vocab_size=dims.vocab_size,
            has_tokenizer=tokenizer_folder is not None,
            num_layers=dims.num_layers,
            num_experts=dims.moe.num_experts,
            num_experts_per_token=dims.moe.num_experts_per_token,
            hidden_size=dims.hidden_size,
            latent_size=dims.moe.latent_size,
        ),
        attention_workers=plan.attention_workers,
        expert_workers=plan.expert_workers,
        state_url=state_url,
        config_json=plan.config_json,
        start_timeout_s=start_timeout_s,
    )


def tls_settings(tls: TlsConfig) -> TlsSettings | None:
    """Return the files of TLS; None where it is off."""
    if tls.certificate is None or tls.private_key is None:
        return None
    return TlsSettings(
        certificate=tls.certificate.absolute(),
        private_key=tls.private_key.absolute(),
        client_ca=None if tls.client_ca is None else tls.client_ca.absolute(),
    )


def describe_config(resolved: ResolvedConfig) -> str:
    """Return a resolved configuration as JSON. A password in `state.url` is left out."""
    tree = resolved.serving.model_dump(mode="json")
    url = tree["state"]["url"]
    if url != "embedded":
        tree["state"]["url"] = f"{url.partition('://')[0]}://{server_name(url)}"
    derived = {
        name: value for name, value in asdict(resolved).items() if name not in ("serving", "notes")
    }
    return json.dumps({"serving": tree, "resolved": derived, "notes": list(resolved.notes)})


def _snapshots(resolved: ResolvedConfig) -> SnapshotSettings:
    config = resolved.serving.attention_pool.snapshots
    return SnapshotSettings(
        memory_bytes=resolved.snapshot_bytes,
        interval_tokens=config.interval_tokens,
        min_gain_tokens=config.min_gain_tokens,
        copy_interval_tokens=config.copy_interval_tokens,
        folder=None if config.folder is None else config.folder.absolute(),
        max_stored_bytes=config.max_stored_bytes,
        transfer_timeout_s=config.transfer_timeout_s,
    )


def _compute(resolved: ResolvedConfig, *, num_threads: int) -> ComputeSettings:
    serving = resolved.serving
    return ComputeSettings(
        checkpoint=serving.checkpoint.absolute(),
        mla_norm_eps=serving.model.mla_norm_eps,
        dtype=serving.model.compute_dtype,
        numerics=serving.numerics,
        device=resolved.device,
        num_threads=num_threads,
    )
