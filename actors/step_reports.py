"""Sorts the news of a step by the gateways that they are for."""

from __future__ import annotations

from collections.abc import Sequence

from actors.engine.outcome import StepOutcome
from actors.engine.request import RequestKey
from actors.request_channel import SavedSnapshot, StepReport
from configs.ids import GatewayId


def split_outcome(
    outcome: StepOutcome, saved: Sequence[SavedSnapshot], owners: dict[RequestKey, GatewayId]
) -> dict[GatewayId, StepReport]:
    """Return a report per gateway that has news.

    Args:
        outcome: Of the engine.
        saved: Copies that have arrived elsewhere since the last step.
        owners: Whose each live request is; those that ended are taken out.
    """
    reports = _Reports(outcome.step, owners)
    for kind in ("tokens", "logits", "prompt_logprobs"):
        for news in getattr(outcome, kind):
            reports.add(kind, RequestKey(news.request_id, news.attempt), news)
    for place in saved:
        reports.add("saved", RequestKey(place.request_id, place.attempt), place)
    for ended in outcome.ended:
        key = RequestKey(ended.request_id, ended.attempt)
        reports.add("ended", key, ended)
        owners.pop(key, None)
    return reports.by_gateway


class _Reports:
    def __init__(self, step: int, owners: dict[RequestKey, GatewayId]) -> None:
        self.by_gateway: dict[GatewayId, StepReport] = {}
        self._step = step
        self._owners = owners

    def add(self, kind: str, key: RequestKey, news: object) -> None:
        """Put news of a request into the list `kind` of its gateway's report, if it has one."""
        gateway = self._owners.get(key)
        if gateway is None:
            return
        if gateway not in self.by_gateway:
            self.by_gateway[gateway] = StepReport(self._step, [], [], [], [], [])
        getattr(self.by_gateway[gateway], kind).append(news)
