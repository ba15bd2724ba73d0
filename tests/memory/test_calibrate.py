"""Calibrating by synthetic measurements: what is fitted, kept, used later and said; no GPU is needed, and without one that is said."""

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.made import machine_slower_by
from tests.memory_logs import Writer
from workbench.__main__ import main
from workbench.core.progress import Waiting
from workbench.memory import calibrate as calibrating
from workbench.memory.analysis.non_pytorch import NonPyTorchMemory, fits_file, is_known, load_fits, non_pytorch_memory
from workbench.memory.calibrate import BATCHES, Gpu, calibrate, calibrated, specs_of
from workbench.runs.failure import Failure, RunError
from workbench.runs.launch import environment, machine_report
from workbench.runs.task import resolve

MIB, GIB = 2**20, 2**30
H100 = Gpu(name="NVIDIA H100 80GB HBM3", driver="570.1", used=0)


def measured(reserved: int, beside: int, *, kind: str = "measured", device: str = "cuda") -> wb.MemoryBreakdown:
    writer = Writer()
    writer.mark("forward", 0, 0)
    writer.alloc(MIB, category="parameter")
    outside = NonPyTorchMemory(low=beside, mid=beside, high=beside, source="measured")
    return wb.MemoryBreakdown.from_log(writer.log, kind=kind, title="a run", device=device, reserved=reserved, outside=outside)  # type: ignore[arg-type]


class Machine:
    """A GPU on which a run reserves a GiB per 8 samples of the first model, two per 8 of the second, …

    Attributes:
        before: bytes that others have there.
        fails: runs that raise → how.
        cut: the run that Ctrl-C cuts short.
    """

    def __init__(self, base: int = 500 * MIB, slope: float = 1.01, before: int = 0) -> None:
        self.base, self.slope, self.before = base, slope, before
        self.fails: dict[tuple[str, int], Failure | type[KeyboardInterrupt]] = {}
        self.seen: list[tuple[str, int]] = []
        self.cut: tuple[str, int] | None = None

    def look(self) -> Gpu:
        return Gpu(name=H100.name, driver=H100.driver, used=self.before)

    def measure(self, spec: wb.RunSpec) -> wb.MemoryBreakdown:
        key = (spec.task, spec.micro_batch)
        self.seen.append(key)
        if key in self.fails:
            why = self.fails[key]
            raise RunError(why) if isinstance(why, Failure) else why
        reserved = (1 + calibrating.MODELS.index(spec.task)) * spec.micro_batch * GIB // 8
        found = measured(reserved, self.before + round(self.base + (self.slope - 1) * reserved))
        return dataclasses.replace(found, notes=("stopped by Ctrl-C after 1 of 3 steps",)) if key == self.cut else found

    def calibrated(self, models: int = 2, path: Path | None = None, **more: Any) -> calibrating.Calibration:
        return calibrated(specs_of(models), self.look, self.measure, torch="2.11.0", path=path, **more)


def out_of(kind: str) -> Failure:
    return Failure(rank=0, kind=kind, message="boom", traceback=None, hint=None)


def test_the_line_is_found_kept_and_told(tmp_path: Path) -> None:
    path, told = tmp_path / "deep" / "fits.json", list[str]()
    machine = Machine()
    found = machine.calibrated(path=path, tell=told.append)
    assert machine.seen == [(task, batch) for task in calibrating.MODELS[:2] for batch in BATCHES]
    assert found.fit.base == pytest.approx(500 * MIB, rel=1e-6)
    assert found.fit.slope == pytest.approx(1.01, rel=1e-9)
    assert found.fit.worst < 1e-6
    assert (found.fit.device, found.fit.driver, found.fit.torch) == ("H100-SXM", "570.1", "2.11.0")
    assert found.path == path
    assert load_fits(path) == [found.fit]
    assert len(told) == len(found.points) == 6
    assert told[0] == "run 1 of 6: tasks-wide_gpt, 8 samples on NVIDIA H100 80GB HBM3 …"
    for word in ("H100-SXM, driver 570.1, torch 2.11.0, 20", "500 MiB + 1.0100 · reserved", str(path), "+0.00 %"):
        assert word in str(found)
    assert "<table>" in found._repr_html_()
    assert repr(found) == "Calibration('H100-SXM', 6 runs)"
    frame = found.to_frame()
    assert frame.fitted.tolist() == pytest.approx(frame.used.tolist(), rel=1e-6)


def test_what_others_have_there_is_subtracted(tmp_path: Path) -> None:
    alone = Machine().calibrated(path=tmp_path / "a.json")
    crowded = Machine(before=3 * GIB).calibrated(path=tmp_path / "b.json")
    assert crowded.points == alone.points
    assert "others had up to 3.00 GiB of the GPU" in str(crowded)
    assert "others had" not in str(alone)


