"""Diagnose, prove, climb: what is refused, how a climb decides, and real ones: launched, in this process, failing, interrupted."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import workbench as wb
from tests.conftest import HandMade, processes_with
from tests.made import World as Made
from workbench.__main__ import main
from workbench.core import run_directory
from workbench.core.statistics import Interval
from workbench.diagnosis import api
from workbench.diagnosis.analysis.calibration import Calibration
from workbench.diagnosis.analysis.evidence import Evidence
from workbench.diagnosis.analysis.proof import Ladder, Proof, how_to_prove
from workbench.diagnosis.analysis.remedy import Remedy, apply_remedy
from workbench.diagnosis.analysis.verdict import Judgement
from workbench.diagnosis.api import LaunchedSpec
from workbench.diagnosis.measure.experiment import speeds_for
from workbench.harness.peers import Peers
from workbench.programs.experiment import progress_writer
from workbench.runs.failure import Failure
from workbench.runs.launch import environment
from workbench.runs.launch.experiments import wait_for
from workbench.runs.run import Run
from workbench.runs.spec import ScriptSpec, SpecError
from workbench.runs.task import lone_builder

TASKS = Path(__file__).parents[1] / "scripts" / "slow_task.py"
SPEC = wb.RunSpec(task=f"{TASKS}:slow_loader", device="cpu", micro_batch=4)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))


def remedy(speedup: float = 2.0, **change: Any) -> Remedy:
    name = " ".join(f"{knob}={value}" for knob, value in change.items()) or "in words"
    return Remedy(name=name, change=change, what="Do it.", speedup=speedup, low=speedup, high=speedup, formula="by hand")


def diagnosis_of(*remedies: Remedy, spec: Any = SPEC, **more: Any) -> wb.Diagnosis:
    return wb.Diagnosis(
        evidence=Evidence(step=0.5, samples=4),
        judgement=Judgement(verdict="input-bound", cause="dataset code", why="because"),
        remedies=remedies,
        spec=spec,
        **more,
    )


# --- what is refused


def a_step(batch: Any) -> None:
    pass


class Module:
    def parameters(self) -> list[Any]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def __call__(self, batch: Any) -> None: ...


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ((a_step,), {}, r"diagnose\(a_step\): a step needs the loader of its batches: diagnose\(step, loader\)"),
        (([1, 2], a_step), {}, r"it is the other way round, diagnose\(step, loader\)"),
        (
            (Module(), [1, 2]),
            {},
            r"diagnose\(Module, …\): expected a function that does one .* a module goes into model=",
        ),
        ((3,), {}, r"diagnose\(int, …\): allowed are a step function with its loader, a RunSpec, a Run or the path.*a script.*Timeline"),
        ((SPEC, [1]), {}, r"diagnose\(RunSpec, …\) was given a loader, which only goes with a step"),
        ((SPEC,), {"model": 1, "optimizer": 2}, r"was given model=, optimizer=, which only go"),
        (("my_task.py:build",), {}, r"there is no file .*my_task\.py"),
        (("clip-art:",), {}, r"task='clip-art:'"),
        (("train.py",), {}, r"train\.py does not exist"),
        (("train.py", [1]), {}, r"expected the path of a run directory or the name of a task; .* a script by a run of it"),
        (("nowhere",), {}, r"nowhere.* is not a run directory"),
        ((SPEC,), {"budget_s": 0}, r"budget_s=0: seconds above 0 are allowed; try budget_s=60"),
        ((SPEC,), {"budget_s": float("nan")}, r"budget_s=nan"),
        ((SPEC,), {"budget_s": "60"}, r"budget_s='60'"),
        ((SPEC.replace(task="nowhere.py:build"),), {}, r"there is no file .*nowhere\.py"),
        ((SPEC.replace(task="clip-art"),), {}, r"no such task"),
    ],
)
def test_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: tuple[Any, ...],
    options: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        wb.diagnose(*given, **options)
    assert list(tmp_path.iterdir()) == []
    assert "running" not in capsys.readouterr().err


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "goes on"])
def test_a_script_is_run_watched_until_it_ends_or_the_budget_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_hand: Any, ends: bool
) -> None:
    made = by_hand().steps(60)
    (tmp_path / "train.py").touch()
    calls: list[Any] = []

    class Launched:
        def wait(self, **options: Any) -> wb.Run:
            calls.append(options)
            if not ends:
                raise TimeoutError
            return wb.Run.load(made.ended("finished").path)

        def stop(self) -> wb.Run:
            return wb.Run.load(made.ended("stopped").path)

    def launch(script: Any, **options: Any) -> Launched:
        calls.append((script, options))
        return Launched()

    monkeypatch.setattr("workbench.diagnosis.api.launch", launch)
    found = wb.diagnose(str(tmp_path / "train.py"), nproc_per_node=2, threads=3, budget_s=7)
    assert calls == [
        (str(tmp_path / "train.py"), {"args": (), "nproc_per_node": 2, "threads": 3, "watch": True, "runs_dir": None}),
        {"timeout": 7, "check": True},
    ]
    assert found.caption.startswith("• observed in 50 steps")
    said = "the budget of 7.00 s ended the script after 60 steps: budget_s= or --budget gives it longer"
    assert (said in found.caption) != ends
    assert f"the run is in {made.path}: " in found.caption
    made = by_hand().steps(3)
    with pytest.raises(ValueError, match="step") as refused:
        wb.diagnose(str(tmp_path / "train.py"), budget_s=7)
    assert str(refused.value).endswith(f"({said.replace('60', '3')})") != ends


@pytest.mark.parametrize(
    ("start_s", "step_s", "budget", "said"),
    [
        (20.0, 0.01, 60.0, "a launch of train.py takes about 20"),
        (0.0, 0.01, 60.0, ""),
        (0.0, 0.02, 0.2, "a launch of train.py takes about"),
        (20.0, 0.01, None, ""),
    ],
    ids=["long start", "fits", "long steps", "no proof"],
)
def test_that_no_proof_of_a_script_fits_is_said_while_it_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    by_hand: Any,
    capsys: pytest.CaptureFixture[str],
    start_s: float,
    step_s: float,
    budget: float | None,
    said: str,
) -> None:
    """`diagnose train.py --prove` refused the proof after the whole diagnosis."""
    made = by_hand().steps(60)
    (tmp_path / "train.py").touch()
    environment = made.path / run_directory.ENVIRONMENT
    heard = ""

    class Launched:
        path = made.path
        spec = ScriptSpec(script="/a/train.py")

        def __init__(self) -> None:
            self.began = time.time()
            environment.touch()
            os.utime(environment, (self.began + start_s,) * 2)

        @property
        def progress(self) -> tuple[int, None]:
            return 1 + int((time.time() - self.began) / step_s), None

        def wait(self, **_: Any) -> wb.Run:
            nonlocal heard
            until = time.monotonic() + (30 if said else 0.8)  # a loaded machine is slow to say it
            while time.monotonic() < until and "will probably not fit" not in heard:
                time.sleep(0.02)
                heard += capsys.readouterr().err
            return wb.Run.load(made.ended("finished").path)

    monkeypatch.delenv("WORKBENCH_PROGRESS")
    monkeypatch.setattr("workbench.diagnosis.api.LOAD_LAP", 0.01)
    monkeypatch.setattr("workbench.diagnosis.api.launch", lambda *_, **__: Launched())
    wb.diagnose(str(tmp_path / "train.py"), prove_budget_s=budget)
    assert ("the proof will probably not fit into" in heard) == bool(said)
    assert said in heard
    assert ("--budget" in heard) == bool(said)


def test_a_look_at_a_run_that_fails_does_not_end_the_measurement_of_the_load(by_hand: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def foresee() -> bool:
        looks.append(1)
        if len(looks) == 1:
            raise FileNotFoundError("a file that is being replaced")
        if len(looks) == 2:
            raise run_directory.DamagedRunError("a file that is being written")
        return True

    monkeypatch.setattr(api, "LOAD_LAP", 0.01)
    foreign, until = list[float](), time.monotonic() + 30
    with api._noting_load(by_hand().steps(3).ended("finished"), foreign, [], foresee):
        while len(foreign) < 5 and time.monotonic() < until:
            time.sleep(0.01)
    assert len(foreign) >= 5
    assert len(looks) == 3


def test_a_script_is_proved_by_a_task_in_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert how_to_prove(str(tmp_path / "examples" / "train.py")).endswith("then: workbench diagnose examples/train.py:build --prove")
    assert how_to_prove("examples/train.py").endswith(" examples/train.py:build --prove")
    assert how_to_prove("/home/me/train.py").endswith(" /home/me/train.py:build --prove")
    assert how_to_prove("my work/train.py").endswith(" 'my work/train.py:build' --prove")


def test_what_does_not_go_with_a_script_is_refused_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("workbench.diagnosis.api.launch", lambda *_, **__: pytest.fail("it was launched"))
    with pytest.raises(ValueError, match=r"was given model=, which only goes with a step: diagnose\(step, loader\)"):
        wb.diagnose(str(tmp_path / "train.py"), model=Module())
    with pytest.raises(ValueError, match="nproc_per_node=2: it is for a script; for a task it belongs in the spec"):
        wb.diagnose("clipart-resnet", nproc_per_node=2)


def test_a_file_that_only_defines_a_task_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = '"""A task."""\nimport workbench as wb\nWIDTH = 8\n\ndef build():\n    return wb.Task(model=None, dataset=None)\n'
    (spec := tmp_path / "spec.py").write_text(text)
    with pytest.raises(ValueError, match=r"spec.py does nothing when it is run: .* build\(\), .* Diagnose that: 'spec.py:build'"):
        wb.diagnose("spec.py")
    assert list(tmp_path.iterdir()) == [spec]
    for same in (
        text.replace("8", "Path(__file__).resolve().parent").replace("WIDTH", "ROOT: Path"),
        text.replace("import workbench as wb", "from workbench import Task as T").replace("wb.Task", "T"),
        text.replace("8", "torch.device('cpu')").replace("return ", "made: wb.Task = ") + "    return made\n",
    ):
        spec.write_text(same)
        assert lone_builder(spec) == "build"
    for other in (
        *(f"{text}wb.launch(build())\n", text.replace("wb.Task", "dict"), "def build(:", "for i in range(3):\n    i = 4\n"),
        text + "\n\ndef main():\n    wb.launch('spec.py:build')\n\n\nhistory = main()\n",
        text + "history: list = [main(seed) for seed in range(3)]\n",
        text.replace("return ", "made = "),
        text.replace("import workbench as wb", "from rich.progress import Task").replace("wb.Task", "Task"),
        text.replace("import workbench as wb", "import celery as wb"),
    ):
        spec.write_text(other)
        assert lone_builder(spec) is None


def test_what_a_task_or_a_script_is_diagnosed_by() -> None:
    task = wb.Task(model=Module, dataset=list, loss=a_step)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"diagnose\(Task\): a task is diagnosed by its spec"):
        wb.diagnose(task)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"climb\(a_step\): expected a RunSpec, whose knobs can be turned"):
        wb.climb(a_step)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"no knob 'micro_bach': did you mean 'micro_batch'"):
        wb.climb(SPEC, leave=["micro_bach"])


def test_what_cannot_be_proved_from_here(by_hand: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"num_workers=2 cannot be proved from here: the step that was diagnosed is not in this process"):
        diagnosis_of(remedy(num_workers=2), spec=None).prove()
    script = wb.Run.load(by_hand(spec={"kind": "script", "script": "x.py"}).path).spec
    launches = r"the run of a script is only observed\. workbench diagnose x\.py --prove launches the script"
    route = rf"{launches}.* a function that returns a wb\.Task, .*: workbench diagnose x\.py:build --prove"
    with pytest.raises(ValueError, match=f"cannot be proved from here: {route}"):
        diagnosis_of(remedy(num_workers=2), spec=script).prove()
    with pytest.raises(ValueError, match=f"cannot be changed from here: .* In a script, {route}"):
        diagnosis_of(remedy(), spec=script).prove(1)


# --- a remedy turns a spec into another one


@pytest.mark.parametrize(
    ("knobs", "change", "then"),
    [
        ({}, {"num_workers": 2}, {"num_workers": 2}),
        ({"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}, {"num_workers": 0}, {}),
        ({}, {"optimizer": "fused"}, {"optimizer": "fused"}),
        ({"optimizer": "foreach"}, {"optimizer": "fused"}, {"optimizer": "fused"}),
        ({"optimizer": "adamw"}, {"optimizer": "fused"}, {"optimizer": "adamw(fused=True)"}),
        (
            {"optimizer": "adamw(lr=0.1, betas=(0.9, 0.95), foreach=True)"},
            {"optimizer": "fused"},
            {"optimizer": "adamw(lr=0.1, betas=(0.9, 0.95), fused=True)"},
        ),
        ({}, {"gc": False, "channels_last": True}, {"gc": False, "channels_last": True}),
    ],
)
def test_a_remedy_turned(knobs: dict[str, Any], change: dict[str, Any], then: dict[str, Any]) -> None:
    assert apply_remedy(SPEC.replace(**knobs), remedy(**change)) == SPEC.replace(**then)


def test_a_remedy_that_no_spec_can_take() -> None:
    with pytest.raises(SpecError, match="RunSpec has no knob 'jit'"):
        apply_remedy(SPEC, remedy(jit=True))


# --- how a climb decides


class World:
    """A machine on which every spec has a known diagnosis, and every change a known speedup."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, offers: Callable[[wb.RunSpec], list[Remedy]], truth: dict[str, Any]) -> None:
        self.offers, self.truth, self.seconds = offers, truth, 0.0
        self.done: list[str] = []
        monkeypatch.setattr(api, "diagnose", self.diagnose)
        monkeypatch.setattr(api, "prove", self.prove)
        monkeypatch.setattr(time, "monotonic", lambda: self.seconds)

    def diagnose(self, spec: wb.RunSpec, *, budget_s: float, runs_dir: Any) -> wb.Diagnosis:
        self.done.append("diagnose")
        self.seconds += 10
        assert budget_s >= api.MIN_CLIMB_SECONDS
        return diagnosis_of(*sorted(self.offers(spec), key=lambda one: -one.speedup), spec=spec, subject=LaunchedSpec(runs_dir=runs_dir))

    def prove(self, diagnosis: wb.Diagnosis, one: Remedy, *, budget_s: float) -> Proof:
        self.done.append(one.name)
        self.seconds += 10
        gain = self.truth[one.name]
        if gain is None:
            raise wb.RunError(Failure(rank=0, kind="out-of-memory", message="no memory", traceback=None, hint=None))
        return Proof(remedy=one, measured=Interval(low=gain - 0.01, mid=gain, high=gain + 0.01), baseline=8.0)


