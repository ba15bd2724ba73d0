"""The memory explorer without a browser: what its knobs ask for, what they show at once, and the process that makes the fake runs."""

import json
import re
import signal
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

from tests.hostile import CONTROLS, EVIL, assert_is_text
from tests.memory_logs import Writer, training
from workbench.core.device import Device
from workbench.memory import api
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.log import MemoryLog
from workbench.memory.estimate_curves import Curves
from workbench.memory.estimator_process import Answer, Estimator, EstimatorError, Question, log_from_json, log_to_json
from workbench.memory.panel.explorer import MemoryExplorer
from workbench.memory.panel.knobs import places, places_of
from workbench.runs.spec import RunSpec

SPEC = RunSpec(task="text-gpt", micro_batch=32)
STOPS = places_of("micro_batch", 32)
TASK = """
import torch
import workbench as wb

print("printed while it is imported")

def build():
    print("printed while it is built")
    return wb.Task(model=lambda: torch.nn.Linear(8, {width}), dataset=lambda: [torch.zeros(8)] * 4, loss=lambda m, b: m(b).mean())

def ends():
    import os
    os._exit(3)

def lasts():
    import time
    time.sleep(600)
"""


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Wait until something holds."""
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.01)


def smooth(question: Question) -> MemoryLog:
    """A program that does the same whatever the batch."""
    if question.spec.checkpointing == "full":
        return training(question.spec.micro_batch, width=16, layers=1)
    return training(question.spec.micro_batch, width=16)


def kinked(question: Question) -> MemoryLog:
    """Above 100 samples something sorts."""
    batch, w = question.spec.micro_batch, Writer()
    for step in range(2):
        w.mark("forward", step, step)
        kept = w.alloc(4096 * batch, "aten.mm.default", "layers.0")
        if batch > 100:
            w.free(w.alloc(9 * 512 * batch, "aten.sort.default"))
        w.mark("backward")
        w.free(kept)
        w.mark("end")
    return w.log


def attention(question: Question) -> MemoryLog:
    """A parabola in the sequence, a line in the batch; longer than 256 it cannot be run."""
    batch, length, w = question.spec.micro_batch, question.sequence or 64, Writer()
    if length > 256:
        raise ValueError(f"the model has 256 positions, not {length}")
    for step in range(2):
        w.mark("forward", step, step)
        kept = [w.alloc(64 * batch * length, "aten.mm.default", "a"), w.alloc(4 * batch * length**2, "aten.bmm.default", "a")]
        w.mark("backward")
        w.free(*kept)
        w.mark("end")
    return w.log


class Fake:
    """Answers in this process; `gate` holds it, `complaint` is what it raises."""

    def __init__(self, program: Callable[[Question], MemoryLog] = smooth, sequence: int | None = None) -> None:
        self.program, self.sequence = program, sequence
        self.asked: list[Question] = []
        self.gate = threading.Event()
        self.gate.set()
        self.complaint: Exception | None = None

    def ask(self, question: Question) -> Answer:
        self.asked.append(question)
        assert self.gate.wait(20)
        if self.complaint:
            raise self.complaint
        device = question.device if isinstance(question.device, str) else question.device.name
        ranks = question.spec.nproc_per_node
        length = self.sequence and (question.sequence or self.sequence)
        return Answer(log=self.program(question), device=device, world_size=ranks, sequence=length)


def explorer(fake: Fake, spec: RunSpec = SPEC, **options: Any) -> MemoryExplorer:
    made = MemoryExplorer(spec, estimator=fake, **options)  # type: ignore[arg-type]
    made.wait(20)
    return made


def settled(made: MemoryExplorer) -> MemoryExplorer:
    """When nothing runs in advance any more."""
    until(lambda: made._thread is None)
    return made


def fresh(program: Callable[[Question], MemoryLog], question: Question) -> MemoryBreakdown:
    return MemoryBreakdown.from_log(program(question), kind="predicted", title="", device="H200")


# --- what goes over the wire


def test_a_log_comes_back_as_it_was() -> None:
    log = training(5)
    log.notes.append("a note")
    assert log_from_json(json.loads(json.dumps(log_to_json(log)))) == log


def test_questions_and_answers_come_back_as_they_were() -> None:
    own = Device(name="Mine", memory=10**9, bandwidth=1e9, flops_per_sec={"bf16": 1e12}, source="its datasheet")
    for question in (Question(spec=SPEC, device="H200", sequence=128), Question(spec=SPEC, device=own, image=224)):
        assert Question.from_json(json.loads(json.dumps(question.to_json()))) == question
    answer = Answer(log=training(3), device="H200", rank=1, world_size=2, sequence=64)
    assert Answer.from_json(json.loads(json.dumps(answer.to_json()))) == answer


# --- between runs


@pytest.mark.parametrize(("program", "most"), [(smooth, 3), (kinked, 12)])
def test_every_place_of_the_slider_is_as_a_fresh_run(program: Callable[[Question], MemoryLog], most: int) -> None:
    curves, start, runs = Curves(), Question(spec=SPEC, device="H200"), 0
    for place in (32, 64, 128, 512):
        here = start.at("micro_batch", place)
        while wanted := curves.wanted(here, {"micro_batch": STOPS}):
            runs += 1
            curves.add(wanted, Answer(log=program(wanted), device="H200"))
    assert runs <= most
    found = {place: curves.estimate(start.at("micro_batch", place), ["micro_batch"], "") for place in STOPS}
    assert sum(estimate is not None for estimate in found.values()) >= len(STOPS) - 8
    for place, estimate in found.items():
        if estimate:
            assert replace(estimate.breakdown, timeline=None) == replace(fresh(program, start.at("micro_batch", place)), timeline=None)  # type: ignore[arg-type]


def test_nothing_is_said_beyond_the_runs_or_about_another_configuration() -> None:
    curves, start = Curves(), Question(spec=SPEC, device="H200")
    for batch in (8, 32):
        curves.add(start.at("micro_batch", batch), Answer(log=training(batch), device="H200"))
    assert curves.knows(start.at("micro_batch", 16), ["micro_batch"])
    assert not curves.knows(start.at("micro_batch", 33), ["micro_batch"])
    assert not curves.knows(start.at("micro_batch", 7), ["micro_batch"])
    assert not curves.knows(replace(start, device="L4").at("micro_batch", 16), ["micro_batch"])
    assert curves.estimate(start.at("micro_batch", 64), ["micro_batch"], "") is None


def test_the_first_sharded_run_tells_its_own_place_only() -> None:
    curves, start = Curves(), Question(spec=SPEC, device="H200")
    for batch in (8, 32, 64):
        curves.add(start.at("micro_batch", batch), Answer(log=training(batch), device="H200", first=batch == 8))
    assert curves.knows(start.at("micro_batch", 8), ["micro_batch"])
    assert not curves.knows(start.at("micro_batch", 16), ["micro_batch"])
    assert curves.knows(start.at("micro_batch", 48), ["micro_batch"])


def test_places_are_spread_evenly_and_hold_the_own_one() -> None:
    assert places(1, 16) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    assert 37 in places_of("micro_batch", 37)
    assert all(place % 32 == 0 for place in places_of("image", 224))
    assert {224, 32, 448} <= set(places_of("image", 224))
    assert {65, 130, 2080} <= set(places_of("sequence", 65))


# --- knobs


def test_a_move_of_the_batch_makes_no_fake_run_and_shows_what_one_would_find() -> None:
    fake = Fake()
    made = settled(explorer(fake))
    before = len(fake.asked)
    assert before == 3  # where it stands, and both ends
    for place in STOPS[1:]:
        made.micro_batch.value = place
        assert made.result is not None
        assert made.result.total == fresh(smooth, Question(spec=SPEC.replace(micro_batch=place))).total
        assert made.between == (place not in (2, 32, STOPS[-1]))
    assert len(fake.asked) == before


def test_another_configuration_is_run_once_and_kept() -> None:
    fake = Fake()
    made = settled(explorer(fake))
    plain = made.result
    made.checkpointing.value = "full"
    settled(made.wait(20))
    assert made.result is not None
    assert plain is not None
    assert made.result.total < plain.total
    count = len(fake.asked)
    assert count == 6
    for value in ("none", "full"):
        made.checkpointing.value = value
        assert made.result is not None
    assert made.bars.value
    assert len(fake.asked) == count


def test_the_knobs_ask_for_what_they_say() -> None:
    fake = Fake()
    made = settled(explorer(fake, SPEC.replace(optimizer="fused", accumulation=3), sequence=128))
    assert fake.asked[0] == Question(spec=SPEC.replace(optimizer="fused", accumulation=3), device="H200", sequence=128)
    fake.gate.clear()
    made.precision.value, made.optimizer.value, made.parallel.value, made.ranks.value = "amp_bf16", "", "fsdp", 1024
    made.accumulation.value, made.device.value = 4, "T4"
    fake.gate.set()
    settled(made.wait(20))
    wanted = SPEC.replace(precision="amp_bf16", optimizer=None, parallel="fsdp", nproc_per_node=1024, accumulation=4)
    assert Question(spec=wanted, device="T4", sequence=128) in fake.asked
    assert made.chosen == wanted
    assert made.result is not None
    assert made.result.world_size == 1024


def test_while_it_estimates_it_says_so_and_the_line_is_where_the_device_has_it() -> None:
    fake = Fake()
    made = settled(explorer(fake, device="H200"))
    fake.gate.clear()
    made.device.value = "L4"
    assert made.result is None
    assert "estimating…" in made.status.value
    assert "L4: 20.9 GiB (5 % kept free)" in made.bars.value
    assert "opacity" in made.bars.value
    assert not made.verdict.value
    with pytest.raises(TimeoutError, match="no estimate within"):
        made.wait(0.01)
    fake.gate.set()
    made.wait(20)
    assert not made.status.value
    assert "opacity" not in made.bars.value
    assert "20.9 GiB that may be used (5.0 % stays free)" in made.verdict.value


def test_a_sequence_slider_shows_where_there_is_one_and_is_exact_between_runs() -> None:
    assert settled(explorer(Fake())).sequence.layout.display == "none"
    fake = Fake(attention, sequence=64)
    made = settled(explorer(fake))
    assert made.sequence.layout.display is None
    assert made.sequence.value == 64
    assert all(question.sequence == 64 for question in fake.asked[1:])
    made.sequence.value = 48
    settled(made.wait(20))
    count = len(fake.asked)
    for length in [place for place in made.sequence.options if place <= 64]:
        made.sequence.value = length
        assert made.result is not None
        assert made.result.total == fresh(attention, Question(spec=SPEC, sequence=length)).total
    settled(made)
    assert made.sequence.options[-1] > 256
    assert len(fake.asked) > count  # other batches at the places it stood at, for the other slider
    made.sequence.value = made.sequence.options[-1]
    made.wait(20)
    assert "the model has 256 positions" in made.problem.value


# --- what is shown


def test_it_fits_or_not_in_words_with_what_is_to_spare() -> None:
    made = settled(explorer(Fake(), device="T4"))
    assert made.fit
    assert ">fits<" in made.verdict.value
    assert "to spare" in made.verdict.value
    assert made.result is not None
    assert made.result.peak_moment in made.verdict.value
    own = Device(name="Small", memory=2**28, bandwidth=1e9, flops_per_sec={}, source="none")
    small = settled(explorer(Fake(), device=own))
    assert small.fit is not None
    assert not small.fit
    assert ">does not fit<" in small.verdict.value
    assert "more than the 243 MiB that may be used (5.0 % stays free)" in small.verdict.value
    assert small.bars.value.count("wb-capacity") == 1


def test_pieces_of_the_bar_add_up_to_what_the_device_must_have() -> None:
    made = settled(explorer(Fake(), device="T4"))
    first = made.bars.value.partition("as large</div>")[0]
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%;background", first)]
    assert made.result is not None
    assert made.result.device_used is not None
    assert sum(widths) == pytest.approx(100 * made.result.device_used / (0.95 * Device.named("T4").memory), abs=0.02)
    assert "times as large" in made.bars.value


def test_modules_and_timeline_are_drawn() -> None:
    made = settled(explorer(Fake()))
    assert made.result is not None
    for module in ("layers.0", "layers.1", "layers.2"):
        assert re.search(rf'title="{module}: [\d.]+ \w+ \(', made.details.value)
    assert made.details.value.count("wb-peak") == 1
    assert "backward, step 2" in made.details.value
    assert "outside any module" in made.details.value


def test_measured_and_predicted_stand_side_by_side() -> None:
    measured = MemoryBreakdown.from_log(training(32, width=16), kind="measured", title="a run", device="cpu")
    made = settled(explorer(Fake(), device="cpu", measured=measured))
    labels = re.findall(r'aria-label="(\w+): parameters', made.bars.value)
    assert labels == ["predicted", "measured"]
    assert "predicted as measured" in made.bars.value
    assert "wb-pale" in made.bars.value
    assert made.fit is None
    assert "wb-capacity" not in made.bars.value
    made.micro_batch.value = 64
    assert "above what was measured" in made.bars.value
    other = settled(explorer(Fake(), device="H200", measured=measured))
    assert "measured on cpu, predicted for H200" in other.bars.value


def test_the_static_face_is_what_is_estimated_or_why_it_is_not() -> None:
    made = settled(explorer(Fake()))
    face = made._repr_mimebundle_()
    assert face["text/plain"] == "MemoryExplorer('text-gpt · 1 rank')"
    for word in ("<table>", "optimizer states", "to spare", "layers.0"):
        assert word in face["text/html"]
    assert "<svg" not in face["text/html"]
    fake = Fake()
    fake.complaint = ValueError("the model <X> cannot be built")
    assert "the model &lt;X&gt; cannot be built" in explorer(fake)._repr_mimebundle_()["text/html"]


def test_what_is_not_possible_is_said_and_turning_back_helps() -> None:
    fake = Fake()
    made = settled(explorer(fake, SPEC.replace(nproc_per_node=12)))
    made.parallel.value = "hsdp"
    assert "shard_ranks=8" in made.problem.value
    assert made.result is None
    made.parallel.value = "ddp"
    assert not made.problem.value
    fake.complaint = ValueError("it needs real values, in layer x")
    made.precision.value = "amp_bf16"
    settled(made.wait(20))
    assert "it needs real values, in layer x" in made.problem.value
    made.precision.value = "fp32"
    assert made.result is not None
    assert not made.problem.value


def test_a_crash_is_shown_and_the_next_turn_asks_again() -> None:
    fake = Fake()
    made = settled(explorer(fake))
    fake.complaint = EstimatorError("the process that estimates was ended by signal 9")
    made.precision.value = "amp_bf16"
    settled(made.wait(20))
    assert "ended by signal 9" in made.problem.value
    fake.complaint = None
    made.precision.value = "fp32"
    made.precision.value = "amp_bf16"
    settled(made.wait(20))
    assert made.result is not None
    assert not made.problem.value


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ("text_gpt", {}, r"MemoryExplorer\(str\): expected a RunSpec"),
        (SPEC, {"measured": 3}, "measured=int: expected a MemoryBreakdown"),
        (SPEC, {"device": "H2000"}, "unknown device 'H2000': did you mean 'H200'"),
    ],
)
def test_what_is_not_allowed_is_refused_at_once(given: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MemoryExplorer(given, **options)


# --- the process


@pytest.fixture(scope="module")
def worker() -> Iterator[Estimator]:
    made = Estimator()
    yield made
    made.close()


def test_a_worker_finds_what_an_estimate_here_finds(worker: Estimator) -> None:
    answer = worker.ask(Question(spec=SPEC, device="H200", sequence=40))
    here = api.estimate_memory(SPEC, device="H200", sequence=40)
    there = MemoryBreakdown.from_log(answer.log, kind="predicted", title=here.title, device=answer.device)
    assert (there.total, there.reserved, there.phases) == (here.total, here.reserved, here.phases)
    assert (answer.sequence, answer.image) == (40, None)


def test_an_explorer_with_a_real_worker(worker: Estimator) -> None:
    made = MemoryExplorer(RunSpec(task="clipart-resnet"), device="T4", estimator=worker).wait(60)
    assert made.fit
    assert made.image.value == 64
    until(lambda: made._thread is None)
    made.micro_batch.value = 512
    assert made.between
    assert made.result is not None
    fresh_run = worker.ask(Question(spec=RunSpec(task="clipart-resnet", micro_batch=512), device="T4"))
    assert made.result.total == MemoryBreakdown.from_log(fresh_run.log, kind="predicted", title="", device="T4").total


def test_tasks_may_print_and_errors_come_in_words(worker: Estimator, tmp_path: Path) -> None:
    (tmp_path / "talks.py").write_text(TASK.format(width=4))
    spec = RunSpec(task=f"{tmp_path}/talks.py:build", micro_batch=2)
    small = worker.ask(Question(spec=spec))
    with pytest.raises(ValueError, match="sequence=5: the batch"):
        worker.ask(Question(spec=spec, sequence=5))
    (tmp_path / "talks.py").write_text(TASK.format(width=4000))  # an edited file is imported anew
    assert sum(r.size for r in worker.ask(Question(spec=spec)).log.records) > sum(r.size for r in small.log.records)


def test_a_worker_that_ends_says_its_last_words_and_another_takes_its_place(worker: Estimator, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(TASK.format(width=4))
    with pytest.raises(EstimatorError, match=r"ended with exit code 3 before it answered(.|\n)*printed while it is imported"):
        worker.ask(Question(spec=RunSpec(task=f"{tmp_path}/dies.py:ends")))
    assert worker.pid is None
    worker.ask(Question(spec=SPEC))
    assert worker.pid is not None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_its_parent_even_in_the_midst_of_a_run(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "waits.py").write_text(TASK.format(width=4))
    program = (
        "import threading\nfrom workbench.memory.estimator_process import Estimator, Question\n"
        "from workbench.runs.spec import RunSpec\ne = Estimator()\n"
        f"spec = RunSpec(task={str(tmp_path / 'waits.py') + ':lasts'!r})\n"
        "threading.Thread(target=e.ask, args=(Question(spec=spec),), daemon=True).start()\n"
        "while e.pid is None: pass\nprint(e.pid, flush=True)\nthreading.Event().wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child = int(parent.stdout.readline())
    assert alive(child)
    parent.send_signal(how)
    parent.wait(20)
    parent.stdout.close()
    until(lambda: not alive(child), 20)


def alive(pid: int) -> bool:
    try:
        return b"workbench.programs.estimate_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_an_explorer_loads_no_torch_into_the_kernel() -> None:
    code = "import sys; from workbench.widgets import MemoryExplorer; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False"]


# --- what somebody else has named


ODD = EVIL + CONTROLS


def named(question: Question) -> MemoryLog:
    """A program whose modules and operators have hostile names."""
    w = Writer()
    w.log.modules = {"": ODD, ODD: ODD}
    w.log.notes.append(ODD)
    for step in range(2):
        w.mark("forward", step, step)
        kept = [w.alloc(10**9, ODD, ODD), w.alloc(10**8, ODD), w.alloc(10**9, "aten.mm.default", f"a.{ODD}.b")]
        w.mark(ODD)
        w.alloc(10**6, ODD, ODD)
        w.mark("backward")
        w.free(*kept)
        w.mark("end")
    return w.log


def faces_of(made: MemoryExplorer) -> list[str]:
    parts = (made.head, made.status, made.problem, made.verdict, made.bars, made.details)
    return ["".join(part.value for part in parts), made._repr_mimebundle_()["text/html"]]


def test_names_of_modules_tasks_and_devices_are_text_and_no_html() -> None:
    device = Device(name=ODD, memory=10**10, bandwidth=1e9, flops_per_sec={"bf16": 1e12}, source=ODD)
    made = explorer(Fake(named), RunSpec(task=EVIL), device=device)
    assert made.result
    assert_is_text(*faces_of(made))
    assert_is_text(made.details.value, made.bars.value, made.head.value)
    assert_is_text(made.result._repr_html_(), made.result.table._repr_html_())
    settled(made)


def test_what_an_estimate_that_fails_says_is_text_and_no_html() -> None:
    fake = Fake()
    fake.complaint = ValueError(ODD)
    made = explorer(fake)
    assert_is_text(*faces_of(made))
    fake = Fake()
    fake.complaint = RuntimeError(ODD)
    assert_is_text(*faces_of(explorer(fake)))
