"""The gallery of planted bottlenecks: every case is well formed, and the verdicts of a few of them (all: benchmarks/verdicts.py)."""

import json
import os
import sys
from pathlib import Path

import pytest

GALLERY = Path(__file__).parent / "gallery"
sys.path.insert(0, str(GALLERY))
from cases import CASES, Case  # noqa: E402
from held_out import HELD_OUT  # noqa: E402
from held_out_proofs import HELD_OUT_PROOFS  # noqa: E402
from judge import build, ours  # noqa: E402

from tests.forked import Forks  # noqa: E402
from workbench.diagnosis.analysis.verdict import VERDICTS  # noqa: E402
from workbench.runs.task import check  # noqa: E402

QUICK = ("slow_compute_on_rank_1", "healthy_mlp")
"""Judged here; other kinds are diagnosed in other tests, from specs and in notebooks (a metric in Python and many tensors in 03)."""


@pytest.mark.parametrize("case", [*CASES.values(), *HELD_OUT.values(), *HELD_OUT_PROOFS.values()], ids=lambda case: case.name)
def test_case_is_well_formed(case: Case) -> None:
    check(f"{case.source}:{case.name}") if case.spec is not None else None
    assert f"def {case.name}(" in case.source.read_text()
    assert case.answers
    assert set(case.answers) <= set(VERDICTS)
    if case.spec is not None:
        case.run_spec(**(case.removed or {}))


def test_a_loop_is_built_as_the_judge_builds_it() -> None:
    loop = build(CASES["python_metric"])
    batch = next(loop.batches())
    loop.step(batch)
    assert len(batch[0]) == 32


def test_no_case_is_seen_twice() -> None:
    assert not CASES.keys() & HELD_OUT.keys()
    assert not (CASES | HELD_OUT).keys() & HELD_OUT_PROOFS.keys()


@pytest.mark.alone
@pytest.mark.slow
def test_the_planted_cost_is_what_the_step_pays(tmp_path: Path, forks: Forks) -> None:
    out, env = tmp_path / "answer.json", {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forks.run(tmp_path, GALLERY / "judge.py", "slow_storage", "truth", out, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    assert 0.25 < json.loads(out.read_text())["saved"] < 0.8


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_verdict(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case = CASES[name]
    found = ours(case, 20, 0, 20)
    if found["verdict"] == "inconclusive":  # other processes may be gone in a moment
        found = ours(case, 60, 0, 60)
    foreign = found["diagnosis"]["evidence"]["noise"]["foreign"]
    if found["verdict"] == "inconclusive" and foreign > 0.3:
        pytest.skip(f"others take {foreign:.1f} cores of this machine: nothing can be said here, and that is what was said")
    assert case.right(found["verdict"], found["cause"]), found["text"]
