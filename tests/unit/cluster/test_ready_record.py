"""The ready file."""

import json

import pytest

from cluster.ready_record import ReadyRecord, read_record, remove_record, write_record
from configs.errors import ConfigError
from configs.ids import ClusterId

RECORD = ReadyRecord(
    cluster_id=ClusterId("a1b2c3"),
    grpc="127.0.0.1:1",
    http="127.0.0.1:2",
    dashboard=None,
    pid=7,
    data_dir="/d",
    model="k3",
)


def test_record_is_read_back_from_every_path(tmp_path):
    paths = [tmp_path / "ready.json", tmp_path / "sub" / "also.json"]
    write_record(RECORD, paths)
    assert [read_record(path) for path in paths] == [RECORD, RECORD]


def test_file_is_json_with_documented_keys_and_nothing_is_left_beside_it(tmp_path):
    write_record(RECORD, [tmp_path / "ready.json"])
    keys = {"cluster_id", "grpc", "http", "dashboard", "pid", "data_dir", "model"}
    assert set(json.loads((tmp_path / "ready.json").read_text())) == keys
    assert [path.name for path in tmp_path.iterdir()] == ["ready.json"]


def test_missing_file_says_how_to_go_on(tmp_path):
    with pytest.raises(ConfigError, match="latentmesh serve"):
        read_record(tmp_path / "ready.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"grpc": 1}'])
def test_other_content_is_an_error(tmp_path, text):
    (tmp_path / "ready.json").write_text(text)
    with pytest.raises(ConfigError, match="no ready file"):
        read_record(tmp_path / "ready.json")


def test_path_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_record(RECORD, [tmp_path / "file" / "ready.json"])


def test_removing_twice_is_allowed(tmp_path):
    write_record(RECORD, [tmp_path / "ready.json"])
    remove_record([tmp_path / "ready.json"])
    remove_record([tmp_path / "ready.json"])
    assert list(tmp_path.iterdir()) == []
