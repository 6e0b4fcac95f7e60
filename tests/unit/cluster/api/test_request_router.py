import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.request_router import WorkerLoad, choose_worker, draw_seed
from configs.errors import NoWorkerError, RequestTooLargeError
from configs.ids import WorkerId


def load(name, num_open, max_request_tokens=100):
    return WorkerLoad(WorkerId(name), num_open, max_request_tokens)


def test_worker_with_the_fewest_requests_is_chosen():
    assert choose_worker([load("a", 3), load("b", 1), load("c", 2)], 10) == "b"


def test_tie_goes_to_the_first_name():
    assert choose_worker([load("b", 1), load("a", 1)], 10) == "a"


def test_worker_that_cannot_hold_the_request_is_passed_over():
    assert choose_worker([load("a", 0, 5), load("b", 9)], 10) == "b"


def test_without_workers_there_is_none_to_take_the_request():
    with pytest.raises(NoWorkerError):
        choose_worker([], 10)


def test_request_that_fits_nowhere_states_both_sizes():
    with pytest.raises(RequestTooLargeError, match="11 tokens exceed the 10"):
        choose_worker([load("a", 0, 5), load("b", 0, 10)], 11)


@settings(deadline=None)
@given(
    loads=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 20)), min_size=1, max_size=6),
    num_tokens=st.integers(1, 20),
)
def test_choice_depends_on_loads_and_not_on_their_order(loads, num_tokens):
    named = [load(f"w{i}", *values) for i, values in enumerate(loads)]
    if all(worker.max_request_tokens < num_tokens for worker in named):
        return
    chosen = choose_worker(named, num_tokens)
    assert chosen == choose_worker(named[::-1], num_tokens)
    best = min(worker.num_open for worker in named if worker.max_request_tokens >= num_tokens)
    assert next(worker for worker in named if worker.worker == chosen).num_open == best


def test_drawn_seeds_differ_and_fit_a_signed_64_bit_number():
    seeds = {draw_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 1 << 63 for seed in seeds)
