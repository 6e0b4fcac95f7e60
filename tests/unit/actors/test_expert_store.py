from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.expert_merge import PairBatch
from actors.expert_store import ExpertStore
from configs.errors import DeviceTooSmallError, PlacementError
from configs.ids import Epoch, WorkerId
from configs.numerics import FloatType, Numerics
from model.experts import expert_ffn
from router.placement import LayerPlacement, Placement
from tests.fakes.expert_rig import (
    ACTIVATION,
    LATENT_SIZE,
    LAYERS,
    NUM_EXPERTS,
    RandomExperts,
    make_store,
    place,
    store_settings,
    worker_names,
)

WORKERS = worker_names(2)
ME = WORKERS[0]


def experts_array(*experts: int) -> np.ndarray:
    return np.array(experts, np.uint32)


def batch_of(z_NL: torch.Tensor, rows: list[int], experts: list[int]) -> PairBatch:
    return PairBatch(
        layer=1,
        wire_dtype=FloatType.FLOAT32,
        latents=z_NL.view(torch.uint8).numpy(),
        rows_P=np.array(rows, np.uint32),
        experts_P=np.array(experts, np.uint32),
    )


class Progress:
    def __init__(self) -> None:
        self.num_bytes = 0

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


def test_a_worker_loads_its_own_experts_and_no_others() -> None:
    source = RandomExperts()
    store = make_store(ME, place(WORKERS), source)
    for placed in place(WORKERS).layers:
        assert store.experts_of(placed.layer) == placed.experts_of(ME)
    assert len(source.loaded) == store.num_experts == len(LAYERS) * NUM_EXPERTS // 2


def test_progress_counts_the_bytes_that_are_held() -> None:
    progress = Progress()
    store = ExpertStore(worker=ME, settings=store_settings())
    store.load(place(WORKERS), RandomExperts(), progress=progress)
    assert progress.num_bytes == store.num_bytes > 0


def test_experts_that_are_held_are_not_loaded_again() -> None:
    source = RandomExperts()
    store = make_store(ME, place(WORKERS), source)
    num_loaded = len(source.loaded)
    store.load(place(WORKERS), source)
    assert len(source.loaded) == num_loaded


def test_a_worker_without_experts_in_a_layer_knows_its_epoch() -> None:
    store = make_store(WorkerId("expert-9"), place(WORKERS), RandomExperts())
    store.check(1, Epoch(1), experts_array())
    with pytest.raises(PlacementError, match="does not hold expert 0 of layer 1; it holds 0"):
        store.check(1, Epoch(1), experts_array(0))


def test_slots_beyond_the_budget_are_refused_with_the_bytes_and_nothing_is_loaded() -> None:
    source = RandomExperts()
    expert_bytes = source.expert_bytes(torch.float32)
    store = ExpertStore(worker=ME, settings=store_settings(memory_bytes=9 * expert_bytes - 1))
    with pytest.raises(
        DeviceTooSmallError,
        match=f"needs {9 * expert_bytes} bytes for 9 experts, its budget is {9 * expert_bytes - 1}",
    ):
        store.load(place(WORKERS), source)
    assert source.loaded == []


def test_slots_of_exactly_the_budget_fit() -> None:
    source = RandomExperts()
    budget = 9 * source.expert_bytes(torch.float32)
    store = ExpertStore(worker=ME, settings=store_settings(memory_bytes=budget))
    store.load(place(WORKERS), source)
    assert store.num_bytes == budget


@pytest.mark.parametrize(
    ("layer", "epoch", "experts", "message"),
    [
        (9, 1, (0,), r"holds no experts of layer 9; layers: \[1, 2\]"),
        (1, 4, (0,), r"knows epochs \[1\] of layer 1, the frame is of epoch 4"),
        (1, 1, (0, 1), "does not hold expert 1 of layer 1; it holds 5: 0, 2, 4, 6, 8"),
        (1, 1, (0, 99), r"has experts 0\.\.8, the frame names 99"),
    ],
    ids=["layer", "epoch", "expert", "unknown"],
)
def test_what_is_not_here_is_named(
    layer: int, epoch: int, experts: tuple[int, ...], message: str
) -> None:
    store = make_store(ME, place(WORKERS), RandomExperts())
    with pytest.raises(PlacementError, match=message):
        store.check(layer, Epoch(epoch), experts_array(*experts))


def test_an_old_epoch_and_its_experts_hold_until_they_are_retired() -> None:
    source = RandomExperts()
    store = make_store(ME, place(WORKERS), source)
    holders = tuple((ME,) if expert == 1 else (WORKERS[1],) for expert in range(NUM_EXPERTS))
    moved = Placement(
        layers=tuple(LayerPlacement(layer=i, epoch=Epoch(2), holders=holders) for i in LAYERS)
    )
    store.load(moved, source)
    store.check(1, Epoch(1), experts_array(0, 2))
    store.check(1, Epoch(2), experts_array(1))
    store.retire(moved)
    assert store.experts_of(1) == (1,)
    with pytest.raises(PlacementError, match="knows epochs"):
        store.check(1, Epoch(1), experts_array(1))
    with pytest.raises(PlacementError, match="does not hold expert 0"):
        store.check(1, Epoch(2), experts_array(0))


def test_a_placement_of_another_number_of_experts_is_refused() -> None:
    store = make_store(ME, place(WORKERS), RandomExperts())
    other = Placement(layers=(LayerPlacement(layer=1, epoch=Epoch(2), holders=((WORKERS[1],),)),))
    with pytest.raises(PlacementError, match="has 9 experts, the placement places 1"):
        store.load(other, RandomExperts())


def test_a_layer_that_a_placement_leaves_out_is_retired() -> None:
    store = make_store(ME, place(WORKERS), RandomExperts())
    store.retire(Placement(layers=place(WORKERS).layers[:1]))
    assert store.experts_of(2) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pairs_are_answered_in_their_order_whatever_stands_beside_them(dtype: torch.dtype) -> None:
    source = RandomExperts()
    store = make_store(ME, place([ME]), source, dtype=dtype)
    torch.manual_seed(0)
    z_NL = torch.randn(50, LATENT_SIZE)
    rows = torch.randint(0, 50, (200,)).tolist()
    experts = torch.randint(0, NUM_EXPERTS, (200,)).tolist()
    y_PL, num_reads = store.run(batch_of(z_NL, rows, experts))
    assert num_reads == len(set(experts))
    assert y_PL.dtype is dtype
    for i in range(0, 200, 17):
        weights = source.load_expert(1, experts[i], dtype=dtype, device=torch.device("cpu"))
        alone = expert_ffn(
            weights,
            z_NL[rows[i]][None].to(dtype),
            activation=ACTIVATION,
            numerics=Numerics.INVARIANT,
        )
        assert torch.equal(y_PL[i], alone[0])


def test_no_pairs_need_no_weights() -> None:
    store = make_store(ME, place([ME]), RandomExperts())
    y_PL, num_reads = store.run(batch_of(torch.zeros(0, LATENT_SIZE), [], []))
    assert (y_PL.shape, num_reads) == ((0, LATENT_SIZE), 0)
