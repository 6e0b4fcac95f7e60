"""An attention worker without a model, on the real request channel; the test says what it answers.

By default every request is answered by counting: token i of the answer is `first_token + i`, until
`max_tokens` or a stop token, in bursts and never beyond the credit; choice c counts from
`first_token + c`. `answers` replaces the counting: choice c gets those of its tokens, in a circle.
A moved request goes on where its tokens end. With `is_manual` nothing is answered by itself.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import numpy as np

from actors.request_channel import (
    LENGTH_BYTES,
    CacheFlushed,
    Cancel,
    Credit,
    Draining,
    Ended,
    FlushCache,
    LogitRows,
    NewTokens,
    PrefixNews,
    PromptLogprobs,
    SavedSnapshot,
    SnapshotPlace,
    StepReport,
    Submit,
    TokenLogprobs,
    Usage,
    Welcome,
    choice_id,
    decode_length,
    decode_to_worker,
    encode_message,
)
from configs.ids import WorkerId
from configs.numerics import EndReason, FinishReason


def place_of(worker="", position=4, name="copy"):
    """Where a copy of a request's memory lies: with a worker, or in a folder."""
    address = f"unix:/vaults/{worker}" if worker else "folder:/copies"
    return SnapshotPlace(address, name, position, 1000, WorkerId(worker))


def choice_of(submit, choice):
    """What stands for one choice of a submission when news of it are sent."""
    return msgspec.structs.replace(submit, request_id=choice_id(submit.request_id, choice))


def logprobs_of(token_id, num_top):
    """What the fake says of a token: exact in float32."""
    top_ids = list(range(token_id, token_id + num_top))
    return TokenLogprobs(-token_id / 8, top_ids, [-index / 4 for index in range(num_top)])