def offered(spec: wb.RunSpec) -> list[Remedy]:
    """In words; a promise that is not kept; one that fails; what helps, once each; what is not worth it."""
    ceiling = Remedy(name="shards", what="…", speedup=9.0, low=9.0, high=9.0, formula="", ceiling=True, change={"seed": 1})
    one = [remedy(9.9), ceiling, remedy(1.9, precision="amp_bf16"), remedy(1.8, threads=4), remedy(1.04, gc=False)]
    if not spec.num_workers:
        one.append(remedy(1.7, num_workers=2))
    elif spec.micro_batch == 4:
        one.append(remedy(1.2, micro_batch=8))
    return one


TRUTH = {"precision=amp_bf16": 0.8, "threads=4": None, "num_workers=2": 1.5, "micro_batch=8": 1.25}


def test_a_climb(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, offered, TRUTH)
    ladder = wb.climb(SPEC, budget_s=1000)
    assert world.done == ["diagnose", "precision=amp_bf16", "threads=4", "num_workers=2", "diagnose", "micro_batch=8", "diagnose"]
    assert [rung.kept for rung in ladder.rungs] == [False, False, True, True]
    assert [rung.samples_per_sec for rung in ladder.rungs] == [8.0, 8.0, 12.0, 10.0]  # 4 samples in 0.5 s at first; then as measured
    assert ladder.start == 8.0
    assert ladder.speedup == pytest.approx(1.5 * 1.25)
    assert ladder.changes == {"num_workers": 2, "micro_batch": 8}
    assert SPEC.replace(**ladder.changes).micro_batch == 8
    assert "predicted to gain more than 5.0 %" in ladder.stopped
    failed = ladder.rungs[1].proof
    assert "it failed: rank 0: no memory" in failed.notes[0]
    assert "precision=amp_bf16" in str(ladder)


