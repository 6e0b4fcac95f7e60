"""Traces of the placement benchmark: what is made, and what is refused of files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.placement.traces import KINDS, TraceSpec, make_trace, read_trace
from configs.errors import ConfigError

SPEC = TraceSpec("plain", num_steps=60, num_layers=2, num_experts=64, top_k=4, tokens=2048)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_is_the_same_for_the_same_seed_and_sums_to_its_tokens(kind: str) -> None:
    trace = make_trace(replace(SPEC, kind=kind))
    np.testing.assert_array_equal(trace, make_trace(replace(SPEC, kind=kind)))
    assert not np.array_equal(trace, make_trace(replace(SPEC, kind=kind, seed=1)))
    assert trace.min() >= 1
    # Each expert's load is rounded.
    assert np.abs(trace.sum(axis=2, dtype=np.int64) - 2048 * 4).max() <= 64


def test_loads_have_the_spread_of_the_rule() -> None:
    trace = make_trace(replace(SPEC, num_steps=400, num_experts=256, tokens=60_000)).astype(float)
    per_expert = np.log(trace).mean(axis=0)
    assert np.log(trace).std(axis=0).mean() == pytest.approx(0.33, rel=0.05)
    assert per_expert.std() == pytest.approx(0.54, rel=0.1)


def test_domains_change_between_200_and_800_steps() -> None:
    trace = make_trace(replace(SPEC, kind="mix", num_steps=1700)).astype(float)
    blocks = np.log(trace[: 17 * 100].reshape(17, 100, -1).mean(axis=1))
    changes = np.abs(np.diff(blocks, axis=0)).mean(axis=1)
    # A change shows in one or two neighbouring blocks.
    assert 2 <= (changes > 0.15).sum() <= 16
    assert (changes < 0.1).any()


def test_spikes_come_and_go() -> None:
    plain = make_trace(replace(SPEC, num_steps=300, seed=3)).astype(float)
    spiky = make_trace(replace(SPEC, kind="spikes", num_steps=300, seed=3)).astype(float)
    median = np.median(spiky, axis=0)
    assert (spiky > 6 * median).any(axis=(1, 2)).sum() > 3 * (
        plain > 6 * np.median(plain, axis=0)
    ).any(axis=(1, 2)).sum()


def test_an_attack_hits_few_experts_for_a_while() -> None:
    trace = make_trace(replace(SPEC, kind="attack", num_steps=900))
    is_hit = np.sort(trace[:, 0])[:, -4] >= 2048 // 4
    assert 0 < is_hit.sum() < 900
    assert 2 <= np.abs(np.diff(is_hit.astype(int))).sum() <= 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "calm"}, "'calm' are not known; known: plain, mix"),
        ({"num_steps": 0}, "at least 1"),
        ({"num_experts": 2}, "cannot be counted"),
        ({"tokens": 70_000}, "65535 tokens"),
    ],
)
def test_traces_that_cannot_be_made_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trace(replace(SPEC, **changes))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 4)), r"has shape \(3, 4\)"),
        (np.zeros((0, 4, 4)), "has shape"),
        (np.full((2, 2, 2), np.nan), "step 0 has values that are no numbers"),
        (np.stack([np.ones((2, 2)), -np.ones((2, 2))]), "step 1 has a negative load"),
        (np.full((2, 2, 2), "a"), "type"),
        (np.full((2, 2, 2), 1e12), "at most"),
    ],
)
def test_files_that_hold_no_load_are_refused(
    tmp_path: Path, array: np.ndarray, message: str
) -> None:
    np.save(tmp_path / "trace.npy", array)
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / "trace.npy")


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.npy").write_bytes(b"no numpy")
    for name in ("trace.npy", "missing.npy"):
        with pytest.raises(ConfigError, match="is no trace"):
            read_trace(tmp_path / name)


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    trace = make_trace(SPEC)
    np.save(tmp_path / "trace.npy", trace)
    np.testing.assert_array_equal(read_trace(tmp_path / "trace.npy"), trace)
