"""Runs the code blocks of Markdown pages as a reader would, on ports and folders of the test's own.

A block says in its info string how it is run: `python` and `bash` to the end; `bash background
ready=URL` stays up once the URL answers with 200 and is asked to end (SIGINT) after the page. Other
`json` and other languages are shown only. Addresses and folders that pages name are replaced.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

BLOCK_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 150.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.2
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    options: tuple[str, ...]
    code: str

    @property
    def ready_url(self) -> str | None:
        """Where a block that stays up says that it is ready; None for any other block."""
        found = [option for option in self.options if option.startswith("ready=")]
        return found[0].removeprefix("ready=") if found else None

    @property
    def is_run(self) -> bool:
        return self.language in ("python", "bash")


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text()
    blocks = []
    for match in _FENCE.finditer(text):
        language, *options = match["info"].split() or [""]
        line = text.count("\n", 0, match.start()) + 1
        blocks.append(Block(page, line, language, tuple(options), match["code"]))
    return blocks


class BlockRunner:
    """Runs blocks in a folder, with replacements in their code; `close` ends what stayed up."""

    def __init__(self, folder: Path, replacements: dict[str, str]):
        self.folder = folder
        self.replacements = replacements
        self._running: list[tuple[Block, subprocess.Popen[bytes]]] = []
        self._output = (folder / "background.txt").open("w+")

    def run(self, block: Block) -> str:
        """Run a block to its end, or until it is ready; return what it printed."""
        code = self.replaced(block.code)
        if block.ready_url is not None:
            self._start(block, code)
            return ""
        command = [sys.executable, "-c", code]
        if block.language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", code]
        result = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=BLOCK_TIMEOUT_S,
            check=False,
        )
        place = f"{block.page.name}:{block.line}"
        assert result.returncode == 0, f"{place}\n{code}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def replaced(self, text: str) -> str:
        for old, new in self.replacements.items():
            text = text.replace(old, new)
        return text

    def close(self) -> None:
        for _, process in reversed(self._running):
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._output.close()

    def _start(self, block: Block, code: str) -> None:
        # Without a shell, so that the signal reaches the program itself.
        process = subprocess.Popen(
            shlex.split(code.replace("\\\n", " "), comments=True),
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )
        self._running.append((block, process))
        url = self.replaced(block.ready_url)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not _answers(url):
            is_alive = process.poll() is None and time.monotonic() < deadline
            assert is_alive, f"{block.page.name}:{block.line}: {url} did not answer\n{self._said()}"
            try:
                process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                continue

    def _said(self) -> str:
        self._output.flush()
        return Path(self._output.name).read_text()[-4000:]

    def _environment(self) -> dict[str, str]:
        binaries = Path(sys.executable).parent
        path = f"{binaries}{os.pathsep}{os.environ['PATH']}"  # noqa: TID251 - a child's
        return {**os.environ, "PATH": path, "OPENAI_API_KEY": ""}  # noqa: TID251 - a child's


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
