"""wb.export: writes a run for TensorBoard, MLflow or Weights & Biases, from its directory, as far as it has come; without a network."""

import contextlib
import importlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from workbench.core import run_directory
from workbench.core.checks import choice
from workbench.core.synonyms import accept_synonyms
from workbench.runs.page import dense_peak, figures_of, flops_of, norms_of, throughput, usage_of
from workbench.runs.run import ACTIVE, Run

STATE = "workbench-export.json"
"""In the folder: the last step of each run that was exported, and what its counterpart is called there."""
EXPORTED = ("safetensors", "dcp")
"""What `export_weights` makes of a checkpoint: weights, or weights and optimizer for torch.distributed.checkpoint."""
DCP_INDEX = ".metadata"
"""In a directory of torch.distributed.checkpoint: its index, which is written last."""
_STRANGE = re.compile(r"[^A-Za-z0-9_\-. :/]")
"""What MLflow does not take in a name."""
Rows = Sequence[tuple[int, float, Mapping[str, float]]]
"""Step, seconds since 1970 and values by name."""
State = dict[str, Any]


class ExportError(ValueError):
    """A run cannot be exported so; the message says what to try."""


@accept_synonyms
def export(run: Run, to: str, folder: str | os.PathLike[str], *, flops_per_sample: float | Literal["count"] | None = None) -> Path:
    """Write a run's new records into a folder for another tool; call it repeatedly while the run continues, and after its end.

    Args:
        run: a run in any state.
        to: "tensorboard" (a folder of event files), "mlflow" (a file store) or "wandb" (offline runs, which `wandb sync --append` uploads).
        folder: created if it does not exist.
        flops_per_sample: for the MFU of each step, as `report` takes it; left out where the peak of the GPUs is not known, or above 100 %.

    Returns:
        The folder.

    Raises:
        ValueError: no such target, or FLOPs that cannot be counted.
        ExportError: the tool's package is not installed, or the folder was not made by `export`.
    """
    choice("to", to, WRITERS)
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ExportError(f"{path} cannot be a folder: {error.strerror}; give another folder") from None
    state: State = {}
    if (path / STATE).exists():
        state = run_directory.read_json(path / STATE)
    mine = state.setdefault(f"{to} {run.id}", {})
    last = mine.get("step", -1)
    rows = [row for row in merged(run, flops_of(run, flops_per_sample)) if row[0] > last]
    ended = run.state not in ACTIVE
    if not ended and rows:  # its evaluation may follow
        rows = rows[:-1]
    if rows or "step" not in mine:
        WRITERS[to](run, path, rows, mine, ended)
        mine["step"] = rows[-1][0] if rows else last
        run_directory.write_json(path / STATE, state)
    return path


def merged(run: Run, flops_per_sample: float | None = None) -> Rows:
    """A row per step: loss, learning rate, throughput, MFU, gradient norms and usage, and what was evaluated after it."""
    steps: dict[int, dict[str, float]] = {}
    times: dict[int, float] = {}
    rows = run.metric_rows
    rates = {row["step"]: rate for row, rate in throughput(rows)}
    peak, _ = dense_peak(run) if flops_per_sample else (None, "")
    for row in rows:
        values = steps.setdefault(row["step"], {})
        if "lr" in row:
            values |= {name: float(row[name]) for name in ("loss", "lr", "grad_norm") if row.get(name) is not None}
            experts = row.get("expert_shares")
            tokens = {f"expert_share/{i}": share for i, share in enumerate(experts if isinstance(experts, list) else ())}
            tokens["dropped_tokens"] = row.get("dropped_tokens")
            values |= {name: float(value) for name, value in tokens.items() if isinstance(value, int | float)}
            times[row["step"]] = run.created + (row.get("seconds") or 0.0)
        else:
            values |= {f"evaluation/{name}": float(row[name]) for name in row.keys() - run_directory.METRIC_KEYS if row[name] is not None}
        if row["step"] in rates:
            values["samples_per_sec"] = rates[row["step"]]
            if flops_per_sample and peak and (used := rates[row["step"]] * flops_per_sample / peak) <= 1:
                values["mfu"] = used
    for row in run.evaluations:
        if (figures := figures_of(row)) and row["step"] in steps:
            steps[row["step"]] |= {f"evaluation/{name.removeprefix('validation_')}": value for name, value in figures.items()}
            for name in figures:
                steps[row["step"]].pop(f"evaluation/validation_{name}", None)
    for kind, more, of in (("usage", run.usage, usage_of), ("gradients", run.gradient_norms, norms_of)):
        for row in more:
            if (found := of(row)) and row["step"] in steps:
                steps[row["step"]] |= {f"{kind}/{name}": value for name, value in found.items()}
    return [
        (step, times.get(step, run.created), {_STRANGE.sub("_", name)[:200]: value for name, value in values.items()})
        for step, values in sorted(steps.items())
    ]


