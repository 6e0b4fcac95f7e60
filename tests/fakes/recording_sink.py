"""A gateway without sockets: keeps the reports it is given, and lets a test wait for its ends."""

from __future__ import annotations

import threading

from actors.engine.request import RequestKey
from actors.request_channel import Ended, StepReport, ToGateway

WAIT_S = 30.0


class RecordingSink:
    """Sink of one gateway."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.news: list[ToGateway] = []
        """What is no report."""
        self.backlog_bytes = 0
        self._changed = threading.Condition()

    def send(self, report: ToGateway) -> None:
        with self._changed:
            if isinstance(report, StepReport):
                self.reports.append(report)
            else:
                self.news.append(report)
            self._changed.notify_all()

    def ends(self) -> dict[RequestKey, Ended]:
        ended = [end for report in self.reports for end in report.ended]
        by_key = {RequestKey(end.request_id, end.attempt): end for end in ended}
        assert len(by_key) == len(ended)
        return by_key

    def tokens(self, key: RequestKey) -> list[int]:
        return [
            token
            for report in self.reports
            for news in report.tokens
            if RequestKey(news.request_id, news.attempt) == key
            for token in news.token_ids
        ]

    def wait_for_end(self, key: RequestKey) -> Ended:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.ends(), WAIT_S)
        return self.ends()[key]

    def wait_for_tokens(self, key: RequestKey, num_tokens: int) -> list[int]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.tokens(key)) >= num_tokens, WAIT_S)
        return self.tokens(key)
