"""Proofs of changes of a script from outside: which there are, launches in turns, what the error says for an edit, real ones (slow)."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import workbench as wb
from tests.conftest import HandMade
from tests.planted_gap import planted
from workbench.__main__ import main
from workbench.core import run_directory
from workbench.core.progress import BudgetError, Waiting
from workbench.core.run_directory import ENV_ARGUMENTS
from workbench.core.system_load import LoadMeter, Noise
from workbench.diagnosis import prove_script as proving
from workbench.diagnosis.analysis.calibration import Calibration
from workbench.diagnosis.analysis.diagnosis import Diagnosis
from workbench.diagnosis.analysis.evidence import Gradients
from workbench.diagnosis.analysis.observed import observe
from workbench.diagnosis.analysis.script_remedies import LaunchedScript
from workbench.diagnosis.analysis.why_not_linear import WhyNotLinear
from workbench.diagnosis.rerun import Arm, Measured, RerunError, Reruns
from workbench.diagnosis.why_not_linear import why_not_linear
from workbench.runs.launch.new_run import NewRun, Surroundings
from workbench.runs.run import Run
from workbench.runs.spec import ScriptSpec

SPEC = ScriptSpec(script="/somewhere/train.py", nproc_per_node=2, watch=True)
PLACES = {"loop": "train.py:30", "step": "train.py:41 main", "ddp": "train.py:12 main"}


def answer(spec: ScriptSpec = SPEC, **parts: Any) -> WhyNotLinear:
    return WhyNotLinear(evidence=replace(planted(**parts), script=True, places=PLACES), spec=spec)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"accumulation": 4}, r"outside train.py: Set accumulation=4. It is made at train.py:41 main \(the optimizer's step\)"),
        ({"gradient_compression": "fp16"}, "train.py:12 main .*register_comm_hook"),
        ({"micro_batch": 64, "threads": 1}, "train.py:30 .*batch_size.*From outside can be set: threads, nproc_per_node, num_workers"),
        ({"compile": True}, "cannot be set from outside train.py: Set compile=True. Then ask again"),
    ],
)
def test_what_needs_an_edit_is_said_with_its_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        answer().prove(change)


def test_a_change_to_what_the_launch_has_already_is_refused() -> None:
    with pytest.raises(ValueError, match=r"was launched with threads=1: there is nothing to change"):
        answer().prove({"threads": SPEC.threads})


def test_remedies_that_can_be_set_from_outside_can_be_proved() -> None:
    crowded = {"waits": 0.01, "sharing": 0.01, "cores": 2.0}
    threads = answer(SPEC.replace(threads=2), threads=2, **crowded)
    assert {remedy.name: remedy.change for remedy in threads.remedies if remedy.provable} == {"threads=1": {"threads": 1}}
    workers = answer(SPEC.replace(args=("--epochs", "1")), num_workers=2, **crowded)
    assert workers.remedy(None).change["num_workers"] == 0
    fewer = answer(SPEC.replace(nproc_per_node=4), ranks=4, **crowded | {"waits": 0.05}).remedy(None)
    assert fewer.change == {"nproc_per_node": 2}
    assert fewer.ceiling
    assert workers.brief()["next"]["command"] == "workbench why-not-linear /somewhere/train.py --nproc-per-node 2 --prove -- --epochs 1"
    many = Gradients(size=40 * 2**20, buckets=40, latency=3e-4, per_byte=1e-10)
    both = answer(reduction=0.01, gradients=many)
    evidence = replace(both.evidence, blocks=tuple(replace(block, backward=_backward(block.arm)) for block in both.evidence.blocks))
    assert WhyNotLinear(evidence=evidence, spec=SPEC).remedy(None).change == {"bucket_cap_mb": 13.3}


def _backward(arm: str) -> tuple[float, ...]:
    return (0.02,) * 2 if arm == "all" else (0.01,) * 2


class Turns:
    """Takes the place of launches: what was asked for, and how long a step takes."""

    def __init__(self, seconds: dict[str, float], replaced: Sequence[str] = ("num_workers",), threads: int = 1) -> None:
        self.seconds, self.names, self.arms = seconds, list[str](), dict[str, Arm]()
        self.rows = {0: [{"replaced": list(replaced), "threads": threads}]}

    def measure(self, arm: Arm, name: str) -> tuple[float, Any]:
        self.names.append(name)
        self.arms[name] = arm
        if len(self.names) > 6:
            raise KeyboardInterrupt
        return self.seconds[name], SimpleNamespace(path=Path("runs"))


def play(monkeypatch: pytest.MonkeyPatch, turns: Turns) -> None:
    monkeypatch.setattr(Reruns, "measure", lambda _, arm, name: turns.measure(arm, name))
    monkeypatch.setattr(proving, "RunRows", lambda _: SimpleNamespace(other_rows=turns.rows))


def test_launches_with_and_without_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns({"as it is": 0.03, "num_workers=2": 0.02})
    play(monkeypatch, turns)
    result = answer()
    proof = result.prove("num_workers=2", budget_s=30)
    assert turns.names[:5] == ["as it is", "num_workers=2", "num_workers=2", "as it is", "as it is"]
    assert {name: arm.variables for name, arm in turns.arms.items()} == {
        "as it is": {ENV_ARGUMENTS: None},
        "num_workers=2": {ENV_ARGUMENTS: '{"num_workers": 2}'},
    }
    assert proof.measured.mid == pytest.approx(1.5)
    assert proof.measured.low < 1.48
    assert proof.measured.high > 1.52
    assert proof.baseline == pytest.approx(1 / 0.03)
    assert "3 pairs of alternating launches" in str(proof.notes)
    assert "Ctrl-C" in str(proof.notes)
    assert result.proofs == [proof]


def test_of_other_ranks_what_all_of_them_do_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns({"as it is": 0.03, "nproc_per_node=1": 0.02})
    play(monkeypatch, turns)
    proof = answer(samples=None).prove({"nproc_per_node": 1})
    assert turns.arms["nproc_per_node=1"].spec.nproc_per_node == 1
    assert proof.measured.mid == pytest.approx(0.75), "half the steps, of which each takes two thirds"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bucket_cap_mb": 9}, "makes no DistributedDataParallel, which takes bucket_cap_mb"),
        ({"threads": 2}, "the script sets its 1 threads itself"),
    ],
)
def test_what_does_not_reach_the_script_is_no_proof(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str) -> None:
    play(monkeypatch, Turns(dict.fromkeys(("as it is", "bucket_cap_mb=9", "threads=2"), 0.03)))
    result = answer()
    with pytest.raises(ValueError, match=words):
        result.prove(change)
    assert result.proofs == []


def test_what_loaders_without_workers_do_not_take_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns({"as it is": 0.03, "prefetch_factor=4, persistent_workers=True": 0.03}, replaced=())
    turns.rows[0][0]["without_workers"] = ["persistent_workers", "prefetch_factor"]
    play(monkeypatch, turns)
    with pytest.raises(ValueError, match=r"loaders have no workers, .*prefetch_factor and persistent_workers.* try num_workers=1 as well"):
        answer().prove({"prefetch_factor": 4, "persistent_workers": True})


def test_each_launch_of_a_proof_is_recorded_and_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: object, spec: ScriptSpec, program: list[str], *__: object, **options: Any) -> Run:
        outs.append(program[-1])
        assert options.get("experiment", {"kind": "prove", "name": "as it is"}) == {"kind": "prove", "name": "as it is"}
        assert Path(program[-1]).is_dir()
        assert spec.args == ("--ckpt", "{out}"), "what is recorded is equal for all launches"
        raise ValueError("nothing starts here")

    outs = list[str]()
    monkeypatch.setattr(NewRun, "start", start)
    (tmp_path / "train.py").write_text("")
    spec = SPEC.replace(script=str(tmp_path / "train.py"), args=("--ckpt", "{out}"))
    for _ in range(2):
        with pytest.raises(ValueError, match="nothing starts"):
            WhyNotLinear(evidence=answer().evidence, spec=spec, subject=tmp_path).prove({"num_workers": 1})
        with pytest.raises(ValueError, match="nothing starts"):
            why_not_linear(spec, runs_dir=tmp_path)
    assert len(set(outs)) == 4


# --- of a diagnosis

LOADER = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False, "batch_size": 8, "epoch": 500}
ALONE = SPEC.replace(nproc_per_node=1)
LAUNCHED = LaunchedScript(folder=Path("/"), start_s=4.0)
LINES = {"loop": "train.py:30", "step": "train.py:41 main", "dataset": "train.py:8 Pictures.__getitem__"}
Make = Callable[..., HandMade]


def launched(
    by_hand: Make,
    *,
    spec: ScriptSpec = ALONE,
    loader: dict[str, Any] | None = None,
    cpu: float = 0.0,
    trained_by: str = "AdamW(fused)",
    cores: float = 2.0,
    noise: Noise | None = None,
    threads: int = 1,
    first: float = 0.0,
    clock: str = "host",
    subject: LaunchedScript | None = LAUNCHED,
    **phases: float,
) -> Diagnosis:
    """The diagnosis of a script that was launched, by steps written by hand; each takes `cpu` seconds of CPU."""
    made = by_hand(spec=spec.to_json())
    usual = {"data_wait": 0.0, "h2d": 0.0, "forward": 0.006, "backward": 0.012, "optimizer": 0.001, "other": 0.001, "samples": 8}
    had = LOADER | (loader or {})
    writer = run_directory.LineWriter(made.path / run_directory.rank_file(0))
    rows: list[dict[str, Any]] = [{"rank": 0, "world_size": 1, "clock": clock, "pid": 1, "device": "cpu"}]
    rows += [{"places": LINES}, {"loader": had}, {"replaced": [], "threads": threads, "optimizer": trained_by}]
    for i in range(120):
        step = {"step": i, **usual, **phases}
        step["data_wait"] += first if had["epoch"] and i % had["epoch"] == 0 else 0.0
        rows.append(step | {"cpu": cpu * i} if i % 10 == 0 else step)
    writer.write(rows)
    writer.close()
    run = Run.load(made.ended("finished").path)
    evidence = observe(run, outside=subject is not None, noise=noise or Noise(cores=cores))
    return Diagnosis.of(evidence, spec=run.spec, subject=subject)


def remedies_of(diagnosis: Diagnosis) -> dict[str, dict[str, Any]]:
    return {remedy.name: dict(remedy.change) for remedy in diagnosis.remedies}


def test_workers_are_recommended_by_what_making_a_batch_waits_and_computes(by_hand: Make) -> None:
    waiting = launched(by_hand, data_wait=0.06, cpu=0.02)
    best = waiting.remedies[0]
    assert best.change == {"num_workers": 3, "persistent_workers": True}
    assert best.scope == "cause"
    assert best.speedup == pytest.approx(0.08 / 0.02, rel=0.05), "three workers wait at once, and training is left"
    assert best.low < best.speedup < best.high < 5
    assert waiting.why.startswith("Without the loader the step would take 20.0 ms instead of 80.0 ms, at best. Batches are made without")
    assert "0 B" not in best.costs
    computing = launched(by_hand, data_wait=0.06, cpu=0.08).remedies
    made = next(remedy for remedy in computing if remedy.name.startswith("num_workers="))
    assert made.speedup < 2.01, "two cores have all to compute"
    many = launched(by_hand, data_wait=1.0, cpu=0.02).remedies[0]
    assert many.change["num_workers"] <= 8, "each is a process"
    assert waiting.loader_curve is not None
    assert waiting.loader_curve.recommended == 3


def test_workers_gain_no_more_than_the_cores_allow_on_an_idle_machine(by_hand: Make) -> None:
    """A loader of 205 ms of CPU and training of 147 ms, on two cores beside others: 2.44× was predicted, up to 6.4×."""
    step = {"data_wait": 0.452, "forward": 0.099, "backward": 0.19, "optimizer": 0.006, "other": 0.004}
    busy = launched(by_hand, cpu=0.352, noise=Noise(cores=2.0, foreign=1.5, waiting=0.53), **step)
    loading = busy.evidence.loading
    assert loading is not None
    assert loading.cpu == pytest.approx(0.21, rel=0.05)
    assert loading.blocked == pytest.approx(0.0, abs=0.01)
    made = busy.remedy("num_workers=2, persistent_workers=True")
    assert made.high == pytest.approx(2.0, rel=0.01)
    assert made.low < 1.1
    assert made.speedup < 1.8
    assert busy.remedies[0].name.startswith("num_workers=")
    assert busy.remedies[0].high <= 2.01
    slow = launched(by_hand, cpu=0.352, noise=Noise(cores=2.0, foreign=1.8, waiting=0.6), **step | {"data_wait": 0.6})
    assert [one.name.partition("=")[0] for one in slow.remedies] == ["num_workers"], "no ceiling above what the cores allow"
    before = {"remedy": "num_workers=1", "predicted": 1.0, "low": 0.9, "high": 1.1, "ceiling": False}
    proofs = Calibration(rows=tuple(before | {"measured": measured} for measured in (0.5, 1.0, 3.0, 3.0)))
    widened = proofs.adjust(made)
    assert widened.low < made.low
    assert widened.high == made.high, "no proof of another loader makes more cores"
    assert busy.loader_curve is not None
    shortest = min(point.step for point in busy.loader_curve.points)
    assert shortest >= 0.352 / 2


def test_a_loader_that_sleeps_gains_more_on_a_busy_machine_too(by_hand: Make) -> None:
    step = {"data_wait": 0.45, "forward": 0.1, "backward": 0.19, "optimizer": 0.006, "other": 0.004}
    asleep = launched(by_hand, cpu=0.15, noise=Noise(cores=2.0, foreign=1.5, waiting=0.2), **step)
    assert asleep.evidence.loading is not None
    assert asleep.evidence.loading.blocked == pytest.approx(0.45, rel=0.02)
    assert asleep.remedies[0].high > 2.1


def test_workers_that_are_there_are_kept_or_get_more_to_do(by_hand: Make) -> None:
    two = {"num_workers": 2, "prefetch_factor": 2}
    busy = launched(by_hand, loader=two, data_wait=0.02, cpu=0.025)
    assert busy.remedies[0].change["num_workers"] > 2
    assert busy.remedies[0].speedup == pytest.approx(2.0, rel=0.1)
    assert remedies_of(busy)["prefetch_factor=8"] == {"prefetch_factor": 8}
    started = launched(by_hand, loader=two | {"epoch": 10}, first=0.5, cpu=0.025)
    again = next(remedy for remedy in started.remedies if remedy.name == "persistent_workers=True")
    assert again.change == {"persistent_workers": True}
    assert again.speedup == pytest.approx(0.07 / 0.02, rel=0.2)
    assert "starting them takes 500 ms per epoch of 10 batches" in again.formula
    assert not remedies_of(launched(by_hand, loader=two, cores=1.0)), "they keep up"


def test_a_stream_of_which_each_worker_may_read_all_gets_no_workers(by_hand: Make) -> None:
    stream = launched(by_hand, loader={"stream": "unknown", "epoch": None}, data_wait=0.06)
    assert not [name for name in remedies_of(stream) if name.startswith("num_workers")]
    told = r"no waiting for data cannot be set from outside train.py: .* made at train.py:8 Pictures"
    with pytest.raises(ValueError, match=told):
        stream.prove(1)
    nothing = stream.prove()
    assert re.match(told, nothing.choice, re.IGNORECASE)
    assert not nothing.gained


def test_beside_a_device_part_of_the_loading_is_taken_to_be_hidden(by_hand: Make) -> None:
    found = launched(by_hand, clock="device", data_wait=0.02, cpu=0.05)
    assert found.evidence.loading is not None
    assert found.evidence.loading.alone == pytest.approx(0.03), "half of the device's 20 ms hides it"
    assert found.loader_curve is not None
    assert found.loader_curve.points[0].step == pytest.approx(0.04)
    assert found.remedies[0].speedup < 0.04 / 0.02
    copies = launched(by_hand, clock="device", h2d=0.02)
    assert remedies_of(copies) == {"pin_memory=True": {"pin_memory": True}}
    assert "copies beside training" in remedies_of(launched(by_hand, clock="device", h2d=0.02, loader={"pin_memory": True}))


def test_threads_and_the_optimizer_are_set_from_outside(by_hand: Make) -> None:
    computes = launched(by_hand)
    assert computes.verdict == "compute-bound"
    assert remedies_of(computes) == {"threads=2": {"threads": 2}}
    assert computes.remedies[0].ceiling
    assert computes.remedies[0].speedup == pytest.approx(1 / (1 - 0.5 * 19 / 20))
    assert computes.next.startswith("Use 2 threads per operator: torch.set_num_threads(2)")
    assert not remedies_of(launched(by_hand, threads=2)), "the script sets them itself"
    assert not remedies_of(launched(by_hand, cores=1.0))
    assert not remedies_of(launched(by_hand, trained_by="AdamW", cores=1.0)), "its step is short"
    long = launched(by_hand, trained_by="AdamW", cores=1.0, optimizer=0.02)
    assert remedies_of(long) == {"optimizer=fused": {"optimizer": "fused"}}
    assert long.remedies[0].gain == "up to 2.05×"
    theirs = launched(by_hand, trained_by="Muon", cores=1.0, optimizer=0.02)
    with pytest.raises(ValueError, match=r"a cheaper optimizer cannot be set from outside train.py: .* made at train.py:41 main"):
        theirs.prove(1)


def test_the_command_proves_a_script_or_says_where_to_edit_it(
    by_hand: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    found = [launched(by_hand, data_wait=0.06, cpu=0.02), launched(by_hand, trained_by="Muon", cores=1.0, optimizer=0.02)]
    monkeypatch.setattr("workbench.diagnosis.commands.diagnose", lambda *_, **__: found.pop(0))
    play(monkeypatch, Turns({"as it is": 0.08, "num_workers=3": 0.025}, replaced=("num_workers", "persistent_workers")))
    assert main(["diagnose", "train.py", "--prove", "--budget", "30"]) == 0
    said = capsys.readouterr().out
    assert "Proof of num_workers=3" in said
    assert "3.20×" in said
    assert main(["diagnose", "train.py", "--prove", "--budget", "30"]) == 0
    assert "A cheaper optimizer cannot be set from outside train.py" in capsys.readouterr().out.splitlines()[-1]


def test_a_diagnosis_that_launched_nothing_proves_nothing_of_a_script(by_hand: Make) -> None:
    loaded = launched(by_hand, data_wait=0.06, subject=None)
    assert [remedy.provable for remedy in loaded.remedies] == [False]
    assert "there is nothing to prove" in loaded.prove().choice.lower()
    again = Diagnosis.from_json(launched(by_hand, data_wait=0.06).to_json())
    with pytest.raises(ValueError, match=r"num_workers=3 cannot be proved from here: the run of a script is only observed"):
        again.prove()


def test_a_diagnosis_of_a_script_is_proved_by_launches(
    by_hand: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = Turns({"as it is": 0.08, "num_workers=3": 0.025}, replaced=("num_workers", "persistent_workers"))
    play(monkeypatch, turns)
    monkeypatch.setenv("WORKBENCH_PROGRESS", "on")
    found = launched(by_hand, data_wait=0.06, cpu=0.02, spec=ALONE.replace(args=("--ckpt", "{out}")))
    proof = found.prove(budget_s=45)
    arms = turns.arms
    assert {name: arm.variables[ENV_ARGUMENTS] for name, arm in arms.items()} == {
        "as it is": None,
        "num_workers=3": '{"num_workers": 3, "persistent_workers": true}',
    }
    assert all(arm.code.folder == Path("/") and arm.spec == found.spec for arm in arms.values())
    assert proof.predicted == found.remedies[0].interval
    assert proof.measured.mid == pytest.approx(3.2)
    assert found.proofs == [proof]
    assert "3.20×" in str(found.remedy_table)
    assert found.brief()["proved"][0]["change"] == "num_workers=3"
    said = capsys.readouterr().err.splitlines()[0]
    assert "alternating launches of train.py as it is and with num_workers=3, persistent_workers=True, about 7.76 s for each launch" in said
    assert "2 pairs or so in all" in said
    monkeypatch.setattr(Waiting, "__enter__", lambda line: pytest.fail(line.now))
    with pytest.raises(pytest.fail.Exception, match=r"about 5\.92 s for each launch, 2 pairs or so in all"):
        found.prove(budget_s=30)
    more = launched(by_hand, data_wait=0.06, spec=ALONE.replace(threads=2)).brief()["next"]["command"]
    assert more == "workbench diagnose /somewhere/train.py --prove --set threads=2"


def test_a_budget_that_one_launch_exceeds_is_refused_before_it(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reruns, "measure", lambda *_: pytest.fail("it was launched"))
    slow = launched(by_hand, data_wait=3.0, forward=2.0)
    with pytest.raises(ValueError, match=r"a launch of train.py takes about .* 8 steps of 5.01 s, .*give prove budget_s=243, --budget 243"):
        slow.prove(budget_s=60)


def test_launches_end_earlier_where_two_pairs_would_not_fit(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget of 60 s was spent on one launch and a half of a script whose steps take a second, and nothing was known."""
    steps = list[int]()

    def measure(reruns: Reruns, arm: Arm, name: str) -> tuple[float, Any]:
        steps.append(reruns.measured.steps)
        return Turns.measure(turns, arm, name)

    turns = Turns({"as it is": 1.0, "num_workers=2": 0.6}, replaced=("num_workers", "persistent_workers"))
    play(monkeypatch, turns)
    monkeypatch.setattr(Reruns, "measure", measure)
    monkeypatch.setattr(LoadMeter, "crowding", lambda _: "other processes took 1.7 of 2 cores")
    found = launched(by_hand, data_wait=0.6, forward=0.2, backward=0.2, cpu=0.5)
    proof = found.prove("num_workers=2", budget_s=75)
    assert steps[0] == 10
    assert "the machine was busy: other processes took 1.7 of 2 cores" in str(proof)
    refused = r"a range needs four: give prove budget_s=\d+, --budget \d+ in a terminal. Nothing was launched"
    with pytest.raises(ValueError, match=refused):
        found.prove("num_workers=2", budget_s=40)