def test_a_climb_leaves_alone_what_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, offered, TRUTH)
    ladder = wb.climb(SPEC, budget_s=1000, leave=["micro_batch", "precision", "threads"])
    assert world.done == ["diagnose", "num_workers=2", "diagnose"]
    assert ladder.changes == {"num_workers": 2}


def test_a_climb_ends_when_its_budget_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, offered, TRUTH)
    ladder = wb.climb(SPEC, budget_s=40)
    assert world.done == ["diagnose", "precision=amp_bf16", "threads=4"]
    assert "spent before num_workers=2 could be tried; budget_s=600 goes further" in ladder.stopped
    assert ladder.changes is None
    assert ladder.speedup == 1

    world = World(monkeypatch, offered, TRUTH)
    ladder = wb.climb(SPEC, budget_s=50)
    assert world.done[-1] == "num_workers=2"
    assert "spent with num_workers=2; the verdict is that before it" in ladder.stopped
    assert ladder.changes == {"num_workers": 2}
    assert Ladder.from_json(ladder.to_json()).rungs[-1] == ladder.rungs[-1]


def test_a_climb_takes_a_minute_and_leaves_half_of_it_for_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, lambda spec: [remedy(1.7, num_workers=2)], TRUTH)
    given: list[float] = []

    def diagnose(*args: Any, budget_s: float, **more: Any) -> wb.Diagnosis:
        given.append(budget_s)
        found = world.diagnose(*args, budget_s=budget_s, **more)
        world.seconds += max(0.0, budget_s - 10)  # it takes all that it is given
        return found

    monkeypatch.setattr(api, "diagnose", diagnose)
    ladder = wb.climb(SPEC)
    assert ladder.changes == {"num_workers": 2}
    assert given == [30.0, 15.0]


