"""The throughput doctor without a browser: what its knobs predict, what its buttons run, what it says. (How it looks: tests/browser.)"""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipywidgets", reason="panels need Jupyter's packages (pip install '.[notebooks]')")

from tests.conftest import processes_with
from tests.slow_loader import SPEC, diagnosis, evidence
from workbench.core import run_directory, units
from workbench.core.display.colors import PARTS as COLORS
from workbench.core.display.table import escape
from workbench.core.statistics import Interval
from workbench.core.vocabulary import PARTS
from workbench.diagnosis import api
from workbench.diagnosis.analysis.diagnosis import Diagnosis
from workbench.diagnosis.analysis.proof import Ladder, Proof, Rung
from workbench.diagnosis.analysis.script_remedies import LaunchedScript
from workbench.diagnosis.analysis.step_model import StepModel
from workbench.diagnosis.panel import html as doctor_faces
from workbench.diagnosis.panel.doctor import ThroughputDoctor
from workbench.diagnosis.panel.knobs import what_if
from workbench.runs.failure import Failure, RunError
from workbench.runs.run import Run, on_run_started
from workbench.runs.spec import RunSpec, ScriptSpec
from workbench.runs.target import Step

Doctor = ThroughputDoctor
TASKS = Path(__file__).parents[1] / "scripts" / "slow_task.py"
PIECE = r"width:([\d.]+)%;background"


def until(holds: Callable[[], object], seconds: float = 20) -> None:
    """Wait until something holds."""
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.01)


def idle(doctor: Doctor) -> bool:
    return not any(thread.name.startswith("doctor") for thread in threading.enumerate()) and not doctor.measure.disabled


def proof_of(result: Diagnosis, mid: float = 2.2) -> Proof:
    return Proof(remedy=result.remedies[0], measured=Interval(low=mid - 0.1, mid=mid, high=mid + 0.1), baseline=640.0)


