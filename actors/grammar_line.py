"""Makes what applies the grammars of requests, in a thread beside the engine's.

A grammar takes up to 0.3 s, in which the streams of all other requests go on. What comes for a
request that is in line waits behind it, so that the order of its messages stays.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from actors.engine.request import RequestKey
from actors.request_channel import Cancel, Credit, FlushCache, Submit, ToWorker
from configs.ids import RequestId
from model.constraint_vocabulary import Matcher

Made = Future[Sequence[Matcher | None]]
"""Done; holds an error, or is cancelled, where nothing could be made."""


class GrammarLine:
    """One line of requests with grammars; may be used from any thread. No thread while unused."""

    def __init__(self, name: str, make: Callable[[Submit], Sequence[Matcher | None]]) -> None:
        """Name the thread, and say what makes the matchers of a submission."""
        self._make = make
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._in_line: Counter[RequestKey] = Counter()
        self._is_closed = False

    def concerns(self, message: ToWorker) -> bool:
        """Whether a message has a grammar, or is for a request that is in line."""
        match message:
            case Submit():
                return message.grammar != ""
            case Cancel() | Credit():
                with self._lock:
                    return any(key in self._in_line for key in _possible_keys(message))
            case FlushCache():
                return False

    def add(self, message: ToWorker, deliver: Callable[[Made | None], None]) -> None:
        """Call `deliver` in turn, in another thread; with what was made for a submission.

        Nothing is delivered after `close`.
        """
        with self._lock:
            if self._is_closed:
                return
            if not isinstance(message, Submit):
                self._executor.submit(deliver, None)
                return
            key = RequestKey(message.request_id, message.attempt)
            self._in_line[key] += 1
            made = self._executor.submit(self._make, message)

        def _on_made(made: Made) -> None:
            deliver(made)
            # Only now: until here what comes for the request must wait behind it.
            with self._lock:
                self._in_line[key] -= 1
                self._in_line += Counter()

        made.add_done_callback(_on_made)

    def close(self) -> None:
        """Deliver what is in line, cancelled, and end the thread. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._executor.shutdown(wait=True, cancel_futures=True)


def _possible_keys(message: Cancel | Credit) -> list[RequestKey]:
    """Names under which the answer's submission may be in line; see `choice_id`."""
    name = message.request_id
    names = (name, RequestId(name.rpartition(".")[0]))
    return [RequestKey(one, message.attempt) for one in names]
