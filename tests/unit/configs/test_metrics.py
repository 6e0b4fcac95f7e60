import re

import pytest

from configs.errors import InvariantError
from configs.metrics import CATALOGUE, MetricKind, metric_named

by_name = pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)


@by_name
def test_name_has_the_prefix_and_says_unit_and_kind(metric):
    assert re.fullmatch(r"latentmesh_[a-z][a-z0-9_]*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
    assert ("_seconds" in metric.name) == (metric.unit == "s")
    assert ("_bytes" in metric.name) == (metric.unit == "By")


@by_name
def test_description_is_a_sentence(metric):
    assert re.fullmatch(r"[A-Z].*\.", metric.description)


@by_name
def test_buckets_ascend_and_only_histograms_have_them(metric):
    assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))


@by_name
def test_labels_do_not_name_single_requests(metric):
    assert not {"request_id", "request", "expert"} & set(metric.labels)


def test_names_are_unique():
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)


def test_metric_is_found_by_its_name():
    assert metric_named(CATALOGUE[0].name) is CATALOGUE[0]


def test_unknown_name_is_an_error():
    with pytest.raises(InvariantError, match="latentmesh_nothing"):
        metric_named("latentmesh_nothing")
