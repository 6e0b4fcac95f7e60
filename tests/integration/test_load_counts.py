"""Counts of a real attention worker equal the choices of its model exactly."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace

import pytest

from actors.load_recorder import LoadRecorder
from actors.request_channel import Sampling, Submit
from cluster.api import load
from cluster.api.client import LatentmeshClient
from cluster.api.generated.latentmesh.v1 import fabric_pb2, fabric_pb2_grpc
from cluster.api.load import LoadQuestion
from cluster.cli import main
from cluster.cluster_load import describe_load
from configs import errors
from configs.ids import Generation, RequestId, WorkerId
from configs.numerics import Numerics
from model.checkpoint import Checkpoint
from router.latent_router import LatentRouter
from router.membership import Membership
from router.placement import plan_initial_placement
from router.settings import RouterSettings
from tests.fakes.gateway_house import answer_of, ask, error_of
from tests.fakes.mini_cluster import make_engine, mini_cluster
from tests.fakes.pool_in_process import pool_in_process


class CountingLane:
    """Counts what the decoder picks, before the router sees it."""

    def __init__(self, lane, counts):
        self._lane = lane
        self._counts = counts

    def begin(self, layer, z_TL, expert_ids_TK, weights_TK):
        for expert in expert_ids_TK.reshape(-1).tolist():
            self._counts[layer, expert] += 1
        return self._lane.begin(layer, z_TL, expert_ids_TK, weights_TK)

    def finish(self, ticket):
        return self._lane.finish(ticket)


class CountingRouter:
    """A router whose lanes count."""

    def __init__(self, router):
        self._router = router
        self.counts = defaultdict(int)

    def lane(self, *, step, lane):
        return CountingLane(self._router.lane(step=step, lane=lane), self.counts)

    def wait_any(self, tickets, *, deadline):
        self._router.wait_any(tickets, deadline=deadline)

    def abandon_step(self):
        self._router.abandon_step()


class PoolLoad:
    """The load source of workers in this process."""

    def __init__(self, workers):
        self._workers = workers

    async def load(self, question):
        heard = {WorkerId(f"a{i}"): [one.load_rows(0)] for i, one in enumerate(self._workers)}
        return describe_load(question, heard)


class StuckLoad:
    """A load source that never answers."""

    async def load(self, question):
        del question
        await asyncio.Event().wait()


def test_every_step_is_counted_as_the_model_chose(golden_dir, tmp_path):
    checkpoint = Checkpoint.open(golden_dir / "mini")
    dims = checkpoint.dims
    recorder = LoadRecorder(
        layers=dims.moe_layers,
        num_experts=dims.moe.num_experts,
        num_rows=128,
        max_step_tokens=64,
    )
    with mini_cluster(
        checkpoint, num_attention=0, num_experts=2, transport="shm", directory=tmp_path
    ) as cluster:
        router = LatentRouter(
            worker=WorkerId("attention-9"),
            settings=RouterSettings(latent_size=dims.moe.latent_size, transport="shm"),
            observer=recorder,
        )
        infos = tuple(expert.info for expert in cluster.experts)
        router.connect(Membership(Generation(1), infos))
        router.set_placement(
            plan_initial_placement(
                moe_layers=dims.moe_layers,
                num_experts=dims.moe.num_experts,
                workers=[info.worker for info in infos],
            )
        )
        counting = CountingRouter(router)
        engine = make_engine(checkpoint, counting, Numerics.FAST)
        # A long prompt beside short ones: prefill and decode lanes in one step.
        for number, length in enumerate((100, 7, 30)):
            prompt = [(5 * i + number) % 256 for i in range(length)]
            engine.submit(Submit(RequestId(f"r{number}"), 0, prompt, 9, Sampling(), []), 0.0)
        num_steps = 0
        while engine.num_live:
            engine.step(0.0)
            recorder.end_step()
            rows = recorder.read(num_steps)
            counted = {
                (layer, expert): int(num)
                for layer, counts_E in zip(rows.layers, rows.counts_RLE.sum(axis=0), strict=True)
                for expert, num in enumerate(counts_E)
                if num
            }
            assert counted == dict(counting.counts)
            counting.counts.clear()
            num_steps = rows.next_row
        router.close()
    assert num_steps > 9


@pytest.mark.asyncio
async def test_a_gateway_tells_the_load_of_its_workers(house, golden_dir):
    with pool_in_process(golden_dir / "mini", num_attention=2) as pool:
        gateway = await house.gateway(
            *(SimpleNamespace(name=one.worker, address=one.address) for one in pool.endpoints),
            load=PoolLoad(pool.attention),
            vocab_size=pool.dims.vocab_size,
        )
        stub = await house.stub(gateway)
        answers = [answer_of(stub.Generate(ask(*range(5, 25 + i), max_tokens=4))) for i in range(6)]
        await asyncio.gather(*answers)
        with LatentmeshClient(gateway.bound.grpc) as client:
            view = await asyncio.to_thread(client.load_quantiles, LoadQuestion(num_hottest=1))
        stats = [one.stats() for one in pool.attention]
        # The last token of an answer is not computed with.
        num_tokens = sum(one.prompt_tokens + one.output_tokens for one in stats) - len(answers)
        for layer in view.layers:
            total = round(layer.mean_picks * view.num_buckets)
            assert total == num_tokens * pool.dims.moe.num_experts_per_token
        assert view.hottest[0].mean_picks > 0


@pytest.mark.asyncio
async def test_questions_are_refused_at_the_door_and_silence_has_a_deadline(house, monkeypatch):
    monkeypatch.setattr(load, "LOAD_TIMEOUT_S", 0.05)
    gateway = await house.gateway(await house.worker(), load=StuckLoad())
    fabric = fabric_pb2_grpc.ExpertFabricServiceStub(await house.channel(gateway))
    bad = fabric_pb2.GetLoadQuantilesRequest(quantiles=[2.0])
    error, status = await error_of(fabric.GetLoadQuantiles(bad))
    assert (type(error), status.name) == (errors.InvalidRequestError, "INVALID_ARGUMENT")
    error, status = await error_of(fabric.GetLoadQuantiles(fabric_pb2.GetLoadQuantilesRequest()))
    assert (type(error), status.name) == (errors.TransportTimeoutError, "UNAVAILABLE")


@pytest.mark.asyncio
async def test_a_gateway_beside_which_nothing_is_recorded_says_so(house, capsys, tmp_path):
    gateway = await house.gateway(await house.worker())
    picture = tmp_path / "load.png"
    arguments = ["load", "--server", gateway.bound.grpc, "--picture", str(picture)]
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(main, arguments)
    assert ended.value.code == 0
    assert "no load" in capsys.readouterr().out
    assert not picture.exists()
