"""Predicts the gap for ranks that are not here: reductions by the ring, waits by the distribution of steps, epochs that get shorter."""

import dataclasses
import math
import statistics

from workbench.core.statistics import Interval
from workbench.diagnosis.analysis.evidence import Gradients
from workbench.diagnosis.analysis.gap import CAUSES, REDUCTION, UNEXPLAINED, Gap, GapPart, gap_of
from workbench.diagnosis.analysis.gap_evidence import GapEvidence, expected_largest, seconds_of

BACKWARD = 0.6
"""Part of a step without loader that is backward, where it was not measured: two of three parts of the compute, less the optimizer's.
Chosen. It decides how much of a reduction is taken to be hidden."""
CHANCE_RANGE = (0.5, 1.5)
"""By how much the predicted wait for the slowest of many may be off. Chosen: steps of ranks are neither quite independent nor alike."""
NOTHING = Interval(low=0.0, mid=0.0, high=0.0)


def predict_gap(evidence: GapEvidence, ranks: int, *, same: str = "micro_batch", link: Gradients | None = None) -> Gap:
    """The gap with another number of ranks, each as those that were measured, on machines as this one.

    Args:
        evidence: of one rank, or of several.
        ranks: how many there shall be.
        same: with what one process is compared, see `gap.SAME`.
        link: what a reduction between two ranks costs; None = as it was measured, and nothing where only one rank was.

    Raises:
        ValueError: fewer ranks than two, or than were measured.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < max(2, evidence.world_size):
        raise ValueError(f"ranks={ranks!r}: a whole number from {max(2, evidence.world_size)} on, such as {4 * evidence.world_size}")
    return _from_one(evidence, ranks, same, link) if evidence.world_size == 1 else _from_several(evidence, ranks, same, link)


def link_of(e: GapEvidence) -> Gradients | None:
    """What a reduction between two of the measured ranks would cost, by what it costs between all of them; None = not known."""
    if e.gradients is None or e.world_size < 2:
        return None
    turns, volume = math.sqrt((e.world_size - 1) * math.log2(e.world_size)), 2 * (1 - 1 / e.world_size)
    return dataclasses.replace(e.gradients, latency=e.gradients.latency / turns, per_byte=e.gradients.per_byte / volume)


def _over_link(e: GapEvidence, gap: Gap, ranks: int, link: Gradients) -> dict[str, Interval]:
    """The two parts of the reduction over another link, of which the backward hides as large a part as it does now.

    Now: `exposed` seconds of the `bare` ones are seen. The rest is hidden, and no more than the backward lasts can be.
    """
    g, measured = e.gradients, link_of(e)
    assert g is not None
    assert measured is not None
    ring, tree = (ranks - 1) / (e.world_size - 1), math.log2(ranks) / math.log2(e.world_size)
    bare, exposed = g.buckets * g.latency + g.size * g.per_byte, max(0.0, sum(gap[cause].mid for cause in REDUCTION))
    s = seconds_of(e)
    hideable = e.tail.backward if e.tail else BACKWARD * (s.one_cached if math.isfinite(s.one_cached) else s.one)
    more = max(1.0, exposed / bare) if bare else 1.0  # beside the training a reduction may take longer than by itself
    hidden = min(max(0.0, bare - exposed), hideable)
    overlap = hidden / min(bare, hideable) if min(bare, hideable) > 0 else 0.0
    starts = more * g.buckets * g.latency * (link.latency / measured.latency if measured.latency else 1.0)
    bytes_ = more * g.size * link.per_byte * 2 * (1 - 1 / ranks)

    def seen(growth: float) -> tuple[float, float]:
        """Of starts and bytes."""
        whole = starts * growth + bytes_
        part = (whole - overlap * min(whole, hideable)) / whole if whole else 0.0
        return starts * growth * part, bytes_ * part

    (low, low_bytes), (mid, mid_bytes), (high, high_bytes) = seen(tree), seen(math.sqrt(ring * tree)), seen(ring)
    return {
        "many reductions": Interval(low=min(low, mid), mid=mid, high=max(mid, high)),
        "large gradients": Interval(low=min(low_bytes, mid_bytes), mid=mid_bytes, high=max(mid_bytes, high_bytes)),
    }


def _from_several(e: GapEvidence, ranks: int, same: str, link: Gradients | None) -> Gap:
    """What belongs to a machine stays as it is; what ranks do together grows as its formula says."""
    gap, s = gap_of(e, same), seconds_of(e)
    grown: dict[str, Interval] = {part.cause: part.seconds for part in gap.parts}
    ring, tree = (ranks - 1) / (e.world_size - 1), math.log2(ranks) / math.log2(e.world_size)
    volume = (1 - 1 / ranks) / (1 - 1 / e.world_size)
    if "many reductions" in grown:
        now = grown["many reductions"]
        mid = now.mid * math.sqrt(ring * tree)
        grown["many reductions"] = Interval(low=min(mid, max(0.0, now.low) * tree), mid=mid, high=max(mid, now.high * ring))
    if "large gradients" in grown:
        grown["large gradients"] = grown["large gradients"].of(lambda seconds: seconds * volume)
    if waits := grown.get("waits and reduction"):
        grown["waits and reduction"] = Interval(low=waits.low, mid=waits.mid * volume, high=max(waits.high * ring, waits.mid * volume))
    if rare := grown.get("rare long steps"):  # the more ranks, the more often one has such a step
        low, mid, high = (max(0.0, end) for end in (rare.low, rare.mid, rare.high))  # that N have fewer than one is chance
        mid *= math.sqrt(ring * tree)
        grown["rare long steps"] = Interval(low=min(mid, low * tree), mid=mid, high=max(mid, high * ring))
    if link is not None and e.gradients is not None and "large gradients" in grown:
        grown |= _over_link(e, gap, ranks, link)
    steps = _busy_steps(e)
    if steps and "uneven steps" in grown:
        usual = statistics.fmean(steps)
        here, there = (expected_largest(steps, count) - usual for count in (e.world_size, ranks))
        if here > 0:
            grown["uneven steps"] = _by_chance(grown["uneven steps"].mid * there / here)
    if e.steps_per_pass:
        grown["epochs"] = _epochs(e, s.start_alone, s.start_together, ranks)
    return _gap(gap.linear, grown, same)


def _from_one(e: GapEvidence, ranks: int, same: str, link: Gradients | None) -> Gap:
    """From one process alone: what it computes and reduces is known, the link is taken, and each rank has as many cores as that process."""
    s = seconds_of(e)
    computing = s.one_cached if math.isfinite(s.one_cached) else s.one
    parts: dict[str, Interval] = {}
    linear = gap_of(e, same).linear
    if e.steps_per_pass and math.isfinite(s.start_alone):  # of which each of the ranks has as many
        linear = linear.of(lambda seconds: seconds - max(0.0, s.start_alone) * (1 - 1 / ranks) / (e.steps_per_pass or 1))
    if same == "global_batch" and e.large and math.isfinite(s.one_large):
        parts["micro-batch"] = _about(computing - s.one_large / e.large, 0.2)
    steps = _busy_steps(e)
    parts["uneven steps"] = _by_chance(expected_largest(steps, ranks) - statistics.fmean(steps)) if steps else NOTHING
    g = e.gradients
    if g is not None and link is not None:
        starts = g.buckets * link.latency * (ranks - 1)
        bytes_ = g.size * link.per_byte * 2 * (1 - 1 / ranks)
        last = (starts + bytes_) / max(1, g.buckets)
        exposed = Interval(low=last, mid=max(last, starts + bytes_ - BACKWARD * computing), high=starts + bytes_)
        share = starts / (starts + bytes_) if starts + bytes_ else 0.0
        parts["many reductions"] = exposed.of(lambda seconds: seconds * share)
        parts["large gradients"] = exposed.of(lambda seconds: seconds * (1 - share))
    if e.steps_per_pass:
        parts["epochs"] = _epochs(e, s.start_alone, s.start_alone, ranks)
    return _gap(linear, parts, same)


def _gap(linear: Interval, parts: dict[str, Interval], same: str) -> Gap:
    mids = linear.mid + math.fsum(part.mid for part in parts.values())
    down = math.hypot(linear.mid - linear.low, *(part.mid - part.low for part in parts.values()))
    up = math.hypot(linear.high - linear.mid, *(part.high - part.mid for part in parts.values()))
    step = Interval(low=min(mids, max(linear.mid / 2, mids - down)), mid=mids, high=mids + up)
    order = [cause for cause in (*CAUSES, UNEXPLAINED) if cause in parts]
    return Gap(
        linear=linear,
        step=step,
        parts=tuple(GapPart(cause=cause, seconds=parts[cause], predicted=True) for cause in order),
        same=same,
        predicted=True,
    )


def _epochs(e: GapEvidence, alone: float, together: float, ranks: int) -> Interval:
    """With more ranks an epoch has fewer steps."""
    if not e.steps_per_pass or not math.isfinite(alone):
        return NOTHING
    together = together if math.isfinite(together) else alone
    steps = e.steps_per_pass * e.world_size
    return _about(together / max(1.0, steps / ranks) - alone / steps, 0.3)


def _busy_steps(e: GapEvidence) -> list[float]:
    """Steps of ranks at their own pace, each around the typical step."""
    arm = "strangers" if e.rounds("strangers") else "one"
    steps: list[float] = []
    for block in e.rounds(arm):
        for rank in range(len(block.steps)):
            row, mean = block.busy(rank), block.mean(rank)
            steps += [step - mean for step in row if step == step and mean == mean]
    usual = seconds_of(e).one
    return [usual + step for step in steps]


def _by_chance(seconds: float) -> Interval:
    seconds = max(0.0, seconds)
    return Interval(low=CHANCE_RANGE[0] * seconds, mid=seconds, high=CHANCE_RANGE[1] * seconds)


def _about(seconds: float, by: float) -> Interval:
    return Interval(low=seconds - by * abs(seconds), mid=seconds, high=seconds + by * abs(seconds))
