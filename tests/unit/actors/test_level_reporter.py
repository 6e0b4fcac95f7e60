"""When a worker tells its metrics, and what."""

from __future__ import annotations

from dataclasses import replace

from actors.level_reporter import LEVELS_INTERVAL_S, LevelReporter, levels_of
from configs.metrics import CATALOGUE
from tests.fakes.engine_rig import EngineRig, submit


def test_metrics_are_told_once_per_interval_and_only_when_they_changed() -> None:
    stats = EngineRig().engine.stats()
    reporter = LevelReporter()
    assert reporter.due_in_s(stats, 10.0) == 0.0
    assert reporter.take(stats, 10.0) is not None
    assert (reporter.take(stats, 99.0), reporter.due_in_s(stats, 99.0)) == (None, None)
    changed = replace(stats, num_queued=3)
    assert reporter.take(changed, 10.0 + LEVELS_INTERVAL_S / 2) is None
    assert reporter.due_in_s(changed, 10.0 + LEVELS_INTERVAL_S / 2) == LEVELS_INTERVAL_S / 2
    assert reporter.take(changed, 10.0 + LEVELS_INTERVAL_S) is not None


def test_every_metric_of_a_worker_is_told_with_its_labels() -> None:
    samples = levels_of(EngineRig().engine.stats()).samples
    told = {sample.metric: {"worker", *sample.labels} for sample in samples}
    assert told == {m.name: set(m.labels) for m in CATALOGUE if m.is_of_worker}


def test_the_values_are_the_engine_s() -> None:
    rig = EngineRig()
    rig.submit(submit(prompt=[1] * 20, max_tokens=3))
    rig.run_to_end()
    values = {
        (sample.metric, *sample.labels.values()): sample.value
        for sample in levels_of(rig.engine.stats()).samples
    }
    assert values["latentmesh_attention_tokens_computed_total", "prompt"] == 20
    assert values["latentmesh_attention_tokens_computed_total", "generated"] == 3
    assert values["latentmesh_attention_blocks", "free"] == rig.limits.num_blocks
