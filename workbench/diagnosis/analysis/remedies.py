"""Remedies: what would help a step, each with the gain it promises, best first. What cannot help is not among them.

Where an experiment tried the change itself, its ratio is put into the full step by `StepModel`; where it did not, a formula predicts, with
an interval as wide as its known errors; where nothing predicts what replaces a part, the removal of the part is the ceiling.
"""

from collections.abc import Iterator

from workbench.core import units
from workbench.core.statistics import Interval
from workbench.diagnosis.analysis.causes import MOSTLY, pausing_rank
from workbench.diagnosis.analysis.costs import saved_by
from workbench.diagnosis.analysis.evidence import Evidence
from workbench.diagnosis.analysis.loader_remedies import for_loader
from workbench.diagnosis.analysis.rank_remedies import for_ranks
from workbench.diagnosis.analysis.remedy import WORTH, WORTH_A_BATCH, Case, Remedy, ceiling, rank, tried, worth
from workbench.diagnosis.analysis.step_model import StepModel
from workbench.diagnosis.analysis.verdict import Judgement
from workbench.runs.spec import Spec


def remedies_for(evidence: Evidence, judgement: Judgement, *, spec: Spec | None = None) -> tuple[Remedy, ...]:
    """What would help, best first.

    Args:
        evidence: of one training step.
        judgement: what follows from it.
        spec: what was diagnosed, if it was a spec or a run: its fields can be turned.
    """
    if judgement.verdict == "inconclusive":
        return ()
    case = Case(evidence=evidence, judgement=judgement, model=StepModel.of(evidence), spec=spec)
    sources = (_observed,) if evidence.observed else (for_loader, for_ranks, _arms, _batch, _host, _compute, _transfer, _stalls)
    found: dict[str, Remedy] = {}
    for source in sources:
        for one in source(case):
            found.setdefault(one.name, one)
    return tuple(sorted(found.values(), key=rank))


def _arms(case: Case) -> Iterator[Remedy]:
    """Changes that an experiment made itself."""
    for name in case.evidence.arms:
        kind, _, value = name.partition("=")
        one: Remedy | None = None
        if kind == "precision":
            costs = "fewer digits in activations and gradients: watch the loss" + (
                "; fp16 skips steps whose gradients overflow" if value == "amp_fp16" else ""
            )
            one = tried(case, name, {kind: value}, f"Compute forward and backward in mixed precision ({value[4:]}).", costs)
        elif kind == "optimizer":
            one = tried(case, name, {kind: value}, f"Use the optimizer's {value} implementation: {value}=True.", _OPTIMIZER_COSTS[value])
        elif kind == "threads":
            one = tried(case, name, {kind: int(value)}, f"Use {value} thread{'s' * (value != '1')} per operator on each rank.", "")
        elif kind == "channels_last":
            what = "Keep weights and images in the channels_last layout: model.to(memory_format=torch.channels_last), and the images, too."
            one = tried(case, name, {kind: True}, what, "")
        elif kind == "no_gc":
            what = "Switch Python's cyclic garbage collector off (gc.disable()) and collect every few hundred steps, or gc.freeze() first."
            one = tried(case, name, {"gc": False}, what, "memory of reference cycles stays until it is collected")
        if one:
            yield one


_OPTIMIZER_COSTS = {
    "fused": "last digits of the weights differ",
    "foreach": "memory for a copy of the parameters during the step; last digits differ",
}


def _batch(case: Case) -> Iterator[Remedy]:
    """A larger batch, where most of the step does not grow with it."""
    e, c, model = case.evidence, case.costs, case.model
    arm, size = e.arm("doubled"), model.knobs["micro_batch"]
    if arm is None or not size:
        return
    larger = round(size * arm.samples)
    speedup = model.speedup(micro_batch=larger)
    new = model.parts(micro_batch=larger).step
    loose = arm.saved.width / 2 * c.replayed
    yield from _worth_a_batch(
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
        )
    )


def _worth_a_batch(remedy: Remedy) -> Iterator[Remedy]:
    if worth(remedy, WORTH_A_BATCH):
        yield remedy


