"""Real attention and expert workers in this process, on a real checkpoint; no Ray."""

import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

from actors.attention_service import AttentionService
from actors.expert_service import ExpertService
from actors.snapshot_transport import SnapshotPeer
from actors.worker_settings import (
    AttentionServiceSettings,
    ComputeSettings,
    ExpertServiceSettings,
    SnapshotSettings,
)
from cluster.api.gateway_settings import AttentionEndpoint
from configs.ids import Generation, WorkerId
from configs.numerics import FloatType, Numerics
from model.checkpoint import Checkpoint
from router.membership import Membership
from router.placement import plan_initial_placement
from router.settings import RouterSettings


class Pool:
    """Workers that serve."""

    def __init__(self, dims, endpoints, attention):
        self.dims = dims
        self.endpoints = endpoints
        self.attention = attention

    @property
    def is_idle(self):
        """Whether no worker holds or queues a request."""
        return all(
            worker.stats().running_requests + worker.stats().queued_requests == 0
            and worker.stats().used_blocks + worker.stats().used_slots == 0
            for worker in self.attention
        )


@contextmanager
def pool_in_process(
    checkpoint,
    *,
    num_attention=1,
    num_experts=2,
    num_blocks=32,
    context_tokens=512,
    num_slots=4,
    numerics=Numerics.FAST,
    snapshots=None,
):
    dims = Checkpoint.open(checkpoint, mla_norm_eps=1e-6).dims
    compute = ComputeSettings(
        checkpoint=checkpoint,
        mla_norm_eps=1e-6,
        dtype=FloatType.FLOAT32,
        numerics=numerics,
        device="cpu",
        num_threads=1,
    )
    experts = [WorkerId(f"expert-{index}") for index in range(num_experts)]
    placement = plan_initial_placement(
        moe_layers=dims.moe_layers, num_experts=dims.moe.num_experts, workers=experts
    )
    sockets = Path(tempfile.mkdtemp(prefix="lmt-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, sockets)
        infos = []
        for name in experts:
            expert = ExpertService(
                ExpertServiceSettings(
                    worker=name,
                    compute=compute,
                    memory_bytes=None,
                    merge_window_s=0.0,
                    spin_s=0.0,
                    transports=("shm", "tcp"),
                    host="127.0.0.1",
                    sockets=sockets,
                )
            )
            stack.callback(expert.stop)
            infos.append(expert.load(placement))
        endpoints, attention = [], []
        for index in range(num_attention):
            name = WorkerId(f"attention-{index}")
            worker = AttentionService(
                AttentionServiceSettings(
                    worker=name,
                    compute=compute,
                    router=RouterSettings(latent_size=dims.moe.latent_size, spin_s=0.0),
                    context_tokens=context_tokens,
                    num_blocks=num_blocks,
                    block_tokens=16,
                    num_state_slots=num_slots,
                    max_step_tokens=64,
                    max_queued_requests=64,
                    host=None,
                    sockets=sockets,
                    snapshots=SnapshotSettings() if snapshots is None else snapshots,
                )
            )
            stack.callback(worker.stop)
            worker.load()
            address = worker.connect(Membership(Generation(1), tuple(infos)), placement)
            endpoints.append(AttentionEndpoint(name, address))
            attention.append(worker)
        peers = [
            SnapshotPeer(endpoint.worker, worker.vault_address)
            for endpoint, worker in zip(endpoints, attention, strict=True)
        ]
        for worker in attention:
            worker.set_peers(peers)
        yield Pool(dims, endpoints, attention)
