"""Workers in processes of their own and a gateway in this one, for benchmarks of whole requests.

Two attention and two expert workers on one checkpoint, `numerics: invariant`, joined by shared
memory and Unix sockets; no Ray.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from actors.attention_service import AttentionService
from actors.expert_service import ExpertService
from actors.snapshot_transport import SnapshotPeer
from actors.worker_settings import (
    AttentionServiceSettings,
    ComputeSettings,
    ExpertServiceSettings,
    SnapshotSettings,
)
from cluster.api.gateway import Gateway
from cluster.api.gateway_settings import AttentionEndpoint, GatewaySettings
from cluster.api.topology import TopologyView
from configs.errors import WorkerError
from configs.ids import GatewayId, Generation, WorkerId
from configs.numerics import FloatType, Numerics
from model.dims import ModelDims
from router.membership import Membership
from router.placement import plan_initial_placement
from router.settings import RouterSettings

TIMEOUT_S = 120.0
BLOCK_TOKENS = 64
BLOCKS_PER_STREAM = 8
MLA_NORM_EPS = 1e-6


class NoTopology:
    """Nobody asks."""

    async def snapshot(self) -> TopologyView:
        """Refuse."""
        raise WorkerError("the benchmark has no topology")


def run_service(make: Callable[[Any], Any], settings: object, pipe: Connection) -> None:
    """Make a service and do with it what is asked, until told to end."""
    service = make(settings)
    while (order := pipe.recv()) is not None:
        name, arguments = order
        try:
            value = getattr(service, name)
            pipe.send((True, value(*arguments) if callable(value) else value))
        except Exception as exc:  # noqa: BLE001 - told to the one who measures
            pipe.send((False, f"{type(exc).__name__}: {exc}"))
    service.stop()


class Remote:
    """A service in a process of its own."""

    def __init__(self, make: Callable[[Any], Any], settings: object) -> None:
        """Start the process."""
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=run_service, args=(make, settings, far), daemon=True)
        self._process.start()

    def call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - whatever it returns
        """Call a method, or read a property."""
        self._pipe.send((name, arguments))
        if not self._pipe.poll(TIMEOUT_S):
            raise SystemExit(f"{name}: no answer within {TIMEOUT_S} s")
        is_done, value = self._pipe.recv()
        if not is_done:
            raise SystemExit(f"{name}: {value}")
        return value

    def stop(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join(timeout=20)
        self._process.kill()


@dataclass(slots=True)
class Pool:
    """Workers that serve."""

    attention: list[Remote] = field(default_factory=list)
    endpoints: list[AttentionEndpoint] = field(default_factory=list)


def start_pool(
    stack: ExitStack, checkpoint: Path, dims: ModelDims, snapshots: SnapshotSettings, streams: int
) -> Pool:
    """Start two attention workers, each with room for `streams`, and two expert workers."""
    sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmb-")))
    compute = ComputeSettings(
        checkpoint, MLA_NORM_EPS, FloatType.FLOAT32, Numerics.INVARIANT, "cpu", num_threads=1
    )
    names = [WorkerId("expert-0"), WorkerId("expert-1")]
    placement = plan_initial_placement(
        moe_layers=dims.moe_layers, num_experts=dims.moe.num_experts, workers=names
    )
    infos = []
    for name in names:
        expert = ExpertServiceSettings(
            name, compute, None, 0.0, 0.0, ("shm",), host="127.0.0.1", sockets=sockets
        )
        remote = Remote(ExpertService, expert)
        stack.callback(remote.stop)
        infos.append(remote.call("load", placement))
    pool, peers = Pool(), []
    for name in (WorkerId("attention-0"), WorkerId("attention-1")):
        settings = AttentionServiceSettings(
            worker=name,
            compute=compute,
            router=RouterSettings(latent_size=dims.moe.latent_size, spin_s=0.0),
            context_tokens=dims.context_tokens,
            num_blocks=streams * BLOCKS_PER_STREAM,
            block_tokens=BLOCK_TOKENS,
            num_state_slots=streams,
            max_step_tokens=512,
            max_queued_requests=1024,
            host=None,
            sockets=sockets,
            snapshots=snapshots,
        )
        remote = Remote(AttentionService, settings)
        stack.callback(remote.stop)
        remote.call("load")
        address = remote.call("connect", Membership(Generation(1), tuple(infos)), placement)
        pool.attention.append(remote)
        pool.endpoints.append(AttentionEndpoint(name, address))
        peers.append(SnapshotPeer(name, remote.call("vault_address")))
    for remote in pool.attention:
        remote.call("set_peers", peers)
    return pool


async def start_gateway(pool: Pool, dims: ModelDims) -> Gateway:
    """Start a gateway for token ids."""
    settings = GatewaySettings(
        gateway=GatewayId("g0"),
        host="127.0.0.1",
        grpc_port=0,
        http_port=0,
        model_name="k3",
        max_message_bytes=1 << 20,
        max_running_requests=1024,
        drain_timeout_s=1.0,
        vocab_size=dims.vocab_size,
        context_tokens=dims.context_tokens,
        eos_token_ids=dims.eos_token_ids,
        tokenizer_folder=None,
    )
    return await Gateway.start(settings, pool.endpoints, NoTopology())
