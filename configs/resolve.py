"""From what the user wrote and what the machine and the model are to what runs. Pure.

Every `auto` becomes a value here, once, with its reason in `ResolvedConfig.notes`; a setting that
cannot be honoured is an error with both numbers. Nothing is written back into the user's config.
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.access import AccessDecision, decide_access
from configs.errors import ConfigError, DeviceTooSmallError
from configs.numerics import Combine, Numerics
from configs.schema import ServingConfig

MAX_AUTO_BLOCKS_BYTES = 4 << 30
"""`num_blocks: auto` takes at most this much for the MLA cache of one CPU worker."""
SCRATCH_SLOTS = 2
"""State slots beside those of requests, for states that become snapshots while a step runs."""
MEMORY_SHARE = 0.7
"""Part of the machine's free memory that all workers together may plan with."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the model and the machine are. Bytes are those of the configured compute dtype."""

    num_cores: int
    available_memory_bytes: int
    """Free memory of the device kind that workers compute on, per machine."""
    has_cuda: bool
    attention_side_bytes: int
    """Weights that every attention worker holds."""
    expert_bytes: int
    """One routed expert as it lies in memory."""
    num_experts: int
    num_moe_layers: int
    num_experts_per_token: int
    bytes_per_block: int
    bytes_per_slot: int
    model_context_tokens: int


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """What runs."""

    serving: ServingConfig
    device: str
    """`cpu` or `cuda`."""
    attention_threads: int
    expert_threads: int
    num_blocks: int
    snapshot_bytes: int
    """State copies of one attention worker."""
    context_tokens: int
    combine: Combine
    access: AccessDecision
    notes: tuple[str, ...]
    """One line per `auto` with the value and its reason."""


def resolve(config: ServingConfig, facts: Facts) -> ResolvedConfig:
    """Replace every `auto` and check that the model fits.

    Raises:
        ConfigError: Settings contradict each other.
        DeviceTooSmallError: Weights, one block and the slots exceed a worker's memory.
    """
    notes: list[str] = []
    access = decide_access(config.api)
    if config.api.auth.keys == "auto":
        keys = "required" if access.needs_key else "off"
        notes.append(f"api.auth.keys = {keys}: {access.reason}")
    device = _resolve_device(config, facts, notes)
    combine = _resolve_combine(config, facts, notes)
    attention_threads, expert_threads = _resolve_threads(config, facts, notes)
    _check_expert_memory(config, facts)
    snapshot_bytes = _resolve_snapshots(config, facts, notes)
    num_blocks = _resolve_blocks(config, facts, device, snapshot_bytes, notes)
    context = _resolve_context(config, facts, num_blocks, notes)
    if config.router.transport == "nccl":
        raise ConfigError(
            "router.transport: nccl is not built in this version; use auto, shm or tcp"
        )
    return ResolvedConfig(
        serving=config,
        device=device,
        attention_threads=attention_threads,
        expert_threads=expert_threads,
        num_blocks=num_blocks,
        snapshot_bytes=snapshot_bytes,
        context_tokens=context,
        combine=combine,
        access=access,
        notes=tuple(notes),
    )


def _resolve_device(config: ServingConfig, facts: Facts, notes: list[str]) -> str:
    wanted = config.model.device
    if wanted == "auto":
        device = "cuda" if facts.has_cuda else "cpu"
        notes.append(f"model.device = {device}: torch sees {'a' if facts.has_cuda else 'no'} GPU")
        return device
    if wanted == "cuda" and not facts.has_cuda:
        raise ConfigError("model.device is cuda, but torch sees no GPU here; set it to cpu or auto")
    return wanted


def _resolve_combine(config: ServingConfig, facts: Facts, notes: list[str]) -> Combine:
    wanted = config.router.combine
    if wanted != "auto":
        if config.numerics is Numerics.INVARIANT and wanted is Combine.PRESUM:
            raise ConfigError(
                "router.combine is presum, but numerics: invariant needs canonical sums, which do "
                "not depend on the placement; set router.combine to canonical or auto"
            )
        return wanted
    if config.numerics is Numerics.INVARIANT:
        notes.append("router.combine = canonical: numerics is invariant")
        return Combine.CANONICAL
    ratio = return_bytes_ratio(
        num_experts=facts.num_experts,
        num_picks=facts.num_experts_per_token,
        num_workers=config.expert_pool.num_workers,
    )
    combine = Combine.CANONICAL if ratio <= MAX_CANONICAL_RATIO else Combine.PRESUM
    notes.append(f"router.combine = {combine}: pairs would return {ratio:.2f} times the bytes")
    return combine


MAX_CANONICAL_RATIO = 1.25
"""Canonical answers may cost this much of the bytes of partial sums before `auto` gives them up."""


def return_bytes_ratio(*, num_experts: int, num_picks: int, num_workers: int) -> float:
    """Bytes of per-pair answers over those of per-worker sums, under uniform routing.

    A token's picks touch `W (1 - C(E - E/W, k) / C(E, k))` of W workers (SPEC 1.7).
    """
    per_worker = num_experts / num_workers
    untouched = 1.0
    for pick in range(num_picks):
        untouched *= max(0.0, num_experts - per_worker - pick) / (num_experts - pick)
    return num_picks / (num_workers * (1 - untouched))


