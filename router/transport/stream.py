"""A link over a connected stream socket: header, then payload, on one channel.

TCP and local links are this; the shared-memory link adds a place for payloads beside it. Reads go
exactly up to the end of a header or payload, so the socket is readable as long as anything of the
next frame waits. Place 0 in a header means that the payload follows on the stream.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from configs.errors import FrameError, PeerClosedError, TransportTimeoutError
from configs.ids import Generation, WorkerId
from router.frames import (
    HEADER_BYTES,
    FrameHeader,
    decode_placed_header,
    encode_header,
)
from router.transport.base import Bytes, Frame
from router.transport.buffers import BufferPool

PLACE_STREAM = 0
_NO_PAYLOAD: Bytes = np.empty(0, np.uint8)
_MAX_CHUNKS_PER_CALL = 64


class StreamLink:
    """One side of a stream connection. Owns the socket."""

    def __init__(self, sock: socket.socket, *, peer: WorkerId, generation: Generation) -> None:
        """Take over a connected socket whose handshake is done."""
        sock.settimeout(0)
        self._sock = sock
        self._peer = peer
        self._generation = generation
        self._closed = False
        self._unsent: deque[tuple[memoryview, float]] = deque()
        self._unsent_bytes = 0
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._head_got = 0
        self._header: FrameHeader | None = None
        self._buffer: Bytes = _NO_PAYLOAD
        self._got = 0
        self._pool = BufferPool()
        self._lent: dict[int, Bytes] = {}
        self._next_token = 1

    @property
    def peer(self) -> WorkerId:
        """Who is on the other side."""
        return self._peer

    @property
    def generation(self) -> Generation:
        """Membership generation the link was made in."""
        return self._generation

    @property
    def unsent_bytes(self) -> int:
        """Bytes queued because the peer had no room."""
        return self._unsent_bytes

    def fileno(self) -> int:
        """Descriptor of the socket."""
        return self._sock.fileno()

    def send(self, header: FrameHeader, parts: Sequence[Bytes], *, deadline: float) -> None:
        """Send or queue one frame; see `Link.send`."""
        self._check_open()
        num_bytes = sum([part.nbytes for part in parts])
        if num_bytes != header.payload_bytes:
            raise FrameError(
                f"frame for {self._peer} has {num_bytes} payload bytes, its header states "
                f"{header.payload_bytes}"
            )
        placed = self._place_payload(parts, num_bytes) if num_bytes else None
        if placed is None:
            chunks = [memoryview(encode_header(header)), *(part.data for part in parts)]
            self._write(chunks, HEADER_BYTES + num_bytes, deadline)
        else:
            place, position = placed
            head = memoryview(encode_header(header, place=place, position=position))
            self._write([head], HEADER_BYTES, deadline)

    def flush(self) -> bool:
        """Push queued bytes; see `Link.flush`."""
        if not self._unsent:
            return True
        self._check_open()
        while self._unsent:
            count = min(len(self._unsent), _MAX_CHUNKS_PER_CALL)
            sent = self._send_now([self._unsent[i][0] for i in range(count)])
            if sent == 0:
                self._check_overdue()
                return False
            self._unsent_bytes -= sent
            while self._unsent and sent >= self._unsent[0][0].nbytes:
                sent -= self._unsent.popleft()[0].nbytes
            if sent:
                chunk, deadline = self._unsent[0]
                self._unsent[0] = (chunk[sent:], deadline)
        return True

    def try_receive(self) -> Frame | None:
        """Return the next complete frame, or None; see `Link.try_receive`."""
        if self._closed:
            self._check_open()
        header = self._header
        if header is None:
            if not self._read_header():
                return None
            try:
                header, place, position = decode_placed_header(self._head)
                placed = self._placed_frame(header, place, position)
            except FrameError:
                self.close()
                raise
            if placed is not None:
                return placed
            self._header = header
            self._buffer = self._pool.take(header.payload_bytes)
            self._got = 0
        if not self._read_payload(header.payload_bytes):
            return None
        token = self._next_token
        self._next_token += 1
        self._lent[token] = self._buffer
        frame = Frame(header, self._buffer[: header.payload_bytes], token)
        self._header = None
        self._buffer = _NO_PAYLOAD
        return frame

    def release(self, frame: Frame) -> None:
        """Give back a frame's buffer; see `Link.release`."""
        buffer = self._lent.pop(frame.token, None)
        if buffer is not None:
            self._pool.give_back(buffer)

    def close(self) -> None:
        """End the link. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._unsent.clear()
        self._unsent_bytes = 0
        self._sock.close()

    def _place_payload(self, parts: Sequence[Bytes], num_bytes: int) -> tuple[int, int] | None:
        """Put a payload elsewhere and return (place, position), or None to send it in line."""
        del parts, num_bytes
        return None

    def _placed_frame(self, header: FrameHeader, place: int, position: int) -> Frame | None:
        """Return the frame whose header was just read, or None when its payload follows.

        Raises:
            FrameError: The header names a place that this link does not have.
        """
        if place != PLACE_STREAM:
            raise FrameError(
                f"frame from {self._peer} puts its payload in place {place}, this link has only "
                f"{PLACE_STREAM}"
            )
        return None if header.payload_bytes else Frame(header, _NO_PAYLOAD)

    def _check_open(self) -> None:
        if self._closed:
            raise PeerClosedError(f"the connection to {self._peer} is closed")

    def _check_overdue(self) -> None:
        if time.monotonic() < self._unsent[0][1]:
            return
        unsent = self._unsent_bytes
        self.close()
        raise TransportTimeoutError(
            f"{self._peer} made no room for {unsent} queued bytes before the deadline; "
            "it is stuck or too slow"
        )

    def _write(self, chunks: list[memoryview], num_bytes: int, deadline: float) -> None:
        if self._unsent:
            sent = 0
        else:
            sent = self._send_now(chunks)
            if sent == num_bytes:
                return
        for chunk in chunks:
            if sent >= chunk.nbytes:
                sent -= chunk.nbytes
                continue
            rest = memoryview(bytes(chunk[sent:]))
            sent = 0
            self._unsent.append((rest, deadline))
            self._unsent_bytes += rest.nbytes
        self.flush()

    def _send_now(self, chunks: list[memoryview]) -> int:
        """Return the bytes that the kernel took at once; 0 when it has no room."""
        try:
            if len(chunks) == 1:
                return self._sock.send(chunks[0])
            return self._sock.sendmsg(chunks)
        except BlockingIOError:
            return 0
        except OSError as exc:
            # Not closed here: frames that the peer sent before it went may still be read.
            raise PeerClosedError(f"{self._peer} closed the connection: {exc}") from exc

    def _read_into(self, target: memoryview) -> int:
        """Return bytes read, 0 when none are there.

        Raises:
            PeerClosedError: End of the stream; the link is closed.
        """
        try:
            count = self._sock.recv_into(target)
        except BlockingIOError:
            return 0
        except OSError as exc:
            self.close()
            raise PeerClosedError(f"{self._peer} closed the connection: {exc}") from exc
        if count == 0:
            self.close()
            raise PeerClosedError(f"{self._peer} closed the connection")
        return count

    def _read_header(self) -> bool:
        got = self._head_got
        while got < HEADER_BYTES:
            count = self._read_into(self._head[got:] if got else self._head)
            if count == 0:
                self._head_got = got
                return False
            got += count
        self._head_got = 0
        return True

    def _read_payload(self, num_bytes: int) -> bool:
        view = self._buffer.data
        while self._got < num_bytes:
            count = self._read_into(view[self._got : num_bytes])
            if count == 0:
                return False
            self._got += count
        return True
