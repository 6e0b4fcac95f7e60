import json

import pytest

from cluster.cli.app import main


def run(capsys, *args):
    with pytest.raises(SystemExit) as caught:
        main(["keys", *args])
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


def test_a_key_is_made_listed_and_taken_back(tmp_path, capsys):
    file = str(tmp_path / "keys.json")
    code, out, _ = run(
        capsys, "create", "alice", "--key-file", file, "--expires-in", "90d", "--json"
    )
    made = json.loads(out)
    assert code == 0
    assert made["key"].startswith(f"lm_{made['id']}_")
    assert run(capsys, "revoke", made["id"], "--key-file", file)[0] == 0
    code, out, _ = run(capsys, "list", "--key-file", file, "--json")
    [listed] = json.loads(out)
    assert (listed["name"], listed["revoked"]) == ("alice", True)
    assert made["key"] not in out


def test_the_table_shows_no_hash(tmp_path, capsys):
    file = str(tmp_path / "keys.json")
    run(capsys, "create", "bob", "--key-file", file)
    code, out, _ = run(capsys, "list", "--key-file", file)
    assert code == 0
    assert "bob" in out
    assert "good" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        pytest.param(("create", "a"), "--key-file", id="nowhere"),
        pytest.param(("create", "--key-file", "F"), "NAME is missing", id="no name"),
        pytest.param(
            ("create", "a", "--key-file", "F", "--expires-in", "soon"), "'soon'", id="span"
        ),
        pytest.param(("revoke", "nobody", "--key-file", "F"), "no key file", id="no file"),
    ],
)
def test_wrong_usage_says_what_to_do(tmp_path, capsys, args, words):
    args = [str(tmp_path / "keys.json") if arg == "F" else arg for arg in args]
    code, _, err = run(capsys, *args)
    assert code != 0
    assert words in " ".join(err.split())
