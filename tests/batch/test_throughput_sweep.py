"""The sweep over micro-batches by a fake clock: how long it takes, what it leaves out, and what it returns when it is cut short."""

import time
from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.batch import throughput_sweep
from workbench.batch.throughput_sweep import START, measure_throughput
from workbench.core.progress import Waiting
from workbench.runs.failure import RunError
from workbench.runs.launch.sweep import Trial
from workbench.runs.spec import RunSpec

SPEC = RunSpec(task="clipart-cnn", micro_batch=32)
PLACES = [4, 8, 16, 32, 64, 128, 256, 512]


class Machine:
    """Launches that take the time of a fake clock: `START` seconds each, and a step `seconds(micro_batch)`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], *, interrupt: int = 0, fails: int = 10**9) -> None:
        self.now, self.seconds, self.interrupt, self.fails = 100.0, seconds, interrupt, fails
        self.launches: list[list[tuple[int, int, int]]] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(throughput_sweep, "in_turn", self.in_turn)
        monkeypatch.setattr(throughput_sweep, "check", lambda spec: None)

    def in_turn(self, trials: Sequence[Trial], runs_dir: object, tick: Callable[[], object]) -> Generator[tuple[Trial, Any], None, None]:
        self.launches.append([])
        self.now += START
        for trial in trials:
            spec = trial.spec
            micro, a = int(spec.micro_batch), spec.accumulation
            if sum(map(len, self.launches)) + 1 == self.interrupt:
                raise KeyboardInterrupt
            works = micro < self.fails
            step = self.seconds(micro) * a if works else 0.0
            for _ in range(spec.steps if works else 0):
                self.now += step
                tick()
            self.launches[-1].append((micro, a, spec.steps))
            timelines = [SimpleNamespace(values=lambda step=step, n=spec.steps: [step] * n)] if works else []
            error = None if works else SimpleNamespace(message="out of memory")
            yield (
                trial,
                SimpleNamespace(
                    spec=spec,
                    ok=works,
                    error=error,
                    state="failed",
                    timelines=timelines,
                    samples_per_sec=micro * a / step if works else 0.0,
                ),
            )

    def count(self, wanted: int) -> int:
        return sum(micro == wanted and a == 1 for launch in self.launches for micro, a, _ in launch)

    def tried(self) -> list[int]:
        return sorted({micro for launch in self.launches for micro, *_ in launch})


def test_a_slow_model_is_measured_within_a_minute_and_what_gains_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 32 samples takes 0.2 s; 16 configurations of 60 steps took seven minutes."""
    machine = Machine(monkeypatch, lambda micro: 0.01 + 0.006 * micro)
    line = Waiting("batch_plan", 60)
    curve = measure_throughput(SPEC, PLACES, line=line)
    assert line.seconds < 60
    assert curve.samples_per_sec(micro_batch=32) == pytest.approx(32 / 0.202)
    assert {16, 32, 64} <= set(curve.micro_batches)
    assert curve.notes == ("micro_batch 512 not tried: those before gained nothing",)
    assert curve.per_step == pytest.approx(0.0, abs=1e-9)
    assert [micro for micro, a, _ in machine.launches[1] if a == 2] == [32]


def test_where_larger_batches_gain_they_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, lambda micro: 0.02 + 0.00001 * micro)
    curve = measure_throughput(SPEC, PLACES, line=Waiting("batch_plan", 60))
    assert curve.micro_batches[-1] == 512
    slow = Machine(monkeypatch, lambda micro: 0.2 + 0.0001 * micro)
    curve = measure_throughput(SPEC, PLACES, noise=4.0, line=Waiting("batch_plan", 60))
    assert 512 not in slow.tried()  # its samples are worth next to nothing
    assert curve.notes == ("micro_batch 512 not tried: those before gained nothing",)


def test_when_the_budget_is_spent_it_returns_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda micro: (0.01 if micro <= 32 else 0.5) * micro)  # slower than anybody can know
    curve = measure_throughput(SPEC, PLACES, line=Waiting("batch_plan", 40))
    assert 32 in curve.micro_batches
    assert machine.now - 100 < 40 + 33  # the step that was under way
    assert any(note.startswith("the budget was spent after") for note in curve.notes)


def test_ctrl_c_returns_what_it_has_or_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, lambda micro: 0.002 * micro, interrupt=4)
    curve = measure_throughput(SPEC, PLACES, line=Waiting("batch_plan", 60))
    assert any(note.startswith("stopped by Ctrl-C after") for note in curve.notes)
    Machine(monkeypatch, lambda micro: 0.002 * micro, interrupt=1)
    with pytest.raises(KeyboardInterrupt):
        measure_throughput(SPEC, PLACES, line=Waiting("batch_plan", 60))


def test_above_what_runs_out_of_memory_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda micro: 0.02, fails=128)
    curve = measure_throughput(SPEC, PLACES, line=Waiting("batch_plan", 60))
    assert curve.micro_batches[-1] == 64
    assert max(machine.tried()) == 128
    assert any("micro_batch=128 was failed: out of memory" in note for note in curve.notes)


def test_where_the_present_one_runs_out_of_memory_smaller_ones_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda micro: 0.02, fails=32)
    curve = measure_throughput(SPEC, PLACES, line=Waiting("batch_plan", 60))
    assert curve.micro_batches[-1] == 16
    assert [micro for launch in machine.launches for micro, *_ in launch].count(32) == 1  # it is not measured again, nor accumulated
    assert max(machine.tried()) == 32
    assert any("micro_batch=32 was failed: out of memory" in note for note in curve.notes)


def test_where_none_fits_no_failure_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda micro: 0.02, fails=1)
    with pytest.raises(RunError, match="out of memory"):
        measure_throughput(SPEC, PLACES, line=Waiting("batch_plan", 200))
    assert max(map(machine.count, machine.tried())) == 1


def test_without_a_limit_each_is_measured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda micro: 0.01 + 0.006 * micro)
    curve = measure_throughput(SPEC, PLACES, steps=20)
    assert curve.micro_batches == tuple(PLACES)
    assert [[micro for micro, a, _ in launch if a == 1] for launch in machine.launches] == [PLACES, PLACES[::-1]]
    assert {steps for launch in machine.launches for _, a, steps in launch if a == 1} == {20}
    assert not curve.notes
