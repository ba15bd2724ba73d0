"""Derives the remedies of a step, each with its predicted speedup, best first. What cannot help is left out.

Where an experiment tried the change itself, its ratio is put into the full step by `StepModel`. Where it did not, a formula predicts, with
an interval as wide as its known errors. Where nothing predicts what replaces a part, the removal of the part is the ceiling.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from workbench.core import units
from workbench.diagnosis.analysis.causes import pausing_rank
from workbench.diagnosis.analysis.costs import saved_by
from workbench.diagnosis.analysis.evidence import Evidence
from workbench.diagnosis.analysis.host_remedies import ALLOCATOR, GC_COSTS, GC_OFF, SPARE_COSTS, SPARE_MEMORY, for_host
from workbench.diagnosis.analysis.loader_remedies import for_loader
from workbench.diagnosis.analysis.model_errors import with_errors
from workbench.diagnosis.analysis.remedy import (
    MIN_BATCH_SPEEDUP,
    MIN_SPEEDUP,
    Case,
    Remedy,
    ceiling,
    from_arm,
    from_formula,
    gain_of,
    if_worthwhile,
    sort_key,
)
from workbench.diagnosis.analysis.script_remedies import from_outside, set_by
from workbench.diagnosis.analysis.step_model import StepModel
from workbench.diagnosis.analysis.untried_remedies import fewer_micro_batches, less_own_code, sparse_tables
from workbench.diagnosis.analysis.verdict import UNMARKED, USUAL, Judgement, unseen
from workbench.runs.spec import RunSpec, Spec

REMOVES = {
    "precision": ("compute",),
    "channels_last": ("compute",),
    "tf32": ("compute",),
    "threads": ("compute", "oversubscribed threads"),
    "optimizer": ("optimizer", "many tensors"),
    "gc": ("garbage collection",),
    "micro_batch": ("small batch",),
    "fewer micro-batches": ("small batch", "python", "launches"),
}
"""Knob → the causes that a change of it removes. It shortens other steps, too."""

ANSWERS = {"small buckets": "bucket_cap_mb"}
"""Cause → the knob that removes that very cause. Where it is offered, what shortens the same part in another way comes after it."""


def remedies_for(
    evidence: Evidence, judgement: Judgement, *, spec: Spec | None = None, outside: bool = False, noise_only: bool = False
) -> tuple[Remedy, ...]:
    """The remedies of a step: first those that remove the cause, the best first. Every cause but computing has one.

    An inconclusive verdict has only those that an experiment tried itself and that surely gain, whatever the cause is; and those of the
    other parts where the largest is time outside all phases.

    Args:
        evidence: what was measured of one training step.
        judgement: what follows from it.
        spec: what was diagnosed, if it was a spec or a run: its fields can be changed.
        outside: the spec is that of a script that can be launched with other arguments.
        noise_only: ranges cover the uncertainty of the measurements alone, and not what formulas leave out (see `model_errors`).
    """
    inconclusive = judgement.verdict == "inconclusive"
    case = Case(evidence=evidence, judgement=judgement, model=StepModel.of(evidence), spec=spec, outside=outside)
    remedies: dict[str, Remedy] = {}
    if inconclusive and judgement.cause != UNMARKED:
        tried = (remedy if noise_only else with_errors(remedy, case.model) for remedy in filter(None, _arms(case)))
        sure = (remedy for remedy in tried if remedy.low * (1 - USUAL.least) > 1)
        return tuple(sorted((replace(remedy, scope="general") for remedy in sure), key=sort_key))
    for remedy in _observed(case) if evidence.observed else _tried(case):
        remedies.setdefault(remedy.name, remedy if noise_only else with_errors(remedy, case.model))
    if not inconclusive and judgement.verdict != "compute-bound" and not any(remedy.scope == "cause" for remedy in remedies.values()):
        remedies |= {remedy.name: remedy for remedy in _without_part(case)}
    return tuple(sorted(_named_cause_first(remedies.values(), judgement.cause), key=sort_key))


def _named_cause_first(remedies: Collection[Remedy], cause: str) -> Iterator[Remedy]:
    """The remedies; where one removes the named cause, those that only shorten the same part are general ones."""
    answer = ANSWERS.get(cause)
    offered = any(remedy.name.partition("=")[0] == answer for remedy in remedies)
    for remedy in remedies:
        other = offered and remedy.scope == "cause" and remedy.name.partition("=")[0] != answer
        yield replace(remedy, scope="general") if other else remedy


def _tried(case: Case) -> Iterator[Remedy]:
    """The remedies of each source, from experiments."""
    for source, verdict in SOURCES.items():
        for remedy in filter(None, source(case)):
            yield replace(remedy, scope=_scope(remedy, verdict, case.judgement))


def _scope(remedy: Remedy, verdict: str, judgement: Judgement) -> str:
    """Does a remedy remove what the step was judged to be? All of its source remove the cause of `verdict`; "" = they shorten any step."""
    if verdict:
        return "cause" if judgement.verdict == verdict else "part"
    return "cause" if judgement.cause in REMOVES.get(remedy.name.partition("=")[0], ()) else "general"


def _arms(case: Case) -> Iterator[Remedy | None]:
    """Changes that an experiment made itself."""
    for name in case.evidence.arms:
        kind, _, value = name.partition("=")
        if kind == "precision":
            costs = "fewer digits in activations and gradients: watch the loss" + (
                "; fp16 skips steps whose gradients overflow" if value == "amp_fp16" else ""
            )
            if tf32 := case.evidence.arm("tf32"):  # else the gain seems to be all of 16 bits
                gained = case.model.without(saved_by(case.evidence, tf32, case.costs.replayed).mid, tf32=True)
                costs += f"; part of this is TF32's gain over strict fp32, in which the step computes now: {units.times(gained)}"
            yield from_arm(case, name, {kind: value}, f"Compute forward and backward in mixed precision ({value[4:]}).", costs)
        elif kind == "optimizer":
            yield from_arm(case, name, {kind: value}, f"Use the optimizer's {value} implementation: {value}=True.", _OPTIMIZER_COSTS[value])
        elif kind == "threads":
            each = " on each rank" if case.evidence.world_size > 1 else ""
            what = f"Use {units.several(int(value), 'thread')} per operator{each}: "
            what += (
                f"threads={value}." if isinstance(case.spec, RunSpec) else f"torch.set_num_threads({value}), or OMP_NUM_THREADS={value}."
            )
            yield from_arm(case, name, {kind: int(value)}, what, "")
        elif kind == "tf32":
            what = "Run fp32 matrix products in TF32: torch.set_float32_matmul_precision('high')."
            yield from_arm(case, name, {kind: True}, what, "products have 10 bits of mantissa instead of 23: watch the loss")
        elif kind == "channels_last":
            what = "Keep weights and images in the channels_last layout: model.to(memory_format=torch.channels_last), and the images, too."
            yield from_arm(case, name, {kind: True}, what, "")
        elif kind == "no_gc":
            yield from_arm(case, name, {"gc": False}, GC_OFF, GC_COSTS)


_OPTIMIZER_COSTS = {
    "fused": "last digits of the weights differ",
    "foreach": "memory for a copy of the parameters during the step; last digits differ",
}


def _batch(case: Case) -> Iterator[Remedy | None]:
    """A larger batch, if most of the step does not grow with it. A step of several micro-batches has fewer of them first, which changes
    nothing of what is trained.
    """
    e, c, model = case.evidence, case.costs, case.model
    arm, size = e.arm("doubled"), model.knobs["micro_batch"]
    if arm is None or not size or e.micro_batches > 1:
        return
    larger = round(size * arm.samples)
    speedup = model.speedup(micro_batch=larger)
    new = model.parts(micro_batch=larger).step
    loose = arm.saved.width / 2 * c.replayed
    if speedup * new / (new + loose) < 1.0:
        return
    yield if_worthwhile(
        Remedy(
            name=f"micro_batch={larger}",
            change=case.turnable({"micro_batch": larger}),
            what=f"Train on {larger} samples at a time instead of {size}.",
            speedup=speedup,
            low=speedup * new / (new + loose),
            high=speedup * new / max(new - loose, new / 2),
            formula=f"measured: {units.times(arm.samples)} the samples make the step without its loader "
            f"{units.times(1 - arm.saved.mid)} as long; put into the full step",
            costs="memory for activations; a global batch as many times as large: learning rate and schedule have to follow",
        ),
        MIN_BATCH_SPEEDUP,
    )


def _optimizer(case: Case) -> Iterator[Remedy | None]:
    """The same optimizer, stepped less often. Only where no other implementation is faster, which would not change the training."""
    faster = (remedy for remedy in _arms(case) if remedy and remedy.name.startswith("optimizer="))
    if case.judgement.verdict == "optimizer-bound" and next(faster, None) is None:
        yield _accumulation(case)


def _padding(case: Case) -> Iterator[Remedy | None]:
    """Less to compute: no padding."""
    e = case.evidence
    arm = e.arm("trimmed")
    if arm is None or not e.padding:
        return
    seconds = saved_by(e, arm, case.costs.replayed)
    remedy = Remedy(
        name="batches by length",
        what="Put samples of like length into one batch (sort chunks of the shuffled order), and pad to the longest of each batch only.",
        speedup=case.model.without(seconds.mid),
        low=1.0,
        high=case.model.without(seconds.high),
        formula=f"ceiling, measured: cut to the mean length of its samples, a batch takes {units.percent(arm.saved.mid)} less",
        costs="the order of samples is a little less random",
        ceiling=True,
    )
    yield if_worthwhile(remedy)


def _transfer(case: Case) -> Iterator[Remedy | None]:
    """Copies that overlap with computing."""
    c = case.costs
    saved = c.share(c.saves(c.transfer))
    pinned = bool((loading := case.evidence.loading) and loading.pin_memory)
    yield ceiling(
        case,
        "copies beside training" if pinned else "pin_memory=True",
        "Copy the next batch while this one is trained on: .to(device, non_blocking=True) in a stream of its own."
        if pinned
        else "Let the loader put batches into page-locked memory, and copy with .to(device, non_blocking=True).",
        saved,
        "copies hide wholly behind computing",
        "memory on the device for a second batch" if pinned else "page-locked memory for the batches that lie ready",
        None if pinned else {"pin_memory": True},
    )


_MOVED = {
    "checkpoint": "Write checkpoints in the background: copy the state to the CPU, and save it in a thread or with "
    "torch.distributed.checkpoint.async_save; or write them less often.",
    "evaluation": "Evaluate less often, on fewer samples, or in a process of its own.",
    "drawing": "Draw pictures less often, or store what they show and draw it in a process of its own.",
    "logging": "Log less often, and write in a thread.",
    "garbage collection": "Switch Python's cyclic garbage collector off (gc.disable()) and collect once per epoch, or gc.freeze() "
    "once everything is built.",
}


def _stalls(case: Case) -> Iterator[Remedy | None]:
    """Moving what stalls the step into the background."""
    e, c = case.evidence, case.costs
    if not e.stalls.at or pausing_rank(e) is not None or c.stalls.mid / c.step < 1 - 1 / MIN_SPEEDUP:
        return
    if case.judgement.cause == ALLOCATOR:
        yield ceiling(case, "memory to spare", SPARE_MEMORY, c.share(c.stalls), "the allocator never waits", SPARE_COSTS)
        return
    yield ceiling(
        case,
        f"{e.stalls.kind or 'pauses'} off the path",
        _moved(e, "Find out what stops the step, and move that into a thread or do it less often."),
        c.share(c.stalls),
        "stalls are gone",
        change={"gc": False} if e.stalls.kind == "garbage collection" else None,
    )


def _moved(e: Evidence, otherwise: str) -> str:
    """What to do about stalls, with the line."""
    what = _MOVED.get(e.stalls.kind or "", otherwise)
    return f"{what.removesuffix('.')} ({e.stalls.where})." if e.stalls.where else what


PART_OF = {
    "input-bound": "data_wait",
    "transfer-bound": "transfer",
    "optimizer-bound": "optimizer",
    "host-bound": "host",
    "communication-bound": "communication",
    "straggler": "straggler",
    "stalled": "stalls",
}
"""Verdict → the part of the step that it blames."""


def _without_part(case: Case) -> Iterator[Remedy]:
    """A ceiling for removing the part that the verdict names, where no remedy says how."""
    part = PART_OF[case.judgement.verdict]
    name, what = _WORDS[part]
    what = _moved(case.evidence, what) if part == "stalls" else what
    yield from filter(None, [ceiling(case, name, what, case.judgement.shares.get(part, 0.0), f"{part} is gone")])


_WORDS = {
    "data_wait": ("no waiting for data", "Load batches during training, in more data loader workers, or prepare them beforehand."),
    "transfer": ("copies beside training", "Put batches into pinned memory and copy them with non_blocking=True."),
    "optimizer": ("a cheaper optimizer", "Use the optimizer's fused implementation, or step it once per several batches."),
    "host": ("less host work", "Move Python, logging and waiting out of the step, or do them less often."),
    "communication": ("fewer reductions", "Reduce gradients less often, or in fewer bytes."),
    "straggler": ("equally fast ranks", "Find out what slows the slowest rank down."),
    "stalls": ("no stalls", "Move what stalls some steps out of the training loop, or into a thread."),
}
"""Part of the step → the name of its removal, and what to do."""
_WORDS_OBSERVED = _WORDS | {
    "data_wait": ("no waiting for data", "Find out by experiment what holds the loader up, and how many workers it needs."),
    "straggler": ("equally fast ranks", "Find out by experiment what slows the slowest rank down."),
    "optimizer": ("a cheaper optimizer", "Find out by experiment whether a fused or foreach implementation is faster."),
    "host": ("less work between the phases", "Move logging and Python work out of the loop, or do them less often."),
}


def _observed(case: Case) -> Iterator[Remedy]:
    """From observation alone: the parts that were seen, as ceilings without a knob; and what can be changed from outside of a script.

    A ceiling of a part that such a change nearly reaches says nothing more, nor does that of the loader where workers are offered: they
    gain less where the cores bind.
    """
    turnable = dict[str, float]()
    copies = [("transfer", remedy) for remedy in _transfer(case) if remedy] if case.outside else []
    for part, remedy in (*from_outside(case), *copies):
        if remedy.speedup < MIN_BATCH_SPEEDUP:
            continue
        blamed = {**PART_OF, "compute-bound": "compute"}.get(case.judgement.verdict) == part
        scope = "cause" if blamed else "general" if part == "compute" else "part"
        workers = remedy.change.get("num_workers")
        turnable[part] = max(turnable.get(part, 0.0), gain_of(remedy) if workers is None else float("inf"))
        by = "" if part == "data_wait" and workers is None else set_by(case.evidence, part, workers)
        yield replace(remedy, what=remedy.what + by, scope=scope)
    for part, saved in case.judgement.shares.items():
        if part not in _WORDS or part == "communication" or saved.mid < 1 - 1 / MIN_BATCH_SPEEDUP:
            continue
        if part == "host" and unseen(case.evidence):  # what lies between the phases may be making batches, or computing
            continue
        name, what = _WORDS_OBSERVED[part]
        what = (_moved(case.evidence, what) if part == "stalls" else what) + set_by(case.evidence, part)
        most = ceiling(case, name, what, saved.mid, f"{part} is gone, as far as the measured times show")
        if most and gain_of(most) > turnable.get(part, 0.0):
            yield replace(most, scope="cause" if PART_OF.get(case.judgement.verdict) == part else "part")


REDUCTIONS_ERROR = (0.93, 1.12)
"""Measured step over predicted one with fewer or larger reductions: they overlap with backward, which the formulas take as it is now.
Chosen for gloo on two cores; `MODEL_ERRORS` adds what nine proofs showed. Ranges get wider or narrower by it, predictions stay."""
ACCUMULATION_FACTOR = 4
"""Micro-batches per step that are offered: more bring little, a step being mostly compute by then."""
FEW_BUCKETS = 4
"""So many still overlap with backward, and start few reductions."""


def _reductions(case: Case) -> Iterator[Remedy | None]:
    """Fewer, larger or cheaper reductions."""
    e, c = case.evidence, case.costs
    if e.world_size > 1 and c.communication.mid / c.step >= 1 - 1 / MIN_SPEEDUP:
        yield _accumulation(case)
        yield from _buckets(case)
        if e.device != "cpu":
            yield _compression(case)


def _accumulation(case: Case) -> Remedy | None:
    e, c = case.evidence, case.costs
    more = e.accumulation * ACCUMULATION_FACTOR
    speedup = case.model.speedup(accumulation=more)
    uncertainty = (case.model.without(c.communication.high) - 1) / max(1e-9, case.model.without(c.communication.mid) - 1)
    reduces = e.world_size > 1
    once = f"{units.seconds(c.optimizer.mid)}) per {more} micro-batches instead of per {e.accumulation}"
    return from_formula(
        case,
        f"accumulation={more}",
        {"accumulation": more},
        f"Reduce gradients once per {more} micro-batches: accumulation with no_sync() in between."
        if reduces
        else f"Step the optimizer once per {more} micro-batches: accumulate their gradients, and divide each loss by {more}.",
        speedup,
        (REDUCTIONS_ERROR[0] / max(1.0, min(1.1, uncertainty)), REDUCTIONS_ERROR[1]),
        (f"one reduction ({units.seconds(c.communication.mid)}) and " if reduces else "") + f"one optimizer step ({once}",
        f"a global batch {ACCUMULATION_FACTOR} times as large: learning rate and schedule have to follow",
        MIN_SPEEDUP if case.judgement.verdict in ("communication-bound", "optimizer-bound") else MIN_BATCH_SPEEDUP,
    )


def _buckets(case: Case) -> Iterator[Remedy | None]:
    c, g = case.costs, case.evidence.gradients
    if g is None or g.buckets <= FEW_BUCKETS:
        return
    size = max(1.0, round(g.size / 2**20 / FEW_BUCKETS, 1))
    speedup = case.model.speedup(bucket_cap_mb=size)
    saved = c.step * (1 - 1 / speedup) if speedup else 0.0
    yield from_formula(
        case,
        f"bucket_cap_mb={size:g}",
        {"bucket_cap_mb": size},
        f"Reduce gradients in buckets of {size:g} MiB: {FEW_BUCKETS} or so instead of {g.buckets}.",
        speedup,
        (1 - 0.3 * saved / c.step, 1 + 0.5 * saved / c.step),
        f"starting a reduction takes {units.seconds(g.latency)}, and there are {g.buckets - FEW_BUCKETS} fewer",
        "the first bucket is reduced a little later; its memory",
    )


def _compression(case: Case) -> Remedy | None:
    c, g = case.costs, case.evidence.gradients
    volume = 1.0
    if g is not None and g.latency * g.buckets + g.size * g.per_byte:
        volume = g.size * g.per_byte / (g.latency * g.buckets + g.size * g.per_byte)
    saved = c.share(c.saves(c.communication))
    return ceiling(
        case,
        "gradients in 16 bits",
        "Send gradients in half the bytes: model.register_comm_hook(None, bf16_compress_hook) on GPUs, or PowerSGD.",
        saved.mid * volume / 2,
        f"half of the {units.percent(volume)} of the reduction that grows with the bytes is gone",
        "gradients lose digits; converting them takes time (on a CPU, more than it saves on one machine)",
    )


def _balance(case: Case) -> Iterator[Remedy | None]:
    e, c = case.evidence, case.costs
    if case.judgement.verdict != "straggler":
        return
    pausing = pausing_rank(e)
    if pausing is not None:
        stalls = next(rank.stalls for rank in e.ranks if rank.rank == pausing)
        where = f" ({stalls.where})" if stalls.where else ""
        yield ceiling(
            case,
            "no pauses",
            f"Find what rank {pausing} does in its pauses{where} and move it off the training thread, or do it less often.",
            c.share(c.stalls),
            "its pauses are gone",
        )
    elif c.slow:
        what = (
            "Give its loader what the others have: the same storage, as many workers and cores, shards of equal size."
            if c.slow.input >= c.slow.compute
            else "Distribute samples by length instead of by number, and check its device: clocks, temperature, other processes."
        )
        late = c.straggler if c.slow.input >= c.slow.compute else c.saves(c.straggler)
        who = f"rank {', '.join(map(str, c.slow.ranks))}"
        yield ceiling(
            case, f"{who} as fast as the others", f"R{who[1:]} is slow. {what}", c.share(late), "all ranks are as fast as a typical one"
        )


SOURCES: dict[Callable[[Case], Iterator[Remedy | None]], str] = {
    for_loader: "input-bound",
    _reductions: "communication-bound",
    _balance: "straggler",
    _optimizer: "optimizer-bound",
    sparse_tables: "optimizer-bound",
    for_host: "host-bound",
    less_own_code: "host-bound",
    _padding: "compute-bound",
    _transfer: "transfer-bound",
    _stalls: "stalled",
    _arms: "",
    _batch: "",
    fewer_micro_batches: "",
}
"""Source of remedies → the verdict whose cause they remove. Those of the last three shorten any step."""
