"""Undoing in reverse order."""

from cluster.unwinding import Unwinding
from configs.errors import WorkerError


def test_last_step_is_undone_first():
    order = []
    unwinding = Unwinding()
    for name in ("a", "b", "c"):
        unwinding.add(name, lambda name=name: order.append(name))
    assert unwinding.run() == []
    assert order == ["c", "b", "a"]


def test_failing_step_is_named_and_the_others_are_undone():
    order = []
    unwinding = Unwinding()

    def fail():
        raise WorkerError("no")

    unwinding.add("a", lambda: order.append("a"))
    unwinding.add("b", fail)
    assert unwinding.run() == ["b"]
    assert order == ["a"]


def test_nothing_is_undone_twice():
    order = []
    unwinding = Unwinding()
    unwinding.add("a", lambda: order.append("a"))
    unwinding.run()
    unwinding.run()
    assert order == ["a"]


def test_step_added_while_undoing_is_undone_too():
    order = []
    unwinding = Unwinding()
    unwinding.add("a", lambda: unwinding.add("late", lambda: order.append("late")))
    unwinding.run()
    assert order == ["late"]