def test_an_interrupted_climb_keeps_what_was_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    world = World(monkeypatch, offered, TRUTH)
    monkeypatch.setattr(api, "prove", lambda *given, **more: world.prove(*given, **more) if len(world.done) < 4 else interrupt())
    ladder = wb.climb(SPEC, budget_s=1000)
    assert ladder.changes == {"num_workers": 2}
    assert ladder.stopped == "stopped by Ctrl-C while micro_batch=8 was tried: this is the result so far"

    def with_what_is_known(*given: Any, **more: Any) -> Proof:
        return dataclasses.replace(
            world.prove(*given, **more), notes=("stopped by Ctrl-C after 2 pairs of blocks: this is the result so far",)
        )

    world = World(monkeypatch, lambda spec: [remedy(1.7, num_workers=2)], TRUTH)
    monkeypatch.setattr(api, "prove", with_what_is_known)
    ladder = wb.climb(SPEC, budget_s=1000)
    assert (ladder.changes, len(ladder.rungs), world.done[-1]) == ({"num_workers": 2}, 1, "num_workers=2")
    assert ladder.stopped == "stopped by Ctrl-C while num_workers=2 was tried: this is the result so far"

    world = World(monkeypatch, offered, TRUTH)
    monkeypatch.setattr(api, "diagnose", lambda *given, **more: interrupt() if world.done else world.diagnose(*given, **more))
    ladder = wb.climb(SPEC, budget_s=1000)
    assert ladder.changes == {"num_workers": 2}
    assert ladder.stopped == "stopped by Ctrl-C with num_workers=2; the verdict is that before it"

    def cut_short(*given: Any, **more: Any) -> wb.Diagnosis:
        found = world.diagnose(*given, **more)
        found.evidence = dataclasses.replace(found.evidence, notes=("stopped by Ctrl-C after 4.00 s: this is the result so far",))
        return found

    monkeypatch.setattr(api, "diagnose", cut_short)
    assert wb.climb(SPEC, budget_s=1000).stopped.startswith("stopped by Ctrl-C during a diagnosis")
    assert world.done[-1] == "diagnose"


