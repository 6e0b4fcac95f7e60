"""`smg`, a gateway that we did not write, as a child process in front of our gRPC door."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

SMG = Path(sys.executable).parent / "smg"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.1


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def smg_in_front_of(grpc_address, folder):
    """Yield the base URL of a running smg; its output lies in `folder`."""
    port, metrics_port = free_port(), free_port()
    command = [str(SMG), "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"grpc://{grpc_address}"]
    command += ["--reasoning-parser", "kimi_k3", "--tool-call-parser", "kimi_k3"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command += ["--history-backend", "none", "--shutdown-grace-period-secs", "2"]
    environment = {**os.environ, "HOME": str(folder)}  # noqa: TID251 - a child's
    output = folder / "smg.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    try:
        _wait_models(process, port, output)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_models(process, port, output):
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        assert process.poll() is None, output.read_text()[-3000:]
        assert time.monotonic() < deadline, output.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
                if b'"id"' in answer.read():
                    return
        except (urllib.error.URLError, OSError):
            pass
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
