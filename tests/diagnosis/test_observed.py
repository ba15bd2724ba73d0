"""Diagnosis from observation: what clocks can tell, what they cannot, and that the difference is said."""

import dataclasses
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.conftest import HandMade
from workbench.core import run_directory
from workbench.core.system_load import Noise
from workbench.core.vocabulary import PHASES
from workbench.diagnosis.analysis import diagnosis, script_remedies
from workbench.diagnosis.analysis.advice import EXPERIMENT
from workbench.diagnosis.analysis.diagnosis import Diagnosis
from workbench.diagnosis.analysis.observed import observe
from workbench.diagnosis.api import _from_run
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec
from workbench.timeline.timeline import Timeline

Make = Callable[..., HandMade]


def write(path: Path, rank: int, steps: list[dict[str, float]]) -> None:
    rows = [{"rank": rank, "clock": "host"}, *({"step": i, "samples": 8, **step} for i, step in enumerate(steps))]
    writer = run_directory.LineWriter(path / run_directory.rank_file(rank))
    writer.write(rows)
    writer.close()


def step(**phases: float) -> dict[str, float]:
    usual = dict(zip(PHASES, (0.001, 0.0, 0.006, 0.012, 0.001, 0.0005), strict=True))
    return {**usual, **phases}


def judged(by_hand: Make, *ranks: list[dict[str, float]]) -> Diagnosis:
    made = by_hand()
    for rank, steps in enumerate(ranks):
        write(made.path, rank, steps)
    return Diagnosis.of(observe(Run.load(made.ended("finished").path)))


@pytest.mark.parametrize("cores", [2.0, 4.0, 16.0])
def test_a_healthy_run(by_hand: Make, cores: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "usable_cores", lambda: cores)
    d = judged(by_hand, [step()] * 60)
    assert d.verdict == "compute-bound"
    assert not d.remedies
    assert d.parts.step == pytest.approx(0.0205)
    assert d.caption.startswith("• observed in 50 steps; nothing was tried: diagnose(step, loader)")
    spec = dataclasses.replace(d, spec=RunSpec(task="text-gpt"))
    threads = f"threads={2 if cores == 2 else 4}"
    assert (
        f"1 thread per operator, which the workbench sets (a process that you start yourself uses all cores): {threads} changes it"
        in spec.caption
    )
    script = dataclasses.replace(d, spec=ScriptSpec(script="train.py"))
    assert "• started with 1 thread per operator" in script.caption
    assert f"all cores): `workbench diagnose train.py --set {threads}` changes it" in script.caption
    assert "thread" not in d.caption, "a timeline does not know them"
    assert "sources" not in str(d)  # there is one
    assert "agree within" not in d.caption
    assert "only an experiment could settle" in d.caption
    assert d.parts.samples == 8


def test_waiting_for_data(by_hand: Make) -> None:
    d = judged(by_hand, [step(data_wait=0.03)] * 60)
    assert (d.verdict, d.cause) == ("input-bound", "loader")
    assert "at best" in d.why
    best = d.remedies[0]
    assert best.ceiling
    assert not best.provable
    assert best.speedup == pytest.approx(0.0495 / 0.0195, rel=0.01)


def test_lines_of_a_watched_script_are_in_the_verdict(by_hand: Make) -> None:
    places = {"loop": "train.py:31", "step": "train.py:35 step", "dataset": "train.py:12 Pictures.__getitem__", "other": "x"}

    def why(places: object, **phases: float) -> str:
        made = by_hand()
        writer = run_directory.LineWriter(made.path / run_directory.rank_file(0))
        rows = [{"rank": 0, "clock": "host"}, {"places": places}, *({"step": i, "samples": 8, **step(**phases)} for i in range(60))]
        writer.write(rows)
        writer.close()
        return Diagnosis.of(observe(Run.load(made.ended("finished").path))).why

    waiting = why(places, data_wait=0.03)
    assert waiting.endswith(" The loop over the loader is at train.py:31, its samples come from train.py:12 (Pictures.__getitem__).")
    assert why(places).endswith(" The loop over the loader is at train.py:31, its optimizer step is at train.py:35 (step).")
    assert why({"step": "train.py:35"}, data_wait=0.03).endswith(" The optimizer step is at train.py:35.")
    hugging = why({"framework": "transformers", **places}, data_wait=0.03)
    assert hugging.endswith(" which train.py:35 (step) starts, its samples come from train.py:12 (Pictures.__getitem__).")
    assert why({"framework": "transformers", **places}).endswith(" which train.py:35 (step) starts.")
    assert "is at" not in why({"loop": 7, "dataset": ["x"]}) + why("x")


