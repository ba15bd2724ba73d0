"""Finds the cause under each verdict ("dataset code", "small buckets", "syncs") and writes the sentence with its numbers."""

import math
from dataclasses import dataclass

from workbench.core import units
from workbench.core.machine_speeds import slowness
from workbench.core.statistics import Interval
from workbench.diagnosis.analysis.costs import NOTHING, Costs, capped, is_crowded, saved_by, widened
from workbench.diagnosis.analysis.evidence import Evidence, Inside, Loading
from workbench.diagnosis.analysis.loader_model import LoaderModel

MIN_EXPLAINED = 0.5
"""A cause is named if it explains at least half of what it is a cause of. Chosen: then no other explains more. Only the cause depends on
it, not the verdict."""
MIN_SLOW_SAMPLES_SHARE = 0.3
"""Of the time of making batches. Derived, where collating takes no time: one and a half times what the slowest twentieth takes where sample
times are exponential (0.2), the most uneven of the usual ones. With half, uneven samples are named for most datasets; with twice, only for
extreme ones."""
SMALL_FILE_BYTES = 256 * 1024
"""Bytes: below, opening a file costs more than reading it. Derived: 1 ms of a disk's seek is 200 KB, a network's round trip is more. Disks
without seeks read 2 MB in it: there, opening is rarely the larger part, and CPU decides."""
OPEN_FILE_SECONDS = 20e-6
"""Seconds of CPU to open, read and close a small file that is in the page cache. Measured: 14 + 6 µs on ext4, on the machine of
`FITTED_ON`; scaled by what that takes on this one."""
CROWDED_SLOWDOWN = 1.2
"""A loader this much slower than its formula slows itself down: workers start, switch and queue for cores. Chosen on two cores, where the
formula is off by 6.5 % in the median. A ratio, so it is not scaled. With 1.1 the formula's own error is called crowding, with 1.4 only
gross crowding is named."""
MANY_TENSORS = 200
"""Tensors of an optimizer. Below, a loop over them in Python takes at most a few milliseconds. Chosen for the machine of `FITTED_ON`; fewer
are many where calling an operator takes longer. With half or twice as many, the cause of optimizer-bound steps with 100 to 400 small
tensors has the other name; the verdict and the remedies stay."""
SMALL_TENSOR_NUMBERS = 50_000
"""Numbers: an update of fewer takes no longer than calling its operators. Derived from calls and memory's rate on the machine of
`FITTED_ON`. Scaled on CPUs: more where calls take longer, fewer where memory is slower."""
FLAT_GROWTH = 0.35
"""Forward and backward with a doubled batch take at most this fraction of the samples' growth: most of their time does not depend on it.
Chosen: a third. With half, steps of which a quarter grows are no small batch any more; with twice, most are called so. Gains are predicted
from what was measured, whatever it is."""

MIN_ALLOC_RETRIES = 0.1
"""Per step: from there on the idle time of the device is blamed on them. Chosen: each empties the queue, and cudaFree and cudaMalloc take
milliseconds; a healthy step has none. Steps that retry have far more or far fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why one part of the step is as large as it is."""

    cause: str
    """Starts with a word of the vocabulary: "dataset code", "small buckets", "slow rank 3: input"."""
    why: str
    """A sentence with the numbers."""


