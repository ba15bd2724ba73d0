"""Three independent sources, part by part: marks in the loop, experiments, and a trace from inside a step. Where they differ, and why."""

import math
import statistics

from workbench import units
from workbench.diagnosis.costs import Costs
from workbench.diagnosis.evidence import Evidence
from workbench.diagnosis.judgement import Source


def sources_of(e: Evidence, c: Costs) -> tuple[Source, ...]:
    """Each part that at least one source can see, as fractions of the step."""
    found = [_data(e, c), _transfer(e, c), _optimizer(e, c), _communication(e, c), _host(e, c)]
    return tuple(one for one in found if one is not None)


def _clock(e: Evidence, phase: str) -> float | None:
    """Mean share of a phase over the ranks."""
    shares = [one.timeline.share(phase) for one in e.ranks if one.timeline.count]
    known = [share for share in shares if not math.isnan(share)]
    return statistics.fmean(known) if known else None


def _traced(c: Costs, seconds: float | None, step: float) -> float | None:
    """From the replayed step to the whole one."""
    return None if seconds is None or not step else seconds / step * c.replayed / c.step


def _arm(e: Evidence, c: Costs, name: str, seconds: float) -> float | None:
    return seconds / c.step if name in e.arms else None


def _data(e: Evidence, c: Costs) -> Source | None:
    clock = _clock(e, "data_wait")
    late = max(0.0, c.straggler.mid - c.slow.compute) if c.slow else 0.0
    arm = _arm(e, c, "cached", c.data.mid + min(late, c.clean - c.cached))
    if clock is None and arm is None:
        return None
    note = ""
    if clock is not None and arm is not None and abs(clock - arm) > 0.05:
        if arm > clock:
            note = "workers take cores from training: the loader costs more than it is waited for"
        else:
            note = "part of the waiting would only move elsewhere: another rank or the device is slower"
    return Source(part="data_wait", clocks=clock, arms=arm, note=note)


def _transfer(e: Evidence, c: Costs) -> Source | None:
    clock = _clock(e, "h2d")
    arm = _arm(e, c, "device_batch", c.transfer.mid)
    if arm is None and not clock:
        return None
    return Source(part="transfer", clocks=clock, arms=arm)


def _optimizer(e: Evidence, c: Costs) -> Source | None:
    clock = _clock(e, "optimizer")
    arm = _arm(e, c, "no_optimizer", c.optimizer.mid)
    trace = _traced(c, e.inside.optimizer, e.inside.step) if e.inside else None
    if clock is None and arm is None and trace is None:
        return None
    note = ""
    if clock is not None and arm is not None and clock > arm + 0.05:
        note = "work queued before it ends in its time"
    elif trace is not None and arm is not None and arm > trace + 0.05:
        note = "its writes push forward and backward out of the caches"
    return Source(part="optimizer", clocks=clock, arms=arm, trace=trace, note=note)


def _communication(e: Evidence, c: Costs) -> Source | None:
    arm = _arm(e, c, "no_sync", c.communication.mid)
    trace = _traced(c, e.inside.collectives, e.inside.step) if e.inside else None
    if arm is None and trace is None:
        return None
    note = "clocks have it inside backward"
    if arm is not None and trace is not None:
        exposed = min(arm, trace)
        note = f"exposed {units.percent(exposed)}, contention {units.percent(max(0.0, arm - exposed))}; clocks have it inside backward"
    return Source(part="communication", arms=arm, trace=trace, note=note)


def _host(e: Evidence, c: Costs) -> Source | None:
    if e.inside is None:
        return None
    clock = _clock(e, "other")
    return Source(part="host", trace=c.host.mid / c.step, note=f"clocks saw {units.percent(clock)} outside all phases" if clock else "")
