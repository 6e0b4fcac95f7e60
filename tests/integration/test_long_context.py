"""Long prompts through the whole path: the same answer in other chunks, and memory that is planned.

Every context length computes with the same pools, so what grows with it is the request's blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from actors.engine.admission import blocks_needed
from actors.request_channel import Sampling, Submit, TokenLogprobs
from actors.single_process import SingleProcess, SingleProcessSettings
from configs.numerics import FloatType, Numerics
from model.checkpoint import Checkpoint
from model.checkpoint_spec import CheckpointSpec, demo_dims, demo_layer_kinds
from model.checkpoint_writer import write_checkpoint
from model.dims import ModelDims
from model.storage import StorageFormat

BLOCK_TOKENS = 64
NUM_OUTPUT = 6
SHORT, LONG = 8_000, 131_072


@dataclass(frozen=True)
class Answer:
    """What came back, and what it took."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    used_blocks: list[int]
    """After each step."""
    step_tokens: list[int]
    """Computed in each step."""


def tiny_dims() -> ModelDims:
    """KDA to MLA 3 : 1, and as narrow as the parts allow: a long prompt costs seconds."""
    small = demo_dims()
    return replace(
        small,
        hidden_size=32,
        dense_hidden_size=32,
        context_tokens=LONG + NUM_OUTPUT,
        layer_kinds=demo_layer_kinds(4),
        kda=replace(small.kda, num_heads=1, head_dim=32),
        mla=replace(
            small.mla,
            num_heads=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
        ),
        moe=replace(
            small.moe,
            num_experts=4,
            num_experts_per_token=2,
            num_shared_experts=1,
            expert_hidden_size=32,
            latent_size=32,
        ),
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("long") / "checkpoint"
    storage = StorageFormat(dtype=FloatType.FLOAT32, has_packed_experts=False)
    write_checkpoint(folder, CheckpointSpec(dims=tiny_dims(), storage=storage), seed=3)
    return Checkpoint.open(folder)


def prompt_of(num_tokens: int) -> list[int]:
    """Text without a period, so that no part of it repeats."""
    return [(i * i + i // 7) % 251 for i in range(num_tokens)]


def run(checkpoint: Checkpoint, prompt: list[int], *, max_step_tokens: int) -> Answer:
    settings = SingleProcessSettings(
        max_request_tokens=len(prompt) + NUM_OUTPUT,
        numerics=Numerics.INVARIANT,
        max_step_tokens=max_step_tokens,
        block_tokens=BLOCK_TOKENS,
    )
    answer = Answer([], [], [], [])
    with SingleProcess(checkpoint, settings) as process:
        submit = Submit(
            request_id=process.next_id(),
            attempt=0,
            token_ids=prompt,
            max_tokens=NUM_OUTPUT,
            sampling=Sampling(),
            stop_token_ids=[],
            logprobs=3,
        )
        for outcome in process.run([submit]):
            for news in outcome.tokens:
                answer.tokens.extend(news.token_ids)
                answer.logprobs.extend(news.logprobs)
            answer.step_tokens.append(outcome.num_computed_tokens)
            answer.used_blocks.append(process._engine.stats().num_used_blocks)
    return answer


def check_memory(answer: Answer, num_prompt: int, *, max_step_tokens: int) -> None:
    """No step computes more than its budget, no block beyond the request's is ever used."""
    limit = blocks_needed(num_prompt + NUM_OUTPUT, BLOCK_TOKENS)
    assert max(answer.used_blocks) <= limit
    assert answer.used_blocks[-1] == 0
    assert max(answer.step_tokens) <= max_step_tokens
    assert sum(answer.step_tokens) == num_prompt + NUM_OUTPUT - 1


def check_chunks(checkpoint: Checkpoint, num_prompt: int, *, sizes: tuple[int, int]) -> None:
    """Both chunk sizes give the same tokens and log-probabilities, bit by bit."""
    prompt = prompt_of(num_prompt)
    answers = [run(checkpoint, prompt, max_step_tokens=size) for size in sizes]
    for answer, size in zip(answers, sizes, strict=True):
        check_memory(answer, num_prompt, max_step_tokens=size)
    assert len(answers[0].tokens) == NUM_OUTPUT
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].logprobs == answers[1].logprobs


def test_a_long_prompt_gives_the_same_bits_in_small_and_large_chunks(
    checkpoint: Checkpoint,
) -> None:
    check_chunks(checkpoint, SHORT, sizes=(512, 64))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_prompt_of_128k_tokens_gives_the_same_bits_in_other_chunks(
    checkpoint: Checkpoint,
) -> None:
    check_chunks(checkpoint, LONG, sizes=(2048, 512))