def test_what_the_spec_does_already_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, lambda spec: [remedy(1.5, num_workers=2)], {"num_workers=2": 1.5})
    ladder = wb.climb(SPEC.replace(num_workers=2), budget_s=1000)
    assert world.done == ["diagnose"]
    assert ladder.rungs == ()


# --- real ones


def nothing_left(run_id: str) -> None:
    end = time.monotonic() + 5
    while processes_with(run_directory.ENV_RUN_ID, run_id):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.alone
def test_a_spec_is_diagnosed_and_its_remedy_proved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = wb.diagnose(SPEC, budget_s=20, runs_dir=tmp_path / "runs")
    assert found.verdict == "input-bound", str(found)
    assert found.spec == SPEC
    again = wb.diagnose(next((tmp_path / "runs").iterdir()))
    assert (again.verdict, again.cause, again.evidence.step) == (found.verdict, found.cause, found.evidence.step)

    more = next(one for one in found.remedies if one.change.get("num_workers"))
    proof = found.prove(more, budget_s=15)
    assert proof.gained, str(proof)
    assert found.proofs == [proof]
    assert [row["remedy"] for row in Calibration.load().rows] == [more.name]
    for folder in (tmp_path / "runs").iterdir():
        run = wb.Run.load(folder)
        assert run.ok
        assert environment.steady_malloc().items() <= run_directory.read_json(folder / run_directory.RUN_JSON)["environment"]["set"].items()
        nothing_left(run.id)
    assert capfd.readouterr() == ("", "")  # a notebook shows the result and nothing else


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_and_accumulation(tmp_path: Path) -> None:
    spec = SPEC.replace(nproc_per_node=2, accumulation=2)
    found = wb.diagnose(spec, budget_s=8, runs_dir=tmp_path)
    assert found.evidence.world_size == 2
    assert found.evidence.accumulation == 2
    assert found.evidence.samples == spec.global_batch
    assert [one.rank for one in found.evidence.ranks] == [0, 1]
    assert found.verdict == "input-bound", str(found)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_specs_that_want_different_numbers_of_ranks_take_turns(tmp_path: Path) -> None:
    """Samples that are waited for come twice as fast to two ranks; one of them rests while the other contestant runs."""
    proof = diagnosis_of(remedy(2.0, nproc_per_node=2), subject=LaunchedSpec(runs_dir=tmp_path)).prove(budget_s=7)
    assert 1.2 < proof.measured.mid < 2.5
    assert proof.baseline < 4 / (4 * 2e-3)  # four samples of 2 ms and the step itself


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("empty", r"the task's dataset\(\) returned an empty Slow: it needs at least one sample"),
        pytest.param("fails_to_build", r"fails_to_build\(\) raised RuntimeError: no such data", marks=pytest.mark.slow),
    ],
)
def test_an_error_in_the_experiment_is_that_of_the_caller(tmp_path: Path, task: str, said: str) -> None:
    with pytest.raises(wb.RunError, match=said) as raised:
        wb.diagnose(SPEC.replace(task=f"{TASKS}:{task}"), budget_s=10, runs_dir=tmp_path)
    if task == "empty":
        assert raised.value.failure.traceback is None  # no line of the user's is to blame, and the message says all
    else:
        assert "slow_task.py" in (raised.value.failure.traceback or "")
    (folder,) = tmp_path.iterdir()
    assert str(folder) in raised.value.__notes__[0]
    run = wb.Run.load(folder)
    assert run.state == "failed"
    nothing_left(run.id)


