from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from router.transport.socket_files import socket_path, sweep_stale


def test_names_of_one_process_differ_and_are_short(tmp_path: Path) -> None:
    first, second = socket_path(tmp_path), socket_path(tmp_path)
    assert first != second
    assert len(first.name) < 50


def test_sockets_of_a_dead_process_are_swept_and_those_of_a_living_one_stay(
    tmp_path: Path,
) -> None:
    code = (
        "from pathlib import Path; import sys;"
        "from router.transport.socket_files import socket_path;"
        "socket_path(Path(sys.argv[1])).touch()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path.cwd())
    [dead] = tmp_path.iterdir()
    own = socket_path(tmp_path)
    own.touch()
    assert sweep_stale(tmp_path) == [dead]
    assert list(tmp_path.iterdir()) == [own]


def test_a_socket_of_an_earlier_process_with_our_number_is_swept(tmp_path: Path) -> None:
    stale = tmp_path / f"lm-{os.getpid()}-123-0.sock"
    stale.touch()
    assert sweep_stale(tmp_path) == [stale]


def test_files_with_other_names_stay(tmp_path: Path) -> None:
    other = tmp_path / "lm-1-2.sock.txt"
    other.touch()
    assert sweep_stale(tmp_path) == []
    assert other.exists()


def test_a_folder_that_is_not_there_has_nothing_to_sweep(tmp_path: Path) -> None:
    assert sweep_stale(tmp_path / "missing") == []
