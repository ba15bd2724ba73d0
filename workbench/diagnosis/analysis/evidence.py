"""Evidence: what clocks and experiments measured of a training step, before it is judged. Seconds, bytes and fractions only.

A step here is one optimizer step, so it takes `accumulation` batches from the loader. Times of several ranks that compute together are
those of the slowest one: the job's.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.machine_speeds import MachineSpeeds
from workbench.core.system_load import Noise
from workbench.data.analysis.format_costs import FormatComparison
from workbench.harness.results import VariantTimes
from workbench.timeline.timeline import Timeline

__all__ = ["ARMS", "SMALL_OP", "TRACE", "Evidence", "Gradients", "Inside", "Loading", "RankEvidence", "Stalls", "Tables", "what_changes"]

TRACE = "a trace of the step"
"""The look inside a step, as notes call it."""
ARMS = {
    "cached": "the batches that were just trained on, again: no loader",
    "loader": "the loader alone: no training",
    "device_batch": "the same batches, already on the device: no transfer",
    "no_optimizer": "no optimizer step",
    "no_sync": "no reduction of the gradients",
    "doubled": "batches twice as large",
    "precision=amp_bf16": "forward and backward in mixed precision with bf16",
    "precision=amp_fp16": "forward and backward in mixed precision with fp16",
    "tf32": "products of fp32 matrices, and convolutions, in TF32",
    "optimizer=fused": "the optimizer's fused implementation",
    "optimizer=foreach": "the optimizer's foreach implementation",
    "channels_last": "weights and images in the channels_last layout",
    "threads=": "another number of threads per operator (`threads=1`, `threads=2`, …)",
    "no_gc": "Python's cyclic garbage collector switched off",
    "trimmed": "batches cut to the mean length of their samples: no padding",
}
"""What each variant changes in the step, by name; a name that ends in "=" is followed by a value."""


def what_changes(name: str) -> str:
    """What an arm changes in the step, in a few words."""
    kind, _, value = name.partition("=")
    return "1 thread" if name == "threads=1" else ARMS[name].partition(":")[0] if name in ARMS else f"{value} {kind}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """What it takes to make a batch. Seconds per batch (not per step)."""

    kind: str
    """"DataLoader", "iterable" (can be read again) or "once" (an iterator or generator)."""
    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    misses_epochs: bool = False
    """Has the dataset a `set_epoch` that persistent workers would not see? A training starts them anew with each epoch."""
    pin_memory: bool = False
    batch_size: int | None = None
    """Samples per batch."""
    batch_bytes: int = 0
    stream: str = ""
    """What workers do with an IterableDataset: "split" (each gives its part), "repeated" (each gives all of it) or "unknown"; "" = no such
    dataset."""
    tensors: bool = False
    """Does it index the tensors of a TensorDataset sample by sample?"""
    epoch: int | None = None
    """Batches per epoch; None = not known."""
    alone: float = math.nan
    """From the loader as it is, nothing else running, start-up and a full queue left out: the service time."""
    cpu: float | None = None
    """CPU of making a batch in the training process (no workers)."""
    blocked: float | None = None
    """Of making it: neither computing nor waiting for a core (storage, network, sleep)."""
    fetch_cpu: float | None = None
    """Of `cpu`: the dataset's own (decode, transform)."""
    fetch_blocked: float | None = None
    collate: float | None = None
    """Of `cpu`: collate_fn."""
    slow_share: float | None = None
    """Share of the time of making batches that the slowest twentieth of the samples takes beyond the median; near 0 = all alike."""
    read_bytes: float | None = None
    """Bytes read from files per batch, page cache included (Linux: rchar)."""
    files: float | None = None
    """Different files opened per batch, where it could be counted: a shard that is opened for each sample counts once."""
    worker_cpu: float | None = None
    """CPU of a worker per batch, transport included; from a probe with one worker, or from the running ones."""
    handover: float | None = None
    """CPU of the training process to take a batch from a worker."""
    start_up: float | None = None
    """From `iter(loader)` to the first batch, beyond a steady one: paid once per epoch unless workers persist."""
    depth: tuple[int, ...] = ()
    """Batches that lay ready before each of the first steps, where that could be read."""
    slow_lines: tuple[tuple[str, float], ...] = ()
    """Where making a batch in this process spends its time: "file.py:12 function" and its share, largest first."""
    random_lines: tuple[tuple[str, float], ...] = ()
    """Those of `slow_lines` that draw random numbers, such as augmentation: nobody can do them beforehand."""

    def within(self, line: str) -> str:
        """The share of a slow line, in words; and that of its function, where other slow lines are in it, too.

        >>> Loading(kind="list", slow_lines=(("a.py:7 warp", 0.36), ("a.py:5 warp", 0.3))).within("a.py:7 warp")
        'at least 66 % is in warp, 36 % in the line a.py:7 alone'
        >>> Loading(kind="list", slow_lines=(("a.py:7 warp", 0.36),)).within("a.py:7 warp")
        '36 % is in a.py:7 warp'
        """
        place, _, function = line.partition(" ")
        share, more = dict(self.slow_lines)[line], self.function_share(line)
        if more == share:
            return f"{units.percent(share)} is in {line}"
        return f"at least {units.percent(min(more, 1.0))} is in {function}, {units.percent(share)} in the line {place} alone"

    def function_share(self, line: str) -> float:
        """The fraction of the time of making a batch that the slow lines of one of them's function take together."""
        place, _, function = line.partition(" ")
        file = place.rpartition(":")[0]
        return sum(other for name, other in self.slow_lines if name.startswith(f"{file}:") and name.partition(" ")[2] == function)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Steps that took far longer than their neighbours, the waiting for data aside. Steps are counted by calls of step()."""

    steps: int = 0
    """How many steps were examined."""
    at: tuple[int, ...] = ()
    """Which of them stalled."""
    extra: float = 0.0
    """Mean seconds that a stall adds."""
    per_step: float = 0.0
    """Mean seconds that they add to a step."""
    share: float = 0.0
    """Fraction of the time of all steps (in a full loop) that the stalls add."""
    every: float | None = None
    """Steps from one to the next, where that is regular."""
    where: str | None = None
    """The line that was running: "train.py:41 save_checkpoint"."""
    kind: str | None = None
    """"checkpoint", "evaluation", "drawing", "logging", "garbage collection" or None."""
    noted: bool = False
    """True: checkpoints of a watched script, each timed where it was saved. False: steps that were too long to be usual ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What happens inside a cached step (no loader), from a short trace and from samples of the Python stack. Seconds per step."""

    step: float
    """Of the cached step while the trace ran."""
    ops: float
    """With at least one torch operator (on a GPU: kernel or copy) running."""
    op_count: float = 0.0
    """Top-level operators (on a GPU: kernels)."""
    small_ops: float = 0.0
    """In operators shorter than SMALL_OP, the optimizer's left out: what is left of them is mostly the cost of calling them. 0 on a GPU,
    where a short kernel costs the host nothing as long as the queue is full."""
    optimizer: float | None = None
    """Inside Optimizer.step, as the trace sees it."""
    optimizer_ops: float | None = None
    """Of `optimizer`: with an operator running; the rest is Python."""
    collectives: float | None = None
    """With a collective running and no other operator: exposed communication; None without several ranks."""
    syncs: float = 0.0
    """`.item()` and the like, per step: at each the GPU runs out of work. Waits for copies to the device are the transfer's."""
    sync_idle: float = 0.0
    """On a GPU: it has nothing to do since such a wait, until the next kernel."""
    launching: float = 0.0
    """On a GPU: it has nothing to do, and a thread of the host is in an operator or in a call that launches."""
    waits: float = 0.0
    """On a GPU: the training thread waits for it."""
    graphs: float = 0.0
    """CUDA graphs that are launched per step."""
    slowdown: float = 0.0
    """What the trace cost: 0.1 = the step took 10 % longer while it ran."""
    cpu: float = 0.0
    """CPU of the process, all threads, per cached step outside the trace."""
    blocked: float = 0.0
    """The training thread neither computes nor waits for a core, for the device or for backward in another thread: it sleeps, reads or
    writes files, or waits for other ranks."""
    waiting: float = 0.0
    """The training thread is ready and waits for a core."""
    gc: float = 0.0
    """In Python's cyclic garbage collector."""
    lines: tuple[tuple[str, float], ...] = ()
    """Where Python was, outside torch: "train.py:41 function" and its share of the step, largest first."""
    own: tuple[tuple[str, float], ...] = ()
    """On a CPU: lines of the step's own code, outside of modules, losses, backward and optimizer, operators of torch included.
    Otherwise like `lines`."""
    helpers: tuple[tuple[str, float], ...] = ()
    """Like `own`: lines of functions that a module's `forward` calls."""


