"""Traces: made ones of five kinds, or a file.

A made trace is the same for the same seed, kind and sizes. Loads are log-normal around a base per
expert, with noise per step (spreads fitted to published traces of DeepSeek-R1).

Shapes: T steps, L layers, E logical experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from configs.errors import ConfigError

KINDS = ("plain", "mix", "spikes", "heavy", "attack")
BASE_SPREAD, NOISE_SPREAD = 0.54, 0.33
HEAVY_BASE_SPREAD, HEAVY_NOISE_SPREAD = 0.62, 0.40
NUM_DOMAINS, DOMAIN_WEIGHT = 4, 0.85
SPIKE_CHANCE, SPIKE_FACTOR, SPIKE_STEPS = 0.02, 4.0, 16
ATTACK_PART = 0.25
"""Of all tokens while an attack lasts."""


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """What to make."""

    kind: str
    num_steps: int
    num_layers: int
    num_experts: int
    top_k: int
    tokens: int = 4096
    """Per step."""
    seed: int = 0


def make_trace(
    spec: TraceSpec, on_step: Callable[[int], None] = lambda _: None
) -> NDArray[np.uint16]:
    """Return picks `[T, L, E]`; a zero counts as one.

    Args:
        spec: What to make.
        on_step: Told each step that is done.

    Raises:
        ConfigError: The kind is unknown, a size is below 1, or counts would not fit 16 bits.
    """
    if spec.kind not in KINDS:
        raise ConfigError(f"traces of kind '{spec.kind}' are not known; known: {', '.join(KINDS)}")
    if min(spec.num_steps, spec.num_layers, spec.num_experts, spec.top_k, spec.tokens) < 1:
        raise ConfigError(f"all sizes of a trace must be at least 1, not {spec}")
    if spec.top_k > spec.num_experts or spec.tokens > np.iinfo(np.uint16).max:
        raise ConfigError(
            f"{spec.top_k} of {spec.num_experts} experts for {spec.tokens} tokens cannot be "
            f"counted; at most {spec.num_experts} picks and {np.iinfo(np.uint16).max} tokens"
        )
    source = _Source(spec)
    shape = (spec.num_steps, spec.num_layers, spec.num_experts)
    load_TLE = np.empty(shape, np.uint16)
    for step in range(spec.num_steps):
        load_TLE[step] = source.next_step(step)
        on_step(step)
    return load_TLE


class _Source:
    """Makes one step after the other."""

    def __init__(self, spec: TraceSpec) -> None:
        self._spec = spec
        self._rng = np.random.default_rng(spec.seed)
        is_heavy = spec.kind == "heavy"
        self._noise = HEAVY_NOISE_SPREAD if is_heavy else NOISE_SPREAD
        spread = HEAVY_BASE_SPREAD if is_heavy else BASE_SPREAD
        shape = (spec.num_layers, spec.num_experts)
        base_LE = self._rng.normal(0, spread, shape)
        self._mean_LE = np.exp(base_LE).astype(np.float32)
        fresh = self._rng.normal(0, spread, (NUM_DOMAINS, *shape))
        self._domains = np.exp(0.5 * base_LE + np.sqrt(0.75) * fresh)
        self._next_change = 0
        self._spike_LE = np.zeros(shape, np.int64)
        self._is_attacked = True
        self._hit_LE = np.zeros(shape, np.bool_)

    def next_step(self, step: int) -> NDArray[np.uint16]:
        spec = self._spec
        if spec.kind == "mix" and step == self._next_change:
            self._change_domain(step)
        noise = self._rng.standard_normal(self._mean_LE.shape, np.float32)
        load_LE = self._mean_LE * np.exp(self._noise * noise)
        if spec.kind == "spikes":
            self._start_spikes()
            load_LE = np.where(self._spike_LE > 0, SPIKE_FACTOR * load_LE, load_LE)
        num_attackers = self._attackers(step) if spec.kind == "attack" else 0
        picks = (spec.tokens - num_attackers) * spec.top_k
        load_LE *= picks / load_LE.sum(axis=1, keepdims=True)
        picks_LE = np.rint(load_LE) + num_attackers * self._hit_LE
        counted_LE: NDArray[np.uint16] = np.maximum(picks_LE, 1).astype(np.uint16)
        return counted_LE

    def _change_domain(self, step: int) -> None:
        weights = np.full(NUM_DOMAINS, (1 - DOMAIN_WEIGHT) / (NUM_DOMAINS - 1))
        weights[self._rng.integers(NUM_DOMAINS)] = DOMAIN_WEIGHT
        self._mean_LE = np.tensordot(weights, self._domains, 1).astype(np.float32)
        self._next_change = step + int(self._rng.integers(200, 801))

    def _start_spikes(self) -> None:
        self._spike_LE = np.maximum(self._spike_LE - 1, 0)
        num = max(1, self._spec.num_experts // 100)
        for layer in np.flatnonzero(self._rng.random(self._spec.num_layers) < SPIKE_CHANCE):
            hit = self._rng.choice(self._spec.num_experts, num, replace=False)
            self._spike_LE[layer, hit] = SPIKE_STEPS

    def _attackers(self, step: int) -> int:
        """Tokens that are one and the same and so pick the same experts; attacks come and go."""
        if step == self._next_change:
            self._is_attacked = not self._is_attacked
            self._next_change = step + int(self._rng.integers(100, 401))
            self._hit_LE[:] = False
            if self._is_attacked:
                for hit_E in self._hit_LE:
                    hit_E[self._rng.choice(hit_E.size, self._spec.top_k, replace=False)] = True
        return int(self._spec.tokens * ATTACK_PART) if self._is_attacked else 0


def read_trace(path: Path) -> NDArray[np.number]:
    """Return a trace from a `.npy` file, mapped into memory; zeros are left as they are.

    Raises:
        ConfigError: The file cannot be read or holds no load `[T, L, E]`.
    """
    try:
        load_TLE: NDArray[np.number] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as exc:
        raise ConfigError(f"{path} is no trace: {exc}") from exc
    if not isinstance(load_TLE, np.ndarray) or load_TLE.ndim != 3 or load_TLE.size == 0:
        shape = getattr(load_TLE, "shape", None)
        raise ConfigError(f"{path} has shape {shape}; expected [steps, layers, experts]")
    if load_TLE.dtype.kind not in "uif":
        raise ConfigError(f"{path} has type {load_TLE.dtype}; expected numbers")
    for step, load_LE in enumerate(load_TLE):
        if load_LE.dtype.kind == "f" and not np.isfinite(load_LE).all():
            raise ConfigError(f"{path}: step {step} has values that are no numbers")
        if load_LE.min() < 0:
            raise ConfigError(f"{path}: step {step} has a negative load, {load_LE.min()}")
        if load_LE.max() > np.iinfo(np.uint32).max:
            raise ConfigError(f"{path}: step {step} has a load of {load_LE.max()}; at most 2^32-1")
    return load_TLE
