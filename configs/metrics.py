"""The metric catalogue: every metric that Latentmesh emits, as data.

Dashboards, alert rules and the code that emits read it; a metric that is not here does not exist.
Base units, `_total` on counters, no request ids in labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from configs.errors import InvariantError


class MetricKind(StrEnum):
    """How a metric behaves."""

    COUNTER = "counter"
    """Only grows."""
    GAUGE = "gauge"
    """A level."""
    HISTOGRAM = "histogram"
    """A distribution in `buckets`."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    name: str
    """As Prometheus shows it, `_total` included."""
    kind: MetricKind
    unit: str
    """UCUM: `s`, `By`, `{request}`, `{answer}`, `{token}`, `{worker}`, `{error}`."""
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    is_of_worker: bool = False
    """Told by attention workers and shown by every gateway: take one gateway's, not the sum."""
    """Upper bounds of a histogram, ascending, in `unit`."""


# Buckets of gen_ai.server.time_to_first_token and gen_ai.server.request.duration,
# open-telemetry/semantic-conventions v1.41.1, docs/gen-ai/gen-ai-metrics.md.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0),
)
_DURATION_S = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12),
    *(10.24, 20.48, 40.96, 81.92),
)

REQUESTS: Final = Metric(
    name="latentmesh_requests_total",
    kind=MetricKind.COUNTER,
    unit="{request}",
    description="Requests that ended, by operation and the one way they ended.",
    labels=("operation", "end_reason"),
)
RUNNING_REQUESTS: Final = Metric(
    name="latentmesh_requests_running",
    kind=MetricKind.GAUGE,
    unit="{request}",
    description="Requests accepted by this gateway that a worker has not ended yet.",
)
REFUSED_REQUESTS: Final = Metric(
    name="latentmesh_requests_refused_total",
    kind=MetricKind.COUNTER,
    unit="{request}",
    description="Requests refused before a worker saw them, by error code.",
    labels=("operation", "code"),
)
MOVED_REQUESTS: Final = Metric(
    name="latentmesh_requests_moved_total",
    kind=MetricKind.COUNTER,
    unit="{request}",
    description="Requests that went on at another worker, because theirs drained or was lost.",
    labels=("reason",),
)
PROMPT_TOKENS: Final = Metric(
    name="latentmesh_prompt_tokens_total",
    kind=MetricKind.COUNTER,
    unit="{token}",
    description="Prompt tokens of requests that their worker ended.",
)
OUTPUT_TOKENS: Final = Metric(
    name="latentmesh_output_tokens_total",
    kind=MetricKind.COUNTER,
    unit="{token}",
    description="Generated tokens of requests that ended.",
)
TIME_TO_FIRST_TOKEN: Final = Metric(
    name="latentmesh_time_to_first_token_seconds",
    kind=MetricKind.HISTOGRAM,
    unit="s",
    description="From the arrival of a request at the gateway to its first token there.",
    buckets=_FIRST_TOKEN_S,
)
REQUEST_DURATION: Final = Metric(
    name="latentmesh_request_duration_seconds",
    kind=MetricKind.HISTOGRAM,
    unit="s",
    description="From the arrival of a request at the gateway to its end.",
    labels=("operation",),
    buckets=_DURATION_S,
)
FINISHED_ANSWERS: Final = Metric(
    name="latentmesh_answers_finished_total",
    kind=MetricKind.COUNTER,
    unit="{answer}",
    description="Answers that finished, by cause: length, stop_token, stop_text or constraint.",
    labels=("cause",),
)
CONNECTED_WORKERS: Final = Metric(
    name="latentmesh_gateway_attention_workers_connected",
    kind=MetricKind.GAUGE,
    unit="{worker}",
    description="Attention workers that this gateway can send requests to.",
)
LOST_CONNECTIONS: Final = Metric(
    name="latentmesh_gateway_connections_lost_total",
    kind=MetricKind.COUNTER,
    unit="{connection}",
    description="Connections to attention workers that ended unasked.",
    labels=("worker",),
)
REFUSED_ACCESS: Final = Metric(
    name="latentmesh_access_refused_total",
    kind=MetricKind.COUNTER,
    unit="{request}",
    description="Requests and connections refused at the door, by door and reason.",
    labels=("door", "reason"),
)
INTERNAL_ERRORS: Final = Metric(
    name="latentmesh_internal_errors_total",
    kind=MetricKind.COUNTER,
    unit="{error}",
    description="Unforeseen exceptions stopped at the gRPC barrier; each is logged.",
    labels=("method",),
)