SMALL_OP = 20e-6
"""Seconds: dispatch, allocation and autograd book-keeping of one operator cost 5 to 15 µs under a profiler. Measured on the machine of
`machine_speeds.FITTED_ON`; scaled by what dispatch takes on this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What the ranks reduce, and what that costs here: seconds = latency × buckets + size × per_byte, measured with bare all-reduces."""

    size: int
    """Bytes of the gradients."""
    buckets: int
    """Reductions per step."""
    latency: float
    """Seconds of a tiny all-reduce."""
    per_byte: float
    """Seconds per byte of a large one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """The module with weights that a step calls most often, as a loop over time steps or samples does."""

    name: str
    """In the model; "" = it is the model."""
    kind: str
    """Its class: "LSTMCell"."""
    calls: float
    """Per batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Embedding tables whose gradient is dense: the optimizer updates all rows, also those that a step does not use."""

    names: tuple[str, ...]
    """Of their modules in the model, the largest first."""
    numbers: int
    """In all of them."""
    touched: float
    """Fraction of these numbers that lie in rows whose gradient is not zero, in the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
    """One rank on its own: seconds per step without reductions."""

    rank: int
    timeline: Timeline
    """Its steps in the full loop, as the clocks see them."""
    alone: float = math.nan
    """Loader and compute, no reduction."""
    wait: float = math.nan
    """Of `alone`: waiting for data."""
    compute: float = math.nan
    """Cached batches, no reduction."""
    stalls: Stalls = Stalls()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(JsonDataclass):
    """Everything that was measured of one training step."""

    step: float
    """Mean seconds of a full step, stalls included: loader, transfer, compute, reductions."""
    device: str = "cpu"
    world_size: int = 1
    accumulation: int = 1
    micro_batches: int = 1
    """Batches for each of which a step calls backward: `accumulation`, or as many as the list holds that it takes as one batch."""
    threads: int = 1
    """Threads per operator of each rank."""
    samples: float | None = None
    """Samples per step over all ranks, where it is known."""
    parameters: int | None = None
    """Numbers in the model that are trained."""
    tensors: int | None = None
    """Tensors they lie in."""
    convolutions: bool = False
    """Is there a 2d convolution in the model?"""
    optimizer: str | None = None
    """Class of the optimizer, and its implementation: "AdamW(foreach)"."""
    precision: str = "fp32"
    arms: Mapping[str, VariantTimes] = dataclasses.field(default_factory=dict)
    loading: Loading | None = None
    inside: Inside | None = None
    stalls: Stalls = Stalls()
    gradients: Gradients | None = None
    tables: Tables | None = None
    """Large embedding tables with a dense gradient; None = there are none, or they were not looked for."""
    repeated: Repeated | None = None
    """The module that is called most often; None = none was seen to be called."""
    ranks: tuple[RankEvidence, ...] = ()
    noise: Noise | None = None
    longest_wait: float = math.nan
    """Mean seconds, over steps, of the longest wait for data of any rank while none waits for another: with reductions, all wait for it."""
    padding: float | None = None
    """Fraction of the batch that is padding; None = no padding was recognised."""
    alloc_retries: float = 0.0
    """How many times per step the GPU's allocator found no memory, waited for the device, and gave back all that it had cached."""
    observed: bool = False
    """True: from a finished run, nothing was tried. False: from experiments."""
    seconds: float = 0.0
    """What the experiments took."""
    steps: int = 0
    """Calls of step()."""
    notes: tuple[str, ...] = ()
    """What could not be measured, and what was done instead."""
    left_out: tuple[str, ...] = ()
    """What the budget left no time for: TRACE, and changes as `what_changes` calls them."""
    enough: int | None = None
    """Seconds of a budget that would probably suffice for all of that; None where nothing was left out."""
    speeds: MachineSpeeds | None = None
    """What basic operations cost on the machine, which scales some limits; None = not measured: they are as they were fitted."""
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of a script that was watched: "loop" (over its loader), "step" (of the optimizer), "dataset" → "train.py:41 main"; "framework" →
    whose training loop it is (`script_remedies.SETTINGS_OF`)."""
    formats: FormatComparison | None = None
    """What the data cost in other formats (`wb.data.compare_formats`); None = not measured: remedies of the data are ceilings."""

    @property
    def shortage(self) -> str:
        """What the budget left no time for, in words; "" = nothing."""
        tries = ", ".join(what for what in self.left_out if what != TRACE)
        parts = [f"for {TRACE}"] * (TRACE in self.left_out) + ([f"to try {tries}"] if tries else [])
        return f"no time was left {', nor '.join(parts)}" if parts else ""

    @property
    def cpu_seen(self) -> float | None:
        """CPU seconds of a step of the first rank, its loader and workers included, as a host's clock saw it; None = it was not read."""
        timeline = self.ranks[0].timeline if self.ranks else None
        if timeline is None or timeline.clock == "device":
            return None
        return seen if (seen := timeline.cpu_per_step) > 0 else None

    @property
    def serial_wait(self) -> float | None:
        """Fraction of the step for which the loop waits for its loader, by its clocks, where that is all that the loader costs: without
        workers, in one process on a CPU. None elsewhere.
        """
        if self.device != "cpu" or self.world_size > 1 or self.loading is None or self.loading.num_workers or not self.ranks:
            return None
        share = self.ranks[0].timeline.share("data_wait")
        return None if math.isnan(share) else share

    def arm(self, name: str) -> VariantTimes | None:
        """The experiment of that name, if it was run."""
        return self.arms.get(name)
