import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracerProvider, StatusCode
from prometheus_client.parser import text_string_to_metric_families

from actors.request_channel import LevelSample
from cluster.telemetry import Metrics, RequestTracer, make_tracer_provider, provider_for
from configs.errors import ConfigError, OverloadedError
from configs.metrics import ATTENTION_REQUESTS, CATALOGUE, REQUESTS, MetricKind


def emit_all(metrics):
    reported = []
    for metric in CATALOGUE:
        labels = dict.fromkeys(metric.labels, "x")
        if metric.is_of_worker:
            del labels["worker"]
            reported.append(LevelSample(metric.name, 1.0, labels))
            continue
        match metric.kind:
            case MetricKind.COUNTER:
                metrics.add(metric, **labels)
            case MetricKind.GAUGE:
                metrics.set(metric, 1, **labels)
            case MetricKind.HISTOGRAM:
                metrics.observe(metric, 0.5, **labels)
    metrics.report("attention-0", reported)


def test_the_metrics_of_a_worker_replace_those_before_and_go_with_it():
    metrics = Metrics()
    name = ATTENTION_REQUESTS.name
    for value in (3.0, 5.0):
        metrics.report("attention-0", [LevelSample(name, value, {"state": "queued"})])
        assert metrics.value(name, worker="attention-0", state="queued") == value
    metrics.report("attention-0", [])
    assert name + "{" not in metrics.exposition().decode()


def test_a_metric_that_is_not_in_the_catalogue_is_not_shown():
    metrics = Metrics()
    metrics.report("attention-0", [LevelSample("made_up", 1.0, {})])
    assert "made_up" not in metrics.exposition().decode()


def test_exposition_holds_every_metric_of_the_catalogue_and_no_other():
    metrics = Metrics()
    emit_all(metrics)
    families = {
        family.name: family
        for family in text_string_to_metric_families(metrics.exposition().decode())
    }
    assert set(families) == {metric.name.removesuffix("_total") for metric in CATALOGUE}
    for metric in CATALOGUE:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.description)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)


def test_two_gateways_of_one_process_count_apart():
    first, second = Metrics(), Metrics()
    first.add(REQUESTS, operation="generate", end_reason="finished")
    labels = {"operation": "generate", "end_reason": "finished"}
    assert first.value(REQUESTS.name, **labels) == 1
    assert second.value(REQUESTS.name, **labels) == 0


def test_no_exporter_records_nothing():
    assert isinstance(make_tracer_provider("none", service_instance="g"), NoOpTracerProvider)


def test_unknown_exporter_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'jaeger'.*none, console"):
        make_tracer_provider("jaeger", service_instance="g")


def spans_of(action):
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(provider_for(exporter, service_instance="g0"))
    action(tracer)
    tracer.shutdown()
    return exporter.get_finished_spans()


def test_span_without_parent_is_a_root():
    def act(tracer):
        with tracer.span("text_completion", "k3", {}):
            pass

    (span,) = spans_of(act)
    assert span.parent is None
    assert span.resource.attributes["service.instance.id"] == "g0"


def test_malformed_traceparent_is_ignored():
    def act(tracer):
        with tracer.span("text_completion", "k3", {"traceparent": "nonsense"}):
            pass

    (span,) = spans_of(act)
    assert span.parent is None


def test_error_marks_the_span_with_its_code_and_not_its_text():
    def act(tracer):
        with (
            pytest.raises(OverloadedError),
            tracer.span("text_completion", "k3", {}),
        ):
            raise OverloadedError("prompt: secret")

    (span,) = spans_of(act)
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "OVERLOADED"
    assert "secret" not in span.to_json()
