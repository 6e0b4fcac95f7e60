"""Grammars are made in a line of their own, and what concerns their requests waits behind them."""

import threading

import pytest

from actors.grammar_line import GrammarLine
from actors.request_channel import Cancel, Credit
from configs.errors import InvalidRequestError
from tests.fakes.engine_rig import submit
from tests.fakes.recording_sink import WAIT_S


class Rig:
    """A line whose work waits to be let go, and what it delivered."""

    def __init__(self):
        self.may_make = threading.Event()
        self.line = GrammarLine("grammars", self.make)
        self.delivered = []
        self.has_delivered = threading.Semaphore(0)

    def make(self, message):
        assert self.may_make.wait(WAIT_S)
        if message.grammar == "bad":
            raise InvalidRequestError("bad grammar")
        return [None] * message.num_choices

    def add(self, message):
        def deliver(made):
            self.delivered.append((message, made))
            self.has_delivered.release()

        self.line.add(message, deliver)

    def wait_for(self, num_messages):
        for _ in range(num_messages):
            assert self.has_delivered.acquire(timeout=WAIT_S)


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.may_make.set()
    made.line.close()


def test_only_grammars_and_what_follows_them_concern_the_line(rig):
    with_grammar = submit("a", grammar="x", choices=3)
    assert rig.line.concerns(with_grammar)
    assert not rig.line.concerns(submit("b"))
    assert not rig.line.concerns(Cancel("a", 0))
    rig.add(with_grammar)
    concerned = [Cancel("a", 0), Credit("a", 0, 5), Cancel("a.2", 0)]
    assert all(map(rig.line.concerns, concerned))
    assert not any(map(rig.line.concerns, [Cancel("a", 1), Cancel("b", 0), Cancel("", 0)]))


def test_a_cancel_comes_after_its_request(rig):
    rig.add(submit("a", grammar="x", choices=2))
    rig.add(Cancel("a.1", 0))
    rig.may_make.set()
    rig.wait_for(2)
    (first, made), (second, nothing) = rig.delivered
    assert (first.request_id, made.result()) == ("a", [None, None])
    assert (second, nothing) == (Cancel("a.1", 0), None)
    assert not rig.line.concerns(Cancel("a", 0))


def test_a_name_is_free_again_only_when_all_of_that_name_are_delivered(rig):
    rig.may_make.set()
    for _ in range(2):
        rig.add(submit("a", grammar="x"))
    rig.wait_for(2)
    rig.line.close()
    assert not rig.line.concerns(Cancel("a", 0))


def test_a_refusal_is_delivered(rig):
    rig.may_make.set()
    rig.add(submit("a", grammar="bad"))
    rig.wait_for(1)
    [(_, made)] = rig.delivered
    with pytest.raises(InvalidRequestError, match="bad grammar"):
        made.result()


def test_closing_delivers_what_is_in_line_and_takes_no_more(rig):
    for name in "ab":
        rig.add(submit(name, grammar="x"))
    closing = threading.Thread(target=rig.line.close)
    closing.start()
    # The second is cancelled at once; the first goes on to its end.
    rig.wait_for(1)
    rig.may_make.set()
    closing.join(WAIT_S)
    rig.wait_for(1)
    assert {m.request_id: made.cancelled() for m, made in rig.delivered} == {"a": False, "b": True}
    rig.add(submit("c", grammar="x"))
    assert len(rig.delivered) == 2