def _package(name: str, wheel: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ExportError(
            f"{package} is not installed ({error}): pip install {wheel}, or all three with pip install 'training-workbench[exporters]'"
        ) from None


def _tensorboard(run: Run, folder: Path, rows: Rows, mine: State, ended: bool) -> None:
    writers = _package("tensorboard.summary.writer.event_file_writer", "tensorboard")
    event, summary = (_package(f"tensorboard.compat.proto.{name}", "tensorboard") for name in ("event_pb2", "summary_pb2"))
    text = _package("tensorboard.plugins.text.summary_v2", "tensorboard")
    writer = writers.EventFileWriter(
        str(folder / "".join(c if c.isalnum() or c in "-_." else "-" for c in f"{run.name[:80]}-{run.id[:8]}"))
    )
    try:
        if "begun" not in mine:
            mine["begun"] = True
            spec = "\n".join(f"    {name}: {value}" for name, value in run.spec.to_json().items())
            writer.add_event(event.Event(wall_time=run.created, step=0, summary=text.text_pb("spec", spec)))
        for step, seconds, values in rows:
            parts = [summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            writer.add_event(event.Event(wall_time=seconds, step=step, summary=summary.Summary(value=parts)))
    finally:
        writer.close()


def _mlflow(run: Run, folder: Path, rows: Rows, mine: State, ended: bool) -> None:
    os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    mlflow, entities = _package("mlflow.tracking", "mlflow-skinny"), _package("mlflow.entities", "mlflow-skinny")
    client = mlflow.MlflowClient(tracking_uri=folder.as_uri())
    if "run" not in mine:
        known = client.get_experiment_by_name("workbench")
        experiment = known.experiment_id if known else client.create_experiment("workbench")
        made = client.create_run(experiment, start_time=int(run.created * 1000), run_name=run.name, tags={"workbench_id": run.id})
        mine["run"] = made.info.run_id
        params = [entities.Param(name, str(value)[:500]) for name, value in run.spec.to_json().items()]
        client.log_batch(mine["run"], params=params)
    metrics = [entities.Metric(name, value, int(seconds * 1000), step) for step, seconds, values in rows for name, value in values.items()]
    for first in range(0, len(metrics), 1000):
        client.log_batch(mine["run"], metrics=metrics[first : first + 1000])
    if ended:
        client.set_terminated(mine["run"], "FINISHED" if run.ok else "FAILED")


def _wandb(run: Run, folder: Path, rows: Rows, mine: State, ended: bool) -> None:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    wandb = _package("wandb", "wandb")
    quiet = {"mode": "offline", "disable_git": True, "console": "off", "silent": True, "x_disable_stats": True, "x_disable_meta": True}
    settings = wandb.Settings(**{name: value for name, value in quiet.items() if name in getattr(wandb.Settings, "model_fields", quiet)})
    words = {
        "project": "workbench",
        "id": re.sub(r"[^\w-]", "-", run.id, flags=re.ASCII)[:32],
        "name": run.name,
        "config": run.spec.to_json(),
        "dir": str(folder),
    }
    alone = wandb.run is None
    with contextlib.closing(_Finished(wandb.init(settings=settings, **words))) as made:
        for step, _, values in rows:
            made.run.log({name: value for name, value in values.items() if not math.isnan(value)}, step=step)

    if alone:  # else a run of the caller's own goes on
        wandb.teardown()


class _Finished:
    """Finishes an offline run of W&B when it is closed."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def close(self) -> None:
        self.run.finish()


WRITERS: Mapping[str, Callable[[Run, Path, Rows, State, bool], None]] = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}
"""Target → what writes the rows that are new."""
