"""Tells the gateways the metrics of a worker: at once when they connect, then now and then."""

from __future__ import annotations

from actors.engine.costs import Way
from actors.engine.outcome import EngineStats
from actors.request_channel import LevelSample, WorkerLevels
from configs import metrics
from configs.metrics import Metric

LEVELS_INTERVAL_S = 1.0
"""Far below any interval of scraping, and no cost beside a step."""


class LevelReporter:
    """Decides when there is something to tell. Owned by the engine thread."""

    def __init__(self) -> None:
        self._told: EngineStats | None = None
        self._due_at = 0.0

    def due_in_s(self, stats: EngineStats, now: float) -> float | None:
        """Return in how many seconds `stats` should be told; None if they are known."""
        return None if stats == self._told else max(self._due_at - now, 0.0)

    def take(self, stats: EngineStats, now: float) -> WorkerLevels | None:
        """Return what to tell everybody now, if it is time and anything has changed."""
        if stats == self._told or now < self._due_at:
            return None
        self._told, self._due_at = stats, now + LEVELS_INTERVAL_S
        return levels_of(stats)


def levels_of(stats: EngineStats) -> WorkerLevels:
    """Return the metrics of an engine."""
    samples = [
        _sample(metrics.ATTENTION_REQUESTS, stats.num_running, state="running"),
        _sample(metrics.ATTENTION_REQUESTS, stats.num_queued, state="queued"),
        _sample(metrics.ATTENTION_BLOCKS, stats.num_used_blocks, state="used"),
        _sample(metrics.ATTENTION_BLOCKS, stats.num_cached_blocks, state="cached"),
        _sample(metrics.ATTENTION_BLOCKS, stats.num_free_blocks, state="free"),
        _sample(metrics.ATTENTION_SLOTS, stats.num_used_slots, state="used"),
        _sample(metrics.ATTENTION_SLOTS, stats.num_free_slots, state="free"),
        _sample(metrics.SNAPSHOT_BYTES, stats.prefix_snapshot_bytes, kind="prefix"),
        _sample(metrics.SNAPSHOT_BYTES, stats.request_copy_bytes, kind="request"),
        _sample(metrics.PREFIX_SNAPSHOTS, stats.num_prefix_snapshots),
        _sample(metrics.PREFIX_HITS, stats.prefix_hits_total),
        _sample(metrics.PREFIX_HIT_TOKENS, stats.prefix_hit_tokens_total),
        _sample(metrics.PREFIX_EVICTIONS, stats.prefix_evictions_total),
        _sample(metrics.PREEMPTIONS, stats.kept_preemptions_total, way=Way.RESTORE),
        _sample(metrics.PREEMPTIONS, stats.dropped_preemptions_total, way=Way.RECOMPUTE),
        _sample(metrics.RESTORES, stats.restores_total),
        _sample(metrics.REFUSED_SNAPSHOTS, stats.refused_snapshots_total),
        _sample(metrics.RECOMPUTED_TOKENS, stats.recomputed_tokens_total),
        _sample(metrics.COMPUTED_TOKENS, stats.prompt_tokens_total, form="prompt"),
        _sample(metrics.COMPUTED_TOKENS, stats.generated_tokens_total, form="generated"),
        _sample(metrics.COMPUTED_TOKENS, stats.replayed_tokens_total, form="replayed"),
        _sample(metrics.STEP_SECONDS, stats.step_seconds_total),
        _sample(metrics.STEPS, stats.steps_total),
    ]
    return WorkerLevels(samples)


def _sample(metric: Metric, value: float, **labels: str) -> LevelSample:
    return LevelSample(metric.name, float(value), labels)