@pytest.mark.usefixtures("forked_ranks")
def test_an_epoch_of_one_batch(tmp_path: Path) -> None:
    found = wb.diagnose(SPEC.replace(task=f"{TASKS}:one_batch"), budget_s=5, runs_dir=tmp_path)
    assert found.evidence.loading is not None
    assert found.evidence.loading.epoch == 1
    assert found.evidence.notes


def test_an_interrupt_of_a_launch_returns_what_is_known_and_leaves_nothing(tmp_path: Path) -> None:
    spec = SPEC.replace(num_workers=1, nproc_per_node=2).to_json()
    code = f"import workbench as wb; print(wb.diagnose(wb.RunSpec.from_json({spec!r}), runs_dir={str(tmp_path)!r}))"
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not any(json.loads(path.read_text())["known"] for path in tmp_path.glob("*/progress.json")):
        assert program.poll() is None
        time.sleep(0.05)
    program.send_signal(signal.SIGINT)
    printed, said = program.communicate(timeout=60)
    (folder,) = tmp_path.glob("*-diagnose")
    run = wb.Run.load(folder)
    assert run.state == "finished", said
    assert "stopped by Ctrl-C after" in printed
    nothing_left(run.id)


def test_an_interrupt_before_anything_is_known_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_hand: Callable[..., HandMade]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("workbench.runs.launch.experiments.run_experiment", interrupt)
    with pytest.raises(
        KeyboardInterrupt, match="diagnose was stopped by Ctrl-C before it knew anything; all processes it started have ended"
    ):
        wb.diagnose(SPEC, runs_dir=tmp_path)
    monkeypatch.setattr("workbench.diagnosis.measure.experiment.experiment", interrupt)
    with pytest.raises(KeyboardInterrupt, match="diagnose was stopped by Ctrl-C before it knew anything"):
        wb.diagnose(print, [1, 2])
    monkeypatch.setattr(Run, "wait", interrupt)
    script = ScriptSpec(script="/train.py", watch=True).to_json()
    run = Run.load(by_hand(spec=script).steps(60).ended("stopped").path)
    monkeypatch.setattr("workbench.diagnosis.api.launch", lambda *_, **__: run)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert any(note.startswith("stopped by Ctrl-C after") for note in wb.diagnose("train.py").evidence.notes)
    few = Run.load(by_hand(spec=script).steps(2).ended("stopped").path)
    monkeypatch.setattr("workbench.diagnosis.api.launch", lambda *_, **__: few)
    with pytest.raises(KeyboardInterrupt, match=r"stopped by Ctrl-C: .*at least 8 are needed"):
        wb.diagnose("train.py")