def input_cause(e: Evidence, c: Costs) -> Cause:
    """Why the loader does not keep up."""
    loading = e.loading
    if e.observed:
        made = (
            "without workers"
            if loading and not loading.num_workers
            else f"with {_workers(loading)}"
            if loading
            else "by the script's loader"
        )
        return Cause(cause="loader", why=f"Batches are made {made}.")
    if loading is None or (loading.kind != "DataLoader" and loading.cpu is None):
        return Cause(cause="loader", why=f"The loader alone takes {units.seconds(c.loader)} for a step's batches.")
    each = c.data.mid / e.accumulation
    started = loading.start_up / loading.epoch if loading.start_up and loading.epoch and not loading.persistent_workers else 0.0
    if loading.num_workers and started >= MIN_EXPLAINED * each:
        return Cause(
            cause="worker start-up",
            why=f"Starting {_workers(loading)} takes {units.seconds(loading.start_up)}, and an epoch is only {loading.epoch} batches long.",
        )
    if crowd := _crowded(e, c, loading):
        return crowd
    if loading.slow_share is not None and loading.slow_share >= MIN_SLOW_SAMPLES_SHARE:
        return Cause(
            cause="slow samples",
            why=f"One sample in twenty takes {units.percent(loading.slow_share)} of the time in which batches are made.",
        )
    if loading.num_workers and not math.isnan(loading.alone) and loading.alone < (1 - MIN_EXPLAINED / 2) * c.cached / e.accumulation:
        queue = loading.num_workers * (loading.prefetch_factor or 2)
        return Cause(
            cause="prefetch",
            why=f"On its own the loader is fast enough, {units.seconds(loading.alone)} per batch, but batches come unevenly, and "
            f"{queue} lie ready at most.",
        )
    return _making(e, loading)


def _crowded(e: Evidence, c: Costs, loading: Loading) -> Cause | None:
    """Too many workers for the cores, or workers that cost more than they save."""
    if not loading.num_workers or loading.cpu is None:
        return None
    feeding = LoaderModel.of(e)
    if feeding is None:
        return None
    cores = e.noise.cores if e.noise else math.inf
    now = c.cached + c.data.mid
    fewer = [n for n in range(loading.num_workers) if feeding.step(n) < now / CROWDED_SLOWDOWN]
    without = 0 in fewer and feeding.step(0) <= min(map(feeding.step, fewer))
    processes = e.world_size * (loading.num_workers + 1)
    if fewer and processes > cores and loading.num_workers > 1:
        best = min(fewer, key=lambda n: (round(feeding.step(n) / now, 2), n))
        ranks = f"{e.world_size} ranks" if e.world_size > 1 else "training"
        return Cause(
            cause="oversubscribed",
            why=f"{_workers(loading)} and {ranks} share {cores:.0f} cores and are in each other's way; {best} would do.",
        )
    if without and loading.worker_cpu is not None and loading.worker_cpu + (loading.handover or 0.0) > 2 * loading.cpu:
        return Cause(
            cause="transport",
            why=f"Making a batch takes {units.seconds(loading.cpu)} of CPU, bringing it over from a worker "
            f"{units.seconds(loading.worker_cpu + (loading.handover or 0.0) - loading.cpu)}.",
        )
    return None


def _making(e: Evidence, loading: Loading) -> Cause:
    """What making a batch consists of."""
    cpu, blocked = loading.cpu or 0.0, loading.blocked or 0.0
    whole = cpu + blocked
    if not whole:
        return Cause(cause="loader", why=f"The loader takes {units.seconds(loading.alone)} per batch.")
    made = f"Making a batch takes {units.seconds(whole)}"
    if not loading.num_workers and is_crowded(e) and loading.alone > CROWDED_SLOWDOWN * whole:
        made += f" of its own ({units.seconds(loading.alone)} by the clock, beside other processes)"
    if loading.num_workers:
        made += f" of each of {_workers(loading)}"
    samples = loading.batch_size or 1
    files = loading.files or 0.0
    small = files >= MIN_EXPLAINED * samples and (loading.read_bytes or 0.0) <= SMALL_FILE_BYTES * files
    if blocked >= MIN_EXPLAINED * whole:
        waiting = f"{made}, of it {units.percent(blocked / whole)} waiting for"
        if small:
            return Cause(cause="small files", why=f"{waiting} {files:.0f} files of {units.bytes_((loading.read_bytes or 0) / files)}.")
        return Cause(cause="storage", why=f"{waiting} storage or network, not computing.{_line(loading)}")
    if files > samples and OPEN_FILE_SECONDS * slowness(e.speeds, "open") * files >= MIN_EXPLAINED * cpu:
        return Cause(cause="small files", why=f"{made}, and opens {files:.0f} files for it.")
    if loading.collate is not None and loading.collate >= MIN_EXPLAINED * cpu:
        return Cause(cause="collate", why=f"{made}, of it {units.seconds(loading.collate)} of CPU in collate_fn.{_line(loading)}")
    if loading.worker_cpu is not None and loading.num_workers and loading.worker_cpu > 2 * cpu:
        return Cause(cause="transport", why=f"{made}, and {units.seconds(loading.worker_cpu - cpu)} more of CPU to bring it over.")
    if loading.kind != "DataLoader":
        return Cause(cause="loader", why=f"{made}, of it {units.seconds(cpu)} of CPU.{_line(loading)}")
    own = loading.fetch_cpu if loading.fetch_cpu is not None else cpu
    return Cause(cause="dataset code", why=f"{made}, of it {units.seconds(own)} of CPU in the dataset's own code.{_line(loading)}")


