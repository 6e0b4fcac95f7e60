"""Vaults that stop in the middle."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

from actors.snapshots.wire import (
    LENGTH_BYTES,
    Answer,
    Found,
    Get,
    Question,
    Ready,
    pack,
    unpack,
    unpack_length,
)
from configs.errors import FrameError


class StallingVault:
    """Takes one connection, answers its question, and then neither reads nor sends."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self.is_in_transfer = threading.Event()
        self.connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Wakes the thread where nobody has connected.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()
        self.leave()

    def leave(self) -> None:
        """Close the connection in the middle."""
        if self.connection is not None:
            self.connection.close()

    def _serve(self) -> None:
        # It ends early where nobody connects, or who connects leaves without a question.
        with contextlib.suppress(OSError, FrameError):
            self.connection, _ = self._listener.accept()
            length = unpack_length(self.connection.recv(LENGTH_BYTES, socket.MSG_WAITALL))
            body = self.connection.recv(length, socket.MSG_WAITALL)
            question = unpack(body, Question)
            answer: Answer = Found(8 << 20) if isinstance(question, Get) else Ready()
            self.connection.sendall(pack(answer))
            self.is_in_transfer.set()
