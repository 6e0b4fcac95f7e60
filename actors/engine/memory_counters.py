"""What reuse, preemption and moves have done so far. Only grows."""

from __future__ import annotations

from dataclasses import dataclass

from actors.engine.costs import Way


@dataclass(slots=True)
class MemoryCounters:
    """Totals of one engine. Written by the engine thread."""

    num_hits: int = 0
    """Admissions that began at a prefix snapshot."""
    num_hit_tokens: int = 0
    """Tokens that these did not compute."""
    num_kept_preemptions: int = 0
    """Preemptions that left a copy to come back from."""
    num_dropped_preemptions: int = 0
    """Preemptions after which everything is computed again."""
    num_recomputed_tokens: int = 0
    """Tokens that were in memory before, and given up without a copy."""
    num_restores: int = 0
    """Admissions that began at a copy of the request's memory."""
    num_refused_snapshots: int = 0
    """Copies from outside that could not be used."""
    num_moved: int = 0
    """Attempts that ended because their worker drains."""

    def count_preemption(self, way: Way, num_tokens: int) -> None:
        """Count the preemption of a request with `num_tokens` in memory."""
        if way is Way.RESTORE and num_tokens:
            self.num_kept_preemptions += 1
        else:
            self.num_dropped_preemptions += 1
            self.num_recomputed_tokens += num_tokens
