"""Compares what the files of a checkpoint hold with what its model needs.

All findings become one `CheckpointError`: a wrong folder has thousands, and the first ten tell why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from configs.errors import CheckpointError
from model.dims import ModelDims
from model.tensor_files import StoredTensor, TensorFiles
from model.tensor_names import (
    TEXT_PREFIX,
    TensorSpec,
    attention_side_tensors,
    canonical_name,
    expert_prefix,
    expert_specs,
    is_vision,
)

MAX_LISTED = 10


def check_tensors(
    dims: ModelDims, files: TensorFiles, *, folder: str
) -> tuple[dict[str, StoredTensor], bool]:
    """Match stored tensors with the expected ones.

    Args:
        dims: The model of the folder's config.
        files: Headers of the folder.
        folder: Named in the error.

    Returns:
        Stored tensors by canonical name, and whether the routed experts are MXFP4-packed.

    Raises:
        CheckpointError: Tensors are missing, surplus, or of another shape or type. Lists the first
            ten with expected and found, and the total count.
    """
    problems = list(files.index_problems)
    stored_by_name: dict[str, StoredTensor] = {}
    has_prefix = any(name.startswith(TEXT_PREFIX) for name in files.tensors)
    for name, stored in files.tensors.items():
        if is_vision(name):
            continue
        canonical = canonical_name(name)
        if has_prefix and not name.startswith(TEXT_PREFIX):
            problems.append(f"{name}: expected the prefix {TEXT_PREFIX} as on the other tensors")
        elif canonical in stored_by_name:
            problems.append(f"{name}: also stored as {stored_by_name[canonical].name}")
        stored_by_name[canonical] = stored
    has_packed_experts = any(name.endswith(".weight_packed") for name in stored_by_name)
    expected = _expected_tensors(dims, has_packed_experts=has_packed_experts)
    problems.extend(_compare(expected, stored_by_name))
    if problems:
        listed = "\n".join(f"  {line}" for line in problems[:MAX_LISTED])
        more = f"\n  and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        raise CheckpointError(
            f"checkpoint {folder} does not hold the tensors of its config.json: "
            f"{len(problems)} problem{'s' if len(problems) > 1 else ''}\n{listed}{more}"
        )
    return stored_by_name, has_packed_experts


def _expected_tensors(dims: ModelDims, *, has_packed_experts: bool) -> dict[str, TensorSpec]:
    expected = attention_side_tensors(dims)
    # Nearly all tensors are the experts'; they share their specs.
    specs = expert_specs(dims, packed=has_packed_experts)
    for layer in dims.moe_layers:
        for expert in range(dims.moe.num_experts):
            prefix = expert_prefix(layer, expert)
            expected.update((prefix + name, spec) for name, spec in specs.items())
    return expected


def _compare(
    expected: Mapping[str, TensorSpec], stored_by_name: Mapping[str, StoredTensor]
) -> Iterable[str]:
    for name, spec in expected.items():
        stored = stored_by_name.get(name)
        if stored is None:
            yield f"{name}: expected {describe(spec)}, found nothing"
        elif not _matches(spec, stored):
            yield f"{name}: expected {describe(spec)}, found {stored.dtype} {list(stored.shape)}"
    for name, stored in stored_by_name.items():
        if name not in expected:
            yield f"{name}: expected nothing, found {stored.dtype} {list(stored.shape)}"


def _matches(spec: TensorSpec, stored: StoredTensor) -> bool:
    if spec.may_be_longer:
        fits = len(stored.shape) == 1 and stored.shape[0] >= spec.shape[0]
    else:
        fits = stored.shape == spec.shape
    return fits and stored.dtype in spec.stored.safetensors_names


def describe(spec: TensorSpec) -> str:
    """`BF16 or F32 [96, 7168]`."""
    at_least = " or longer" if spec.may_be_longer else ""
    return f"{' or '.join(spec.stored.safetensors_names)} {list(spec.shape)}{at_least}"
