"""The page about a run stands alone and shows hostile text as text; the figures that it cannot know it refuses; exports add what is new."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.conftest import HandMade
from tests.hostile import CONTROLS, EVIL, STEERING, harmful
from workbench.__main__ import main
from workbench.cluster.analysis.pipeline_idle import pipeline_idle
from workbench.core import run_directory
from workbench.runs.export import STATE, ExportError, merged
from workbench.runs.page import throughput
from workbench.runs.spec import ScriptSpec


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    writer = run_directory.LineWriter(path)
    writer.write(rows)
    writer.close()


def metrics(first: int, last: int) -> list[dict[str, Any]]:
    return [
        {"step": n, "steps": 20, "lr": 0.1, "samples": 32 * n, "seconds": 0.5 * n, "loss": math.nan if n == 3 else 1 / n}
        for n in range(first, last + 1)
    ]


def made(path: Path, **knobs: Any) -> wb.Run:
    """A run of 10 of 20 steps that failed, by hand; its texts are hostile."""
    path.mkdir()
    spec = wb.RunSpec(task=EVIL, device="cpu", steps=20, **knobs)
    info = {
        "format": 1,
        "id": "abc",
        "name": EVIL + CONTROLS[:5],
        "created": 1.8e9,
        "host": EVIL,
        "launch_dir": ".",
        "spec": spec.to_json(),
    }
    info |= {
        "outcome": {
            "state": "failed",
            "seconds": 5.0,
            "error": {"rank": 0, "kind": "exception", "message": EVIL, "hint": EVIL, "traceback": EVIL},
        }
    }
    run_directory.write_json(path / "run.json", info)
    write(path / "metrics.jsonl", [*metrics(1, 10), {"step": 10, "steps": 20, "accuracy": 0.5, "validation_loss": 0.7}])
    phases = {"data_wait": 0.1, "forward": 0.2, "backward": 0.2}
    steps = [{"step": n, **phases, "samples": 32, "memory": 1000 * n} for n in range(10)]
    write(path / "rank0.jsonl", [{"rank": 0, "world_size": 1, "clock": "host", "device": EVIL}, *steps, {"validation": 2.0, "after": 10}])
    row = {"step": 10, "seconds": [2.0], "figures": {"accuracy": 0.5, "validation_loss": 0.7, EVIL: 0.1, "odd": EVIL}}
    row |= {"classes": {EVIL: {"count": 3, "recall": None}, "b": EVIL}, "worst": [{"index": EVIL, "loss": 2.0}, 7], "calibration": EVIL}
    write(path / "evaluations.jsonl", [{"step": EVIL, "figures": []}, row])
    write(path / "resumes.jsonl", [{"step": 5, "checkpoint": EVIL}])
    write(path / "usage.jsonl", [{"step": EVIL}, {"step": 4, "cpu": 0.25, EVIL: 1.0, "gpu": EVIL}, {"step": 6, "cpu": 0.75, "watts": -1.0}])
    write(path / "gradients.jsonl", [{"step": 4, "norms": EVIL}, *({"step": n, "norms": {EVIL: 3.0, "layer": 0.5 * n}} for n in (4, 8))])
    facts = {"environment": {"device": "NVIDIA H100 80GB HBM3", EVIL: EVIL}, "versions": {"torch": EVIL}, "data": {"type": EVIL}, "code": 7}
    run_directory.write_json(path / run_directory.ENVIRONMENT, facts)
    return wb.Run.load(path)


def test_the_page_stands_alone_and_is_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "run")
    page = wb.report(run).save(tmp_path / "page.html").read_text()
    assert harmful(page.replace('<meta charset="utf-8">', "").replace('<meta name="color-scheme" content="light dark">', "")) == []
    assert not set(page) & set(STEERING)
    assert "http" not in page
    for part in (
        "Where a step goes", "1 evaluations between the steps: 2.00 s", "loss: 1 at step 1, 0.1 at step 10; least 0.1, most 1", "alert(1)",
        "throughput: 64.0 samples/s", "peak memory, rank 0: 0 B at step 0, 8.79 KiB at step 9", "time of a step, rank 0: 500 ms at step 0",
        "that were busy: 25 % at step 4, 75 % at step 6", "Worst examples", "Resumed", "Failure", "the FLOPs of a sample are not known",
    ):  # fmt: skip
        assert part in page, part
    assert "failed" in str(wb.report(run))
    assert main(["report", str(run.path), "--html", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_text() == page
    assert capsys.readouterr().out == f"the report is in {tmp_path / 'other.html'}\n"
    with pytest.raises(ValueError, match=r"report\(\) got a int: expected a run"):
        wb.report(5)  # type: ignore[arg-type]


def test_a_utilisation_that_cannot_be_is_refused(tmp_path: Path) -> None:
    run = made(tmp_path / "run", precision="amp_bf16")
    assert run.samples_per_sec == pytest.approx(64)
    used, how = wb.report(run, flops_per_sample=1e12).mfu
    assert used == pytest.approx(64e12 / 989.4e12, rel=1e-3)
    assert "(bf16) × 1" in how
    used, how = wb.report(run, flops_per_sample=1e14).mfu
    assert used is None
    assert "of the peak is impossible" in how
    run_directory.write_json(run.path / run_directory.ENVIRONMENT, {"environment": {"device": "cpu"}})
    assert wb.report(run, flops_per_sample=1e12).mfu == (None, "the peak of cpu is not known")
    with pytest.raises(ValueError, match="flops_per_sample"):
        wb.report(run, flops_per_sample=-1)
    used, how = wb.report(run).mfu
    assert used is None
    assert 'wb.report(run, flops_per_sample="count") counts them in a dry run' in how
    assert "MFU" not in str(wb.report(run))
    refused = "MFU: not known, since the peak of cpu is not known"
    assert str(wb.report(run, flops_per_sample=1e12)).endswith(refused)
    run_directory.write_json(run.path / run_directory.ENVIRONMENT, {"environment": {"device": "NVIDIA H100 80GB HBM3"}})
    assert "\n\nMFU: 6.5 %: 64.0 samples/s × 1.00 TFLOP, over " in str(wb.report(run, flops_per_sample=1e12))


def test_the_command_prints_the_mfu_or_why_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "run")
    info = run_directory.read_json(run.path / run_directory.RUN_JSON)
    info["spec"]["task"] = "text-gpt"
    run_directory.write_json(run.path / run_directory.RUN_JSON, info)
    run_directory.write_json(run.path / run_directory.ENVIRONMENT, {"environment": {"device": "cpu"}})
    assert main(["report", str(run.path), "--mfu"]) == 0
    assert capsys.readouterr().out.endswith("MFU: not known, since the peak of cpu is not known\n")
    assert main(["report", str(run.path), "--mfu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mfu_reason"] == "the peak of cpu is not known"


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"checkpointing": "full", "micro_batch": "auto"},
        {"nproc_per_node": 2, "parallel": "fsdp", "optimizer": "adamw"},
        {"nproc_per_node": 2, "pipeline_parallel": 2, "accumulation": 2},
    ],
    ids=str,
)
def test_flops_are_those_of_the_estimate_however_the_model_is_shared(tmp_path: Path, knobs: dict[str, Any]) -> None:
    one = wb.estimate_time(wb.RunSpec(task="text-gpt", precision="amp_bf16", micro_batch=8, optimizer="sgd"), device="H100").flops / 8
    run = made(tmp_path / "run", precision="amp_bf16", **{"micro_batch": 8, **knobs})
    info = run_directory.read_json(run.path / run_directory.RUN_JSON)
    info["spec"]["task"] = "text-gpt"
    run_directory.write_json(run.path / run_directory.RUN_JSON, info)
    report = wb.report(run.path, flops_per_sample="count")
    assert report.flops_per_sample == pytest.approx(one, rel=1e-9)
    ((_, _, values), *_) = merged(report.run, report.flops_per_sample)[1:]
    assert values["mfu"] == pytest.approx(64 * one / (989.4e12 * report.run.spec.world_size))


def test_flops_of_a_script_are_not_counted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='flops_per_sample="count": the FLOPs of a script are not counted; give a number'):
        wb.report(HandMade(tmp_path / "run", spec=ScriptSpec(script="train.py").to_json()).path, flops_per_sample="count")


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    for file in ("metrics.jsonl", "rank0.jsonl", "evaluations.jsonl", run_directory.ENVIRONMENT):
        (run.path / file).unlink()
    assert "no step was measured" in wb.report(wb.Run.load(run.path)).html
    assert throughput([{"step": 1}, {"step": 2, "samples": 1, "seconds": 1.0}]) == []


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'training-workbench[exporters]'")


def written(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.suffix != ".log"}


def exported_twice(tmp_path: Path, to: str) -> tuple[wb.Run, Path]:
    """While the run goes on, and after its end."""
    run = made(tmp_path / "run")
    folder = wb.export(run, to, tmp_path / "out")
    write(run.path / "metrics.jsonl", metrics(11, 12))
    assert wb.export(wb.Run.load(run.path), to, folder) == folder
    before = written(folder)
    wb.export(wb.Run.load(run.path), to, folder)
    assert written(folder) == before, "nothing is new"
    assert json.loads((folder / STATE).read_text())[f"{to} abc"]["step"] == 12
    return run, folder


@pytest.mark.slow
def test_tensorboard(tmp_path: Path) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder = exported_twice(tmp_path, "tensorboard")
    (board,) = (path for path in folder.iterdir() if path.is_dir())
    read = EventAccumulator(str(board)).Reload()
    losses = read.Scalars("loss")
    assert [event.step for event in losses] == [*range(1, 13)]
    assert losses[3].value == pytest.approx(0.25)
    assert losses[3].wall_time == pytest.approx(1.8e9 + 2)
    assert read.Scalars("evaluation/loss")[0].value == pytest.approx(0.7)
    assert read.Scalars("samples_per_sec")[0].value == pytest.approx(64)
    assert [(event.step, event.value) for event in read.Scalars("usage/cpu")] == [(4, 0.25), (6, 0.75)]
    assert [(event.step, event.value) for event in read.Scalars("gradients/layer")] == [(4, 2.0), (8, 4.0)]
    assert not {"usage/watts", "usage/gpu"} & set(read.Tags()["scalars"])
    assert "spec/text_summary" in read.Tags()["tensors"] or "spec" in read.Tags()["tensors"]


def test_a_pipeline_s_idle_time_is_beside_its_prediction(tmp_path: Path) -> None:
    run = made(tmp_path / "run", nproc_per_node=4, pipeline_parallel=2, accumulation=4)
    assert wb.report(run).pipeline_idle is None  # the second stage has not written yet
    for rank, (computes, waits) in enumerate(((0.3, 0.1), (0.5, 0.1), (0.2, 0.2), (0.2, 0.4))):
        steps = [{"step": n, "data_wait": 0.1, "forward": 0.1, "backward": computes - 0.1, "other": waits} for n in range(10)]
        write(tmp_path / "run" / f"rank{rank}.new", [{"rank": rank, "world_size": 4, "clock": "host", "device": "cpu"}, *steps])
        (tmp_path / "run" / f"rank{rank}.new").rename(tmp_path / "run" / f"rank{rank}.jsonl")
    report = wb.report(wb.Run.load(run.path))
    found = report.pipeline_idle
    assert [(stage.computes, stage.waits) for stage in found.stages] == [pytest.approx((0.4, 0.1)), pytest.approx((0.2, 0.3))]
    assert (found.idle, found.bubble, found.predicted) == (pytest.approx(0.4), 0.25, 0.2)
    assert [found.of_stage(rank) for rank in (0, 1)] == [pytest.approx(0.2), pytest.approx(0.6)]
    assert list(found.to_frame().columns) == ["computes", "waits", "idle", "predicted"]
    assert type(found).from_json(found.to_json()) == found
    for shown in (report.html, str(report)):
        assert "40 % idle; predicted 20 % with equal stages" in shown
    for schedule, expected in (("gpipe", 0.25), ("interleaved(chunks=3)", 1 / 12), ("zero_bubble", 0.0)):
        other = run.spec.replace(pipeline_schedule=schedule)
        assert pipeline_idle(other, run.rank_means).bubble == pytest.approx(expected)  # type: ignore[union-attr]


@pytest.mark.slow
def test_mlflow(tmp_path: Path) -> None:
    needs("mlflow")
    from mlflow.tracking import MlflowClient

    _, folder = exported_twice(tmp_path, "mlflow")
    client = MlflowClient(tracking_uri=folder.as_uri())
    experiment = client.get_experiment_by_name("workbench")
    (stored,) = client.search_runs([experiment.experiment_id])
    assert [metric.step for metric in client.get_metric_history(stored.info.run_id, "loss")] == [*range(1, 13)]
    assert stored.data.metrics["evaluation/accuracy"] == 0.5
    assert [metric.value for metric in client.get_metric_history(stored.info.run_id, "gradients/layer")] == [2.0, 4.0]
    assert stored.data.metrics["usage/cpu"] == 0.75
    assert stored.data.params["steps"] == "20"
    assert stored.info.status == "FAILED"


@pytest.mark.slow
def test_wandb(tmp_path: Path) -> None:
    needs("wandb")
    _, folder = exported_twice(tmp_path, "wandb")
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert all(file.stat().st_size > 500 for file in files)
    assert all(name in files[0].read_bytes() for name in (b"samples_per_sec", b"usage/cpu", b"gradients/layer"))


def test_what_cannot_be_exported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(tmp_path / "run")
    with pytest.raises(ValueError, match="tensorbord"):
        wb.export(run, "tensorbord", tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ExportError, match=r"wandb is not installed .*pip install wandb"):
        wb.export(run, "wandb", tmp_path / "out")
