"""A decoder without a model, and a router without workers, for tests of the engine.

The fake writes what it is given into the real memory tensors and computes the next token from what
it reads back: the token and form of every position through the block table, and a running hash in
the state slot. A leaked slot, a wrong block, a stale state, a skipped or repeated position or the
wrong form gives another token or an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from configs.errors import InvariantError, ServingError, TransportTimeoutError
from model.batch import Segment, StepBatch
from model.cache import ModelMemory
from model.dispatcher import Dispatcher, Ticket

MODULUS = 8191  # Exact in float32.


def fake_memory(*, num_blocks: int, block_size: int, num_slots: int) -> ModelMemory:
    """Memory whose rows the fake uses as it likes; filled with rubbish to begin with."""
    return ModelMemory(
        kv_MNPC=torch.full((1, num_blocks, block_size, 1), 777.0),
        state_ASHDD=torch.full((1, num_slots, 1, 2, 2), 777.0),
        conv_ASJ3HD=torch.full((1, num_slots, 1, 3), 777.0),
    )


def mix(state: int, token: int, *, is_decode: bool) -> int:
    """One step of the running hash."""
    return (state * 31 + token * 2 + (2 if is_decode else 1)) % MODULUS


def next_token(state: int, vocab_size: int) -> int:
    """The token that follows a history."""
    return (state * 7 + 3) % vocab_size


def expected_tokens(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What a request generates when it runs alone, computed without any memory."""
    state = 0
    for token in prompt:
        state = mix(state, token, is_decode=False)
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(next_token(state, vocab_size))
        state = mix(state, tokens[-1], is_decode=True)
    return tokens


class FakeDecoder:
    """Same surface as the decoder; `num_layers` tickets per run."""

    def __init__(self, *, vocab_size: int, num_layers: int = 2) -> None:
        self.vocab_size = vocab_size
        self.num_layers = num_layers
        self.batches: list[StepBatch] = []

    def run(
        self, batch: StepBatch, memory: ModelMemory, dispatcher: Dispatcher
    ) -> Generator[Ticket, None, Tensor]:
        self.batches.append(batch)
        num_tokens = int(batch.token_ids_T.shape[0])
        z_TL = torch.zeros(num_tokens, 1)
        for layer in range(self.num_layers):
            ticket = dispatcher.begin(
                layer, z_TL, torch.zeros(num_tokens, 1, dtype=torch.int64), z_TL
            )
            yield ticket
            dispatcher.finish(ticket)
        logits_TV = torch.zeros(num_tokens, self.vocab_size)
        expected_start = 0
        for segment in batch.segments:
            if segment.start != expected_start:
                raise InvariantError(f"segments leave a gap at row {expected_start}")
            expected_start += segment.num_tokens
            self._run_segment(segment, batch.token_ids_T.tolist(), memory, logits_TV)
        if expected_start != num_tokens:
            raise InvariantError(f"segments cover {expected_start} of {num_tokens} rows")
        return logits_TV[batch.logit_rows_R]

    def _run_segment(
        self, segment: Segment, token_ids: list[int], memory: ModelMemory, logits_TV: Tensor
    ) -> None:
        slot = memory.state_ASHDD[0, segment.state_slot, 0]
        state, position = int(slot[0, 0]), int(slot[0, 1])
        if position != segment.position:
            raise InvariantError(
                f"state slot {segment.state_slot} holds {position} tokens, segment starts at "
                f"{segment.position}"
            )
        history = _read_history(segment, memory)
        if history != state:
            raise InvariantError(f"blocks hash to {history}, state slot holds {state}")
        for row in range(segment.start, segment.start + segment.num_tokens):
            token = token_ids[row]
            state = mix(state, token, is_decode=segment.is_decode)
            block, offset = divmod(position, memory.block_size)
            memory.kv_MNPC[0, segment.block_table[block], offset, 0] = token * 2 + segment.is_decode
            position += 1
            logits_TV[row, next_token(state, self.vocab_size)] = 1.0
        slot[0, 0], slot[0, 1] = float(state), float(position)
        if segment.save_slot is not None:
            memory.copy_slot(segment.state_slot, segment.save_slot)


def _read_history(segment: Segment, memory: ModelMemory) -> int:
    state = 0
    for position in range(segment.position):
        block, offset = divmod(position, memory.block_size)
        value = int(memory.kv_MNPC[0, segment.block_table[block], offset, 0])
        state = mix(state, value // 2, is_decode=bool(value % 2))
    return state


class FakeTicket:
    """Ready when the router says so."""

    def __init__(self, router: FakeRouter, lane: int, layer: int) -> None:
        self.router = router
        self.lane = lane
        self.layer = layer
        self.is_open = True

    def is_ready(self) -> bool:
        return self in self.router.ready


class FakeRouter:
    """Records events; answers come in the order that `choose` picks among the open tickets."""

    def __init__(
        self,
        *,
        choose: Callable[[list[FakeTicket]], FakeTicket | None] | None = None,
        fail: Callable[[int, int, int], Exception | None] | None = None,
    ) -> None:
        """Make a router.

        Args:
            choose: Picks the ticket that is answered when all lanes wait; None times out.
            fail: From (step, lane, layer) to the error that `finish` raises.
        """
        self.events: list[tuple[str, int, int]] = []
        """("begin" | "finish", lane, layer) in order."""
        self.ready: list[FakeTicket] = []
        self.open: deque[FakeTicket] = deque()
        self.num_abandoned = 0
        self._choose = choose
        self._fail = fail

    def lane(self, *, step: int, lane: int) -> Dispatcher:
        return _FakeDispatcher(self, step, lane)

    def wait_any(self, tickets: Sequence[Ticket], *, deadline: float) -> None:
        waiting = [ticket for ticket in self.open if ticket in tickets]
        chosen = waiting[0] if self._choose is None else self._choose(waiting)
        if chosen is None:
            raise TransportTimeoutError(f"no answer until {deadline}; peer expert-0, layer 0")
        self.ready.append(chosen)

    def abandon_step(self) -> None:
        self.num_abandoned += 1
        self.open.clear()
        self.ready.clear()

    def error_of(self, step: int, lane: int, layer: int) -> Exception | None:
        return None if self._fail is None else self._fail(step, lane, layer)


class _FakeDispatcher:
    def __init__(self, router: FakeRouter, step: int, lane: int) -> None:
        self._router = router
        self._step = step
        self._lane = lane

    def begin(self, layer: int, z_TL: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Ticket:
        ticket = FakeTicket(self._router, self._lane, layer)
        self._router.open.append(ticket)
        self._router.events.append(("begin", self._lane, layer))
        return ticket

    def finish(self, ticket: Ticket) -> Tensor:
        fake = next(open_ticket for open_ticket in self._router.open if open_ticket is ticket)
        self._router.open.remove(fake)
        self._router.events.append(("finish", fake.lane, fake.layer))
        error = self._router.error_of(self._step, fake.lane, fake.layer)
        if error is not None:
            raise error
        return torch.zeros(1, 1)


__all__ = [
    "FakeDecoder",
    "FakeRouter",
    "FakeTicket",
    "ServingError",
    "expected_tokens",
    "fake_memory",
]
