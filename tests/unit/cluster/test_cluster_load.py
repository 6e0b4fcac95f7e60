"""What is told of the rows of several attention workers, and its way over the proto."""

from __future__ import annotations

import numpy as np
import pytest

from actors.load_recorder import LoadRows
from cluster.api.generated.latentmesh.v1 import fabric_pb2
from cluster.api.load import LoadQuestion, read_load, read_question, write_load, write_question
from cluster.cluster_load import describe_load
from configs.errors import InvalidRequestError
from configs.ids import WorkerId

A, B = WorkerId("attention-0"), WorkerId("attention-1")


def make_rows(*counts: list[list[int]], first: int = 0) -> LoadRows:
    return LoadRows(
        counts_RLE=np.array(counts, np.uint16),
        ended_at_R=np.arange(len(counts)) * 0.1 + 0.05,
        layers=(1, 2),
        life=1.0,
        first=first,
        num_dropped=0,
        num_left=0,
    )


STEPS = make_rows([[4, 0, 0], [1, 1, 1]], [[8, 2, 0], [1, 1, 1]])


def test_workers_add_up_and_the_hottest_come_first() -> None:
    view = describe_load(LoadQuestion(num_hottest=2), {A: [STEPS], B: [STEPS]}, [WorkerId("c")])
    assert (view.num_buckets, view.workers, view.silent_workers) == (2, (A, B), ("c",))
    assert [one.layer for one in view.layers] == [1, 2]
    assert view.layers[0].picks_QE.tolist() == [[8, 0, 0], [16, 4, 0]]
    assert view.layers[0].mean_picks == 14
    assert view.layers[0].peak_to_average == pytest.approx(12 / (14 / 3))
    assert view.layers[1].peak_to_average == 1
    first, second = view.hottest
    assert (first.layer, first.expert, first.picks) == (1, 0, (8, 16))
    assert first.share == pytest.approx(12 / 14)
    assert (second.layer, second.expert) == (1, 1)


def test_nothing_recorded_is_told_without_layers() -> None:
    for heard in ({}, {A: []}):
        view = describe_load(LoadQuestion(), heard, [B])
        assert (view.num_buckets, view.layers, view.silent_workers) == (0, (), (B,))


def test_layers_can_be_chosen_and_unknown_ones_are_refused() -> None:
    view = describe_load(LoadQuestion(layers=(2,)), {A: [STEPS]})
    assert [one.layer for one in view.layers] == [2]
    with pytest.raises(InvalidRequestError, match=r"layers \[7\] have no routed experts"):
        describe_load(LoadQuestion(layers=(2, 7)), {A: [STEPS]})


def test_answers_that_no_client_would_take_are_refused() -> None:
    wide = LoadRows(np.ones((1, 92, 896), np.uint16), np.ones(1), tuple(range(92)), 1.0, 0, 0, 0)
    question = LoadQuestion(quantiles=tuple(np.linspace(0, 1, 8)))
    with pytest.raises(InvalidRequestError, match="659,456 loads are asked for"):
        describe_load(question, {A: [wide]})
    assert len(describe_load(LoadQuestion(), {A: [wide]}).layers) == 92
    summary = LoadQuestion(quantiles=question.quantiles, is_summary=True, num_hottest=3)
    assert len(describe_load(summary, {A: [wide]}).hottest) == 3


def test_a_view_comes_over_the_wire_whole() -> None:
    view = describe_load(LoadQuestion(num_hottest=3), {A: [STEPS]}, [B])
    got = read_load(
        fabric_pb2.GetLoadQuantilesResponse.FromString(write_load(view).SerializeToString())
    )
    assert write_load(got) == write_load(view)
    assert got.layers[0].picks_QE.tolist() == view.layers[0].picks_QE.tolist()
    question = LoadQuestion((0.25,), (1, 2), 5, is_summary=True)
    assert read_question(write_question(question)) == question


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"quantiles": [1.5]}, r"outside 0\.\.1"),
        ({"quantiles": [float("nan")]}, r"outside 0\.\.1"),
        ({"quantiles": [0.5] * 17}, "at most 16"),
        ({"num_hottest": 1025}, "at most 1024"),
    ],
)
def test_questions_that_cannot_be_answered_are_refused(
    request_: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read_question(fabric_pb2.GetLoadQuantilesRequest(**request_))
