import asyncio
import os
import stat
from datetime import UTC, datetime, timedelta

import pytest

from cluster.api.access.key_file import KeyFile
from cluster.api.access.key_table import KeyTable
from cluster.api.access.keys import Refusal, judge_key, make_key, parse_key
from configs.errors import ConfigError, StateStoreError

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def run(work):
    return asyncio.run(work)


def test_a_key_is_good_for_its_own_record_only():
    text, record = make_key("a", now=NOW)
    other, _ = make_key("a", now=NOW)
    assert judge_key(parse_key(text), record, NOW) is None
    assert judge_key(parse_key(other), record, NOW) is Refusal.WRONG_KEY
    assert judge_key(parse_key(text), None, NOW) is Refusal.UNKNOWN_KEY


def test_the_record_holds_nothing_of_the_secret():
    text, record = make_key("a", now=NOW)
    assert text.split("_", 2)[2] not in repr(record)


@pytest.mark.parametrize(
    ("after", "expected"),
    [(timedelta(hours=1), None), (timedelta(days=2), Refusal.EXPIRED_KEY)],
    ids=["in time", "late"],
)
def test_a_key_expires(after, expected):
    text, record = make_key("a", now=NOW, lifetime=timedelta(days=1))
    assert judge_key(parse_key(text), record, NOW + after) is expected


def test_who_does_not_have_the_secret_learns_nothing_of_a_revocation():
    text, record = make_key("a", now=NOW)
    gone = record.as_revoked()
    wrong = text[:-2] + ("AA" if not text.endswith("AA") else "BB")
    assert judge_key(parse_key(text), gone, NOW) is Refusal.REVOKED_KEY
    assert judge_key(parse_key(wrong), gone, NOW) is Refusal.WRONG_KEY


@pytest.mark.parametrize("text", ["", "lm_", "sk-1", "lm_0_0", "lm_" + "a" * 16 + "_" + "b" * 42])
def test_what_has_not_the_form_of_a_key_is_none(text):
    assert parse_key(text) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""},
        {"name": "x" * 65},
        {"name": "a\nb"},
        {"name": "a", "lifetime": timedelta(0)},
        {"name": "a", "requests_per_minute": 0},
    ],
    ids=["empty", "long", "two lines", "no lifetime", "no requests"],
)
def test_a_key_that_makes_no_sense_is_not_made(fields):
    with pytest.raises(ConfigError):
        make_key(**fields, now=NOW)


def test_a_key_file_is_its_owners_and_remembers_every_key(tmp_path):
    path = tmp_path / "keys.json"
    records = [make_key(f"k{i}", now=NOW)[1] for i in range(3)]
    for record in records:
        run(KeyFile(path).put(record))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert set(run(KeyFile(path).read_all())) == set(records)


def test_a_running_reader_sees_a_change_of_the_file(tmp_path):
    file = KeyFile(tmp_path / "keys.json")
    _, record = make_key("a", now=NOW)
    run(KeyFile(tmp_path / "keys.json").put(record))
    assert run(file.find(record.id)) == record
    run(KeyFile(tmp_path / "keys.json").put(record.as_revoked()))
    assert run(file.find(record.id)).revoked


def test_a_file_that_others_may_write_is_refused(tmp_path):
    path = tmp_path / "keys.json"
    run(KeyFile(path).put(make_key("a", now=NOW)[1]))
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod 600"):
        KeyFile(path).check()


@pytest.mark.parametrize("content", ["{", "[]", '{"keys": [{"id": 1}]}'])
def test_a_damaged_file_refuses_every_key(tmp_path, content):
    path = tmp_path / "keys.json"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(StateStoreError, match="no key file"):
        run(KeyFile(path).find("x"))


def test_a_missing_file_says_how_to_make_it(tmp_path):
    with pytest.raises(ConfigError, match="latentmesh keys create"):
        KeyFile(tmp_path / "none").check()


def test_a_table_in_redis_keeps_keys(state_server):
    async def check():
        table = KeyTable.connect(state_server.url)
        _, record = make_key(f"k{os.getpid()}", now=NOW, requests_per_minute=3)
        await table.put(record)
        found = await table.find(record.id)
        everything = await table.read_all()
        await table.close()
        return record, found, everything

    record, found, everything = run(check())
    assert found == record
    assert record in everything
