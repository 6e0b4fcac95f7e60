"""Invariant numerics: a request's logits, bit for bit, whatever is batched beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from configs.numerics import Numerics
from model.dims import KdaDims, MlaDims
from model.kda import CHUNK_TOKENS
from tests.fakes.small_model import Part, SmallModel, random_tokens, small_dims

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@dataclass(frozen=True)
class Request:
    """A prompt and the tokens generated after it."""

    seed: int
    num_prompt: int
    num_generated: int

    @property
    def token_ids(self) -> list[int]:
        return random_tokens(self.num_prompt + self.num_generated, seed=self.seed)


REQUESTS = st.lists(
    st.builds(
        Request,
        seed=st.integers(0, 10**6),
        num_prompt=st.integers(1, 150),
        num_generated=st.integers(0, 5),
    ),
    min_size=1,
    max_size=4,
)


def run_alone(model: SmallModel, request: Request) -> Tensor:
    """The whole prompt at once, then token after token, in slot 0."""
    model = model.with_fresh_memory()
    tokens, num_prompt = request.token_ids, request.num_prompt
    logits = model.run(Part(0, tokens[:num_prompt]))
    for position in range(num_prompt, len(tokens)):
        logits += model.run(Part(0, [tokens[position]], position, is_decode=True))
    return torch.cat(logits)


def plan_lanes(requests: list[Request], data: st.DataObject) -> Iterator[list[Part]]:
    """Random lanes until every request is through: any chunks on the grid, order and company."""
    done = [0] * len(requests)
    while any(done[i] < len(request.token_ids) for i, request in enumerate(requests)):
        parts = []
        order = data.draw(st.permutations(range(len(requests))))
        for i in order[: data.draw(st.integers(1, len(requests)))]:
            request, start = requests[i], done[i]
            tokens = request.token_ids
            if start == len(tokens):
                continue
            if start < request.num_prompt:
                stop = min(request.num_prompt, start + CHUNK_TOKENS * data.draw(st.integers(1, 6)))
            else:
                stop = min(len(tokens), start + data.draw(st.integers(1, 3)))
            is_decode = start >= request.num_prompt
            parts.append(Part(i, tokens[start:stop], start, is_decode=is_decode))
            done[i] = stop
        if parts:
            yield parts


def check_invariance(model: SmallModel, requests: list[Request], data: st.DataObject) -> None:
    mixed = model.with_fresh_memory()
    mixed.memory.kv_MNPC.normal_(std=100)
    logits: list[list[Tensor]] = [[] for _ in requests]
    for parts in plan_lanes(requests, data):
        for part, result in zip(parts, mixed.run(*parts), strict=True):
            logits[part.request].append(result)
    for request, results in zip(requests, logits, strict=True):
        assert torch.equal(torch.cat(results), run_alone(model, request))


@pytest.fixture(scope="module")
def models() -> dict[torch.dtype, SmallModel]:
    """Odd widths on purpose: they make tails where a kernel could have one."""
    dims = replace(
        small_dims(),
        kda=KdaDims(num_heads=3, head_dim=20, conv_kernel_size=3, gate_lower_bound=-5.0),
        mla=MlaDims(
            num_heads=5,
            q_lora_rank=24,
            kv_lora_rank=20,
            qk_nope_head_dim=12,
            qk_rope_head_dim=4,
            v_head_dim=10,
            norm_eps=1e-6,
        ),
    )
    return {
        dtype: SmallModel.build(dims=dims, numerics=Numerics.INVARIANT, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }


@DTYPES
@settings(max_examples=8, deadline=None)
@given(requests=REQUESTS, data=st.data())
def test_logits_do_not_depend_on_batch_or_prompt_split(
    models: dict[torch.dtype, SmallModel],
    dtype: torch.dtype,
    requests: list[Request],
    data: st.DataObject,
) -> None:
    check_invariance(models[dtype], requests, data)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@DTYPES
@pytest.mark.usefixtures("two_threads")
def test_two_threads_keep_the_promise(
    models: dict[torch.dtype, SmallModel], dtype: torch.dtype
) -> None:
    model = models[dtype].with_fresh_memory()
    tokens = [random_tokens(60, seed=seed) for seed in range(3)]
    first = model.run(*(Part(i, ids[:32]) for i, ids in enumerate(tokens)))
    then = model.run(*(Part(i, ids[32:50], 32) for i, ids in enumerate(tokens)))
    last = model.run(*(Part(i, ids[50:], 50, is_decode=True) for i, ids in enumerate(tokens)))
    alone = models[dtype].with_fresh_memory()
    prompt = alone.run(Part(1, tokens[1][:50]))[0]
    generated = alone.run(Part(1, tokens[1][50:], 50, is_decode=True))[0]
    assert torch.equal(torch.cat([first[1], then[1]]), prompt)
    assert torch.equal(last[1], generated)


def test_wide_model_does_not_depend_on_its_batch() -> None:
    """Long element-wise loops and joined products with odd widths."""
    dims = replace(
        small_dims(),
        hidden_size=256,
        kda=KdaDims(num_heads=7, head_dim=32, conv_kernel_size=4, gate_lower_bound=-5.0),
        mla=MlaDims(
            num_heads=5,
            q_lora_rank=96,
            kv_lora_rank=80,
            qk_nope_head_dim=48,
            qk_rope_head_dim=16,
            v_head_dim=40,
            norm_eps=1e-6,
        ),
    )
    model = SmallModel.build(dims=dims, numerics=Numerics.INVARIANT)
    tokens = [random_tokens(num, seed=num) for num in (55, 120, 7, 90)]
    together = model.with_fresh_memory().run(*(Part(i, ids) for i, ids in enumerate(tokens)))
    for ids, logits in zip(tokens, together, strict=True):
        assert torch.equal(logits, model.with_fresh_memory().run(Part(0, ids))[0])


def test_fast_stays_within_tolerance_of_invariant() -> None:
    tokens = random_tokens(150, seed=5)
    invariant = SmallModel.build(numerics=Numerics.INVARIANT).run(Part(0, tokens))[0]
    fast = SmallModel.build(numerics=Numerics.FAST)
    split = [fast.run(Part(0, tokens[a:b], a))[0] for a, b in ((0, 37), (37, 38), (38, 150))]
    torch.testing.assert_close(torch.cat(split), invariant, rtol=0, atol=1e-4)