def _line(loading: Loading) -> str:
    if not loading.slow_lines:
        return ""
    line, _ = loading.slow_lines[0]
    drawn = ", which draws random numbers" if loading.slow_lines[0] in loading.random_lines else ""
    return f" Of it, {loading.within(line)}{drawn}."


def _workers(loading: Loading) -> str:
    return units.several(loading.num_workers, "worker")


def transfer_cause(e: Evidence, c: Costs) -> Cause:
    """Why copies to the device are not hidden."""
    size = e.loading.batch_bytes * e.accumulation if e.loading else 0
    speed = f", {units.bytes_(size / c.transfer.mid)}/s" if size and c.transfer.mid else ""
    if e.loading and not e.loading.pin_memory:
        return Cause(
            cause="pageable copy", why=f"Batches of {units.bytes_(size)} are copied from pageable memory while the device waits{speed}."
        )
    return Cause(cause="copies", why=f"The device waits while {units.bytes_(size)} are copied{speed}.")


def optimizer_cause(e: Evidence, c: Costs) -> Cause:
    """Why the optimizer takes so long."""
    tensors, numbers = e.tensors or 0, e.parameters or 0
    name = e.optimizer or "The optimizer"
    if tensors * slowness(e.speeds, "dispatch") >= MANY_TENSORS and numbers / tensors <= _small_tensor(e):
        return Cause(
            cause="many tensors",
            why=f"{name} updates {tensors:,} tensors of {units.count(numbers / tensors)} numbers on average: calling the operators "
            "takes longer than the arithmetic.",
        )
    text = f" {units.count(numbers)} parameters" if numbers else " the parameters"
    rows = ""
    if e.tables and numbers and e.tables.numbers >= MIN_EXPLAINED * numbers:
        rows = (
            f" {units.percent(e.tables.numbers / numbers)} of them are rows of {', '.join(e.tables.names[:3])}, and a step uses "
            f"{units.percent(e.tables.touched)} of these rows."
        )
    return Cause(cause="optimizer", why=f"{name} takes {units.seconds(c.optimizer.mid)} per step to update{text}.{rows}")


def _small_tensor(e: Evidence) -> float:
    """Numbers that an optimizer updates about as fast as it calls the operators for it."""
    if e.device != "cpu":
        return SMALL_TENSOR_NUMBERS
    return SMALL_TENSOR_NUMBERS * slowness(e.speeds, "dispatch") / slowness(e.speeds, "copy")


