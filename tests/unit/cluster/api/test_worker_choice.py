import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.worker_choice import (
    PREFIX_EXTRA_REQUESTS,
    PREFIX_TOKENS_PER_REQUEST,
    WorkerLoad,
    choose_worker,
)
from configs.errors import NoWorkerError, RequestTooLargeError
from configs.ids import WorkerId


def load(name, num_open, max_request_tokens=100, **kwargs):
    return WorkerLoad(WorkerId(name), num_open, max_request_tokens, **kwargs)


def test_worker_with_the_fewest_requests_is_chosen():
    assert choose_worker([load("a", 3), load("b", 1), load("c", 2)], 10) == "b"


def test_tie_goes_to_the_first_name():
    assert choose_worker([load("b", 1), load("a", 1)], 10) == "a"


def test_worker_that_cannot_hold_the_request_is_passed_over():
    assert choose_worker([load("a", 0, 5), load("b", 9)], 10) == "b"


def test_without_workers_there_is_none_to_take_the_request():
    with pytest.raises(NoWorkerError):
        choose_worker([], 10)


def test_draining_worker_is_passed_over_whatever_it_has():
    drained = load("a", 0, is_draining=True, prefix_tokens=9000)
    assert choose_worker([drained, load("b", 9)], 10) == "b"
    with pytest.raises(NoWorkerError):
        choose_worker([drained], 10)


def test_request_that_fits_nowhere_states_both_sizes():
    with pytest.raises(RequestTooLargeError, match="11 tokens exceed the 10"):
        choose_worker([load("a", 0, 5), load("b", 0, 10)], 11)


def test_longest_prefix_wins_over_load():
    loads = [load("a", 0), load("b", 2, prefix_tokens=64), load("c", 3, prefix_tokens=128)]
    assert choose_worker(loads, 10) == "c"


def test_equal_prefixes_go_to_the_less_loaded_worker():
    loads = [load("a", 2, prefix_tokens=64), load("b", 1, prefix_tokens=64), load("c", 0)]
    assert choose_worker(loads, 10) == "b"


@pytest.mark.parametrize(("excess", "expected"), [(0, "b"), (1, "a")], ids=["at", "above"])
@pytest.mark.parametrize("num_kilo", [0, 3])
def test_prefix_wins_only_up_to_its_bound_of_load(excess, expected, num_kilo):
    tokens = 64 + num_kilo * PREFIX_TOKENS_PER_REQUEST
    bound = 1 + PREFIX_EXTRA_REQUESTS + num_kilo
    loads = [load("a", 1), load("b", bound + excess, prefix_tokens=tokens)]
    assert choose_worker(loads, 10) == expected


LOADS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 20), st.booleans(), st.sampled_from([0, 64, 3000])),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(loads=LOADS, num_tokens=st.integers(1, 20))
def test_choice_fits_does_not_drain_and_does_not_depend_on_the_order(loads, num_tokens):
    named = [
        load(f"w{i}", num_open, limit, is_draining=drains, prefix_tokens=prefix)
        for i, (num_open, limit, drains, prefix) in enumerate(loads)
    ]
    fitting = [
        worker
        for worker in named
        if worker.max_request_tokens >= num_tokens and not worker.is_draining
    ]
    if not fitting:
        return
    chosen = choose_worker(named, num_tokens)
    assert chosen == choose_worker(named[::-1], num_tokens)
    [chosen_load] = [worker for worker in fitting if worker.worker == chosen]
    least = min(worker.num_open for worker in fitting)
    assert chosen_load.num_open <= least + PREFIX_EXTRA_REQUESTS + 3
    if not any(worker.prefix_tokens for worker in fitting):
        assert chosen_load.num_open == least
