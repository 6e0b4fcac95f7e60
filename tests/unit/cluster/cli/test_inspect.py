from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.cli import main


def run(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(args)
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


def test_config_of_k3_gives_the_published_sizes(
    golden_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(["inspect", str(golden_dir / "config_k3.json"), "--json"], capsys)
    sizes = json.loads(out)
    assert code == 0
    assert sizes["num_parameters"] == 2_779_484_478_208
    assert sizes["num_active_parameters"] == 104_189_614_848
    assert sizes["kv_bytes_per_token"] == 27_648
    assert sizes["kda_state_bytes_per_request"] == 434_110_464
    assert sizes["boundary_bytes_per_token"] == 7_168
    assert sizes["routed_expert_bytes"] == 1_446_456_066_048
    assert sizes["attention_side_bytes"] == 113_509_540_864


def test_checkpoint_folder_is_inspected_with_its_files(
    golden_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(["inspect", str(golden_dir / "mini-mxfp4"), "--json"], capsys)
    assert code == 0
    assert json.loads(out)["num_vision_tensors"] == 0


def test_table_shows_components_and_costs(
    golden_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(["inspect", str(golden_dir / "config_k3.json")], capsys)
    assert code == 0
    assert "2,779,484,478,208" in out
    assert "434,110,464" in out


@pytest.mark.parametrize("name", ["absent", "absent.json"])
def test_absent_source_is_one_clear_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(["inspect", str(tmp_path / name)], capsys)
    assert code == 2
    assert out == ""
    assert err.startswith("error [CHECKPOINT_INVALID]")
    assert name in err


def test_written_checkpoint_is_inspected_and_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ckpt"
    assert run(["init-checkpoint", str(folder), "--sharded"], capsys)[0] == 0
    assert run(["inspect", str(folder), "--json"], capsys)[0] == 0
    code, _, err = run(["init-checkpoint", str(folder)], capsys)
    assert code == 2
    assert "not empty" in err


def test_checkpoint_takes_the_shape_of_another_config(
    golden_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = golden_dir / "mini" / "config.json"
    run(["init-checkpoint", str(tmp_path / "c"), "--like", str(source)], capsys)
    _, wanted, _ = run(["inspect", str(source), "--json"], capsys)
    _, made, _ = run(["inspect", str(tmp_path / "c"), "--json"], capsys)
    same = ("num_layers", "num_experts", "latent_size", "num_active_parameters")
    assert [json.loads(made)[key] for key in same] == [json.loads(wanted)[key] for key in same]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["--help"], capsys)
    assert code == 0
    for command in ("serve", "status", "generate", "score", "inspect", "init-checkpoint"):
        assert command in out


def test_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["fly"], capsys)
    assert code == 2
    assert "fly" in err