def communication_cause(e: Evidence, c: Costs) -> Cause:
    """Why the reduction of gradients takes so long; split into exposed communication and contention."""
    split = ""
    if e.inside and e.inside.collectives is not None and e.inside.step:
        exposed = min(c.communication.mid, e.inside.collectives / e.inside.step * c.replayed)
        split = (
            f" Of the {units.seconds(c.communication.mid)} that it costs, {units.seconds(exposed)} are exposed (nothing else runs); "
            f"the rest, {units.seconds(c.communication.mid - exposed)}, is contention (it slows down what runs beside it)"
            + (", and what keeps ranks waiting only with fresh batches or now and then." if c.cached > c.replayed else ".")
        )
    g = e.gradients
    if g is None:
        return Cause(cause="gradient volume", why=f"{units.count(e.parameters)} gradients are reduced per step.{split}")
    starts, volume = g.latency * g.buckets, g.size * g.per_byte
    text = f"{units.bytes_(g.size)} of gradients are reduced in {units.several(g.buckets, 'bucket')}"
    if starts > volume and g.buckets > 4:
        return Cause(cause="small buckets", why=f"{text}, and starting a reduction alone takes {units.seconds(g.latency)}.{split}")
    if starts > volume:
        return Cause(cause="latency", why=f"{text}, and {units.seconds(g.latency)} pass before a reduction gets going.{split}")
    return Cause(cause="gradient volume", why=f"{text}, at {units.bytes_(1 / g.per_byte)}/s.{split}")


def straggler_cause(e: Evidence, c: Costs) -> Cause:
    """Which rank is slow, and in which part of the step."""
    slow = c.slow
    assert slow is not None
    what = "input" if slow.input >= slow.compute else "compute"
    who = f"slow rank{'s' * (len(slow.ranks) > 1)} {', '.join(map(str, slow.ranks))}"
    does = (
        f"waits {units.seconds(slow.input)} longer for data"
        if what == "input"
        else f"computes {units.seconds(slow.compute)} longer on batches that are there already"
    )
    return Cause(
        cause=f"{who}: {what}",
        why=f"On its own, rank {slow.ranks[-1]} takes {units.seconds(slow.alone)} for a step and another one "
        f"{units.seconds(slow.typical)}: it {does}, and all ranks wait for it.",
    )


def stalled_cause(e: Evidence, c: Costs) -> Cause:
    """What stalls the step now and then."""
    s = e.stalls
    if s.kind is None and e.alloc_retries * s.steps >= MIN_EXPLAINED * len(s.at):
        return Cause(cause="allocator retries", why=f"{_retries(e)} The steps in which that happens take {units.seconds(s.extra)} longer.")
    often = f"{len(s.at)} times in {s.steps} steps"
    if s.every:
        often = f"every {s.every:.0f} steps" if s.every >= 1.5 else "in each step"
    if s.every and e.observed:  # whose mean step has as many as were seen
        often += f" ({len(s.at)} times in {s.steps})"
    where = f" in {s.where}" if s.where else ""
    if s.noted:
        savers = [rank.rank for rank in e.ranks if rank.stalls.noted and rank.stalls.at]
        alone = len(savers) == 1 < len(e.ranks)
        saved = f"Rank {savers[0]} saves a checkpoint" if alone else "A checkpoint is saved"
        waited = f", and the other rank{'s wait' if len(e.ranks) > 2 else ' waits'} for it" * alone
        return Cause(cause="checkpoint", why=f"{saved} {often}: {units.seconds(s.extra)} each time{where}{waited}.")
    return Cause(cause=s.kind or "pause", why=f"The step stops {often} for {units.seconds(s.extra)}{where}.")


def _retries(e: Evidence) -> str:
    often = f"{e.alloc_retries:.1f} times per step" if e.alloc_retries >= 1 else f"once per {1 / e.alloc_retries:.0f} steps"
    return f"The GPU's memory is full {often}: the allocator then waits for the device, frees its cached memory and allocates again."


def pausing_rank(e: Evidence) -> int | None:
    """The one rank that stalls while the others do not; None if they all do, or for a reason that belongs to the job (a checkpoint)."""
    if len(e.ranks) < 2 or e.stalls.kind in ("checkpoint", "evaluation", "drawing", "logging"):
        return None
    shares = sorted(e.ranks, key=lambda rank: rank.stalls.share)
    worst, next_ = shares[-1], shares[-2]
    alone = worst.stalls.share >= MIN_EXPLAINED * e.stalls.share and next_.stalls.share <= worst.stalls.share / 4
    return worst.rank if alone and worst.stalls.at else None