def _resolve_threads(config: ServingConfig, facts: Facts, notes: list[str]) -> tuple[int, int]:
    num_workers = config.attention_pool.num_workers + config.expert_pool.num_workers
    if config.numerics is Numerics.INVARIANT:
        # Bits hold for a fixed number of threads, so it must not follow the number of workers.
        share, reason = 1, "numerics is invariant, and the worker counts must not change bits"
    else:
        share = max(1, facts.num_cores // num_workers)
        reason = f"{facts.num_cores} cores, {num_workers} workers"
    attention = config.attention_pool.num_threads
    expert = config.expert_pool.num_threads
    if attention == "auto":
        attention = share
        notes.append(f"attention_pool.num_threads = {share}: {reason}")
    if expert == "auto":
        expert = share
        notes.append(f"expert_pool.num_threads = {share}: {reason}")
    for key, value in (("attention_pool", attention), ("expert_pool", expert)):
        if value < 1:
            raise ConfigError(f"{key}.num_threads is {value}, must be at least 1 or auto")
    return attention, expert


def _check_expert_memory(config: ServingConfig, facts: Facts) -> None:
    num_workers = config.expert_pool.num_workers
    per_layer = -(-facts.num_experts // num_workers)
    needed = per_layer * facts.num_moe_layers * facts.expert_bytes
    limit = _worker_memory(config.expert_pool.memory_bytes, config, facts)
    if needed > limit:
        raise DeviceTooSmallError(
            f"an expert worker needs {needed:,} bytes for {per_layer} of {facts.num_experts} "
            f"experts in each of {facts.num_moe_layers} layers, and may use {limit:,}; "
            f"raise expert_pool.num_workers (now {num_workers}) or expert_pool.memory_bytes"
        )


def _worker_memory(setting: int | str, config: ServingConfig, facts: Facts) -> int:
    if isinstance(setting, int):
        return setting
    num_workers = config.attention_pool.num_workers + config.expert_pool.num_workers
    if facts.attention_side_bytes > facts.available_memory_bytes:
        return facts.available_memory_bytes
    return int(facts.available_memory_bytes * MEMORY_SHARE) // num_workers


def _resolve_snapshots(config: ServingConfig, facts: Facts, notes: list[str]) -> int:
    pool = config.attention_pool
    wanted = pool.snapshots.memory_bytes
    if wanted == "auto":
        snapshot_bytes = pool.num_state_slots * facts.bytes_per_slot
        notes.append(
            f"attention_pool.snapshots.memory_bytes = {snapshot_bytes:,}: as the "
            f"{pool.num_state_slots} state slots"
        )
        return snapshot_bytes
    if wanted < 0:
        raise ConfigError(
            f"attention_pool.snapshots.memory_bytes is {wanted}, must be at least 0 or auto"
        )
    return wanted


def _resolve_blocks(
    config: ServingConfig, facts: Facts, device: str, snapshot_bytes: int, notes: list[str]
) -> int:
    pool = config.attention_pool
    num_slots = pool.num_state_slots + (SCRATCH_SLOTS if snapshot_bytes else 0)
    # Copies lie beside the caches only where workers compute in the same memory.
    kept_bytes = snapshot_bytes if device == "cpu" else 0
    slots_bytes = num_slots * facts.bytes_per_slot
    limit = _worker_memory(pool.memory_bytes, config, facts)
    fixed = facts.attention_side_bytes + slots_bytes + kept_bytes
    wanted = pool.num_blocks
    smallest = wanted if isinstance(wanted, int) else 1
    if smallest < 1:
        raise ConfigError(f"attention_pool.num_blocks is {smallest}, must be at least 1 or auto")
    needed = fixed + smallest * facts.bytes_per_block
    if needed > limit:
        raise DeviceTooSmallError(
            f"an attention worker needs {needed:,} bytes ({facts.attention_side_bytes:,} weights, "
            f"{slots_bytes:,} for {num_slots} state slots, {kept_bytes:,} for snapshots, "
            f"{smallest} block(s) of {facts.bytes_per_block:,}) and may use {limit:,}; lower "
            f"attention_pool.num_state_slots or attention_pool.snapshots.memory_bytes, or raise "
            f"attention_pool.memory_bytes"
        )
    if isinstance(wanted, int):
        return wanted
    if facts.bytes_per_block == 0:
        return 1
    # More than every slot at full context can never be used.
    context = facts.model_context_tokens
    useful = pool.num_state_slots * -(-context // pool.block_tokens)
    room = min(limit - fixed, MAX_AUTO_BLOCKS_BYTES) // facts.bytes_per_block
    num_blocks = max(1, min(useful, room))
    notes.append(
        f"attention_pool.num_blocks = {num_blocks}: {num_blocks * pool.block_tokens} tokens in "
        f"{num_blocks * facts.bytes_per_block:,} bytes"
    )
    return num_blocks


def _resolve_context(config: ServingConfig, facts: Facts, num_blocks: int, notes: list[str]) -> int:
    capacity = num_blocks * config.attention_pool.block_tokens
    wanted = config.attention_pool.context_tokens
    if wanted == "auto":
        context = min(facts.model_context_tokens, capacity)
        notes.append(
            f"attention_pool.context_tokens = {context}: the model allows "
            f"{facts.model_context_tokens}, the blocks hold {capacity}"
        )
        return context
    if not 1 <= wanted <= facts.model_context_tokens:
        raise ConfigError(
            f"attention_pool.context_tokens is {wanted}, allowed is 1 to "
            f"{facts.model_context_tokens}, the model's limit"
        )
    if wanted > capacity:
        raise ConfigError(
            f"attention_pool.context_tokens is {wanted}, but {num_blocks} blocks hold {capacity} "
            f"tokens; raise attention_pool.num_blocks"
        )
    return wanted
