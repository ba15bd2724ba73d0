"""Derives the remedies of a step that its host holds up: Python, launches of operators, waiting, reading of values, garbage collection."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

from workbench.core import units
from workbench.core.statistics import Interval
from workbench.diagnosis.analysis.causes import MIN_EXPLAINED, own_code
from workbench.diagnosis.analysis.evidence import Evidence
from workbench.diagnosis.analysis.remedy import Case, Remedy, ceiling, gain_of
from workbench.runs.spec import RunSpec, SpecError

ALLOCATOR = "allocator retries"
"""The cause of which memory to spare is the remedy."""
SPARE_MEMORY = (
    "Keep memory free: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the start, which avoids fragmentation, "
    "or use a smaller micro-batch or activation checkpointing."
)
SPARE_COSTS = "a smaller micro-batch or checkpointing takes longer per sample"
GC_OFF = "Switch off Python's cyclic garbage collector (gc.disable()) and collect every few hundred steps, or call gc.freeze() first."
GC_COSTS = "the memory of reference cycles is freed only at the next collection"


def for_host(case: Case) -> Iterator[Remedy | None]:
    """Changes that would relieve the host. People have to make them, but for the garbage collector and the compiling of a task."""
    c, cause = case.costs, case.judgement.cause
    if case.judgement.verdict != "host-bound":
        return
    saved = case.judgement.shares["host"]
    lines = case.evidence.inside.lines if case.evidence.inside else ()
    most, where = bool(lines) and lines[0][1] >= MIN_EXPLAINED * saved.mid, ""
    if lines:
        where = f" {'It is mostly in' if most else f'Of the step, {units.percent(lines[0][1])} are in'} {lines[0][0]}."
    if cause.startswith("sleeping"):
        sleeping = Interval(low=c.sleeping, mid=c.sleeping, high=c.sleeping)
        what = f"Move waiting, reading, writing and printing out of the step or into a thread, or do them less often.{where}"
        yield ceiling(case, "no waiting in the step", what, c.share(c.saves(sleeping)), "the training thread never sleeps")
    elif cause == ALLOCATOR:
        yield ceiling(case, "memory to spare", SPARE_MEMORY, saved, "the allocator never waits", SPARE_COSTS)
    elif cause.startswith("syncs"):
        what = f"Read values of tensors (.item(), print, if loss > …) every hundred steps, not in each; keep sums on the device.{where}"
        yield ceiling(case, "fewer syncs", what, saved, "operators follow each other without a gap")
    elif cause.startswith(("python", "launches")):
        yield from _launches(case, saved, where, most)
    elif cause == "garbage collection":
        yield ceiling(case, "gc=False", GC_OFF, saved, "the collector never runs", GC_COSTS, {"gc": False})


MOST_FIXED = 0.9
"""Fraction of training that does not grow with the batch, at most. Chosen: how much it grows is measured to a few percent of it, and "up to
37×" would follow from the noise of a step that seemed not to grow at all."""
LOOPS = 100
"""Operators per parameter tensor from which on there are loops in Python. Chosen: models without them have 5 to 30, an LSTMCell that is
called 96 times 400, and a loop over pairs of boxes or over points thousands."""
COMPILE_SECONDS = 0.012
"""That torch.compile takes for an operator on one core. Measured on two steps, of 1,183 and of 41,349 operators: 10 and 12 ms."""
LONGEST_COMPILE = 60.0
"""Seconds from which on compiling is not proposed: loops are unrolled, which takes minutes. Chosen: as long as a proof may take."""
LOOPED = 32
"""Calls of one module per batch from which on it is taken to be called in a loop over time or samples. Chosen: a block whose weights are
shared in depth is called 12 or 24 times."""