def test_an_estimate_for_that_gpu_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    spec = wb.RunSpec(task="text-gpt", micro_batch=4)
    before = wb.estimate_memory(spec, device="H100")
    assert "was not measured for this GPU" in before.caption
    found = Machine().calibrated()
    assert found.path == fits_file()
    after = wb.estimate_memory(spec, device="H100")
    assert after.outside is not None
    assert after.reserved == before.reserved
    assert after.outside == non_pytorch_memory("H100-SXM", reserved=after.reserved or 0)
    assert after.outside.mid == pytest.approx(500 * MIB, rel=0.01)
    assert "fitted on 20" in after.outside.source
    assert "was not measured for this GPU" not in after.caption
    assert "fitted" not in wb.estimate_memory(spec, device="H200").caption


def test_a_gpu_that_no_table_has(tmp_path: Path) -> None:
    path = tmp_path / "fits.json"
    calibrated(specs_of(1), lambda: Gpu(name="NVIDIA RTX A6000", driver="1", used=0), Machine().measure, path=path)
    assert is_known("RTX A6000", path)
    assert is_known("NVIDIA RTX A6000", path)
    assert not is_known("RTX A5000", path)


def test_a_second_one_takes_the_place_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "fits.json"
    Machine().calibrated(path=path)
    again = Machine(base=600 * MIB).calibrated(path=path)
    assert load_fits(path) == [again.fit]


@pytest.mark.parametrize("text", ["{", "7", "[1]", '[{"device": "H100"}]', '{"a": 1}', "\udcff"])
def test_a_file_that_cannot_be_read_is_set_aside(tmp_path: Path, text: str) -> None:
    path = tmp_path / "fits.json"
    path.write_text(text, errors="surrogateescape")
    assert load_fits(path) == []
    assert not is_known("H100", path)
    found = Machine().calibrated(path=path)
    assert load_fits(path) == [found.fit]
    assert "could not be read" in str(found)
    assert (tmp_path / "fits.damaged.json").read_text(errors="surrogateescape") == text


