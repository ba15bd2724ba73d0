"""Finds, for a run that ran out of memory, the cheapest changes with which it would have fitted, and the largest micro-batch."""

import os
from dataclasses import dataclass
from typing import Any

from workbench.core import run_directory, units
from workbench.core.device import Device
from workbench.core.display import table as display
from workbench.core.progress import predicts
from workbench.core.synonyms import accept_synonyms
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.fit import MARGIN
from workbench.memory.analysis.whatif import MaxMicroBatch, MemoryLadder, needed
from workbench.memory.ladder import memory_ladder
from workbench.memory.max_micro_batch import max_micro_batch
from workbench.runs.launch.resume import refuse_code_of_others
from workbench.runs.out_of_memory import HOST, OutOfMemory
from workbench.runs.rows import said_by
from workbench.runs.run import Run
from workbench.runs.spec import AUTO, RunSpec, ScriptSpec
from workbench.runs.target import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory that was available to a rank."""

    bytes: int
    """Bytes."""
    source: str
    """Source of the number, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WouldFit(display.Shown):
    """Which changes would have kept a run from running out of memory, predicted by dry runs."""

    run: str
    """Name of the run."""
    room: Room
    """Memory that was available to a rank."""
    ladder: MemoryLadder
    """The cheapest changes that make it fit; its start is the run as it was."""
    largest: MaxMicroBatch
    """The largest micro-batch, with nothing else changed."""
    micro_batch: int
    """Micro-batch of the run."""

    @property
    def start(self) -> MemoryBreakdown:
        """The run as it was."""
        return self.ladder.start

    @property
    def changes(self) -> dict[str, Any]:
        """Knobs to change: `run.spec.replace(**found.changes)`; none where it should have fitted."""
        return self.ladder.changes

    @property
    def expected(self) -> bool:
        """Does the prediction agree that it could not fit?"""
        return needed(self.start) > self.ladder.capacity

    @property
    def word(self) -> str:
        """Predicted need against what there was, and what would have fitted."""
        needs = (
            f"{self.run}: predicted need {units.bytes_(needed(self.start))}, at the {self.start.peak_moment}; there was "
            f"{units.bytes_(self.room.bytes)} ({self.room.source}), {units.percent(self.ladder.margin)} of it to stay free"
        )
        if not self.expected:
            return f"{needs}. By that it should have fitted: {_SURPRISE}"
        if self.ladder.fits:
            cure = f"It would have fitted with {units.knobs(self.changes)}{self.ladder.doubt}"
        else:
            over = units.bytes_(needed(self.ladder.end) - self.ladder.capacity)
            cure = f"Nothing tried would have made it fit; with {units.knobs(self.changes) or 'the run as it was'} {over} are missing"
        return f"{needs}. {cure}. {self._batch}"

    @property
    def _batch(self) -> str:
        if not self.largest.micro_batch:
            return "With nothing else changed not even one sample fits"
        largest = f"micro_batch={self.largest.micro_batch} is the largest that fits, instead of {self.micro_batch}"
        return f"With nothing else changed {largest}{self.largest.doubt}"

    @property
    def table(self) -> display.Table:
        """The changes one by one, and the result."""
        ladder = self.ladder.table
        return display.Table(columns=ladder.columns, rows=ladder.rows, title=ladder.title, note=self.word)

    def to_frame(self) -> Any:
        """A DataFrame with one row per change, the start first, in bytes."""
        return self.ladder.to_frame()

    def plot(self, ax: Any = None) -> Any:
        """The memory after each change, against what there was; returns the Axes."""
        return self.ladder.plot(ax=ax)

    def __repr__(self) -> str:
        return f"WouldFit({self.run!r}, {units.knobs(self.changes) or 'no changes'}, fits={self.ladder.fits})"


_SURPRISE = (
    "something grew that is not in a step (wb.find_leaks(step, loader) finds a leak), what others took at that moment, fragmentation, or "
    "shapes that depend on the data"
)


