"""The lock of a data folder and the run folder beside it."""

import os
import subprocess
import sys

import pytest

from cluster.data_folder import DataFolder
from cluster.run_folder import RunFolder
from configs.errors import ConfigError, DataDirInUseError


@pytest.fixture
def data_folder(tmp_path):
    folder = DataFolder.lock(tmp_path / "data")
    yield folder
    folder.unlock()


def test_second_cluster_is_told_folder_and_holder(data_folder):
    with pytest.raises(DataDirInUseError) as caught:
        DataFolder.lock(data_folder.path)
    assert str(data_folder.path) in str(caught.value)
    assert str(os.getpid()) in str(caught.value)


def test_unlocked_folder_can_be_locked_again(tmp_path):
    DataFolder.lock(tmp_path).unlock()
    DataFolder.lock(tmp_path).unlock()


def test_lock_ends_with_its_process(tmp_path):
    code = "import sys, pathlib; from cluster.data_folder import DataFolder as D; "
    code += "D.lock(pathlib.Path(sys.argv[1])); import os; os._exit(1)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    DataFolder.lock(tmp_path).unlock()


def test_folder_that_cannot_be_made_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="data_dir"):
        DataFolder.lock(tmp_path / "file" / "data")


def test_removed_run_folder_keeps_the_logs_of_ray(data_folder):
    run = RunFolder.create(data_folder)
    logs = run.ray / "session_2026-01-01_x" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("hello")
    run.remove()
    assert not run.path.exists()
    kept = data_folder.log_folder / "ray-session_2026-01-01_x" / "raylet.out"
    assert kept.read_text() == "hello"


def test_run_folder_of_a_dead_launch_is_removed_by_the_next(data_folder):
    dead = RunFolder.create(data_folder)
    run = RunFolder.create(data_folder)
    assert not dead.path.exists()
    run.remove()


def test_recorded_folder_that_is_not_ours_is_never_removed(data_folder, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    data_folder.run_record.write_text(str(precious))
    RunFolder.create(data_folder).remove()
    assert precious.is_dir()


def test_run_folder_with_a_path_too_long_for_sockets_is_refused(data_folder, tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"):
        RunFolder.create(data_folder)
    assert list(deep.iterdir()) == []


def test_only_the_latest_logs_are_kept(data_folder):
    for day in range(1, 9):
        run = RunFolder.create(data_folder)
        (run.ray / f"session_2026-01-0{day}" / "logs").mkdir(parents=True)
        run.remove()
    kept = sorted(path.name for path in data_folder.log_folder.iterdir())
    assert kept == [f"ray-session_2026-01-0{day}" for day in range(4, 9)]
