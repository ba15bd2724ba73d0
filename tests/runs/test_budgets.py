"""Runs held against budgets: met, exceeded, not measured, relative to another run, and what cannot be a budget."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies

import workbench as wb
from workbench.__main__ import main
from workbench.core import run_directory
from workbench.core.vocabulary import PHASES
from workbench.runs.budgets import QUANTITIES, check_run, read_limit
from workbench.runs.spec import ScriptSpec


@pytest.fixture
def run_dir(by_hand: Any) -> Path:
    """A run of 60 steps that has ended well."""
    path: Path = by_hand(name="now").steps(60).losses(20).ended("finished").path
    return path


def states(check: wb.RunCheck) -> dict[str, str]:
    return {budget.name: budget.state for budget in check.budgets}


def test_limits_of_its_own(run_dir: Path) -> None:
    run = wb.Run.load(run_dir)
    step, rate = max(rank.mean() for rank in run.rank_means), run.samples_per_sec
    kept = check_run(run, {"step": f"{1001 * step} ms", "samples_per_sec": 0.99 * rate, "data_wait": "100 %", "loss": 1e9})
    assert set(states(kept).values()) == {"met"}
    assert kept.ok
    exceeded = check_run(run_dir, {"step": f"{0.99 * step:f}s", "samples_per_sec": 1.01 * rate, "forward": 0})
    assert set(states(exceeded).values()) == {"exceeded"}
    assert not exceeded.ok
    assert "not all limits are met" in str(exceeded)
    assert "step: the mean of the slowest rank after its warm-up" in str(exceeded)


def test_what_was_not_measured_is_not_met(run_dir: Path) -> None:
    check = check_run(run_dir, {"peak_memory": "38 GiB"})
    assert math.isnan(check.budgets[0].measured)
    assert states(check) == {"peak_memory": "not measured"}
    assert not check.ok
    assert check.to_json()["budgets"][0]["measured"] is None


def test_relative_to_another_run(run_dir: Path, by_hand: Any) -> None:
    before = by_hand(name="before").steps(60).losses(20).ended("finished").path
    assert check_run(run_dir, {"step": "+1 %", "samples_per_sec": "-1%", "loss": "+0 %"}, against=before).ok
    assert states(check_run(run_dir, {"step": "-1 %", "samples_per_sec": "+1 %"}, against=before)) == dict.fromkeys(
        ("step", "samples_per_sec"), "exceeded"
    )


def test_it_says_which_of_the_two_runs_lacks_a_figure(run_dir: Path, by_hand: Any) -> None:
    experiments = by_hand(name="before", experiment={"kind": "diagnose"}).ended("finished").path
    check = check_run(run_dir, {"step": "+5 %", "data_wait": "100 %"}, against=experiments)
    assert states(check) == {"step": "not measured", "data_wait": "met"}
    assert "the run to compare with, before, has no step: it has no measured step; it is a run of experiments (diagnose)" in str(check)
    assert "the run, now, has no peak_memory" in str(check_run(run_dir, {"peak_memory": "1 GiB"}))


def test_it_says_in_what_the_two_runs_differ_beside_their_knobs(run_dir: Path, by_hand: Any) -> None:
    before = by_hand(name="before").steps(60).losses(20).ended("finished").path
    assert "the two differ" not in str(check_run(run_dir, {"step": "+5 %"}, against=before))
    for path, digest in ((before, "1"), (run_dir, "2")):
        run_directory.write_json(path / run_directory.GIT, {"commit": digest * 40, "branch": digest})
        run_directory.write_json(path / run_directory.ENVIRONMENT, {"code": {"task.py": digest}, "versions": {"torch": "2.13"}})
    said = "the two differ in git (commit), code (task.py): a limit may be met or exceeded because of that"
    assert said in str(check_run(run_dir, {"step": "+5 %"}, against=before))


def test_the_loss_of_a_script_is_not_recorded(by_hand: Any) -> None:
    spec = ScriptSpec(script="/x/train.py", watch=True).to_json()
    check = check_run(by_hand(spec=spec, name="train").steps(60).ended("finished").path, {"loss": 2.5})
    assert "the run, train, has no loss; the loss of a script is not recorded: a limit on it is for tasks" in str(check)


@pytest.mark.parametrize(("given", "limit"), [("+5 %", -1.9), ("-5 %", -2.1)])
def test_more_of_a_negative_loss_is_nearer_to_zero(run_dir: Path, monkeypatch: pytest.MonkeyPatch, given: str, limit: float) -> None:
    monkeypatch.setitem(QUANTITIES, "loss", dataclasses.replace(QUANTITIES["loss"], read=lambda run: -2.0))  # type: ignore[arg-type]
    assert check_run(run_dir, {"loss": given}, against=run_dir).budgets[0].limit == pytest.approx(limit)


def test_a_run_that_failed_is_not_ok(by_hand: Any) -> None:
    check = check_run(by_hand().steps(60).ended("failed").path, {"data_wait": "100 %"})
    assert states(check) == {"data_wait": "met"}
    assert not check.ok
    assert "the run is failed" in str(check)


@pytest.mark.parametrize(
    ("budgets", "said"),
    [
        ({}, "no budgets were given; allowed are step"),
        ({"stepp": "1 s"}, "no budget 'stepp': did you mean 'step'"),
        ({"step": "fast"}, 'step = \'fast\': expected a limit such as "120 ms", or "\\+5 %" of another run'),
        ({"step": "5 GiB"}, 'expected a limit such as "120 ms"'),
        ({"step": "5 %"}, "expected a limit such as"),
        ({"step": "+5 s"}, "expected a limit such as"),
        ({"step": True}, "expected a limit such as"),
        ({"samples_per_sec": "quick"}, 'or "-5 %" of another run'),
        ({"peak_memory": "+5 %"}, "is relative to another run: give it"),
    ],
)
def test_what_is_no_budget(run_dir: Path, budgets: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_run(run_dir, budgets)


def test_a_run_that_still_runs_is_not_checked(by_hand: Any) -> None:
    with pytest.raises(ValueError, match="still runs"):
        check_run(by_hand().alive().steps(3).path, {"loss": 1})


def test_in_a_terminal(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budgets = tmp_path / "budgets.toml"
    budgets.write_text('[budgets]\ndata_wait = "100 %"\nstep = "1 s"\n')
    assert main(["check", str(run_dir), "--budgets", str(budgets)]) == 0
    assert "all limits are met" in capsys.readouterr().out
    budgets.write_text('step = "1 us"\n')
    assert main(["check", str(run_dir), "--budgets", str(budgets), "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert (value["ok"], value["budgets"][0]["state"]) == (False, "exceeded")
    budgets.write_text("step = 1 ms")
    assert main(["check", str(run_dir), "--budgets", str(budgets)]) == 2
    assert "is not TOML" in capsys.readouterr().err
    assert main(["check", str(run_dir), "--budgets", "nowhere.toml"]) == 2


@given(
    text=strategies.text(max_size=12) | strategies.from_regex(r"[+-]?\d{1,3}(\.\d)? ?(ms|s|%|GiB)?"),
    name=strategies.sampled_from([*QUANTITIES]),
)
def test_any_text_is_a_limit_or_refused_by_name(text: str, name: str) -> None:
    try:
        limit, relative = read_limit(name, text)
    except ValueError as error:
        said = str(error)
    else:
        said = name if math.isfinite(limit) and (relative or limit >= 0) else ""
    assert name in said


def test_every_phase_can_be_limited() -> None:
    assert set(PHASES) < set(QUANTITIES)
