"""Metrics and traces of one gateway.

Metrics are those of `configs/metrics.py` in a registry of their own, so that two gateways of one
process do not mix. Traces go through OpenTelemetry; which exporter runs is a setting, where it
sends to is read by the exporter itself from the standard `OTEL_*` variables. By default nothing is
exported and no span is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Final, Protocol

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import NoOpTracerProvider, Span, SpanKind, StatusCode
from opentelemetry.trace import TracerProvider as TracerProviderApi
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client import Metric as PrometheusMetric
from prometheus_client.registry import Collector

from configs.errors import ConfigError, ServingError
from configs.metrics import CATALOGUE, Metric, MetricKind

# gen_ai.* of open-telemetry/semantic-conventions-genai v0.1.0. The constants of the opentelemetry
# package are marked deprecated since the conventions moved there.
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
ERROR_TYPE: Final = "error.type"

PROVIDER_NAME: Final = "latentmesh"
EXPOSITION_TYPE: Final = CONTENT_TYPE_LATEST
EXPORTER_GROUP: Final = "opentelemetry_traces_exporter"

Attribute = str | int | float | bool | Sequence[str]


class Metrics:
    """The catalogue's metrics, ready to be counted. Thread-safe."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._reported = _ReportedMetrics()
        self._registry.register(self._reported)
        for metric in CATALOGUE:
            if not metric.is_of_worker:
                self._create(metric)

    def add(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        """Add to a counter of the catalogue."""
        counter = self._counters[metric.name]
        (counter.labels(**labels) if labels else counter).inc(amount)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Set a gauge of the catalogue."""
        gauge = self._gauges[metric.name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def track(self, metric: Metric, level: Callable[[], float]) -> None:
        """Let a gauge without labels call `level` whenever it is read."""
        self._gauges[metric.name].set_function(level)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Put a value into a histogram of the catalogue."""
        histogram = self._histograms[metric.name]
        (histogram.labels(**labels) if labels else histogram).observe(value)

    def report(self, worker: str, samples: Sequence[Sample]) -> None:
        """Show these as the metrics of a worker, in place of those before; none forgets it."""
        self._reported.samples.pop(worker, None)
        if samples:
            self._reported.samples[worker] = tuple(samples)

    def exposition(self) -> bytes:
        """Return all metrics as Prometheus text, of `EXPOSITION_TYPE`."""
        return generate_latest(_WithoutCreated(self._registry))

    def value(self, name: str, **labels: str) -> float:
        """Return one sample as a scrape would show it; 0 when it has not been counted yet."""
        sample = self._registry.get_sample_value(name, labels)
        return 0.0 if sample is None else sample

    def _create(self, metric: Metric) -> None:
        name, text, labels = metric.name, metric.description, metric.labels
        match metric.kind:
            case MetricKind.COUNTER:
                self._counters[name] = Counter(name, text, labels, registry=self._registry)
            case MetricKind.GAUGE:
                self._gauges[name] = Gauge(name, text, labels, registry=self._registry)
            case MetricKind.HISTOGRAM:
                self._histograms[name] = Histogram(
                    name, text, labels, registry=self._registry, buckets=metric.buckets
                )


class Sample(Protocol):
    """One value that a worker reports."""

    @property
    def metric(self) -> str:
        """Name of a metric of the catalogue."""

    @property
    def value(self) -> float:
        """In the metric's unit."""

    @property
    def labels(self) -> dict[str, str]:
        """But `worker`."""


class _ReportedMetrics(Collector):
    """The metrics that workers report, as they were last told."""

    def __init__(self) -> None:
        self.samples: dict[str, tuple[Sample, ...]] = {}

    def collect(self) -> Iterator[PrometheusMetric]:
        families = {metric.name: _family(metric) for metric in CATALOGUE if metric.is_of_worker}
        # A scrape comes on another thread than the reports.
        for worker, samples in list(self.samples.items()):
            for sample in samples:
                family = families.get(sample.metric)
                if family is not None:
                    labels = {"worker": worker, **sample.labels}
                    family.add_sample(sample.metric, labels, sample.value)
        yield from families.values()


def _family(metric: Metric) -> PrometheusMetric:
    name = metric.name.removesuffix("_total")
    return PrometheusMetric(name, metric.description, metric.kind.value)


class _WithoutCreated(CollectorRegistry):
    """A registry's metrics without the `_created` series that the library adds to each of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._inner = registry

    def collect(self) -> Iterator[PrometheusMetric]:
        for metric in self._inner.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


def make_tracer_provider(exporter: str, *, service_instance: str) -> TracerProviderApi:
    """Return a provider that exports through the named exporter; "none" records nothing.

    Args:
        exporter: "none", or a name of the entry-point group `opentelemetry_traces_exporter`, e.g.
            "console" or "otlp_proto_grpc". The exporter reads its own `OTEL_*` variables.
        service_instance: Name of this gateway in traces.

    Raises:
        ConfigError: No exporter of that name is installed.
    """
    if exporter == "none":
        return NoOpTracerProvider()
    found = {entry.name: entry for entry in entry_points(group=EXPORTER_GROUP)}
    if exporter not in found:
        raise ConfigError(
            f"trace exporter {exporter!r} is not installed; known here: none, "
            f"{', '.join(sorted(found))}; install the package that brings it"
        )
    return provider_for(found[exporter].load()(), service_instance=service_instance)


def provider_for(exporter: SpanExporter, *, service_instance: str) -> TracerProvider:
    """Return a provider that batches spans into `exporter`; its `shutdown` flushes them."""
    resource = Resource.create(
        {"service.name": PROVIDER_NAME, "service.instance.id": service_instance}
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class RequestTracer:
    """Makes one span per request."""

    def __init__(self, provider: TracerProviderApi) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(PROVIDER_NAME)
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def span(
        self, operation: str, model: str, carrier: Mapping[str, str], **attributes: Attribute
    ) -> Iterator[Span]:
        """Span of one request, a child of the caller's `traceparent` when `carrier` holds one.

        An error that leaves the block sets the span's status and `error.type`; its text is not
        recorded, it may quote the request.
        """
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={
                GEN_AI_OPERATION_NAME: operation,
                GEN_AI_PROVIDER_NAME: PROVIDER_NAME,
                GEN_AI_REQUEST_MODEL: model,
                **attributes,
            },
        )
        try:
            yield span
        except Exception as exc:
            span.set_attribute(
                ERROR_TYPE, exc.code if isinstance(exc, ServingError) else type(exc).__name__
            )
            span.set_status(StatusCode.ERROR)
            raise
        finally:
            span.end()

    def shutdown(self) -> None:
        """Flush and end the exporter. Idempotent. Blocks; not for the event loop."""
        if isinstance(self._provider, TracerProvider):
            self._provider.shutdown()