def pauses_cause(e: Evidence, rank: int) -> Cause:
    """One rank pauses, and the others wait for it."""
    s = next(other.stalls for other in e.ranks if other.rank == rank)
    where = f" in {s.where}" if s.where else ""
    return Cause(
        cause=f"slow rank {rank}: pauses",
        why=f"Rank {rank} stops {len(s.at)} times in {s.steps} steps for {units.seconds(s.extra)}{where}, and the others wait.",
    )


def compute_cause(e: Evidence, c: Costs) -> Cause:
    """What kind of computing it is."""
    trimmed = e.arm("trimmed")
    if e.padding and trimmed and trimmed.saved.mid >= 0.1:
        return Cause(
            cause=f"padding: {units.percent(e.padding)} of each batch",
            why=f"{units.percent(e.padding)} of each batch is padding; cut to the mean length of its samples, the step takes "
            f"{units.percent(trimmed.saved.mid)} less.",
        )
    doubled = e.arm("doubled")
    if doubled and growth(e) <= FLAT_GROWTH:
        return Cause(
            cause="small batch",
            why=f"Most of forward and backward does not depend on the batch: with twice the samples the step takes "
            f"{units.percent(max(0.0, -doubled.saved.mid))} longer.",
        )
    return Cause(cause="compute", why="")


def growth(e: Evidence) -> float:
    """How much longer the cached step gets with twice the samples: 0 = not at all, 1 = twice as long (or not tried)."""
    return growth_interval(e).mid


def growth_interval(e: Evidence) -> Interval:
    """`growth` with its interval."""
    doubled = e.arm("doubled")
    if doubled is None or doubled.samples <= 1:
        return Interval(low=1.0, mid=1.0, high=1.0)
    saved, more = widened(e, doubled), doubled.samples - 1
    low, mid, high = (max(0.0, -end / more) for end in (saved.high, saved.mid, saved.low))
    return Interval(low=low, mid=mid, high=high)


MAX_PYTHON_GAP = 25e-6
"""Seconds of Python from one operator to the next, where it only calls them: a module and a function or two. Fitted on the machine of
`FITTED_ON`; scaled by what calling a module takes on this one."""
SHORT_OPERATOR = 60e-6
"""Mean seconds of operators that are called for longer than they compute. Fitted on the machine of `FITTED_ON`; scaled by what dispatch
takes."""
READ_ON_CPU, READ_OPERATORS = 4e-6, 3
"""Seconds that reading a number takes where operators run at once, and operators: nothing is waited for, but mostly two select what is
read. Measured on one core: 0.1 µs for `.item()` alone, 1.0 with an index before it, 4.6 with two and a comparison, where an operator takes
2 to 3; scaled by what calling an operator takes. It decides the cause only: whether the host is blamed at all is decided by its share of
the step."""
TINY_OPERATOR = 5e-6
"""Mean seconds of short operators that do next to nothing: a call costs as much, whatever the size of the batch. Fitted on the machine of
`FITTED_ON`; scaled by what dispatch takes on this one."""


def oversubscription(e: Evidence, c: Costs) -> tuple[Interval, Cause] | None:
    """More threads than cores; proved by the variant with fewer threads."""
    cores = e.noise.cores if e.noise else float("inf")
    if e.device != "cpu" or e.world_size * e.threads <= cores:
        return None
    tried = [arm for name, arm in e.arms.items() if name.startswith("threads=") and int(name.partition("=")[2]) < e.threads]
    if not tried:
        return None
    best = max(tried, key=lambda arm: arm.saved.mid)
    ranks = f"{e.world_size} ranks × " if e.world_size > 1 else ""
    return saved_by(e, best, c.replayed), Cause(
        cause="oversubscribed threads",
        why=f"{ranks}{e.threads} threads share {cores:.0f} cores; with {best.name} the step without its loader takes "
        f"{units.percent(best.saved.mid)} less.",
    )