def _launches(case: Case, saved: Interval, where: str, most: bool) -> Iterator[Remedy | None]:
    """Fewer operators, and less Python between them.

    Args:
        case: the step.
        saved: fraction of it that the host holds up.
        where: the line in which Python is most often, in words.
        most: is that line most of it?
    """
    e, c, device = case.evidence, case.costs, case.evidence.device != "cpu"
    launches = case.judgement.cause.startswith("launches")
    own = sum(share for _, share in e.inside.own) if e.inside else 0.0
    own *= c.replayed / c.step  # in the step's own code, which compiling the model leaves as it is
    follow = f"{'kernels' if device else 'operators'} follow each other without a gap; that there may be fewer of them is not counted"
    all_of_it, gone = saved, follow
    if launches and not device and not math.isnan(c.fixed):  # one operator in the place of many computes as fast as large batches do
        most_of_it = min(c.fixed, MOST_FIXED * c.replayed)
        fixed = c.share(c.saves(Interval(low=most_of_it, mid=most_of_it, high=most_of_it)))
        all_of_it = Interval(low=max(saved.low, fixed.low), mid=max(saved.mid, fixed.mid), high=max(saved.high, fixed.high))
        gone = "all of forward and backward that does not grow with the batch is gone" if all_of_it.mid > saved.mid else follow
    if launches or (not most and own < MIN_EXPLAINED * saved.mid):
        left = max(0.0, 1 - own)
        models, top = (Interval(low=min(x.low, left), mid=min(x.mid, left), high=min(x.high, left)) for x in (saved, all_of_it))
        compiled = _compiled(case, models, follow if models == saved else f"{follow}, and the step's own code stays as it is")
        if compiled and launches and not device:
            compiled = replace(
                compiled,
                ceiling=False,
                speedup=gain_of(compiled),
                high=max(compiled.high, 1 / max(1e-3, 1 - top.high)),
                formula="half of what would be gained if operators followed each other without a gap; at most, all of forward and backward "
                "that does not grow with the batch is gone",
            )
        yield compiled
    called = own_code(e, c)
    helper = own_code(e, c, helpers=True) if launches and _has_loops(e) else None
    if helper:
        if called and called.function == helper.function:  # by a forward and by the loss
            helper = called = replace(helper, share=helper.share + called.share)
        yield ceiling(
            case,
            f"less work in {helper.function}",
            f"Make {helper.function}, which a forward calls, cheaper: it takes {units.percent(helper.share)} of the step, most of it in "
            f"{helper.line}. Work on whole tensors instead of one sample or one row at a time.",
            helper.share,
            f"all of {helper.function} is gone; its backward is not counted",
        )
    if device and launches and not (e.inside and e.inside.graphs):
        yield ceiling(
            case,
            "CUDA graphs",
            "Record the kernels once and launch them all at once: torch.compile(model, mode='reduce-overhead'), or "
            "torch.cuda.make_graphed_callables.",
            saved,
            follow,
            "shapes and addresses of tensors must not change; the graph keeps memory of its own",
        )
    looped = e.repeated if launches and e.repeated and e.repeated.calls >= LOOPED else None
    if looped:
        named = f"{looped.name} ({looped.kind})" if looped.name else looped.kind
        what = (
            f"{named} is called {looped.calls:.0f} times per batch: call it once with all of it, or, where a call needs the result of the "
            f"last one, a module that loops inside, such as nn.LSTM instead of an LSTMCell.{where}"
        )
        yield ceiling(case, f"fewer calls of {looped.name or looped.kind}", what, all_of_it, gone)
        return
    named_share = max((function.share for function in (helper, called) if function), default=0.0)
    if not launches or named_share < MIN_EXPLAINED * saved.mid:  # else `less_own_code` says so of its function
        what = f"Replace Python loops by operations on whole tensors, and print and log less often.{where}"
        less = ceiling(case, "less Python in the step", what, all_of_it, gone)
        yield less and replace(less, vague=launches)


def _has_loops(e: Evidence) -> bool:
    """Are there so many operators that loops in Python call them?"""
    return e.inside is not None and e.inside.op_count >= LOOPS * max(1, e.tensors or 1)


def _compiled(case: Case, saved: Interval, follow: str) -> Remedy | None:
    """A compiled model, by the knob of a spec where its other knobs allow it; none where it is compiled already, or where that would take
    too long.
    """
    e = case.evidence
    takes = COMPILE_SECONDS * e.inside.op_count if e.inside and e.device == "cpu" else 0.0
    if takes > LONGEST_COMPILE:
        return None
    name, what, change = "torch.compile", "Compile the model, model = torch.compile(model)", {}
    if isinstance(case.spec, RunSpec):
        if case.spec.compile != "none":
            return None
        for value in ("model", "blocks"):
            with contextlib.suppress(SpecError):
                case.spec.replace(compile=value)
                name, what, change = f"compile={value}", f'Compile the model: compile="{value}"', {"compile": value}
                break
    what += ": fewer and larger operators, less Python between them." if not change else ", for fewer and larger operators and less Python."
    first = f"about {units.seconds(max(10.0, takes))}" if takes else "a minute or more"
    costs = f"{first} at the first step, and again for each new shape; a C++ compiler"
    return ceiling(case, name, what, saved, follow, costs, change)