def test_a_place_that_cannot_be_written_does_not_cost_the_result(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = Machine().calibrated(path=tmp_path / "file" / "fits.json")
    assert found.path is None
    assert found.fit.slope == pytest.approx(1.01)
    for word in ("not kept", "cannot be written", "WORKBENCH_CACHE"):
        assert word in str(found)


def test_runs_without_enough_memory_are_left_out(tmp_path: Path) -> None:
    machine = Machine()
    machine.fails = {(calibrating.MODELS[0], 128): out_of("out-of-memory")}
    found = machine.calibrated(path=tmp_path / "fits.json")
    assert len(found.points) == 5
    assert "left out, since memory ran out: tasks-wide_gpt, 128 samples" in str(found)
    with pytest.raises(ValueError, match="only 2 of 3 runs had enough memory on NVIDIA H100 80GB HBM3, and a fit needs 3"):
        machine.calibrated(1)


def test_the_runs_so_far_are_fitted_where_the_budget_or_ctrl_c_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(Waiting, "seconds", property(lambda self: 10.0 * len(machine.seen)))
    found = machine.calibrated(path=tmp_path / "a.json", line=Waiting("calibrate", 35))
    assert len(found.points) == 4
    assert "the budget ended after 4 of 6 runs" in found.notes
    machine.seen.clear()
    assert len(machine.calibrated(path=tmp_path / "b.json", line=Waiting("calibrate", 5)).points) == 3  # the fewest
    machine.fails = {(calibrating.MODELS[1], 32): KeyboardInterrupt}
    assert "stopped by Ctrl-C after 4 of 6 runs" in machine.calibrated(path=tmp_path / "c.json").notes
    machine.fails, machine.cut = {}, (calibrating.MODELS[1], 32)
    cut = machine.calibrated(path=tmp_path / "e.json")
    assert (len(cut.points), "stopped by Ctrl-C after 4 of 6 runs" in cut.notes) == (4, True), "a run that was cut short is not fitted"
    machine.cut = None
    machine.fails = {(calibrating.MODELS[0], 32): KeyboardInterrupt}
    with pytest.raises(KeyboardInterrupt):
        machine.calibrated(path=tmp_path / "d.json")
    assert not (tmp_path / "d.json").exists()


def test_another_failure_is_an_error(tmp_path: Path) -> None:
    machine = Machine()
    machine.fails = {(calibrating.MODELS[1], 8): out_of("crash")}
    with pytest.raises(RunError, match="boom"):
        machine.calibrated(path=tmp_path / "fits.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("found", [measured(GIB, MIB, kind="predicted")])
def test_only_what_is_measured_counts(found: wb.MemoryBreakdown) -> None:
    with pytest.raises(ValueError, match="predicted on cuda; only measurements on a GPU"):
        calibrated(specs_of(1), lambda: H100, lambda spec: found)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 0)
    with pytest.raises(ValueError, match="no NVIDIA GPU is visible here") as raised:
        wb.calibrate()
    assert str(fits_file()) in str(raised.value)
    speeds = machine_slower_by(dispatch=2.0).to_json()
    monkeypatch.setattr(machine_report, "probe_torch", lambda *options: {"speeds": speeds, "options": options})
    assert main(["calibrate"]) == 0  # the machine's speeds are known then
    out = capsys.readouterr().out
    assert "4.00 µs" in out
    assert "it can only be measured on an NVIDIA GPU, and none is visible here" in out
    assert main(["calibrate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"speeds": speeds, "memory": None}
    monkeypatch.setattr(machine_report, "probe_torch", lambda *_: {"error": "torch could not be tested: no such module"})
    assert main(["calibrate"]) == 2
    assert capsys.readouterr().err == "workbench: torch could not be tested: no such module\n"


@pytest.mark.parametrize("models", [0, 7, True, "2"])
def test_so_many_models_there_are_not(models: Any) -> None:
    with pytest.raises(ValueError, match="a whole number from 1 to 6"):
        calibrate(models)


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        asked.append(command)
        return subprocess.CompletedProcess(
            command, 0, stdout="NVIDIA H100 80GB HBM3, 570.124.06, 17, 582\nNVIDIA H100 80GB HBM3, 570.124.06, 0, 582\n"
        )

    monkeypatch.setattr(environment, "gpu_count", lambda: 2)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-123,GPU-7")
    assert calibrating.look() == Gpu(name="NVIDIA H100 80GB HBM3", driver="570.124.06", used=17 * MIB)
    assert "--id=GPU-123" in asked[0]


@pytest.mark.parametrize("unknown", ["error", "[N/A]"])
def test_an_older_driver_counts_as_used_what_it_reserves(monkeypatch: pytest.MonkeyPatch, unknown: str) -> None:
    """CUDA does not: what processes have is subtracted, and not the driver's part."""

    def run(command: list[str], **_: Any) -> Any:
        if "compute-apps" in command[1]:
            said = "300\n[N/A]\n40\n"
        elif "reserved" in command[1]:
            if unknown == "error":
                raise subprocess.CalledProcessError(2, command, output='Field "memory.reserved" is not a valid field to query.')
            said = "Tesla V100-SXM2-16GB, 470.57.02, 650, [N/A]\n"
        else:
            said = "Tesla V100-SXM2-16GB, 470.57.02\n"
        return subprocess.CompletedProcess(command, 0, stdout=said)

    monkeypatch.setattr(environment, "gpu_count", lambda: 1)
    monkeypatch.setattr(subprocess, "run", run)
    assert calibrating.look() == Gpu(name="Tesla V100-SXM2-16GB", driver="470.57.02", used=340 * MIB)


@pytest.mark.parametrize("said", ["", "[N/A]\n", "No devices were found\n", "a, b, [N/A]\n", None])
def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, said: str | None) -> None:
    def run(command: list[str], **_: Any) -> Any:
        if said is None:
            raise FileNotFoundError("nvidia-smi")
        return subprocess.CompletedProcess(command, 0, stdout=said)

    monkeypatch.setattr(environment, "gpu_count", lambda: None)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ValueError, match=r"no NVIDIA GPU was found: `nvidia-smi .*` did not answer"):
        calibrating.look()


def test_in_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    machine = Machine()
    monkeypatch.setattr(calibrating, "look", machine.look)
    monkeypatch.setattr(calibrating, "measure_memory", lambda spec, **_: machine.measure(spec))
    monkeypatch.setattr(environment, "gpu_count", lambda: 1)
    monkeypatch.setattr(machine_report, "probe_torch", lambda *_: {"speeds": machine_slower_by(dispatch=2.0).to_json()})
    assert main(["calibrate", "--models", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["fit"]["base"] == pytest.approx(500 * 2**20)
    assert main(["calibrate", "--models", "1"]) == 0
    assert "device used = 500 MiB + 1.0100 · reserved" in capsys.readouterr().out
    assert len(load_fits()) == 1


@pytest.mark.slow
def test_its_tasks_are_there_and_lie_far_apart() -> None:
    for task in calibrating.MODELS:
        assert resolve(task).name
    wanted = [wb.estimate_memory(spec, device="cuda").reserved or 0 for spec in specs_of(2)]
    assert max(wanted) > 10 * min(wanted)
    assert max(wanted) < 8e9