def garbage_collection(e: Evidence, c: Costs) -> tuple[Interval, Cause] | None:
    """Python's cyclic garbage collector, where it is at work in most steps."""
    arm, inside = e.arm("no_gc"), e.inside
    if arm:
        saved = saved_by(e, arm, c.replayed)
    elif inside and inside.step and inside.gc:
        seconds = inside.gc * (1 + inside.slowdown) / inside.step * c.replayed
        saved = Interval(low=0.8 * seconds, mid=seconds, high=1.2 * seconds)
    else:
        return None
    return saved, Cause(
        cause="garbage collection", why=f"Python's cyclic garbage collector takes {units.percent(saved.mid / c.step)} of the step."
    )


MIN_OWN_SHARE = 0.1
"""Fraction of the step from which on a function of the step's own code is named. Chosen: what is less cannot gain much. With half, the line
that computes a loss is named in steps of small models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCode:
    """The function of the step's own code, outside of modules, losses, backward and optimizer, that takes longest."""

    function: str
    line: str
    """Of its lines the one that takes longest: "train.py:41"."""
    share: float
    """Fraction of the full step that the function takes, the operators of torch that it calls included."""


def own_code(e: Evidence, c: Costs, *, helpers: bool = False) -> OwnCode | None:
    """None where none takes MIN_OWN_SHARE of the step. `helpers`: of the functions that a module's forward calls."""
    shares, heaviest = dict[tuple[str, str], float](), dict[tuple[str, str], str]()
    for label, share in (e.inside.helpers if helpers else e.inside.own) if e.inside else ():
        line, _, function = label.partition(" ")
        key = line.rpartition(":")[0], function
        shares[key] = shares.get(key, 0.0) + share * c.replayed / c.step
        heaviest.setdefault(key, line)
    best = max(shares, key=shares.__getitem__, default=None)
    if best is None or shares[best] < MIN_OWN_SHARE:
        return None
    return OwnCode(function=best[1], line=heaviest[best], share=shares[best])


def own_code_note(e: Evidence, c: Costs) -> str:
    """A note on what the step's own code takes, outside of the model, backward and optimizer; "" = little, or not known."""
    own = None if e.observed else own_code(e, c)
    if own is None:
        return ""
    return f"{units.percent(own.share)} of the step is spent in {own.function}, outside of model and optimizer, most of it in {own.line}"


def between_operators(e: Evidence, c: Costs) -> tuple[Interval, Cause] | None:
    """The time in which no operator runs, and that of operators so short that launching them is most of their cost."""
    inside = e.inside
    if inside is None or c.host == NOTHING:
        return None
    gaps = units.percent(c.host.mid / c.step)
    where = "".join(f" {units.percent(share)} of the step is spent in {line}." for line, share in inside.lines[:1])
    if (own := own_code(e, c)) and own.share > max((share for _, share in inside.lines[:1]), default=0.0):
        where = f" {units.percent(own.share)} of the step is spent in {own.function}, most of it in {own.line}."
    if c.sleeping >= MIN_EXPLAINED * c.host.mid and c.sleeping:
        return c.host, Cause(
            cause="sleeping or I/O",
            why=f"For {units.seconds(c.sleeping)} of each step the training thread neither computes nor waits for a core: it sleeps, "
            f"or reads or writes.{where}",
        )
    if e.device != "cpu":
        return c.host, _idle_device(e, c, inside, gaps, where)
    if _reading(e, inside) >= MIN_EXPLAINED * c.called.mid:
        return c.called, Cause(
            cause="syncs",
            why=f"{inside.syncs:.0f} times per step Python asks for a number (.item() and the like) and goes on only when it is there; "
            f"for {gaps} of the step no operator runs.{where}",
        )
    if _flat(e, c) and _short(e, c):
        return capped(c.called, max(c.fixed, c.host.mid)), Cause(
            cause="launches",
            why=f"{inside.op_count:.0f} operators per step are so short that calling them is most of their cost: with twice the samples "
            f"the step takes only {units.percent(growth(e))} longer.",
        )
    if _tiny(e):
        return c.called, Cause(
            cause="launches",
            why=f"{inside.op_count:.0f} operators per step, most of them so short that calling them is all of their cost, hang on loops of "
            f"Python; for {gaps} of the step no operator runs.{where}",
        )
    return c.host, Cause(cause="python", why=f"For {gaps} of the step no operator runs: Python is at work.{where}")