@accept_synonyms
@predicts("dry runs of the step that ran out of memory, and of changes")
def would_fit(run: Run | str | os.PathLike[str], *, margin: float = MARGIN) -> WouldFit:
    """Find what would have kept a run from running out of memory: the cheapest changes, and the largest micro-batch, by dry runs.

    The available memory is taken from the error. On a GPU, it is the capacity minus what other processes used. In main memory, it is what
    the rank held in tensors plus its share of the free memory, or else its share of the limit that the ranks had in common.

    Args:
        run: a run of a RunSpec that ran out of memory, or its directory (otherwise: `wb.memory_ladder(build, device, batch=batch)`).
        margin: share of the memory that stays free.

    Raises:
        ValueError: it is a run of a script, did not run out of memory, its available memory is not known, or its task cannot be estimated.
        LaunchError: the directory belongs to another user or contains the code, and its task would be executed as you.
    """
    if not isinstance(run, Run | str | os.PathLike):
        model = (
            " A model that has not run: wb.memory_ladder(build, device, batch=batch), or wb.estimate_memory(build, batch, device=device)."
        )
        instead = " Of a spec: wb.max_micro_batch(spec, …)." if isinstance(run, RunSpec) else model if callable(run) else ""
        raise ValueError(f"would_fit({shown(run)}): expected a run whose memory ran out, or the path of its directory.{instead}")
    run = run if isinstance(run, Run) else Run.load(run)
    failure = run.error
    reason = failure and (failure.memory or OutOfMemory.parse(failure.message))
    if not failure or not reason:
        how = f"it failed of something else: {failure.message:.200}" if failure else f"it is {run.state}"
        other = "wb.estimate_memory(model, batch, …)" if isinstance(run.spec, ScriptSpec) else "wb.max_micro_batch(run.spec, …)"
        raise ValueError(f"would_fit({run!r}): expected a run whose memory ran out, and {how}. Of others: {other}")
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
    refuse_code_of_others(run)  # its task is imported to be estimated
    spec, gpu = run.spec, _gpu_of(run, failure.rank or 0)
    if reason.device == HOST and (gpu or spec.device == "cuda"):
        raise ValueError(
            f"would_fit({run!r}): main memory ran out, and its steps were on a GPU: it was filled by the loader and its workers. "
            "Try fewer num_workers, a smaller prefetch_factor, or a dataset that is read piece by piece"
        )
    device: str | Device = "cpu" if reason.device == HOST else gpu or "cuda"
    available = available_memory(reason, ranks=spec.nproc_per_node, limit=_memory_limit(run), gpu=gpu.memory if gpu else None)
    return WouldFit(
        run=run.name,
        room=available,
        ladder=memory_ladder(spec, device, capacity=available.bytes, margin=margin),
        largest=max_micro_batch(spec, device, capacity=available.bytes, margin=margin, budget_s=None),
        micro_batch=spec.micro_batch,
    )


def _gpu_of(run: Run, rank: int) -> Device | None:
    """The GPU on which a rank ran, by the head of its file; None on a CPU, for one that the table lacks, and where it died too early."""
    try:
        return Device.named(said_by(run.path, rank)["device"])
    except (LookupError, ValueError):
        return None


def _memory_limit(run: Run) -> int | None:
    """Bytes of main memory that all ranks together could have."""
    info = run_directory.read_json(run.path / run_directory.RUN_JSON)
    for record in (info, run_directory.read_json(run.path / info["launch_dir"] / run_directory.RUN_JSON)):
        if limit := (record.get("outcome") or {}).get("memory_limit"):
            return int(limit)
    return None


def available_memory(reason: OutOfMemory, *, ranks: int, limit: int | None = None, gpu: int | None = None) -> Room:
    """Memory that was available to a rank when it ran out.

    Args:
        reason: what the error said.
        ranks: how many shared the main memory.
        limit: bytes of main memory that they had together, where that is known beside the error.
        gpu: bytes of the GPU, for errors that do not say it.

    Raises:
        ValueError: it is not known.

    >>> available_memory(OutOfMemory(device="GPU 0", capacity=8 * 2**30, this_process=2 * 2**30, processes={7: 3 * 2**30}), ranks=1).source
    'GPU 0 has 8.00 GiB, of which other processes had 3.00 GiB'
    """
    return _of_main_memory(reason, ranks, limit) if reason.device == HOST else _of_gpu(reason, gpu)


def _of_gpu(reason: OutOfMemory, datasheet: int | None) -> Room:
    capacity = datasheet if reason.capacity is None else reason.capacity
    if capacity is None and reason.allowed is None:
        raise ValueError(
            f"memory ran out on {reason.device}, and neither the error nor the run says how much it has: "
            "wb.memory_ladder(run.spec, device) with its name, such as 'H200'"
        )
    limits = []
    if capacity is not None:
        others = min(reason.others or 0, capacity - 1)
        beside = f", of which other processes had {units.bytes_(others)}" if others else ""
        limits.append(Room(bytes=capacity - others, source=f"{reason.device} has {units.bytes_(capacity)}{beside}"))
    if reason.allowed is not None:  # counts what the allocator reserves only
        words = f"PyTorch was allowed {units.bytes_(reason.allowed)} of {reason.device}, and had more outside of its allocator"
        limits.append(Room(bytes=reason.allowed + (reason.outside or 0), source=words))
    return min(limits, key=lambda room: room.bytes)


def _of_main_memory(reason: OutOfMemory, ranks: int, limit: int | None) -> Room:
    each = f", shared by {ranks} ranks" if ranks > 1 else ""
    if reason.held is not None and reason.held.available is not None:
        held, left = reason.held.total, reason.held.available
        return Room(bytes=max(1, held + left // ranks), source=f"{units.bytes_(held)} held in tensors, {units.bytes_(left)} left{each}")
    common = limit if reason.capacity is None else reason.capacity
    if common is None:
        raise ValueError(
            "main memory ran out, and nobody noted how much there was: wb.memory_ladder(run.spec, 'cpu', capacity=bytes_per_rank)"
        )
    return Room(bytes=max(1, common // ranks), source=f"a limit of {units.bytes_(common)}{each}, Python and its libraries included")