def _host(case: Case) -> Iterator[Remedy]:
    """What people have to change themselves in what the host does."""
    c, cause = case.costs, case.judgement.cause
    if case.judgement.verdict != "host-bound":
        return
    saved = case.judgement.shares["host"]
    lines = case.evidence.inside.lines if case.evidence.inside else ()
    where = f" It is mostly in {lines[0][0]}." if lines else ""
    if cause.startswith("sleeping"):
        what = f"Move waiting, reading and writing out of the step, or into a thread.{where}"
        one = ceiling(case, "no waiting in the step", what, c.share(c.saves(_exactly(c.sleeping))), "the training thread never sleeps")
    elif cause.startswith("syncs"):
        what = f"Ask for numbers (.item(), print, if loss > …) every hundred steps instead of in each; keep sums on the device.{where}"
        one = ceiling(case, "fewer syncs", what, saved, "operators follow each other without a gap")
    elif cause.startswith(("python", "launches")):
        what = f"Do on whole tensors what Python does piece by piece.{where}"
        one = ceiling(case, "less Python in the step", what, saved, "operators follow each other without a gap")
        spread = not lines or lines[0][1] < MOSTLY * saved.mid  # one long piece of Python is none of the model's
        compiled = ceiling(
            case,
            "torch.compile",
            "Compile the model, model = torch.compile(model): fewer and larger operators, less Python between them.",
            saved,
            "operators follow each other without a gap",
            "a minute or more at the first step, and again for each new shape; a C++ compiler",
        )
        if compiled and (spread or cause.startswith("launches")):
            yield compiled
    else:
        return
    if one:
        yield one


def _exactly(seconds: float) -> Interval:
    return Interval(low=seconds, mid=seconds, high=seconds)


def _compute(case: Case) -> Iterator[Remedy]:
    """Less to compute: no padding."""
    e = case.evidence
    arm = e.arm("trimmed")
    if arm is None or not e.padding:
        return
    seconds = saved_by(e, arm, case.costs.replayed)
    one = Remedy(
        name="batches by length",
        what="Put samples of like length into one batch (sort chunks of the shuffled order), and pad to the longest of each batch only.",
        speedup=case.model.without(seconds.mid),
        low=1.0,
        high=case.model.without(seconds.high),
        formula=f"ceiling, measured: cut to the mean length of its samples, a batch takes {units.percent(arm.saved.mid)} less",
        costs="the order of samples is a little less random",
        ceiling=True,
    )
    if worth(one):
        yield one


def _transfer(case: Case) -> Iterator[Remedy]:
    """Copies that overlap with computing."""
    c, loading = case.costs, case.evidence.loading
    saved = c.share(c.saves(c.transfer))
    pinned = bool(loading and loading.pin_memory)
    one = ceiling(
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
    if one:
        yield one


_MOVED = {
    "checkpoint": "Write checkpoints in the background: copy the state to the CPU, and save it in a thread or with "
    "torch.distributed.checkpoint.async_save; or write them less often.",
    "evaluation": "Evaluate less often, on fewer samples, or in a process of its own.",
    "logging": "Log less often, and write in a thread.",
    "garbage collection": "Switch Python's cyclic garbage collector off (gc.disable()) and collect once per epoch, or gc.freeze() "
    "once everything is built.",
}


def _stalls(case: Case) -> Iterator[Remedy]:
    """What stops the step now and then, moved off the path."""
    e, c = case.evidence, case.costs
    if not e.stalls.at or pausing_rank(e) is not None or c.stalls.mid / c.step < 1 - 1 / WORTH:
        return
    where = f" ({e.stalls.where})" if e.stalls.where else ""
    what = _MOVED.get(e.stalls.kind or "", "Find out what stops the step there, and move it into a thread or do it less often.")
    one = ceiling(
        case,
        f"{e.stalls.kind or 'pauses'} off the path",
        f"{what}{where}" if not where else f"{what.removesuffix('.')}{where}.",
        c.share(c.stalls),
        "stalls are gone",
        change={"gc": False} if e.stalls.kind == "garbage collection" else None,
    )
    if one:
        yield one


def _observed(case: Case) -> Iterator[Remedy]:
    """From observation alone: the parts that were seen, as ceilings, and nothing to turn."""
    words = {
        "data_wait": ("no waiting for data", "Find out by experiment what holds the loader up, and how many workers it needs."),
        "straggler": ("ranks equally fast", "Find out by experiment what holds the slowest rank up."),
        "transfer": ("copies beside training", "Put batches into page-locked memory and copy with non_blocking=True."),
        "optimizer": ("a cheaper optimizer", "Find out by experiment whether a fused or foreach implementation is faster."),
        "stalls": ("no stalls", "Move what stops the step now and then off the path."),
        "host": ("less work between the phases", "Move logging and Python work out of the loop, or do them less often."),
    }
    for part, saved in case.judgement.shares.items():
        if part in words and saved.mid >= 1 - 1 / WORTH_A_BATCH:
            name, what = words[part]
            if one := ceiling(case, name, what, saved.mid, f"{part} is gone, as far as clocks can see"):
                yield one