def test_the_budget_counts_what_passes_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    def experiment(*_: object, budget_s: float, **__: object) -> Evidence:
        budgets.append(budget_s)
        return Made(cpu=0.03).evidence()

    monkeypatch.setattr("workbench.diagnosis.measure.experiment.experiment", experiment)
    for passed in (20.0, 70.0):
        clock = iter([0.0])
        monotonic = lambda clock=clock, passed=passed: next(clock, passed)  # noqa: E731
        monkeypatch.setattr("workbench.core.progress.time", SimpleNamespace(monotonic=monotonic))
        wb.diagnose(print, [1, 2])
    assert budgets == [40.0, 15.0]


def test_the_program_of_a_rank_ends_early_when_asked(by_hand: Callable[..., HandMade], monkeypatch: pytest.MonkeyPatch) -> None:
    made = by_hand().alive()
    say = progress_writer(made.path)
    say("no loader", "")
    interrupts = iter([True])

    def interrupted_once() -> None:
        if next(interrupts, False):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:  # nothing is known: it is stopped
        patched.setattr(Run, "stop", lambda run: made.ended("stopped"))
        with pytest.raises(KeyboardInterrupt):
            wait_for(Run.load(made.path), tick=interrupted_once, finish=True)
    assert not (made.path / run_directory.FINISH).exists()
    made = by_hand().alive()
    say = progress_writer(made.path)
    say("no optimizer step", "no loader: 61 % less")

    def obey(_: float) -> None:
        if (made.path / run_directory.FINISH).exists():
            with pytest.raises(KeyboardInterrupt):
                say("a trace of a step", "")
            made.ended("finished")

    interrupts = iter([True])
    monkeypatch.setattr("workbench.runs.launch.experiments.time.sleep", obey)
    assert wait_for(Run.load(made.path), tick=interrupted_once, finish=True).ok


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", f"{TASKS}:slow_loader", "--set", "micro_batch=4", "device=cpu", "--budget", "8", "--prove"]) == 0
    said = capsys.readouterr().out
    assert "input-bound" in said
    assert "Proof of" in said


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_an_error_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", f"{TASKS}:boom", "--budget", "10"]) == 1
    said = capsys.readouterr().err
    assert "workbench: rank 0: KeyError: 'boom'" in said
    assert "slow_task.py" in said  # its traceback


def test_rank_0_sends_something_even_if_the_speeds_of_the_machine_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for it."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("workbench.diagnosis.measure.experiment.machine_speeds", refuse)
    monkeypatch.setattr("workbench.diagnosis.measure.experiment.MachineSpeeds.load", refuse)
    for budget in (1.0, 60.0):
        speeds = speeds_for(Peers(), torch.device("cpu"), budget)
        assert speeds.slowness("dispatch") == 1
        assert "RuntimeError: Could not determine home directory." in speeds.notes[0]