def test_a_launch_after_others_that_takes_no_step_may_go_on_from_their_checkpoints(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(_: Reruns, __: Arm, name: str) -> tuple[float, Any]:
        if name != "as it is":
            raise RerunError("it finished after 0 steps, and recorded no time")
        return 0.08, SimpleNamespace(path=Path("runs"))

    monkeypatch.setattr(Reruns, "measure", measure)
    with pytest.raises(ValueError, match=r"num_workers=3: it finished after 0 steps.* give their folder as \{out\}"):
        launched(by_hand, data_wait=0.06, cpu=0.02).prove()


def test_a_budget_that_ended_before_a_pair_is_answered_by_one_that_suffices(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(reruns: Reruns, _: Arm, name: str) -> tuple[float, Any]:
        reruns.seconds.append(12.0 if name == "as it is" else 8.0)
        if name != "as it is":
            raise BudgetError(name)
        return 0.08, SimpleNamespace(path=Path("runs"))

    monkeypatch.setattr(Reruns, "measure", measure)
    with pytest.raises(ValueError, match=r"the budget of 30\.0 s ended before the script ran twice: give prove budget_s=60, --budget 60"):
        launched(by_hand, data_wait=0.06, cpu=0.02).prove(budget_s=30)


def test_what_the_loader_has_in_the_end_counts(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns({"as it is": 0.08, "num_workers=3": 0.025}, replaced=("num_workers", "persistent_workers"))
    turns.rows[0].append({"loader": LOADER | {"persistent_workers": True}})
    play(monkeypatch, turns)
    with pytest.raises(ValueError, match="num_workers=3 changes nothing here: the script sets num_workers=0 after it has made the loader"):
        launched(by_hand, data_wait=0.06, cpu=0.02).prove()
    play(monkeypatch, Turns({"as it is": 0.08, "optimizer=fused": 0.07}, replaced=()))
    with pytest.raises(ValueError, match="optimizer=fused changes nothing here: the script makes no optimizer of torch, which takes"):
        launched(by_hand).prove("optimizer=fused")
    with pytest.raises(ValueError, match="optimizer='magic': of a script's optimizer, fused or foreach can be set"):
        launched(by_hand).prove("optimizer=magic")


def test_knobs_of_which_nothing_is_known_predict_nothing(by_hand: Make) -> None:
    found = launched(by_hand, data_wait=0.06, cpu=0.02)
    assert found.remedy("num_workers=1").speedup == pytest.approx(0.08 / 0.06, rel=0.05)
    for unknown in ("pin_memory=True", "nproc_per_node=2", "optimizer=foreach"):
        assert found.remedy(unknown).interval.low == 0, unknown


def test_a_quicker_launch_runs_as_long_as_one_of_the_script_as_it_is(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = by_hand(spec=SPEC.to_json()).alive().steps(20)
    run, clock, stopped = Run.load(made.path), [0.0], list[float]()

    def wait_for(run: Run, *, tick: Callable[[], None], check: bool) -> Run:
        while not stopped:
            clock[0] += 1.0
            tick()
        return run

    monkeypatch.setattr("workbench.diagnosis.rerun.wait_for", wait_for)
    monkeypatch.setattr("workbench.diagnosis.rerun.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(NewRun, "start", lambda *_, **__: run)
    monkeypatch.setattr(Run, "stop", lambda _: stopped.append(clock[0]))
    with Reruns(Measured(of="time", steps=10, seconds=5.0), kind="prove", runs_dir=None) as reruns:
        reruns.train(SPEC, Surroundings(), "as it is")
    assert stopped == [6.0], "five seconds after it had taken a step"
    made.ended("stopped")


@pytest.mark.parametrize("kept", [False, True])
def test_an_interrupt_names_no_directory_that_goes(by_hand: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: bool) -> None:
    def wait_for(*_: object, **__: object) -> Run:
        error = KeyboardInterrupt()
        error.add_note("what it measured: …")
        raise error

    run = Run.load(by_hand(spec=SPEC.to_json()).path)
    monkeypatch.setattr(NewRun, "start", lambda *_, **__: run)
    monkeypatch.setattr("workbench.diagnosis.rerun.wait_for", wait_for)
    with (
        Reruns(Measured(of="time", steps=10), kind="prove", runs_dir=tmp_path / "kept" if kept else None) as reruns,
        pytest.raises(KeyboardInterrupt) as stopped,
    ):
        reruns.train(SPEC, Surroundings(), "as it is")
    assert stopped.value.__notes__ == ["what it measured: …"] * kept


SCRIPT = """
import os, sys, time, torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, get_worker_info

class Slow(Dataset):
    def __len__(self):
        return 1600

    def __getitem__(self, index):
        time.sleep(0.002)
        for folder in sys.argv[1:]:
            with open(folder + "/made" + os.environ["RANK"], "a") as file:
                print(os.getpid(), getattr(get_worker_info(), "num_workers", 0), file=file)
        return torch.ones(4)

distributed.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in DataLoader(Slow(), batch_size=8):
    time.sleep(0.015)
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_real_script_is_proved_unedited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    result = why_not_linear(tmp_path / "train.py", nproc_per_node=2, budget_s=100, runs_dir=tmp_path / "runs")
    lines = SCRIPT.splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "= DistributedDataParallel" in text)
    assert result.evidence.places["ddp"] == f"train.py:{line}"
    with pytest.raises(ValueError, match=r"It is made at train.py:\d+"):
        result.prove({"accumulation": 4})
    measure, launches = Reruns.measure, list[str]()

    def some(reruns: Reruns, arm: Arm, name: str) -> tuple[float, Run]:
        launches.append(name)
        if len(launches) > 4:  # two pairs, however long they take
            raise KeyboardInterrupt
        return measure(reruns, arm, name)

    monkeypatch.setattr(Reruns, "measure", some)
    proof = result.prove({"num_workers": 1}, budget_s=600)
    assert "2 pairs of alternating launches" in str(proof.notes)
    assert proof.measured.mid > 1.3, "the samples are made while the step sleeps"
    assert (tmp_path / "train.py").read_text() == SCRIPT


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_workers_of_a_diagnosed_script_are_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the changed launches each rank's samples come from that many processes, and from its own in the others."""
    (tmp_path / "train.py").write_text(SCRIPT)
    found = wb.diagnose(str(tmp_path / "train.py"), args=["{out}"], nproc_per_node=2, budget_s=60, runs_dir=tmp_path / "runs")
    assert found.verdict == "input-bound"
    best = found.remedy()
    assert best.change["num_workers"] >= 1
    measure, launches = Reruns.measure, list[str]()

    def two_pairs(reruns: Reruns, arm: Arm, name: str) -> tuple[float, Run]:
        if len(launches) == 4:
            raise KeyboardInterrupt
        seconds, run = measure(reruns, arm, name)
        launches.append(name)
        wanted = best.change["num_workers"] if name == best.name else 0
        for rank in range(2):  # it was ended, perhaps in a line
            made = [line.split() for line in (run.path / f"out/made{rank}").read_text().splitlines()[:-1]]
            assert {workers for _, workers in made} == {str(wanted)}
            assert len({process for process, _ in made}) == max(1, wanted)
        return seconds, run

    monkeypatch.setattr(Reruns, "measure", two_pairs)
    proof = found.prove(budget_s=600)
    assert launches == ["as it is", best.name, best.name, "as it is"]
    assert proof.measured.mid > 1.15, "the samples are made while the step sleeps"
    assert proof.remedy == best
    assert (tmp_path / "train.py").read_text() == SCRIPT