ATTENTION_REQUESTS: Final = Metric(
    name="latentmesh_attention_requests",
    kind=MetricKind.GAUGE,
    unit="{request}",
    description="Requests at an attention worker: running (they have memory) or queued.",
    labels=("worker", "state"),
    is_of_worker=True,
)
ATTENTION_BLOCKS: Final = Metric(
    name="latentmesh_attention_blocks",
    kind=MetricKind.GAUGE,
    unit="{block}",
    description="MLA blocks of an attention worker: used, cached (prefixes only) or free.",
    labels=("worker", "state"),
    is_of_worker=True,
)
ATTENTION_SLOTS: Final = Metric(
    name="latentmesh_attention_state_slots",
    kind=MetricKind.GAUGE,
    unit="{slot}",
    description="KDA and conv state slots of an attention worker: used or free.",
    labels=("worker", "state"),
    is_of_worker=True,
)
SNAPSHOT_BYTES: Final = Metric(
    name="latentmesh_attention_snapshot_bytes",
    kind=MetricKind.GAUGE,
    unit="By",
    description="State copies at an attention worker: of prefixes, or of requests without memory.",
    labels=("worker", "kind"),
    is_of_worker=True,
)
PREFIX_SNAPSHOTS: Final = Metric(
    name="latentmesh_attention_prefix_snapshots",
    kind=MetricKind.GAUGE,
    unit="{snapshot}",
    description="Positions at which new requests can begin instead of at their first token.",
    labels=("worker",),
    is_of_worker=True,
)
PREFIX_HITS: Final = Metric(
    name="latentmesh_attention_prefix_hits_total",
    kind=MetricKind.COUNTER,
    unit="{request}",
    description="Requests that began at a prefix snapshot.",
    labels=("worker",),
    is_of_worker=True,
)
PREFIX_HIT_TOKENS: Final = Metric(
    name="latentmesh_attention_prefix_hit_tokens_total",
    kind=MetricKind.COUNTER,
    unit="{token}",
    description="Tokens that were not computed because a prefix snapshot held them.",
    labels=("worker",),
    is_of_worker=True,
)
PREFIX_EVICTIONS: Final = Metric(
    name="latentmesh_attention_prefix_evictions_total",
    kind=MetricKind.COUNTER,
    unit="{snapshot}",
    description="Prefix snapshots that were given up for others or for requests.",
    labels=("worker",),
    is_of_worker=True,
)
PREEMPTIONS: Final = Metric(
    name="latentmesh_attention_preemptions_total",
    kind=MetricKind.COUNTER,
    unit="{request}",
    description="Requests that gave up their memory to others, by how they come back.",
    labels=("worker", "way"),
    is_of_worker=True,
)
RESTORES: Final = Metric(
    name="latentmesh_attention_restores_total",
    kind=MetricKind.COUNTER,
    unit="{request}",
    description="Requests that went on from a copy of their memory.",
    labels=("worker",),
    is_of_worker=True,
)
REFUSED_SNAPSHOTS: Final = Metric(
    name="latentmesh_attention_snapshots_refused_total",
    kind=MetricKind.COUNTER,
    unit="{snapshot}",
    description="Copies from other workers that were missing, damaged or of something else.",
    labels=("worker",),
    is_of_worker=True,
)
RECOMPUTED_TOKENS: Final = Metric(
    name="latentmesh_attention_recomputed_tokens_total",
    kind=MetricKind.COUNTER,
    unit="{token}",
    description="Tokens that were given up without a copy and had to be computed again.",
    labels=("worker",),
    is_of_worker=True,
)
COMPUTED_TOKENS: Final = Metric(
    name="latentmesh_attention_tokens_computed_total",
    kind=MetricKind.COUNTER,
    unit="{token}",
    description="Tokens computed: of prompts, generated, or replayed in decode form.",
    labels=("worker", "form"),
    is_of_worker=True,
)
STEP_SECONDS: Final = Metric(
    name="latentmesh_attention_step_seconds_total",
    kind=MetricKind.COUNTER,
    unit="s",
    description="Time in steps that computed something.",
    labels=("worker",),
    is_of_worker=True,
)
STEPS: Final = Metric(
    name="latentmesh_attention_steps_total",
    kind=MetricKind.COUNTER,
    unit="{step}",
    description="Steps that computed something.",
    labels=("worker",),
    is_of_worker=True,
)

CATALOGUE: Final[tuple[Metric, ...]] = (
    REQUESTS,
    RUNNING_REQUESTS,
    REFUSED_REQUESTS,
    MOVED_REQUESTS,
    PROMPT_TOKENS,
    OUTPUT_TOKENS,
    TIME_TO_FIRST_TOKEN,
    REQUEST_DURATION,
    FINISHED_ANSWERS,
    CONNECTED_WORKERS,
    LOST_CONNECTIONS,
    REFUSED_ACCESS,
    INTERNAL_ERRORS,
    ATTENTION_REQUESTS,
    ATTENTION_BLOCKS,
    ATTENTION_SLOTS,
    SNAPSHOT_BYTES,
    PREFIX_SNAPSHOTS,
    PREFIX_HITS,
    PREFIX_HIT_TOKENS,
    PREFIX_EVICTIONS,
    PREEMPTIONS,
    RESTORES,
    REFUSED_SNAPSHOTS,
    RECOMPUTED_TOKENS,
    COMPUTED_TOKENS,
    STEP_SECONDS,
    STEPS,
)


def metric_named(name: str) -> Metric:
    """Return the metric of a name.

    Raises:
        InvariantError: The catalogue has no such metric.
    """
    for metric in CATALOGUE:
        if metric.name == name:
            return metric
    raise InvariantError(f"metric {name!r} is not in configs/metrics.py")