class FakeAttentionWorker:
    def __init__(
        self, *, name, is_manual, max_request_tokens, vocab_size, first_token, burst, answers
    ):
        self.name = WorkerId(name)
        self.is_manual = is_manual
        self.max_request_tokens = max_request_tokens
        self.vocab_size = vocab_size
        self.first_token = first_token
        self.burst = burst
        self.answers = answers
        self.num_sent = 0
        self.is_starved = False
        self.is_draining = False
        self.block_tokens = 4
        self.num_snapshots = 0
        """Answered to the next flush; None leaves it unanswered."""
        self.submitted = asyncio.Queue()
        self.cancelled = asyncio.Queue()
        self.credited = asyncio.Queue()
        self.connected = asyncio.Queue()
        self.flushed = asyncio.Queue()
        self.received = []
        self.live = {}
        """Submissions, one per choice, that have not ended and whose gateway is there."""
        self._writers = {}
        self._submits = {}
        self._credit = {}
        self._has_credit = asyncio.Condition()
        self._tasks = {}
        self._server = None

    @classmethod
    async def start(
        cls,
        name="attention-0",
        *,
        is_manual=False,
        max_request_tokens=1000,
        vocab_size=64,
        first_token=10,
        burst=1,
        answers=None,
        port=0,
    ):
        fake = cls(
            name=name,
            is_manual=is_manual,
            max_request_tokens=max_request_tokens,
            vocab_size=vocab_size,
            first_token=first_token,
            burst=burst,
            answers=answers,
        )
        await fake.listen(port)
        return fake

    async def listen(self, port=0):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.address = f"tcp:127.0.0.1:{self.port}"

    async def send_tokens(self, submit, token_ids):
        token_ids = list(token_ids)
        logprobs = []
        if submit.logprobs is not None:
            logprobs = [logprobs_of(token_id, submit.logprobs) for token_id in token_ids]
        tokens = NewTokens(submit.request_id, submit.attempt, token_ids, logprobs)
        await self._send(submit, StepReport(step=1, tokens=[tokens]))

    async def send_end(self, submit, reason=EndReason.FINISHED, **kwargs):
        if reason is EndReason.FINISHED:
            kwargs.setdefault("finish_reason", FinishReason.LENGTH)
        kwargs.setdefault("usage", Usage(prompt_tokens=len(submit.token_ids)))
        self.live.pop((submit.request_id, submit.attempt), None)
        ended = Ended(submit.request_id, submit.attempt, reason, **kwargs)
        await self._send(submit, StepReport(step=2, ended=[ended]))

    async def send_prompt_logprobs(self, submit, first_position, end_position):
        token_ids = submit.token_ids[first_position:end_position]
        logprobs = [logprobs_of(token_id, submit.prompt_logprobs) for token_id in token_ids]
        news = PromptLogprobs(submit.request_id, submit.attempt, first_position, logprobs)
        await self._send(submit, StepReport(step=1, prompt_logprobs=[news]))

    async def send_rows(self, submit, first_position, logits):
        rows = LogitRows(
            submit.request_id, submit.attempt, first_position, len(logits), logits.tobytes()
        )
        await self._send(submit, StepReport(step=1, logits=[rows]))

    async def send_moved(self, submit, **kwargs):
        await self.send_end(submit, EndReason.MOVED, **kwargs)

    async def give_up(self, submit):
        """Stop to answer a request and let it move; nothing happens if its gateway is gone."""
        self._tasks[submit.request_id, submit.attempt].cancel()
        with contextlib.suppress(ConnectionError):
            await self.send_moved(submit)

    async def send_saved(self, submit, place):
        saved = SavedSnapshot(submit.request_id, submit.attempt, place)
        await self._send(submit, StepReport(step=1, saved=[saved]))

    async def broadcast(self, message):
        """Send what concerns no request to every gateway."""
        for writer in self._open_writers():
            writer.write(encode_message(message))
            await writer.drain()

    async def send_prefixes(self, epoch, added=(), removed=()):
        await self.broadcast(PrefixNews(epoch, list(added), list(removed)))

    async def drain(self):
        """Tell every gateway, now and on connecting, that no new requests are taken."""
        self.is_draining = True
        await self.broadcast(Draining())

    def _open_writers(self):
        return [writer for writer in set(self._writers.values()) if not writer.is_closing()]

    def drop_connections(self):
        """Break every connection, as a process that dies does."""
        for writer in set(self._writers.values()):
            writer.transport.abort()

    async def close(self):
        for task in self._tasks.values():
            task.cancel()
        if self._server is not None:
            self._server.close()
            self.drop_connections()
            await self._server.wait_closed()

    async def _accept(self, reader, writer):
        self._writers[id(writer)] = writer
        welcome = Welcome(
            self.name, 1, self.max_request_tokens, self.block_tokens, is_draining=self.is_draining
        )
        writer.write(encode_message(welcome))
        self.connected.put_nowait(id(writer))
        try:
            while True:
                prefix = await reader.readexactly(LENGTH_BYTES)
                body = await reader.readexactly(decode_length(prefix))
                await self._take(decode_to_worker(body), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            for key in [key for key in self.live if self._writers[key] is writer]:
                del self.live[key]
                if key in self._tasks:
                    self._tasks[key].cancel()

    async def _take(self, message, writer):
        self.received.append(message)
        if isinstance(message, FlushCache):
            self.flushed.put_nowait(message)
            if self.num_snapshots is not None:
                writer.write(encode_message(CacheFlushed(message.flush_id, self.num_snapshots)))
            return
        key = (message.request_id, message.attempt)
        match message:
            case Submit():
                for choice in range(message.num_choices):
                    submit = choice_of(message, choice)
                    key = (submit.request_id, submit.attempt)
                    self._submits[key] = self.live[key] = submit
                    self._writers[key] = writer
                    self._credit[key] = message.credit_tokens
                    if not self.is_manual:
                        # A choice that was moved comes alone.
                        number = submit.sampling.choice + choice
                        self._tasks[key] = asyncio.create_task(self._answer(submit, number))
                self.submitted.put_nowait(message)
            case Credit():
                async with self._has_credit:
                    self._credit[key] += message.num_tokens
                    self._has_credit.notify_all()
                self.credited.put_nowait(message)
            case Cancel():
                self.cancelled.put_nowait(message)
                if key in self._tasks:
                    self._tasks[key].cancel()
                await self.send_end(self._submits[key], EndReason.CANCELLED)

    def _token(self, choice, index):
        if self.answers is not None:
            answer = self.answers[choice]
            return answer[index % len(answer)]
        return (self.first_token + choice + index) % self.vocab_size

    async def _answer(self, submit, choice):
        key = (submit.request_id, submit.attempt)
        if submit.want_logits:
            logits = np.tile(
                np.asarray(submit.token_ids, dtype="<f4")[:, None], (1, self.vocab_size)
            )
            num_sent = 0
            while num_sent < len(logits):
                room = await self._room(key, num_sent)
                await self.send_rows(submit, num_sent, logits[num_sent : num_sent + room])
                num_sent = self.num_sent = min(num_sent + room, len(logits))
            await self.send_end(submit, usage=Usage(prompt_tokens=len(submit.token_ids)))
            return
        if submit.prompt_logprobs is not None and choice == 0:
            await self.send_prompt_logprobs(submit, 1, len(submit.token_ids))
        reason = FinishReason.LENGTH
        num_old = num_sent = len(submit.generated_ids)
        while num_sent < submit.max_tokens and reason is FinishReason.LENGTH:
            room = await self._room(key, num_sent - num_old)
            num_new = min(self.burst, submit.max_tokens - num_sent, room)
            token_ids = []
            while len(token_ids) < num_new and reason is FinishReason.LENGTH:
                token_ids.append(self._token(choice, num_sent))
                num_sent += 1
                if token_ids[-1] in submit.stop_token_ids:
                    reason = FinishReason.STOP
            await self.send_tokens(submit, token_ids)
            self.num_sent = num_sent
        usage = Usage(
            prompt_tokens=len(submit.token_ids),
            computed_tokens=len(submit.token_ids),
            output_tokens=num_sent,
            first_token_s=0.25,
            total_s=0.5,
        )
        await self.send_end(submit, finish_reason=reason, usage=usage)

    async def _room(self, key, num_sent):
        async with self._has_credit:
            self.is_starved = self._credit[key] <= num_sent
            await self._has_credit.wait_for(lambda: self._credit[key] > num_sent)
            self.is_starved = False
            return self._credit[key] - num_sent

    async def _send(self, submit, report):
        writer = self._writers[submit.request_id, submit.attempt]
        writer.write(encode_message(report))
        await writer.drain()