def test_a_queue_that_hid_the_loader_at_first(by_hand: Make) -> None:
    d = judged(by_hand, [step()] * 40 + [step(data_wait=0.015)] * 40)
    assert d.verdict == "input-bound"
    assert d.judgement.shares["data_wait"].mid == pytest.approx(0.015 / 0.0345, rel=0.05)
    assert "only the last steps count" in d.caption


def test_a_slow_rank_by_input(by_hand: Make) -> None:
    d = judged(by_hand, [step(backward=0.032)] * 60, [step(data_wait=0.021)] * 60)
    assert (d.verdict, d.cause) == ("straggler", "slow rank 1: input")
    assert d.judgement.shares["straggler"].mid == pytest.approx(0.020 / 0.0405, rel=0.02)
    assert d.judgement.shares["data_wait"].mid < 0.05
    assert d.parts.step == pytest.approx(d.evidence.step)


def test_a_slow_rank_by_compute(by_hand: Make) -> None:
    d = judged(by_hand, [step(backward=0.024)] * 60, [step(forward=0.018)] * 60)
    assert (d.verdict, d.cause) == ("straggler", "slow rank 1: compute")


def test_a_rank_that_pauses(by_hand: Make) -> None:
    pauses = [step(forward=0.2) if i % 12 == 11 else step() for i in range(96)]
    waits = [step(backward=0.206) if i % 12 == 11 else step() for i in range(96)]
    d = judged(by_hand, waits, pauses)
    assert (d.verdict, d.cause) == ("straggler", "slow rank 1: pauses")


def test_stalls(by_hand: Make) -> None:
    d = judged(by_hand, [step(other=0.2) if i % 20 == 19 else step() for i in range(120)])
    assert (d.verdict, d.cause) == ("stalled", "pause")
    assert "every 20 steps" in d.why
    assert d.parts.step == pytest.approx(d.evidence.step)


CONTENDED = {
    31: step(data_wait=0.0013, forward=0.022, backward=0.14, optimizer=0.0022),
    32: step(data_wait=0.0016, forward=0.18, backward=0.42, optimizer=0.036),
    33: step(data_wait=0.0034, forward=0.066, backward=0.19, optimizer=0.17),
}
"""Three steps in a row, in which every part took longer: as in a run beside other processes, scaled to `step`."""


def test_steps_that_are_longer_in_all_their_parts_are_no_pauses(by_hand: Make) -> None:
    """They are those of other processes. A run beside some was called stalled, to be mended by moving the pauses out of its loop."""
    d = judged(by_hand, [CONTENDED.get(i, step()) for i in range(60)])
    assert (d.verdict, d.cause) == ("compute-bound", "compute")
    assert not d.remedies
    note = "3 of 50 steps took 390 ms longer, in several phases at once: other processes had the cores, which is no pause of the loop"
    assert d.doubt.startswith(f"The machine was busy: {note}. Close decisions")
    assert str(d).count(note) == 1
    one_phase = [step(forward=0.4) if i in CONTENDED else step() for i in range(60)]
    d = judged(by_hand, one_phase)
    assert (d.verdict, d.cause) == ("stalled", "pause")
    assert "stops 3 times in 50 steps" in d.why
    assert not d.doubt


