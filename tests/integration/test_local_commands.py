"""`latentmesh generate` and `score` with `--checkpoint`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cluster.cli import main
from model.checkpoint_spec import CheckpointSpec
from model.checkpoint_writer import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "checkpoint"
    write_checkpoint(folder, CheckpointSpec(), seed=3)
    return folder


def run(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(args)
    printed = capsys.readouterr()
    return ended.value.code or 0, printed.out, printed.err


@pytest.mark.parametrize("name", ["mini", "mini-mxfp4"])
def test_golden_greedy_tokens_are_generated(
    name: str, golden_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = np.load(golden_dir / name / "golden.npz")
    ids = ",".join(map(str, golden["tokens"]))
    args = ["generate", "--token-ids", ids, "--checkpoint", str(golden_dir / name)]
    code, out, _ = run([*args, "--max-tokens", "64", "--ignore-eos", "--json"], capsys)
    answer = json.loads(out)
    assert code == 0
    assert answer["token_ids"] == [int(token) for token in golden["greedy"]]
    assert answer["finish_reason"] == "length"
    assert answer["prompt_tokens"] == len(golden["tokens"])
    assert answer["timings"]["total_s"] > 0


@pytest.mark.parametrize(("name", "tolerance"), [("mini", 1e-3), ("mini-mxfp4", 5e-3)])
def test_golden_logits_are_scored(
    name: str,
    tolerance: float,
    golden_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    golden = np.load(golden_dir / name / "golden.npz")
    ids = ",".join(map(str, golden["tokens"]))
    out = tmp_path / "logits.npy"
    args = ["score", "--token-ids", ids, "--checkpoint", str(golden_dir / name)]
    assert run([*args, "--logits", str(out)], capsys)[0] == 0
    logits = np.load(out)
    assert logits.dtype == np.float32
    assert np.abs(logits - golden["logits"]).max() < tolerance


def test_text_in_gives_text_out_and_a_seed_repeats_it(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["generate", "Hello", "--checkpoint", str(checkpoint), "--max-tokens", "12"]
    args += ["--temperature", "1", "--json", "--ignore-eos"]
    first = json.loads(run(args, capsys)[1])
    again = json.loads(run([*args, "--seed", str(first["seed"])], capsys)[1])
    assert again["token_ids"] == first["token_ids"]
    assert again["text"] == first["text"]
    plain = run([*args[:-2], "--ignore-eos", "--seed", str(first["seed"])], capsys)[1]
    assert plain == first["text"] + "\n"


def test_without_tokenizer_ids_are_printed(
    golden_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["generate", "--token-ids", "1,2,3", "--checkpoint", str(golden_dir / "mini")]
    code, out, _ = run([*args, "--max-tokens", "3", "--ignore-eos"], capsys)
    assert code == 0
    assert len(out.strip().split(",")) == 3


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["hi", "--checkpoint", "MINI"], ["TOKENIZER_MISSING", "token_ids"]),
        (["--token-ids", "1,320", "--checkpoint", "MINI"], ["320", "319"]),
        (["--token-ids", "", "--checkpoint", "MINI"], ["empty"]),
        (["--token-ids", "a", "--checkpoint", "MINI"], ["CONFIG_INVALID", "1,2,3"]),
        (["--checkpoint", "MINI"], ["CONFIG_INVALID", "PROMPT"]),
        (["hi", "--token-ids", "1", "--checkpoint", "MINI"], ["CONFIG_INVALID"]),
        (["hi"], ["--checkpoint", "--server"]),
        (["--token-ids", "1", "--max-tokens", "0", "--checkpoint", "MINI"], ["max_tokens", "0"]),
        (["--token-ids", "1", "--top-p", "2", "--checkpoint", "MINI"], ["top_p", "2"]),
        (["--token-ids", "1", "--temperature", "nan", "--checkpoint", "MINI"], ["temperature"]),
        (["--token-ids", "1", "--checkpoint", "ABSENT"], ["CHECKPOINT_INVALID", "absent"]),
        (["--token-ids", "1", "--checkpoint", "EMPTY"], ["CHECKPOINT_INVALID", "config.json"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_wrong_use_is_one_line_with_the_value_and_no_traceback(
    args: list[str],
    words: list[str],
    golden_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    places = {
        "MINI": golden_dir / "mini",
        "ABSENT": tmp_path / "absent",
        "EMPTY": tmp_path / "empty",
    }
    code, out, err = run(["generate", *(str(places.get(a, a)) for a in args)], capsys)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["generate", "--token-ids", "1", "--server", "127.0.0.1:1", "--timeout", "2"]
    code, _, err = run(args, capsys)
    assert code == 1
    assert "127.0.0.1:1" in err