@pytest.fixture
def doctor() -> Doctor:
    return Doctor(diagnosis())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is launched: `diagnose` waits for the gate, then says what a quicker loader would give."""
    opened, asked = threading.Event(), []

    def diagnose(spec: RunSpec, **options: Any) -> Diagnosis:
        asked.append((spec, options))
        assert opened.wait(20)
        return diagnosis(spec, step=0.021) if spec.num_workers else diagnosis(spec)

    monkeypatch.setattr(api, "diagnose", diagnose)
    opened.asked = asked  # type: ignore[attr-defined]
    yield opened
    opened.set()


# --- knobs


def test_knobs_stand_where_the_spec_has_them_and_nothing_is_predicted_before_a_measurement() -> None:
    doctor = Doctor(RunSpec(task="text-gpt", micro_batch=24, num_workers=3, precision="amp_bf16", nproc_per_node=2))
    stand = [getattr(doctor, name).value for name in ("num_workers", "prefetch_factor", "micro_batch", "precision", "nproc_per_node")]
    assert stand == [3, 2, 24, "amp_bf16", 2]
    assert doctor.result is None
    doctor.num_workers.value = 4
    assert doctor.what_if is None
    assert "press Measure" in doctor.bars.value
    assert doctor.chosen == RunSpec(task="text-gpt", micro_batch=24, num_workers=4, precision="amp_bf16", nproc_per_node=2)


def test_turning_a_knob_predicts_what_the_model_says_beside_what_was_measured(doctor: Doctor) -> None:
    doctor.num_workers.value = 2
    assert doctor.result is not None
    assert doctor.what_if is not None
    assert doctor.what_if.parts == doctor.result.model.parts(num_workers=2)
    assert doctor.what_if.speedup == pytest.approx(doctor.result.model.speedup(num_workers=2))
    labels = re.findall(r'aria-label="(\w+): data_wait (\d+ %|[\d.]+ %)', doctor.bars.value)
    assert [label for label, _ in labels] == ["measured", "predicted"]
    assert labels[0][1] == "60 %"
    assert "predicted with num_workers=2" in doctor.bars.value
    doctor.num_workers.value = 0
    assert doctor.what_if is None
    assert "predicted" not in doctor.bars.value


def test_moving_a_slider_asks_the_model_once_and_starts_nothing(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    parts = StepModel.parts

    def counted(model: StepModel, **changes: Any) -> Any:
        asked.append(changes)
        return parts(model, **changes)

    def forbidden(*given: Any, **options: Any) -> None:
        raise AssertionError(f"a slider started something: {given}")

    monkeypatch.setattr(StepModel, "parts", counted)
    monkeypatch.setattr(StepModel, "of", forbidden)
    monkeypatch.setattr(threading.Thread, "start", forbidden)
    monkeypatch.setattr(subprocess.Popen, "__init__", forbidden)
    for workers in (1, 2, 3):
        doctor.num_workers.value = workers
    doctor.micro_batch.value = 64
    doctor.precision.value = "amp_bf16"
    assert [len(changes) for changes in asked] == [1, 1, 1, 2, 3]
    assert asked[-1] == {"num_workers": 3, "micro_batch": 64, "precision": "amp_bf16"}


def test_a_larger_batch_is_drawn_per_as_many_samples_as_before() -> None:
    result = diagnosis()
    then = what_if(result.model, result.parts, {"micro_batch": 64}, 2.0)
    assert then.parts is not None
    assert sum(then.pieces(result.parts).values()) == pytest.approx(result.parts.step / then.speedup)
    assert then.speedup == pytest.approx(2 * result.parts.step / then.parts.step)


def test_prefetching_needs_workers(doctor: Doctor) -> None:
    assert doctor.prefetch_factor.disabled
    doctor.num_workers.value = 2
    assert not doctor.prefetch_factor.disabled
    doctor.prefetch_factor.value = 4
    assert doctor.knobs.changes == {"num_workers": 2, "prefetch_factor": 4}
    doctor.num_workers.value = 0
    assert doctor.prefetch_factor.disabled
    assert doctor.knobs.changes == {}
    assert doctor.chosen == SPEC


def test_no_workers_means_none_that_persist() -> None:
    doctor = Doctor(RunSpec(task="text-gpt", num_workers=2, prefetch_factor=4, persistent_workers=True))
    doctor.num_workers.value = 0
    assert doctor.chosen == RunSpec(task="text-gpt")


def test_a_knob_that_nothing_is_known_of_cannot_be_turned() -> None:
    found = evidence()
    assert found.loading is not None
    doctor = Doctor(Diagnosis.of(replace(found, loading=replace(found.loading, batch_size=None))))
    assert doctor.micro_batch.disabled
    assert not doctor.num_workers.disabled
    assert doctor.knobs.changes == {}


def test_what_the_model_cannot_predict_is_said(doctor: Doctor) -> None:
    doctor.precision.value = "amp_fp16"
    assert "precision=amp_fp16 was not tried: its effect is not known and left out" in doctor.bars.value


# --- buttons


def test_measure_runs_the_spec_that_the_knobs_make_and_sets_the_prediction_beside_it(gate: threading.Event) -> None:
    doctor = Doctor(diagnosis(), budget_s=7, runs_dir="somewhere")
    doctor.num_workers.value = 2
    predicted = doctor.what_if
    assert predicted is not None
    doctor.measure.click()
    assert doctor.measure.disabled
    assert doctor.num_workers.disabled
    until(lambda: "measuring" in doctor.status.value)
    gate.set()
    until(lambda: idle(doctor))
    assert gate.asked == [(SPEC.replace(num_workers=2), {"budget_s": 7, "runs_dir": "somewhere"})]  # type: ignore[attr-defined]
    assert doctor.status.value == ""
    assert doctor.spec == SPEC.replace(num_workers=2)
    assert doctor.result is not None
    assert doctor.result.evidence.step == 0.021
    assert doctor.knobs.changes == {}
    assert [match[0] for match in re.finditer(r"predicted(?=: data)|measured(?=: data)", doctor.bars.value)] == ["predicted", "measured"]
    error = predicted.parts.rate / doctor.result.parts.rate - 1  # type: ignore[union-attr]
    assert f"{abs(100 * error):.1f} % too {'fast' if error > 0 else 'slow'}" in doctor.bars.value
    assert "num_workers=2" in doctor.head.value
    doctor.num_workers.value = 3
    assert "too " not in doctor.bars.value


def test_one_thing_runs_at_a_time(gate: threading.Event) -> None:
    doctor = Doctor(SPEC)
    doctor.measure.click()
    doctor.measure.click()
    doctor.climb.click()
    gate.set()
    until(lambda: idle(doctor))
    assert len(gate.asked) == 1  # type: ignore[attr-defined]


def test_a_measurement_ends_in_verdict_why_next_and_remedies(gate: threading.Event) -> None:
    gate.set()
    doctor = Doctor(SPEC)
    doctor.measure.click()
    until(lambda: idle(doctor))
    assert "input-bound" in doctor.verdict.value
    assert doctor.result is not None
    assert f"<strong>Why</strong> {escape(doctor.result.why)}" in doctor.verdict.value
    assert f"<strong>Next</strong> {escape(doctor.result.next)}" in doctor.verdict.value
    assert len(doctor.remedies.children) == len(doctor.result.remedies)
    assert set(doctor.proves) == {one.name for one in doctor.result.remedies if one.provable}
    for one, row in zip(doctor.result.remedies, doctor.remedies.children, strict=True):
        assert f"<strong>{escape(one.name)}</strong>" in row.children[0].value
        assert len(row.children) == 1 + one.provable  # what is not ours to turn has no button
    assert not all(one.provable for one in doctor.result.remedies)


def test_prove_shows_the_measured_gain_beside_the_predicted_one(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(result: Diagnosis, remedy: Any, *, budget_s: float) -> Proof:
        assert remedy is result.remedies[0]
        return proof_of(result)

    monkeypatch.setattr(api, "prove", prove)
    words = doctor.remedies.children[0].children[0]
    best = diagnosis().remedies[0]
    assert f"predicted: {best.gain}" in words.value
    assert "measured" not in words.value
    doctor.proves[best.name].click()
    until(lambda: idle(doctor))
    assert "measured: 2.20× (2.10× … 2.30×)" in words.value
    assert f"it helps; the prediction was {units.percent(best.speedup / 2.2 - 1)} too high" in words.value
    widths = [float(width) for width in re.findall(PIECE, words.value)]
    assert widths == pytest.approx([part / best.speedup for part in (100, 100 * best.speedup - 100, 100, 120)], abs=0.5)


def test_climb_draws_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = proof_of(diagnosis())
    climbed = Ladder(
        start=640.0,
        rungs=(
            Rung(verdict="input-bound", cause="dataset code", proof=proof, samples_per_sec=1408.0),
            Rung(
                verdict="compute-bound",
                cause="compute",
                proof=replace(proof, measured=Interval(low=0.9, mid=0.95, high=1.0)),
                samples_per_sec=1408.0,
            ),
        ),
        changes={"num_workers": 2},
        stopped="nothing is left",
    )
    monkeypatch.setattr(api, "climb", lambda spec, **options: climbed)
    doctor = Doctor(SPEC)
    doctor.climb.click()
    until(lambda: doctor.ladder is not None and idle(doctor))
    html = doctor.ladder_view.value
    assert html.count('class="wb-row"') == 3
    assert f"1,408 samples/s · 2.20× measured, {units.times(proof.remedy.speedup)} predicted" in html
    assert "dropped · 0.950× measured" in html
    assert "2.20× in all with num_workers=2; now compute-bound (compute); nothing is left" in html


def test_a_remedy_that_failed_in_its_proof_is_a_rung_without_gain() -> None:
    nothing = Interval(low=float("nan"), mid=float("nan"), high=float("nan"))
    proof = replace(proof_of(diagnosis()), measured=nothing)
    html = doctor_faces.ladder(
        Ladder(start=640.0, rungs=(Rung(verdict="input-bound", cause="dataset code", proof=proof, samples_per_sec=640.0),))
    )
    assert "dropped · failed, " in html
    assert "nan" not in html


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("the <loader> is empty"), "<strong>ValueError: </strong>the &lt;loader&gt; is empty"),
        (
            RunError(Failure(rank=1, kind="exception", message="KeyError: 'x'", traceback="Traceback\n  here", hint="Look.")),
            "<strong>rank 1 failed first: </strong>KeyError: &#x27;x&#x27;",
        ),
    ],
)
def test_what_goes_wrong_is_shown_and_the_buttons_come_back(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def diagnose(spec: RunSpec, **options: Any) -> Diagnosis:
        raise error

    monkeypatch.setattr(api, "diagnose", diagnose)
    doctor = Doctor(SPEC)
    doctor.measure.click()
    until(lambda: idle(doctor))
    assert said in doctor.problem.value
    assert not doctor.num_workers.disabled
    monkeypatch.setattr(api, "diagnose", lambda spec, **options: diagnosis(spec))
    doctor.measure.click()
    until(lambda: idle(doctor) and doctor.result)
    assert doctor.problem.value == ""


def test_a_step_of_this_process_is_measured_again_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(batch: Any) -> None: ...

    here = Step(step=step, loader=[1, 2])
    asked = []
    monkeypatch.setattr(api, "diagnose", lambda *given, **options: asked.append((given, options)) or diagnosis(None))
    doctor = Doctor(Diagnosis.of(evidence(), subject=here))
    assert doctor.climb.disabled
    doctor.measure.click()
    until(lambda: bool(asked) and not doctor.status.value)
    assert asked[0][0] == (step, [1, 2])


def test_a_stored_diagnosis_predicts_and_has_nothing_to_measure() -> None:
    doctor = Doctor(Diagnosis.from_json(diagnosis(None).to_json()))
    assert doctor.measure.disabled
    assert doctor.climb.disabled
    doctor.num_workers.value = 2
    assert "predicted with num_workers=2" in doctor.bars.value


def test_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ThroughputDoctor\(str\): a RunSpec or a Diagnosis is needed; try"):
        Doctor("clipart-resnet")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="budget_s=0: seconds above 0"):
        Doctor(SPEC, budget_s=0)


# --- stop


def shown(doctor: Doctor) -> bool:
    return doctor.stop.layout.display != "none"


def only_run(runs_dir: Path) -> Run:
    (folder,) = runs_dir.iterdir()
    return Run.load(folder)


def test_stop_ends_the_processes_of_a_measurement(tmp_path: Path) -> None:
    spec = RunSpec(task=f"{TASKS}:slow_loader", micro_batch=4, num_workers=1, device="cpu")
    doctor = Doctor(spec, budget_s=60, runs_dir=tmp_path)
    assert not shown(doctor)
    doctor.measure.click()
    assert shown(doctor)
    assert not doctor.stop.disabled
    until(lambda: list(tmp_path.glob("*/logs/*/attempt_0/0/stdout.log")))
    run = only_run(tmp_path)
    assert processes_with(run_directory.ENV_RUN_ID, run.id)
    doctor.stop.click()
    assert (doctor.stop.disabled, doctor.stop.description) == (True, "Stopping")
    until(lambda: idle(doctor), 40)
    assert run.state == "stopped"
    until(lambda: not processes_with(run_directory.ENV_RUN_ID, run.id))
    assert "stopped while measuring" in doctor.status.value
    assert doctor.problem.value == ""
    assert doctor.result is None
    assert not shown(doctor)
    assert not doctor.num_workers.disabled


def test_stop_before_anything_is_launched_ends_what_is_launched_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diagnose, asked, opened = api.diagnose, threading.Event(), threading.Event()

    def later(spec: RunSpec, **options: Any) -> Diagnosis:
        asked.set()
        assert opened.wait(20)
        return diagnose(spec, **options)

    monkeypatch.setattr(api, "diagnose", later)
    doctor = Doctor(RunSpec(task=f"{TASKS}:slow_loader", device="cpu"), runs_dir=tmp_path)
    doctor.climb.click()
    assert asked.wait(20)
    doctor.stop.click()
    opened.set()
    until(lambda: idle(doctor), 40)
    run = only_run(tmp_path)
    assert run.state == "stopped"
    until(lambda: not processes_with(run_directory.ENV_RUN_ID, run.id))  # the guard itself ends a moment after it has said so
    assert "stopped while climbing" in doctor.status.value
    assert doctor.ladder is None


def test_a_climb_whose_last_rung_was_stopped_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, opened = threading.Event(), threading.Event()

    def climb(spec: RunSpec, **options: Any) -> Ladder:
        asked.set()
        assert opened.wait(20)
        return Ladder(start=640.0, stopped="nothing is left")

    monkeypatch.setattr(api, "climb", climb)
    doctor = Doctor(SPEC)
    doctor.climb.click()
    assert asked.wait(20)
    doctor.stop.click()
    opened.set()
    until(lambda: idle(doctor))
    assert "stopped while climbing" in doctor.status.value
    assert doctor.ladder is None
    assert doctor.ladder_view.value == ""


def test_a_step_of_this_process_cannot_be_stopped_and_the_button_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()
    monkeypatch.setattr(api, "diagnose", lambda *given, **options: opened.wait(20) and diagnosis(None))
    doctor = Doctor(Diagnosis.of(evidence(), subject=Step(step=print, loader=[1, 2])), budget_s=30)
    doctor.measure.click()
    assert shown(doctor)
    assert doctor.stop.disabled
    assert doctor.stop.tooltip == "A step of this process cannot be stopped: it ends by itself, after about 30.0 s"
    opened.set()
    until(lambda: doctor.stop.layout.display == "none")


def test_a_script_is_proved_by_launches_that_can_be_stopped(monkeypatch: pytest.MonkeyPatch, by_hand: Callable[..., Any]) -> None:
    made, opened, proved = by_hand().alive(), threading.Event(), list[Any]()

    def prove_script(spec: ScriptSpec, remedy: Any, *_: object, **options: Any) -> Proof:
        proved.append((spec, remedy.name, options["budget_s"], options["launched"]))
        Run.load(made.path)
        assert opened.wait(20)
        raise ValueError("it stopped after 3 steps")

    monkeypatch.setattr(api, "prove_script", prove_script)
    monkeypatch.setattr(Run, "stop", lambda _: opened.set())
    subject = LaunchedScript(folder=Path("/somewhere"), start_s=4.0)
    spec = ScriptSpec(script="/somewhere/train.py", watch=True)
    doctor = Doctor(Diagnosis.of(evidence(), spec=spec, subject=subject), budget_s=30)
    assert repr(doctor) == "ThroughputDoctor('train.py · 1 rank · watched')"
    assert (doctor.measure.disabled, doctor.climb.disabled) == (True, True)
    best = next(remedy for remedy in doctor.result.remedies if remedy.provable)  # type: ignore[union-attr]
    doctor.proves[best.name].click()
    assert shown(doctor)
    assert not doctor.stop.disabled
    until(lambda: proved)
    doctor.stop.click()
    until(lambda: not shown(doctor))
    assert proved == [(spec, best.name, 30, subject)]
    assert f"stopped while proving {best.name}" in doctor.status.value
    assert not doctor.problem.value


def test_a_remedy_that_is_new_cannot_be_proved_before_the_measurement_has_ended(gate: threading.Event) -> None:
    doctor = Doctor(SPEC)
    doctor.measure.click()
    doctor._take(diagnosis())  # as the thread of the measurement does
    assert all(button.disabled for button in doctor.proves.values())
    gate.set()
    until(lambda: idle(doctor))
    assert not any(button.disabled for button in doctor.proves.values())


def test_what_cannot_be_stopped_is_said(gate: threading.Event, monkeypatch: pytest.MonkeyPatch, by_hand: Callable[..., Any]) -> None:
    def stop(run: Run) -> None:
        raise TimeoutError("it has not ended")

    monkeypatch.setattr(Run, "stop", stop)
    doctor = Doctor(SPEC)
    doctor.measure.click()
    doctor._background._launched(Run.load(by_hand().alive().path))
    doctor.stop.click()
    until(lambda: "it has not ended" in doctor.problem.value)
    until(lambda: doctor.stop.description == "Stop")
    assert not doctor.stop.disabled
    gate.set()
    until(lambda: idle(doctor))


def test_a_thread_hears_of_the_runs_that_it_opens_and_of_no_others(by_hand: Callable[..., Any]) -> None:
    path, heard = by_hand().ended("finished").path, list[Run]()
    with on_run_started(heard.append):
        run = Run.load(path)
        other = threading.Thread(target=Run.load, args=(path,))
        other.start()
        other.join()
    Run.load(path)
    assert heard == [run]


# --- faces


def test_a_bar_has_the_colours_of_its_parts_and_says_them_in_words(doctor: Doctor) -> None:
    html = doctor.bars.value
    assert f"background-color:{COLORS['data_wait']}" in html
    assert 'title="data_wait: 30.0 ms (60 %)"' in html
    assert "50.0 ms · 640 samples/s" in html
    shown = [part for part in PARTS if f"</span>{part}</span>" in html]
    assert shown == ["data_wait", "compute", "optimizer"]  # the host takes a thousandth


def test_the_static_face_can_be_read_without_a_kernel(doctor: Doctor) -> None:
    doctor.num_workers.value = 2
    bundle = doctor._repr_mimebundle_()
    html = bundle["text/html"]
    assert bundle["text/plain"] == "ThroughputDoctor('clipart-resnet · 1 rank')"
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "<strong>input-bound</strong> (dataset code)" in html
    assert "predicted with num_workers=2" in html
    assert "<td" in html
    assert not any(word in html for word in ("<script", "<svg", "<style", " id=", "12.0 s"))
    before = Doctor(SPEC)._repr_mimebundle_()["text/html"]
    assert "nothing is measured yet: run this cell and press Measure" in before


def test_words_from_outside_are_escaped() -> None:
    result = diagnosis()
    odd = replace(result.remedies[0], name="<b>", what="<i>", costs="<u>")
    html = doctor_faces.remedy(odd, Proof(remedy=odd, measured=Interval(low=1, mid=2, high=3), notes=("<s>",)), 3.0)
    assert not any(tag in html for tag in ("<b>", "<i>", "<u>", "<s>"))


def test_a_promise_without_end_fills_its_bar() -> None:
    endless = replace(diagnosis().remedies[0], speedup=float("inf"), high=float("inf"), ceiling=True)
    html = doctor_faces.remedy(endless, None, 4.0)
    assert [float(width) for width in re.findall(PIECE, html)] == [25, 75]


def test_the_doctor_needs_no_matplotlib_pandas_or_torch() -> None:
    code = (
        "import sys, workbench as wb; repr(wb.widgets.ThroughputDoctor(wb.RunSpec(task='clipart-resnet')));"
        "print(*sorted({'matplotlib', 'pandas', 'torch'} & set(sys.modules)) or ['none'])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["none"]