def test_the_load_before_a_run_puts_its_diagnosis_in_doubt(by_hand: Make) -> None:
    made = by_hand()
    write(made.path, 0, [step()] * 60)
    calm = Run.load(made.ended("finished").path)
    assert not Diagnosis.of(observe(calm)).doubt
    info = run_directory.read_json(made.path / run_directory.RUN_JSON)
    run_directory.write_json(made.path / run_directory.RUN_JSON, {**info, "machine": {"load": 4.3, "cores": 2}})
    d = wb.diagnose(made.path)
    assert d.doubt.startswith("The machine was busy in the minute before it began (load 4.3, 2 cores): its times may vary. Close decisions")
    assert "Doubt: " in d.summary
    assert str(d).lower().count("machine was busy") == 1
    beside = Diagnosis.of(dataclasses.replace(d.evidence, noise=Noise(cores=2.0, foreign=1.5)))
    assert "other processes took 1.5 of 2 cores" in beside.doubt
    assert str(beside).lower().count("machine was busy") == 1
    several = Diagnosis.of(dataclasses.replace(d.evidence, threads=2))
    assert "Each operator runs in 2 threads, which share the cores with other processes: small operators" in several.next
    assert "several" not in several.next


def test_what_was_only_observed_never_says_that_nothing_would_help(by_hand: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch of a script with one thread was four times as fast as the script alone, with one thread per core."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("workbench.core.system_load.usable_cores", lambda: 2.0)
    plain = judged(by_hand, [step()] * 60)
    assert plain.next.startswith("It computes, and nothing was tried to make it faster: wb.diagnose(step, loader) experiments")
    alone = dataclasses.replace(plain.evidence, world_size=1)
    script = dataclasses.replace(plain, evidence=alone, spec=ScriptSpec(script="/a/my train.py"))
    assert "Nothing we know of" not in str(script) + str(plain)
    assert "Without the workbench, your script uses 2 threads per operator, unless it sets them; here it ran with 1 thread." in script.next
    assert "`workbench diagnose '/a/my train.py' --set threads=2` shows its step with 2" in script.next
    assert "torch.set_num_threads(1)" not in script.next
    busy = dataclasses.replace(script, evidence=dataclasses.replace(script.evidence, noise=Noise(cores=2.0, foreign=1.5)))
    assert "Beside other processes fewer are often faster: torch.set_num_threads(1) keeps them." in busy.next
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "Without the workbench" not in script.next
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert "Without the workbench" not in dataclasses.replace(script, evidence=dataclasses.replace(script.evidence, threads=2)).next
    task = dataclasses.replace(plain, spec=RunSpec(task="text-gpt"))
    assert task.next.endswith("wb.diagnose(run.spec) experiments.")
    trainer = dataclasses.replace(plain, evidence=dataclasses.replace(plain.evidence, places={"framework": "transformers"}))
    assert trainer.next.endswith("How to give it the step and loader of a Trainer: docs, how-to/frameworks.")


@pytest.mark.parametrize(("cores", "threads", "workers"), [(2.0, 1, 1), (1.0, 1, 1), (6.0, 2, 4), (128.0, 1, 8)])
def test_the_setting_of_a_trainer_has_a_number_that_the_cores_allow(
    by_hand: Make, monkeypatch: pytest.MonkeyPatch, cores: float, threads: int, workers: int
) -> None:
    monkeypatch.setattr(script_remedies, "usable_cores", lambda: cores)
    waiting = judged(by_hand, [step(data_wait=0.03)] * 60).evidence
    waiting = dataclasses.replace(waiting, places={"framework": "transformers"}, threads=threads, world_size=1)
    what = Diagnosis.of(waiting).remedies[0].what
    assert f" With Hugging Face's Trainer: TrainingArguments(dataloader_num_workers={workers}) to begin with. " in what
    assert what.endswith(f"How to give wb.diagnose its step and loader: docs, {script_remedies.TRAINER_PAGE}.")
    assert (Path(__file__).parents[2] / f"docs/pages/{script_remedies.TRAINER_PAGE}.md").is_file()
    named = re.search(r"docs, (\S+)\.$", EXPERIMENT)
    assert named
    page = (Path(__file__).parents[2] / f"docs/pages/{named[1]}.md").read_text()
    assert "## A script whose loop is in main()" in page
    allowed = int(cores) - threads or 1
    waiting.places["workers"] = str(workers)  # type: ignore[index]
    more = f"dataloader_num_workers={2 * workers}) to begin with" if allowed > workers else f"num_workers is {workers} already"
    assert more in Diagnosis.of(waiting).remedies[0].what
    waiting.places["workers"] = str(allowed)  # type: ignore[index]
    assert f"num_workers is {allowed} already, and the cores allow no more: make each batch" in Diagnosis.of(waiting).remedies[0].what


def test_stalls_have_the_name_and_the_settings_of_what_pauses(by_hand: Make) -> None:
    """By what a watched script noted: before the optimizer step of a long step, or after it; not where it is too short to explain them."""

    def stalled(seconds: float, before: int, **places: str) -> Diagnosis:
        made, line = by_hand(), "train.py:43 main"
        pauses = [["evaluation", seconds, 20 * i + 20 - before, line] for i in range(6)]
        pauses += [["checkpoint", 0.02, 60, "train.py:50 keep"], ["rest", 0.1, 1, ""], ["evaluation", -1.0, 1, ""], ["evaluation"]]
        rows = [{"step": i, "samples": 8, **(step(other=0.2) if i % 20 == 19 else step())} for i in range(120)]
        writer = run_directory.LineWriter(made.path / run_directory.rank_file(0))
        writer.write(
            [
                {"rank": 0, "clock": "host"},
                {"places": {"step": line, "loop": line, **places}},
                *rows,
                *({"pause": pause} for pause in pauses),
            ]
        )
        writer.close()
        run = Run.load(made.ended("finished").path)
        (timeline,) = run.timelines
        assert [pause.kind for pause in timeline.pauses] == ["evaluation"] * 6 + ["checkpoint"]
        assert Timeline.from_json(timeline.to_json()).pauses == timeline.pauses
        return Diagnosis.of(observe(run))

    own = stalled(0.19, before=1)
    assert (own.verdict, own.cause, stalled(0.19, before=0).cause) == ("stalled", "evaluation", "evaluation")
    assert "every 20 steps (6 times in 110) for 200 ms in train.py:43 main" in own.why
    assert own.remedies[0].what == "Evaluate less often, on fewer samples, or in a process of its own (train.py:43 main)."
    assert (stalled(0.05, before=0).cause, stalled(0.05, before=0).evidence.stalls.where) == ("pause", None)
    hugging_face = stalled(0.19, before=0, framework="transformers")
    assert hugging_face.why.endswith(" The training loop is that of Hugging Face's Trainer, which train.py:43 (main) starts.")
    assert hugging_face.remedies[0].what.endswith(
        " With Hugging Face's Trainer: TrainingArguments(eval_steps=…, per_device_eval_batch_size=…)."
    )
    assert stalled(0.05, before=0, framework="lightning").remedies[0].what.endswith("ModelCheckpoint(every_n_train_steps=…).")


def saving(every: int, *, ranks: int = 1, waits: str = "backward", seconds: float = 0.02) -> list[list[dict[str, Any]]]:
    """The rows of ranks of which the first saves a checkpoint every so many steps, and the others wait for it in a phase."""
    saves = [i % every == every - 1 for i in range(120)]
    first = [{"step": i, "samples": 8, **step(other=0.0005 + seconds * saved)} for i, saved in enumerate(saves)]
    noted = [{"pause": ["checkpoint", seconds, i + 1, "train.py:41 main"]} for i, saved in enumerate(saves) if saved]
    late = [False, *saves] if waits == "backward" else saves
    more = [{"step": i, "samples": 8, **step(**{waits: step()[waits] + seconds * late[i]})} for i in range(120)]
    return [[*first, *noted], *[more] * (ranks - 1)]


def diagnosed(by_hand: Make, rows: list[list[dict[str, Any]]]) -> Diagnosis:
    made = by_hand()
    for rank, lines in enumerate(rows):
        writer = run_directory.LineWriter(made.path / run_directory.rank_file(rank))
        writer.write([{"rank": rank, "clock": "host"}, *lines])
        writer.close()
    return Diagnosis.of(observe(Run.load(made.ended("finished").path)))


@pytest.mark.parametrize(("every", "often"), [(1, "in each step"), (2, "every 2 steps"), (5, "every 5 steps"), (10, "every 10 steps")])
def test_checkpoints_are_named_however_often_they_are_saved(by_hand: Make, every: int, often: str) -> None:
    """Every fifth step was called host-bound: nothing distinguishes such a step from one of two lengths, but that the saving was timed."""
    d = diagnosed(by_hand, saving(every))
    assert (d.verdict, d.cause) == ("stalled", "checkpoint")
    assert f"A checkpoint is saved {often} ({110 // every} times in 110): 20.0 ms each time in train.py:41 main." in d.why
    assert d.parts.seconds("stalls") == pytest.approx(0.02 / every)
    assert d.parts.seconds("host") == pytest.approx(0.0005, rel=0.01)
    assert d.parts.seconds("compute") == pytest.approx(0.018)
    best = d.remedies[0]
    assert best.what.startswith("Write checkpoints in the background")
    assert "(train.py:41 main)" in best.what
    assert best.speedup == pytest.approx(1 + 0.02 / every / 0.0205, rel=0.01)


def test_checkpoints_that_are_seldom_saved_are_not_blamed(by_hand: Make) -> None:
    d = diagnosed(by_hand, saving(20))
    assert (d.verdict, d.cause) == ("compute-bound", "compute")
    assert d.parts.seconds("stalls") == pytest.approx(0.02 * 6 / 110)


@pytest.mark.parametrize("waits", ["backward", "other"])
@pytest.mark.parametrize(("every", "ranks"), [(1, 2), (5, 2), (8, 4)])
def test_ranks_that_wait_for_the_checkpoints_of_another(by_hand: Make, every: int, ranks: int, waits: str) -> None:
    """In the next backward, or at a barrier. It was inconclusive, as the reduction of gradients lies in backward, too."""
    d = diagnosed(by_hand, saving(every, ranks=ranks, waits=waits))
    assert (d.verdict, d.cause) == ("stalled", "checkpoint")
    assert "Rank 0 saves a checkpoint" in d.why
    assert d.why.rstrip(".").endswith("and the other rank waits for it" if ranks == 2 else "and the other ranks wait for it")
    assert d.parts.seconds("stalls") == pytest.approx(0.02 / every, rel=0.05)
    assert d.parts.seconds("host") == pytest.approx(0.0005, rel=0.1)
    assert d.parts.seconds("compute") == pytest.approx(0.018, rel=0.05)
    assert "(train.py:41 main)" in d.remedies[0].what


def test_ranks_that_save_checkpoints_at_the_same_time(by_hand: Make) -> None:
    rows = saving(5) * 2
    d = diagnosed(by_hand, rows)
    assert (d.verdict, d.cause) == ("stalled", "checkpoint")
    assert "A checkpoint is saved every 5 steps" in d.why
    assert d.parts.seconds("stalls") == pytest.approx(0.02 / 5)


def test_stalls_are_deducted_from_the_phase_in_which_they_lie(by_hand: Make) -> None:
    """Three long steps of 48, none of them in forward or backward: they are no less to compute, and no work of the host in each step."""
    made, extra = by_hand(), {11: 0.74, 31: 0.53, 51: 0.64}
    steps = [{"data_wait": 0.0, "forward": 0.035, "backward": 0.0713, "other": 0.0037 + extra.get(i, 0.0)} for i in range(60)]
    writer = run_directory.LineWriter(made.path / run_directory.rank_file(0))
    pauses = ({"pause": ["evaluation", seconds, i + 1, "train.py:43 main"]} for i, seconds in extra.items())
    writer.write([{"rank": 0, "clock": "host"}, *({"step": i, "samples": 8, **step(**row)} for i, row in enumerate(steps)), *pauses])
    writer.close()
    d = Diagnosis.of(observe(Run.load(made.ended("finished").path)))
    count, parts = d.evidence.stalls.steps, d.parts
    assert (d.verdict, d.cause) == ("stalled", "evaluation")
    assert parts.seconds("compute") == pytest.approx(0.1063)
    assert parts.seconds("host") == pytest.approx(0.0037, rel=0.01)
    assert parts.seconds("stalls") == pytest.approx(sum(seconds for i, seconds in extra.items() if i >= 60 - count) / count)
    assert parts.step == pytest.approx(d.evidence.step)
    assert "outside all phases" not in str(d)


def test_the_other_phases(by_hand: Make) -> None:
    assert judged(by_hand, [step(h2d=0.02)] * 60).verdict == "transfer-bound"
    assert judged(by_hand, [step(optimizer=0.02)] * 60).verdict == "optimizer-bound"
    assert judged(by_hand, [step(other=0.02)] * 60).verdict == "host-bound"


def test_a_timeline_of_this_process(by_hand: Make) -> None:
    made = by_hand()
    write(made.path, 0, [step(data_wait=0.03)] * 60)
    run = Run.load(made.ended("finished").path)
    d = wb.diagnose(run.timelines[0])
    assert (d.verdict, d.cause) == ("input-bound", "loader")
    assert d.judgement.shares["data_wait"] == wb.diagnose(run).judgement.shares["data_wait"]
    with pytest.raises(ValueError, match="the timeline has 0 measured steps, and at least 8 are needed to judge it: take more steps"):
        wb.diagnose(dataclasses.replace(run.timelines[0], steps=()))
    with pytest.raises(ValueError, match="was given a loader, which only goes with a step"):
        wb.diagnose(run.timelines[0], [1])


def test_reductions_cannot_be_seen(by_hand: Make) -> None:
    d = judged(by_hand, [step(backward=0.05)] * 60, [step(backward=0.05)] * 60)
    assert (d.verdict, d.cause) == ("inconclusive", "communication hides inside backward")
    assert "wb.diagnose(spec) tries it" in d.why
    assert "what reducing the gradients costs" in d.caption
    usual = judged(by_hand, [step()] * 60, [step()] * 60)
    assert usual.verdict == "compute-bound"


def test_a_run_without_steps(by_hand: Make) -> None:
    with pytest.raises(ValueError, match=r"has 0 measured steps, and at least 8 are needed .*no more steps of an optimizer were seen"):
        observe(Run.load(by_hand().ended("finished").path))
    script = ScriptSpec(script="/a/my_task.py", watch=True).to_json()
    with pytest.raises(ValueError, match=r"no steps of an optimizer were seen\. Does it train .*my_task\.py:FUNCTION"):
        observe(Run.load(by_hand(spec=script).ended("finished").path))
    for seconds, more in ((20.0, 120), (200.0, 600)):  # a script that had 200 s was told to try 120
        with pytest.raises(ValueError, match=rf"let it run longer, diagnose\(…, budget_s={more}\) or --budget {more}$"):
            observe(Run.load(by_hand().ended("stopped", seconds=seconds).path))
    with pytest.raises(ValueError, match=r"wait for it: run\.wait\(\)"):
        observe(Run.load(by_hand().alive().steps(6).path))


def test_time_outside_the_phases_is_not_called_python_where_no_loader_was_seen(by_hand: Make) -> None:
    """The script may make its batches there."""
    d = judged(by_hand, [step(data_wait=0.0, other=0.05)] * 60)
    assert (d.verdict, d.cause) == ("inconclusive", "time outside all phases")
    assert "no DataLoader was seen, so that is making the batches, or other Python" in d.why
    assert "wb.watch(batches" in d.next
    assert "wb.diagnose(step, loader)" in d.next
    assert not d.remedies
    no_model = judged(by_hand, [step(forward=0.0, backward=0.0, other=0.05)] * 60)
    assert no_model.verdict == "inconclusive"
    assert "no forward and no backward was seen, so that is computing, or Python" in no_model.why
    seen = judged(by_hand, [step(other=0.05)] * 60)
    assert seen.verdict == "host-bound"
    assert seen.why.startswith("Without the work outside all phases the step would take")
    assert judged(by_hand, [step(data_wait=0.0)] * 60).verdict == "compute-bound"


def test_what_else_is_large_beside_time_outside_the_phases_is_said(by_hand: Make) -> None:
    d = judged(by_hand, [step(data_wait=0.0, optimizer=0.03, other=0.035)] * 60)
    assert (d.verdict, d.cause) == ("inconclusive", "time outside all phases")
    (note,) = d.judgement.notes
    assert note.startswith("also optimizer-bound (optimizer): 36 %")
    assert [remedy.name for remedy in d.remedies] == ["a cheaper optimizer"]
    assert d.remedies[0].scope == "part"
    assert d.next.startswith("Let the loop be measured, for batch in wb.watch(")
    assert [remedy["change"] for remedy in d.brief()["predicted"]] == ["a cheaper optimizer"]


def test_time_outside_the_phases_is_not_called_python_beside_a_larger_part_either(by_hand: Make) -> None:
    d = judged(by_hand, [step(data_wait=0.0, optimizer=0.036, other=0.03)] * 60)
    assert d.verdict == "optimizer-bound"
    (note,) = d.judgement.notes
    assert note.startswith("also time outside all phases, 36 % (")
    assert note.endswith(": no DataLoader was seen, so that is making the batches, or other Python")
    assert [remedy.name for remedy in d.remedies] == ["a cheaper optimizer"]
    stalls = [step(data_wait=0.0, other=0.006, forward=0.4 if i % 20 == 19 else 0.006) for i in range(120)]
    d = judged(by_hand, stalls)
    assert d.verdict == "stalled"
    assert "python" not in str(d.judgement.notes)
    d = judged(by_hand, [step(optimizer=0.036, other=0.03)] * 60)
    assert d.judgement.notes[0].startswith("also host-bound (python): 35 %")
    assert "less work between the phases" in [remedy.name for remedy in d.remedies]


def test_what_to_run_next_exists(by_hand: Make) -> None:
    """A script that was only observed cannot be proved: a trace of it tells more."""
    made = by_hand(spec=ScriptSpec(script="/tasks/my train.py", args=("--epochs", "1"), watch=True).to_json())
    write(made.path, 0, [step(data_wait=0.03)] * 60)
    d = _from_run(Run.load(made.ended("finished").path))
    command = d.brief()["next"]["command"]
    assert shlex.split(command) == ["workbench", "launch", "/tasks/my train.py", "--profile", "--", "--epochs", "1"]
    assert "wb.diagnose(step, loader) experiments" in d.next
    made = by_hand()
    write(made.path, 0, [step(data_wait=0.03)] * 60)
    assert _from_run(Run.load(made.ended("finished").path)).brief()["next"]["command"].startswith("workbench diagnose ")


def test_a_timeline_of_a_busy_cpu_says_to_try_one_thread_and_never_a_larger_budget(by_hand: Make) -> None:
    """A Trainer that one thread made 14 times as fast was said to need a larger budget_s, which a timeline does not have."""
    made = by_hand()
    slow = [step(forward=0.006 + 0.012 * (i % 10 == 9), other=0.004 * (i % 3)) for i in range(24)]
    write(made.path, 0, slow)
    plain = Run.load(made.ended("finished").path).timelines[0]
    crowded = Noise(cores=2.0, foreign=1.7)
    busy = wb.diagnose(dataclasses.replace(plain, threads=2, noise=crowded))
    assert "Each operator runs in 2 threads, which share the cores with other processes: small operators" in busy.next
    assert busy.next.endswith("Try torch.set_num_threads(1), or OMP_NUM_THREADS=1.")
    assert "2 threads per operator" in busy.caption
    assert str(busy).lower().count("other processes took 1.7 of 2 cores.") == 1
    assert "nothing we know of" not in busy.next.lower()
    for calm in (
        dataclasses.replace(plain, threads=1, noise=crowded),
        dataclasses.replace(plain, threads=2, noise=Noise(cores=2.0)),
        plain,
    ):
        assert "set_num_threads" not in wb.diagnose(calm).next
    waits = dataclasses.replace(plain, steps=tuple(dataclasses.replace(one, phases=(0.1, *one.phases[1:])) for one in plain.steps))
    assert "set_num_threads" not in wb.diagnose(dataclasses.replace(waits, threads=2, noise=crowded)).next
    for cause in ("noise", "too few measurements"):
        unclear = dataclasses.replace(busy, judgement=dataclasses.replace(busy.judgement, verdict="inconclusive", cause=cause))
        assert unclear.next.startswith(
            "Record more steps, while the machine is quiet, or find out by experiment: wb.diagnose(step, loader)"
        )
        assert "budget" not in unclear.next
        assert "set_num_threads(1)" in unclear.next


def test_a_timeline_keeps_its_threads_and_the_load() -> None:
    timeline = Timeline(threads=2, noise=Noise(cores=2.0, foreign=1.5))
    again = Timeline.from_json(timeline.to_json())
    assert (again.threads, again.noise) == (2, timeline.noise)
    assert "noise" not in Timeline().to_json()
