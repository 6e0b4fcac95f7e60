"""The embedded state server, with the real binary."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
import redis

from cluster.valkey import PID_FILE, EmbeddedValkey, end_orphan
from configs.errors import StateStoreError


@pytest.fixture
def start(tmp_path, short_folder):
    """Starts servers on one data folder and ends them."""
    started = []

    def _start():
        server = EmbeddedValkey.start(
            folder=tmp_path / "state",
            socket=short_folder / f"v{len(started)}.sock",
            log_file=tmp_path / "valkey.log",
        )
        started.append(server)
        return server

    yield _start
    for server in started:
        server.stop()


def test_data_outlive_a_restart(start):
    first = start()
    redis.Redis.from_url(first.url).set("key", "value")
    first.stop()
    assert redis.Redis.from_url(start().url).get("key") == b"value"


def test_stop_leaves_no_process_socket_or_pid_file(start, tmp_path, short_folder):
    server = start()
    pid = server.pid
    server.stop()
    assert not psutil.pid_exists(pid)
    assert list(short_folder.iterdir()) == []
    assert not (tmp_path / "state" / PID_FILE).exists()


def test_server_that_was_killed_is_not_running(start):
    server = start()
    assert server.is_running
    os.kill(server.pid, signal.SIGKILL)
    server._process.wait(5)
    assert not server.is_running


def test_stop_twice_is_allowed(start):
    server = start()
    server.stop()
    server.stop()


def test_orphan_of_a_dead_launch_is_ended_by_the_next_start(start):
    orphan = start()
    successor = start()
    assert orphan._process.wait(5) == 0
    assert redis.Redis.from_url(successor.url).ping()


def test_process_that_reuses_the_number_of_an_orphan_is_left_alone(tmp_path):
    (tmp_path / PID_FILE).write_text(json.dumps({"pid": os.getpid(), "started": 1.0}))
    end_orphan(tmp_path)
    assert not (tmp_path / PID_FILE).exists()


def test_other_program_with_the_recorded_start_is_left_alone(tmp_path):
    own = psutil.Process()
    (tmp_path / PID_FILE).write_text(json.dumps({"pid": own.pid, "started": own.create_time()}))
    end_orphan(tmp_path)
    assert not (tmp_path / PID_FILE).exists()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"pid": "x", "started": 0}'])
def test_unreadable_pid_file_is_removed(tmp_path, text):
    (tmp_path / PID_FILE).write_text(text)
    end_orphan(tmp_path)
    assert not (tmp_path / PID_FILE).exists()


def test_broken_data_is_an_error_with_the_last_words_of_the_server(start, tmp_path):
    folder = tmp_path / "state" / "appendonlydir"
    folder.mkdir(parents=True)
    (folder / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(StateStoreError, match="ended with code"):
        start()


def test_stop_ends_a_server_that_does_not_react(start):
    server = start()
    os.kill(server.pid, signal.SIGSTOP)
    server.stop(timeout_s=0.2)
    assert not psutil.pid_exists(server.pid)


def test_server_ends_with_a_launch_that_is_killed(tmp_path, short_folder):
    program = (
        "import os, pathlib, sys; from cluster.valkey import EmbeddedValkey as V;"
        "folder, sockets = map(pathlib.Path, sys.argv[1:]);"
        "server = V.start(folder=folder, socket=sockets / 'v.sock', log_file=folder / 'log');"
        "print(server.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(short_folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    try:
        psutil.Process(int(done.stdout)).wait(10)
    except psutil.NoSuchProcess:
        return