def _reading(e: Evidence, inside: Inside) -> float:
    """Seconds per step in which numbers are read where operators run at once, with the short operators that select them."""
    theirs = min(1.0, READ_OPERATORS * inside.syncs / inside.op_count) if inside.op_count else 0.0
    return inside.syncs * READ_ON_CPU * slowness(e.speeds, "dispatch") + theirs * inside.small_ops


def _idle_device(e: Evidence, c: Costs, inside: Inside, gaps: str, where: str) -> Cause:
    """Why the device is idle: what the host does meanwhile."""
    if e.alloc_retries >= MIN_ALLOC_RETRIES:
        return Cause(cause="allocator retries", why=f"{_retries(e)} The device is idle for {gaps} of the step.")
    idle = inside.step - inside.ops - (inside.collectives or 0.0)
    works = (inside.step - inside.waits) / (1 + max(0.0, inside.slowdown))
    hides = works <= inside.ops + (inside.collectives or 0.0)  # the host would keep up if it did not wait
    if inside.sync_idle >= MIN_EXPLAINED * idle and hides:
        often = f"{inside.syncs:.0f} times" if inside.syncs >= 1.5 else "once" if inside.syncs >= 0.75 else f"{inside.syncs:.1f} times"
        return Cause(
            cause="syncs",
            why=f"Python waits {often} per step for a number from the device (.item() and the like); the device is idle for {gaps} of the "
            f"step.{where}",
        )
    if inside.launching >= MIN_EXPLAINED * idle or (_flat(e, c) and _short(e, c)):
        return Cause(
            cause="launches",
            why=f"{inside.op_count:.0f} kernels and copies per step take {units.seconds(inside.ops)}, and the host takes longer to launch "
            f"them: the device is idle for {gaps} of the step.{where}",
        )
    return Cause(cause="python", why=f"The device is idle for {gaps} of the step, while Python is at work.{where}")


def _flat(e: Evidence, c: Costs) -> bool:
    """Does the step hardly grow with its batch? Where noise hides that, the trace says how much of it is the calling of operators."""
    grown = growth_interval(e)
    if grown.low <= FLAT_GROWTH < grown.high:
        return c.called.low >= MIN_EXPLAINED * c.replayed
    return growth(e) <= FLAT_GROWTH


def _tiny(e: Evidence) -> bool:
    """Do most operators do next to nothing? Then there are as many of them as a loop of Python makes, of samples or of tensors."""
    inside = e.inside
    if inside is None or not inside.op_count or e.device != "cpu":
        return False
    work = inside.ops - (inside.optimizer_ops or 0.0)
    return inside.small_ops >= MIN_EXPLAINED * work and inside.small_ops <= TINY_OPERATOR * slowness(e.speeds, "dispatch") * inside.op_count


def _short(e: Evidence, c: Costs) -> bool:
    """Is the time without an operator that between operators, spread over many short ones, rather than one long piece of Python?"""
    inside = e.inside
    if inside is None or not inside.op_count:
        return False
    gap, operator = MAX_PYTHON_GAP * slowness(e.speeds, "call"), SHORT_OPERATOR * slowness(e.speeds, "dispatch")
    return c.host.mid <= gap * inside.op_count and inside.ops <= operator * inside.op_count
