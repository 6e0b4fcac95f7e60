from __future__ import annotations

import numpy as np
import pytest

from configs.errors import RoutingError
from configs.ids import Epoch, WorkerId
from router.pairs import EXPERT, ROW, WEIGHT, PairOrder, list_pairs, rank_pairs
from router.placement import LayerPlacement
from router.routes import index_placement

ROUTES = index_placement(
    LayerPlacement(layer=7, epoch=Epoch(1), holders=((WorkerId("expert-a"),),) * 4)
)


def rank(*rows: list[int]) -> PairOrder:
    ids = np.array(rows, np.int64)
    weights = (ids / 10).astype(np.float32)
    return rank_pairs(list_pairs(ids, weights, layer=7), len(rows), ROUTES)


def test_pairs_are_listed_token_by_token() -> None:
    weights = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    pairs = list_pairs(np.array([[2, 0], [1, 3]]), weights, layer=7)
    assert pairs[ROW].tolist() == [0, 0, 1, 1]
    assert pairs[EXPERT].tolist() == [2, 0, 1, 3]
    assert pairs[WEIGHT].view(np.float32).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_weights_keep_their_bits() -> None:
    weights = np.array([[-0.0, np.inf, 1e-45]], np.float32)
    pairs = list_pairs(np.array([[2, 1, 0]]), weights, layer=7)
    assert pairs[WEIGHT].tobytes() == weights.tobytes()


def test_the_canonical_order_is_by_rank_of_the_expert_then_by_token() -> None:
    order = rank([2, 0], [1, 3])
    assert order.positions_P.tolist() == [1, 2, 0, 3]
    assert order.weights_P.tolist() == np.array([0.0, 0.1, 0.2, 0.3], np.float32).tolist()


def test_no_pairs_have_an_empty_order() -> None:
    ids = np.empty((0, 4), np.int64)
    order = rank_pairs(list_pairs(ids, ids.astype(np.float32), layer=7), 0, ROUTES)
    assert order.positions_P.size == order.weights_P.size == 0


@pytest.mark.parametrize("expert", [4, 1000, -1], ids=str)
def test_an_unknown_expert_is_named(expert: int) -> None:
    with pytest.raises(RoutingError, match=rf"token 1 picks expert {expert}, experts are 0..3"):
        rank([0], [expert])


def test_an_expert_picked_twice_by_a_token_is_named() -> None:
    with pytest.raises(RoutingError, match="layer 7: token 1 picks expert 2 twice"):
        rank([0, 1, 2], [2, 0, 2])


def test_choices_of_different_shapes_are_refused() -> None:
    with pytest.raises(RoutingError, match=r"\(2, 1\) and weights \(1, 2\)"):
        list_pairs(np.zeros((2, 1), np.int64), np.zeros((1, 2), np.float32), layer=7)
