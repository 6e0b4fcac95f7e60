"""`latentmesh serve` as a user runs it: a process, its addresses, and what it leaves behind.

Not a fake: the real program. It stands beside the fakes because several tests share it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from cluster.api.answers import Chunk
from cluster.api.client import LatentmeshClient
from cluster.api.params import GenerateParams, StopParams
from cluster.ready_record import ReadyRecord, read_record

MINI = Path(__file__).parent.parent / "golden" / "mini"
LATENTMESH = Path(sys.executable).parent / "latentmesh"
START_TIMEOUT_S = 150.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.05
SHARED_MEMORY = Path("/dev/shm")


class ServedCluster:
    """One run of `latentmesh serve` with its own temporary folder, hence findable leftovers."""

    def __init__(self, folder: Path, settings: Sequence[str] = (), *, checkpoint: Path = MINI):
        self.data_dir = folder / "data"
        self.ready_file = folder / "ready.json"
        # Short, because sockets go below it; its own, because what is left in it was left by us.
        self.temporary = Path(tempfile.mkdtemp(prefix="lmt-"))
        self._memory_before = set(SHARED_MEMORY.iterdir())
        self._seen: dict[int, psutil.Process] = {}
        self._output = (folder / "output.txt").open("w+")
        self._errors = (folder / "errors.txt").open("w+")
        command = [str(LATENTMESH), "serve", "--checkpoint", str(checkpoint)]
        command += ["--ready-file", str(self.ready_file), "--set", f"data_dir={self.data_dir}"]
        for setting in settings:
            command += ["--set", setting]
        environment = {**os.environ, "TMPDIR": str(self.temporary)}  # noqa: TID251 - a child's
        self.process = psutil.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        """What it printed."""
        self._output.flush()
        return Path(self._output.name).read_text()

    @property
    def errors(self) -> str:
        """What it printed as errors."""
        return Path(self._errors.name).read_text()

    @property
    def log(self) -> str:
        """Its log file."""
        path = self.data_dir / "logs" / "serve.log"
        return path.read_text() if path.exists() else ""

    def wait_ready(self) -> ReadyRecord:
        """Wait until requests are served."""
        self.wait_for(self.ready_file.exists, "the ready file")
        self.processes()
        return read_record(self.ready_file)

    def wait_for(self, condition, what: str) -> None:
        """Wait until something holds, as long as a start may take."""
        for _ in range(int(START_TIMEOUT_S / POLL_S)):
            if condition():
                return
            try:
                code = self.process.wait(POLL_S)
            except psutil.TimeoutExpired:
                continue
            raise AssertionError(f"ended with {code} before {what}: {self.errors}\n{self.log}")
        raise AssertionError(f"no {what} in {START_TIMEOUT_S} s\n{self.log}")

    def wait_for_end_of_all(self) -> None:
        """Wait until no process of the launch runs."""
        _, alive = psutil.wait_procs(self.processes(), timeout=STOP_TIMEOUT_S)
        assert alive == []

    def processes(self) -> list[psutil.Process]:
        """Processes of this launch that run now; every one seen is remembered for `leftovers`."""
        for process in psutil.process_iter():
            if self._is_ours(process):
                self._seen[process.pid] = process
        return [process for process in self._seen.values() if process.is_running()]

    def _is_ours(self, process: psutil.Process) -> bool:
        # Children of any depth inherit a temporary folder in ours. Programs that write their title
        # over their environment name a file in it, or are children of one that does neither.
        try:
            if process.pid in self._seen:
                return self._seen[process.pid] == process
            return (
                str(self.temporary) in process.environ().get("TMPDIR", "")
                or str(self.temporary) in " ".join(process.cmdline())
                or any(parent.pid in self._seen for parent in process.parents())
            )
        except psutil.Error:
            return False

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; return the exit code."""
        if self.process.is_running():
            self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)

    def leftovers(self) -> list[str]:
        """Name every process, socket and file of the launch that outlived it."""
        left = [f"process {p.pid} {p.name()} {p.cmdline()}" for p in self.processes()]
        left += [f"file {path}" for path in self.temporary.rglob("*")]
        left += [f"socket {path}" for path in self.data_dir.rglob("*") if path.is_socket()]
        left += [f"memory {path}" for path in set(SHARED_MEMORY.iterdir()) - self._memory_before]
        for path in (self.ready_file, self.data_dir / "ready.json", self.data_dir / "run-folder"):
            left += [f"file {path}"] if path.exists() else []
        return left

    def close(self) -> None:
        """End whatever is left, by force: a failed test must not burden the next one."""
        for process in [*self.processes(), self.process]:
            if process.is_running():
                process.kill()
        self.process.wait(STOP_TIMEOUT_S)
        shutil.rmtree(self.temporary, ignore_errors=True)
        self._output.close()
        self._errors.close()


def run_latentmesh(*args: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [str(LATENTMESH), *args], capture_output=True, text=True, timeout=120, check=False
    )


def generate(address: str, prompt: Sequence[int], *, max_tokens: int) -> list[int]:
    """Greedy tokens through the gRPC client."""
    params = GenerateParams(
        prompt=list(prompt), max_tokens=max_tokens, stop=StopParams(ignore_eos=True)
    )
    tokens: list[int] = []
    with LatentmeshClient(address) as client:
        for event in client.generate(params, timeout_s=120):
            if isinstance(event, Chunk):
                tokens += event.token_ids
    return tokens


def read_json(text: str):
    """Parse JSON, with the text in the error."""
    try:
        return json.loads(text)
    except ValueError as exc:
        raise AssertionError(f"not JSON: {text!r}") from exc
