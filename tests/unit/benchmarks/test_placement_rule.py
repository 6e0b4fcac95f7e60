"""The benchmark's rule against slow obvious twins, and its baselines by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.placement.case import EMPTY, Case, make_table, start_table
from benchmarks.placement.eplb import Eplb, Static, pack, replicate
from benchmarks.placement.exact_split import exact_time
from benchmarks.placement.measure import chosen_pars, fixed_pars
from benchmarks.placement.policies import FACTORIES
from benchmarks.placement.policy import Switch
from benchmarks.placement.run import run_case
from benchmarks.placement.simulate import Simulation, count_moves
from benchmarks.placement.traces import TraceSpec, make_trace
from cluster.cli import main
from cluster.control.layer_plan import find_copies
from configs.errors import ConfigError, PlacementError

CASE = Case(num_layers=3, num_experts=16, num_workers=4, num_redundant=4)
TRACE = make_trace(TraceSpec("mix", 300, 3, 16, 2, tokens=512))


def twin_par(load_E: np.ndarray, slots_DS: np.ndarray) -> float:
    num_E = np.bincount(slots_DS[slots_DS != EMPTY], minlength=load_E.size)
    loads = [sum(load_E[e] / num_E[e] for e in slots if e != EMPTY) for slots in slots_DS]
    return max(loads) / (sum(loads) / len(loads))


class Scripted:
    """A policy that plans what it is told, and remembers when it was asked."""

    name = "scripted"
    num_choosers = 0
    sees_next = False

    def __init__(self, window_steps: int, plans: list[Switch | None]) -> None:
        self.window_steps = window_steps
        self.plans = iter(plans)
        self.asked_with: list[int] = []

    def plan(self, load_TLE: np.ndarray, present: object) -> Switch | None:
        del present
        self.asked_with.append(len(load_TLE))
        return next(self.plans, None)


def test_the_start_has_experts_in_order_and_repeats_the_last() -> None:
    table = start_table(CASE)
    assert table.slots_LDS[0].tolist() == [
        [0, 1, 2, 3, 3],
        [4, 5, 6, 7, 7],
        [8, 9, 10, 11, 11],
        [12, 13, 14, 15, 15],
    ]
    assert table.shares_LDS[0, 0].tolist() == [1, 1, 1, 0.5, 0.5]


def test_slots_are_spread_as_evenly_as_possible() -> None:
    uneven = Case(num_layers=1, num_experts=7, num_workers=3, num_redundant=3)
    assert uneven.slots_D.tolist() == [4, 3, 3]
    assert start_table(uneven).slots_LDS[0].tolist() == [[0, 1, 2, 2], [3, 4, 4, -1], [5, 6, 6, -1]]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 16, 0, 0), "num_workers is 0"),
        ((0, 16, 4, 0), "num_layers is 0"),
        ((3, 16, 4, -2), "2 slots are missing"),
    ],
)
def test_cases_that_cannot_be_placed_are_refused(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        Case(*sizes)


def test_peaks_of_fixed_shares_equal_those_of_the_twin() -> None:
    table = start_table(CASE)
    pars_T = np.empty(20)
    fixed_pars(TRACE[:20, 1], table.slots_LDS[1], table.shares_LDS[1], pars_T)
    for step in range(20):
        assert pars_T[step] == pytest.approx(twin_par(TRACE[step, 1], table.slots_LDS[1]))


@pytest.mark.parametrize("num_choosers", [1, 3, 8])
def test_choosers_keep_every_pick_and_beat_fixed_shares(num_choosers: int) -> None:
    slots_DS = pack(np.ones(16), np.array([2] * 4 + [1] * 12), np.full(4, 5))
    copies = find_copies(slots_DS, np.ones(4), 16)
    chosen, fixed = np.empty(50), np.empty(50)
    chosen_pars(np.ascontiguousarray(TRACE[:50, 0]), copies, num_choosers, 3, chosen)
    table = make_table(slots_DS[None], 16)
    fixed_pars(TRACE[:50, 0], slots_DS, table.shares_LDS[0], fixed)
    exact = [exact_time(load.astype(float), slots_DS) / (load.sum() / 4) for load in TRACE[:50, 0]]
    assert (chosen >= np.array(exact) - 1e-9).all()
    assert chosen.mean() < fixed.mean()
    if num_choosers == 1:
        # A whole pick more or less, of 256 per worker.
        assert chosen == pytest.approx(np.array(exact), abs=0.01)


def test_plans_come_late_by_their_time_and_switch_a_layer_per_step() -> None:
    other = make_table(start_table(CASE).slots_LDS[:, ::-1].copy(), 16)
    policy = Scripted(10, [Switch(other, np.array([2, 0])), None])
    outcome = Simulation(policy, CASE, TRACE[:40]).run()
    # Asked at 10; in force from 11 on, as it took less than a step: layer 2, then layer 0.
    before, after = start_table(CASE).slots_LDS[0], other.slots_LDS[0]
    for step in range(40):
        for layer, since in ((0, 12), (1, 40), (2, 11)):
            slots = after if step >= since else before
            assert outcome.pars_TL[step, layer] == pytest.approx(
                twin_par(TRACE[step, layer], slots)
            )
    assert outcome.num_moves == 2 * count_moves(before, after) == 2 * 20
    # Asked again with what was new since, not before the plan was applied.
    assert policy.asked_with == [10, 10, 10]


def test_time_never_goes_back_where_a_plan_takes_longer_than_a_window() -> None:
    other = make_table(start_table(CASE).slots_LDS[:, ::-1].copy(), 16)
    policy = Scripted(2, [Switch(other, np.arange(3)), None, None])
    outcome = Simulation(policy, CASE, TRACE[:8]).run()
    # Asked at 2; layers switch at 3, 4 and 5, which is after the next window has passed.
    assert policy.asked_with[:2] == [2, 4]
    for step, layer in itertools.product(range(8), range(3)):
        table = other if step >= 3 + layer else start_table(CASE)
        expected = twin_par(TRACE[step, layer], table.slots_LDS[layer])
        assert outcome.pars_TL[step, layer] == pytest.approx(expected)


def test_moves_count_slots_with_another_expert_whatever_their_order() -> None:
    before = np.array([[0, 1, 1], [2, 3, EMPTY]])
    assert count_moves(before, np.array([[1, 1, 0], [3, 2, EMPTY]])) == 0
    assert count_moves(before, np.array([[0, 1, EMPTY], [2, 3, 3]])) == 1
    assert count_moves(before, np.array([[2, 3, 1], [0, 1, EMPTY]])) == 4


def test_eplb_replicates_the_heaviest_and_packs_into_the_least_loaded() -> None:
    weights = np.array([90.0, 40, 30, 20, 10, 10])
    num_E = replicate(weights, 8)
    assert num_E.tolist() == [3, 1, 1, 1, 1, 1]
    slots_DS = pack(weights, num_E, np.array([4, 4]))
    loads = [sum(weights[e] / num_E[e] for e in slots) for slots in slots_DS]
    assert sorted(loads) == [100, 100]
    assert np.bincount(slots_DS.reshape(-1)).tolist() == num_E.tolist()


def test_none_never_plans_and_uses_no_redundant_slot() -> None:
    outcome = Simulation(Static(), CASE, TRACE).run()
    slots = np.arange(16).reshape(4, 4)
    assert outcome.plan_s == []
    assert outcome.pars_TL[5, 0] == pytest.approx(twin_par(TRACE[5, 0], slots))


def test_the_oracle_is_told_the_next_window() -> None:
    load = np.concatenate([TRACE[:64], TRACE[:64][:, :, ::-1]])
    oracle = Eplb(CASE, "oracle", 64, sees_next=True)
    blind = Eplb(CASE, "blind", 64)
    seen, unseen = (Simulation(one, CASE, load).run().pars_TL[70:] for one in (oracle, blind))
    assert seen.mean() < unseen.mean()


def test_the_exact_program_equals_trying_all_splits() -> None:
    slots_DS = np.array([[0, 1], [0, 2], [1, 2]])
    load = np.array([6.0, 3.0, 4.0])
    best = min(
        max(a + b, (6 - a) + c, (3 - b) + (4 - c))
        for a, b, c in itertools.product(
            np.linspace(0, 6, 25), np.linspace(0, 3, 13), np.linspace(0, 4, 17)
        )
    )
    assert exact_time(load, slots_DS) == pytest.approx(13 / 3)
    assert best == pytest.approx(13 / 3, abs=0.3)
    slow = exact_time(load, slots_DS, np.array([1.0, 1.0, 1000.0]))
    assert slow == pytest.approx(6.5, rel=0.01)
    with pytest.raises(PlacementError, match="no split"):
        exact_time(np.array([1.0, 1, 1, 1]), slots_DS)


def test_our_policies_beat_the_baselines_on_a_changing_load() -> None:
    case = Case(2, 64, 8, 8, 1_000_000)
    trace = make_trace(TraceSpec("mix", 1500, 2, 64, 4, seed=11))
    names = ["none", "eplb", "eplb_256", "flash_lb", "ours", "ours_b1", "ours_b8"]
    report = run_case(case, trace, names, trace="mix", seed=11, num_floors=12)
    rows = {row.name: row for row in report.rows}
    best = max(rows[name].score for name in ("none", "eplb", "eplb_256", "flash_lb"))
    assert rows["ours"].score > best
    assert rows["ours_b1"].score > rows["ours"].score
    assert rows["ours_b1"].mean_par - 1 < 0.5 * (rows["eplb"].mean_par - 1)
    floor, own = rows["ours_b1"].floor_par, rows["ours_b1"].sampled_par
    assert floor <= own <= 1 + 1.05 * (floor - 1) + 0.002
    assert rows["ours"].moves < rows["eplb_256"].moves


def test_equal_loads_move_nothing() -> None:
    case = Case(2, 16, 4, 4)
    trace = np.full((200, 2, 16), 100, np.uint16)
    for name in ("ours", "ours_b1"):
        outcome = Simulation(FACTORIES[name](case), case, trace).run()
        assert outcome.num_moves == 0
        assert len(outcome.plan_s) > 1


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "placement", *arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


SMALL = ("--layers", "2", "--experts", "16", "--steps", "150", "--floors", "2")


def test_the_command_prints_the_agreed_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = "none,eplb,ours,ours_b1"
    plot = tmp_path / "plot.png"
    code, out, _ = run_cli(
        capsys,
        *SMALL,
        *("--workers", "4", "--policies", names, "--json", "--plot", str(plot)),
        *("--results", str(tmp_path)),
    )
    assert code == 0
    policies = json.loads(out)["policies"]
    assert list(policies) == names.split(",")
    for row in policies.values():
        keys = {"track", "mean_par", "max_par", "moves", "planner_s_median", "score"}
        assert keys <= row.keys()
    assert policies["eplb"]["score"] == 100
    assert plot.read_bytes().startswith(b"\x89PNG")
    (result,) = tmp_path.glob("placement_2x16_150steps_*.md")
    assert "| ours_b1 | B |" in result.read_text()


def test_the_command_reads_a_file_and_several_fleets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    np.save(tmp_path / "trace.npy", TRACE[:150].astype(np.float32))
    trace = ("--trace", str(tmp_path / "trace.npy"))
    code, out, _ = run_cli(
        capsys, *trace, "--workers", "2,4", "--policies", "eplb,ours", "--json", "--floors", "0"
    )
    assert code == 0
    cases = json.loads(out)["cases"]
    assert [case["shape"]["num_workers"] for case in cases] == [2, 4]
    assert run_cli(capsys, *trace, "--workers", "4", "--policies", "ours")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "0"), "num_workers is 0"),
        (("--workers", "many"), "'many' is no number of workers"),
        (("--policies", "luck"), "policies luck are not known"),
        (("--kind", "calm"), "'calm' are not known"),
        (("--redundant", "-3"), "3 slots are missing"),
        (("--trace", "/nowhere.npy"), "is no trace"),
    ],
)
def test_the_command_refuses_what_cannot_be(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, _, errors = run_cli(capsys, *SMALL, *arguments)
    assert code != 0
    assert message in errors


def test_a_trace_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 layers of 16 experts"):
        run_case(Case(2, 16, 4, 4), TRACE, ["none"], trace="x", seed=0)
