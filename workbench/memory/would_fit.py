"""Advising: what would have fitted, of a run that ran out of memory."""

import os

from workbench.core import run_directory
from workbench.core.device import Device
from workbench.memory.analysis.advice import WouldFit, room_of
from workbench.memory.capacity import MARGIN
from workbench.memory.ladder import memory_ladder
from workbench.memory.max_micro_batch import max_micro_batch
from workbench.runs.out_of_memory import HOST, OutOfMemory
from workbench.runs.run import Run
from workbench.runs.spec import AUTO, RunSpec


def would_fit(run: Run | str | os.PathLike[str], *, margin: float = MARGIN) -> WouldFit:
    """What would have kept a run from running out of memory: the cheapest changes by fake runs, and the largest micro-batch without any.

    What could be had is taken from the error: of a GPU its capacity, less what other processes had there; of main memory what the rank held
    in tensors and its share of what was left, else its share of the limit that the ranks had in common.

    Args:
        run: a run of a RunSpec whose memory ran out, or its directory.
        margin: share of the memory that is to stay free.

    Raises:
        ValueError: it is a script's, did not run out of memory, or nobody knows how much there was; or its task cannot be estimated.
    """
    run = run if isinstance(run, Run) else Run.load(run)
    failure = run.error
    reason = failure and (failure.memory or OutOfMemory.parse(failure.message))
    if not failure or not reason:
        how = f"it failed of something else: {failure.message:.200}" if failure else f"it is {run.state}"
        raise ValueError(f"would_fit({run!r}): wanted is a run whose memory ran out, and {how}. Of others: wb.max_micro_batch(run.spec, …)")
    if not isinstance(run.spec, RunSpec):
        raise ValueError(
            f"would_fit({run!r}): it ran a script, whose step is not known before it runs. With its model and batch it is: "
            "wb.memory_ladder(build_model, device, batch=batch, loss=loss, optimizer=…)"
        )
    if run.spec.micro_batch == AUTO:
        raise ValueError(
            f"would_fit({run!r}): its micro_batch was chosen when it started, and its first lines say which (run.logs(0)). What fits: "
            "wb.memory_ladder(run.spec.replace(micro_batch=…), device, capacity=bytes_per_rank)"
        )
    spec, gpu = run.spec, _gpu_of(run, failure.rank or 0)
    if reason.device == HOST and (gpu or spec.device == "cuda"):
        raise ValueError(
            f"would_fit({run!r}): main memory ran out, and its steps were on a GPU: not they filled it, but the loader and its workers. "
            "Try fewer num_workers, a smaller prefetch_factor, or a dataset that is read piece by piece"
        )
    device: str | Device = "cpu" if reason.device == HOST else gpu or "cuda"
    room = room_of(reason, ranks=spec.nproc_per_node, limit=_memory_limit(run), gpu=gpu.memory if gpu else None)
    return WouldFit(
        run=run.name,
        room=room,
        ladder=memory_ladder(spec, device, capacity=room.bytes, margin=margin),
        largest=max_micro_batch(spec, device, capacity=room.bytes, margin=margin),
        micro_batch=spec.micro_batch,
    )


def _gpu_of(run: Run, rank: int) -> Device | None:
    """The GPU on which a rank ran, by the head of its file; None on a CPU, for one that the table lacks, and where it died too early."""
    try:
        rows = run_directory.LineTail(run.path / run_directory.rank_file(rank)).read()
        return Device.named(next(row["device"] for row in rows if "device" in row))
    except (StopIteration, OSError, ValueError):
        return None


def _memory_limit(run: Run) -> int | None:
    """Bytes of main memory that all ranks together could have."""
    info = run_directory.read_json(run.path / run_directory.RUN_JSON)
    for one in (info, run_directory.read_json(run.path / info["launch_dir"] / run_directory.RUN_JSON)):
        if limit := (one.get("outcome") or {}).get("memory_limit"):
            return int(limit)
    return None
