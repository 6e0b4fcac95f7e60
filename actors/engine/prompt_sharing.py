"""Answers to one prompt: one request computes it, the others take over its memory.

A submission with several choices is a group: the leader, its first request that lives, computes
the prompt; the followers own slots and blocks of their own from admission on, but the blocks that
the prompt fills are the leader's, shared by reference and never written again. At the prompt's end
each follower gets an exact copy of the leader's state and of the block that the prompt fills in
part. A leader that ends before hands its memory and its followers to the next one. A leader that is
preempted takes its followers along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from actors.engine.admission import EngineLimits, blocks_needed
from actors.engine.request import EngineRequest
from actors.request_channel import Submit, choice_id
from model.cache import ModelMemory


@dataclass(frozen=True, slots=True)
class GroupNeed:
    """Memory that a request and its followers are admitted with."""

    num_slots: int
    num_blocks: int


def split_choices(submit: Submit) -> list[Submit]:
    """Return one submission per choice, in order; one also where too few are asked for."""
    if submit.num_choices <= 1:
        return [submit]
    return [
        msgspec.structs.replace(
            submit,
            request_id=choice_id(submit.request_id, choice),
            sampling=msgspec.structs.replace(
                submit.sampling, choice=submit.sampling.choice + choice
            ),
            num_choices=1,
            prompt_logprobs=submit.prompt_logprobs if choice == 0 else None,
        )
        for choice in range(submit.num_choices)
    ]


def group_need(num_prompt: int, num_blocks: int, num_members: int, block_tokens: int) -> GroupNeed:
    """Return what `num_members` requests of `num_blocks` blocks each need when they share."""
    num_shared = num_prompt // block_tokens
    return GroupNeed(num_members, num_blocks + (num_members - 1) * (num_blocks - num_shared))


def can_share(submit: Submit, limits: EngineLimits) -> bool:
    """Whether all choices of a submission can be in memory at once, and go on at once.

    Without credit at the start each waits for its own, and none may wait for that of another.
    """
    if submit.credit_tokens <= 0:
        return False
    # Each begins with its prompt and the first token; later they make room for each other.
    num_blocks = blocks_needed(len(submit.token_ids) + 1, limits.block_tokens)
    need = group_need(len(submit.token_ids), num_blocks, submit.num_choices, limits.block_tokens)
    return need.num_slots <= limits.num_state_slots and need.num_blocks <= limits.num_blocks


def form_group(requests: Sequence[EngineRequest]) -> None:
    """Make the first request the leader of the others."""
    leader, *followers = requests
    leader.followers = followers
    for follower in followers:
        follower.leader = leader


def fork_prompt(leader: EngineRequest, memory: ModelMemory) -> list[EngineRequest]:
    """Copy what the leader's prompt left in memory to its followers, and set them free.

    Returns:
        The followers: from now on they are requests like any other.
    """
    followers, leader.followers = leader.followers, []
    num_full, num_rest = divmod(leader.num_prompt, memory.block_size)
    for follower in followers:
        if leader.slot is not None and follower.slot is not None:
            memory.copy_slot(leader.slot, follower.slot)
        if num_rest:
            memory.copy_block(leader.blocks[num_full], follower.blocks[num_full], num_rest)
        follower.leader = None
        follower.computed = follower.num_shared = leader.num_prompt
        follower.last_step, follower.last_saved = leader.last_step, leader.last_saved
    return followers


def hand_over(leader: EngineRequest) -> EngineRequest:
    """Make the leader's first follower the leader, with the memory that holds the prompt so far.

    The old leader owns the follower's memory afterwards.

    Returns:
        The new leader.
    """
    heir, *others = leader.followers
    leader.followers, heir.leader = [], None
    heir.followers = others
    for other in others:
        other.leader = heir
    leader.slot, heir.slot = heir.slot, leader.slot
    leader.blocks, heir.blocks = heir.blocks, leader.blocks
    leader.snapshot, heir.snapshot = heir.snapshot, leader.snapshot
    heir.computed = heir.num_shared = leader.computed
    heir.last_step, heir.last_saved = leader.last_step, leader.last_saved
    return heir
