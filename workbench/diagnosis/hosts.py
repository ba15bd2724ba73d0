"""What the host may hold a step back by: its threads, its garbage collector, sleeping, waiting for the device, launches, Python."""

from workbench import units
from workbench.diagnosis.causes import GROWS, MOSTLY, Cause, growth, growths
from workbench.diagnosis.costs import NOTHING, Costs, saved_by
from workbench.diagnosis.doubt import capped
from workbench.diagnosis.evidence import Evidence
from workbench.statistics import Interval

MANY_SYNCS = 2.0
"""Per step, on a GPU: one (the loss that is logged) is usual, and at the end of a step it is nearly free."""
GAP = 25e-6
"""Seconds of Python from one operator to the next, where it only calls them: a module and a function or two."""
SHORT = 60e-6
"""Mean seconds of operators that are called for longer than they compute."""
MANY_ITEMS = 20.0
"""Per step, where operators run at once: each costs a few microseconds, so only many matter."""
TINY = 5e-6
"""Mean seconds of short operators that do next to nothing: a call costs as much, whatever the size of the batch."""


def oversubscription(e: Evidence, c: Costs) -> tuple[Interval, Cause] | None:
    """More threads than cores; proved by the arm with fewer threads."""
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


def collection(e: Evidence, c: Costs) -> tuple[Interval, Cause] | None:
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
        cause="garbage collection",
        why=f"Python's cyclic garbage collector takes {units.percent(saved.mid / c.step)} of the step.",
    )


def without_operators(e: Evidence, c: Costs) -> tuple[Interval, Cause] | None:
    """The time in which no operator runs, and that of operators so short that launching them is most of their cost."""
    inside = e.inside
    if inside is None or c.host == NOTHING:
        return None
    gaps = units.percent(c.host.mid / c.step)
    where = "".join(f" {units.percent(share)} of the step is spent in {line}." for line, share in inside.lines[:1])
    if c.sleeping >= MOSTLY * c.host.mid and c.sleeping:
        return c.host, Cause(
            cause="sleeping or I/O",
            why=f"For {units.seconds(c.sleeping)} of each step the training thread neither computes nor waits for a core: it sleeps, "
            f"or reads or writes.{where}",
        )
    if (e.device != "cpu" and inside.syncs >= MANY_SYNCS) or inside.syncs >= MANY_ITEMS:
        return c.called if e.device == "cpu" else c.host, Cause(
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


def _flat(e: Evidence, c: Costs) -> bool:
    """Does the step hardly grow with its batch? Where that is lost in noise, the trace tells how much of it is the calling of operators."""
    grown = growths(e)
    if grown.low <= GROWS < grown.high:
        return c.called.low >= MOSTLY * c.replayed
    return growth(e) <= GROWS


def _tiny(e: Evidence) -> bool:
    """Do most operators do next to nothing? Then there are as many of them as a loop of Python makes, of samples or of tensors."""
    inside = e.inside
    if inside is None or not inside.op_count or e.device != "cpu":
        return False
    work = inside.ops - (inside.optimizer_ops or 0.0)
    return inside.small_ops >= MOSTLY * work and inside.small_ops <= TINY * inside.op_count


def _short(e: Evidence, c: Costs) -> bool:
    """Is the time without an operator that between operators, spread over many short ones, rather than one long piece of Python?"""
    inside = e.inside
    if inside is None or not inside.op_count:
        return False
    return c.host.mid <= GAP * inside.op_count and inside.ops <= SHORT * inside.op_count
