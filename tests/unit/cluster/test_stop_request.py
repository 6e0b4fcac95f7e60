"""Asking to stop, once and twice."""

import pytest

from cluster.stop_request import StopRequest, StopRequestedError


def test_nobody_asked():
    stop = StopRequest()
    stop.check_asked()
    stop.check_asked_twice()
    assert not stop.is_asked
    assert not stop.wait(0)


def test_asked_once_ends_a_start_and_lets_draining_go_on():
    stop = StopRequest()
    stop.ask()
    stop.check_asked_twice()
    with pytest.raises(StopRequestedError):
        stop.check_asked()


def test_asked_twice_ends_draining_too():
    stop = StopRequest()
    stop.ask()
    stop.ask()
    with pytest.raises(StopRequestedError):
        stop.check_asked_twice()
