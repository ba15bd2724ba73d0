"""EvidenceBuilder: turns the timings of blocks, trials and traces on all ranks into Evidence, and times the reductions of gradients."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workbench.core import units
from workbench.diagnosis.analysis.evidence import Evidence, Gradients, Inside, Loading, RankEvidence, Repeated, Stalls, Tables
from workbench.diagnosis.analysis.stalls import Call, find_stalls, within
from workbench.harness import ablations
from workbench.harness.blocks import BlockTimer, StepTimes, known_pairs
from workbench.harness.discover import ReachableState, describe
from workbench.harness.feed import Feed
from workbench.harness.interleave import MIN_STEPS_PER_PASS, InterleavedRounds
from workbench.harness.module_use import DenseTables
from workbench.harness.observe import StepFacts, has_convolutions, weights_of
from workbench.harness.peers import Peers
from workbench.harness.results import VariantTimes
from workbench.timeline.timeline import Timeline

UNSYNCED_ARMS = ("alone", "no_sync")
"""Variants in which no rank waits for another."""
NOT_FOR_STALLS = ("warm-up", "loader", "first", "threads=")
"""Variants whose calls vary for reasons of their own: more threads than cores wait for each other."""
MAX_CALLS = 20_000
"""At most so many calls, the last ones, are searched for stalls."""
MAX_STEPS = 400
"""Steps of the timeline of each rank that are kept."""


class EvidenceBuilder:
    """Turns what was measured into Evidence."""

    def __init__(self, bench: BlockTimer, feed: Feed, rounds: InterleavedRounds) -> None:
        self.bench, self.feed, self.rounds, self.peers = bench, feed, rounds, bench.peers

    def pairs(self, base: str, arm: str) -> tuple[tuple[float, float], ...]:
        """Neighbours of the rounds. What a new pass of the loader costs is spread over the steps of a pass."""
        left, right = self._with_passes(base), self._with_passes(arm)
        return known_pairs(left[: len(right)], right[: len(left)])

    def arm(self, name: str) -> VariantTimes:
        """One of the rounds' variants beside the full step."""
        return VariantTimes(name=name, baseline="full", pairs=self.pairs("full", name))

    def _with_passes(self, arm: str) -> list[float]:
        extra = self._per_step_of_passes(arm)
        return [value + extra for value in self.bench.timings.slowest(arm)[: self.rounds.pairs]]

    def _per_step_of_passes(self, arm: str) -> float:
        """Seconds per step that beginning new passes adds: blocks leave such steps out, or some would have one and others none.

        Where each pass forks workers, the call is a part of it: training then copies each page that it writes to and shares with them.
        """
        if not MIN_STEPS_PER_PASS <= self.rounds.steps_per_pass < math.inf or arm not in ("full", "loader"):
            return 0.0
        if arm == "full" and self.rounds.whole_passes:
            return 0.0
        forks = self.feed.forks
        first, waits, calls = list[float](), list[float](), list[float]()
        for laps in (laps for block in self.bench.timings.blocks.get(arm, ()) for laps in block.laps):
            fresh = set(laps.fresh)
            first += [laps.waits[i] + (laps.calls[i] if forks else 0.0) for i in fresh]
            waits += [wait for i, wait in enumerate(laps.waits) if i not in fresh]
            calls += [call for i, call in enumerate(laps.calls) if i not in fresh] if forks else []
        usual = _mean(waits) + (statistics.median(calls) if calls else 0.0)  # some of the calls may have stalled
        cost = statistics.median(first) - usual if first else self.rounds.start_up - _mean(waits) / self.feed.accumulation
        return max(0.0, cost) / self.rounds.steps_per_pass

    def spread(self) -> float:
        """Interquartile range over median of ratios of neighbouring cached blocks, which slow changes of the machine do not affect."""
        values = [value for value in self.bench.timings.slowest("cached") if value == value]
        ratios = [after / before for before, after in pairwise(values)]
        if len(ratios) < 4:
            return 0.0
        low, mid, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return (high - low) / mid / math.sqrt(2)

    def stalls(self, *, alone: bool = False) -> Stalls:
        """The stalls of this rank, among the calls of all variants but those that differ from step to step; `alone`: while none waits."""
        rank, forks = self.peers.rank, self.feed.forks
        calls = [
            Call(number=block.first + i, seconds=laps.calls[i], arm=arm, delay=laps.delays[i], gc=laps.gcs[i])
            for arm, blocks in self.bench.timings.blocks.items()
            if not arm.startswith(NOT_FOR_STALLS) and (not alone or arm in UNSYNCED_ARMS)
            for block in blocks
            for laps in [block.laps[rank]]
            for i in range(len(laps.calls))
            if not (forks and i in laps.fresh)  # a part of the pass, as `_per_step_of_passes` has it
        ]
        calls.sort(key=lambda call: call.number)
        wait = _mean([wait for block in self.bench.timings.blocks.get("full", ()) for wait in block.laps[rank].waits])
        return find_stalls(calls[-MAX_CALLS:], wait=wait, places=self.bench.sampler.places)

    def evidence(
        self,
        objects: ReachableState,
        *,
        tried: Mapping[str, VariantTimes],
        inside: Inside | None,
        loading: Loading | None,
        samples: int | None,
        micro_batches: int,
        precision: str,
        padding: float | None,
        tables: Tables | None,
        repeated: Repeated | None,
        notes: Sequence[str],
    ) -> Evidence:
        """All of it, the same on all ranks. Collective."""
        timings, peers, models = self.bench.timings, self.peers, objects.models
        stalls = self.stalls()
        alone = self.stalls(alone=True) if peers.world_size > 1 else stalls
        everyone = peers.gather((self.rounds.timeline, stalls, alone, inside, loading, notes, samples))
        timings.stalled = [frozenset(stalls.at) for _, stalls, *_ in everyone]
        together = max((stalls for _, stalls, *_ in everyone), key=lambda stalls: stalls.share)
        all_arms = {"cached": self.arm("cached"), "loader": self.arm("loader"), **tried}
        steady = statistics.fmean(base for base, _ in all_arms["cached"].pairs)
        _, _, _, look, load, _, _ = everyone[0]
        optimizers = [
            f"{describe(optimizer)}({kind})" if (kind := ablations.implementation_of(optimizer)) else describe(optimizer)
            for optimizer in objects.optimizers
        ]
        weights = [weight for weight in weights_of(models) if weight.requires_grad]
        updated = {id(weight) for optimizer in objects.optimizers for group in optimizer.param_groups for weight in group["params"]}
        counts = [count for *_, count in everyone if count is not None]
        own = timings.blocks.get("alone" if peers.world_size > 1 else "full", ())
        return Evidence(
            step=steady + together.per_step,
            device=self.bench.device.type,
            world_size=peers.world_size,
            accumulation=self.feed.accumulation,
            micro_batches=micro_batches,
            threads=torch.get_num_threads(),
            samples=float(sum(counts)) if len(counts) == len(everyone) else None,
            parameters=sum(weight.numel() for weight in weights) if models else None,
            tensors=max(len(weights), len(updated)) if models or objects.optimizers else None,
            convolutions=has_convolutions(models),
            optimizer=", ".join(optimizers) or None,
            precision=precision,
            arms=all_arms,
            loading=load,
            inside=look,
            stalls=within(together, steady),
            ranks=tuple(self._rank(rank, timeline, alone) for rank, (timeline, _, alone, *_) in enumerate(everyone)),
            longest_wait=_mean([max(waits) for block in own for waits in zip(*(laps.waits for laps in block.laps), strict=False)]),
            padding=padding,
            tables=tables,
            repeated=repeated,
            seconds=self.bench.elapsed,
            steps=self.bench.called,
            notes=tuple(dict.fromkeys(note for *_, notes, _ in everyone for note in notes)),
        )

    def _rank(self, rank: int, timeline: Timeline, stalls: Stalls) -> RankEvidence:
        timings, parallel = self.bench.timings, self.peers.world_size > 1
        own, bare = ("alone", "no_sync") if parallel else ("full", "cached")
        return RankEvidence(
            rank=rank,
            timeline=replace(timeline, rank=rank, steps=timeline.steps[:MAX_STEPS], warmup=0),
            alone=_mean([row[rank] for row in timings.means(own)]) if own in timings.blocks else float("nan"),
            wait=_mean([wait for block in timings.blocks.get(own, ()) for wait in block.laps[rank].waits]),
            compute=_mean([row[rank] for row in timings.means(bare)]) if bare in timings.blocks else float("nan"),
            stalls=stalls,
        )


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else 0.0


MIN_NEW_PAGES, MIN_KERNEL_SHARE = 200, 0.15
"""Page faults per step, and share of the step in the kernel, from which on both are noted. Measured with AdamW on a table of 10 MB (glibc
2.36): 3,000 to 5,500 faults and 26 to 45 % of the step, and none where freed memory is kept. Chosen well below, for a note only."""


def new_pages_note(laps: Sequence[StepTimes]) -> list[str]:
    """A note, where much of a step goes into memory that the C library gives back to the kernel and gets again.

    How much that is depends on what else is in the heap, so such a step is slower and faster from block to block, and so are variants.
    """
    steps = sum(len(lap.calls) for lap in laps)
    if not steps:
        return []
    faults, kernel = (sum(getattr(lap, name) * len(lap.calls) for lap in laps) / steps for name in ("faults", "kernel"))
    share = kernel * steps / max(1e-12, sum(sum(lap.calls) + lap.tail for lap in laps))
    if faults < MIN_NEW_PAGES or share < MIN_KERNEL_SHARE:
        return []
    return [
        f"{units.percent(share)} of the step without its loader passes in the kernel, which gives it new pages of memory {faults:,.0f} "
        "times: the C library gives freed memory back. How often varies, and with it what another optimizer or batch gains. "
        "MALLOC_TRIM_THRESHOLD_=4294967296 MALLOC_MMAP_THRESHOLD_=33554432 in the environment of Python keeps it (glibc; wb.launch sets "
        "both)"
    ]


def tables_of(seen: DenseTables) -> Tables | None:
    """The embedding tables of a step as evidence; None if there are none."""
    names = sorted(seen.rows, key=lambda name: -seen.rows[name][0])
    numbers = sum(seen.rows[name][0] for name in names)
    touched = sum(seen.rows[name][0] * seen.rows[name][1] for name in names)
    return Tables(names=tuple(names), numbers=numbers, touched=touched / numbers) if names else None


def repeated_of(seen: StepFacts) -> Repeated | None:
    """The module that a step calls most often, as evidence; None if none was seen to be called."""
    if seen.most_called is None:
        return None
    (_, name, kind), calls = seen.most_called
    return Repeated(name=name, kind=kind, calls=calls / seen.micro_batches)


LARGE_BYTES = 25 * 2**20
"""Bytes of the large reduction: a bucket of DDP's."""
REDUCTION_REPEATS = 9
"""Reductions of each size, the first of which warms up."""


def measure_gradients(models: Sequence[nn.Module], peers: Peers) -> Gradients | None:
    """What all ranks reduce in a step. Collective. None if no model is parallel and none has gradients."""
    parallel = [part for model in models for part in model.modules() if isinstance(part, DistributedDataParallel)]
    weights = {id(weight): weight for model in parallel or models for weight in model.parameters() if weight.requires_grad}
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    if not size:
        return None
    group = parallel[0].process_group if parallel else None
    device = next(iter(weights.values())).device
    large = min(LARGE_BYTES, max(size, 2**20))
    small = _seconds(1, device, group, peers)
    per_byte = max(0.0, _seconds(large // 4, device, group, peers) - small) / large
    buckets = sum(_buckets(model) for model in parallel) if parallel else len(weights)
    return Gradients(size=size, buckets=buckets, latency=small, per_byte=per_byte)


def _seconds(numbers: int, device: torch.device, group: Any, peers: Peers) -> float:
    values, times = torch.zeros(numbers, device=device), []
    for _ in range(REDUCTION_REPEATS):
        peers.barrier()
        start = time.perf_counter()
        dist.all_reduce(values, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return peers.agree(statistics.median(times[1:]))


def _buckets(model: DistributedDataParallel) -> int:
    """Pieces in which DDP reduces, as it logs them; else by their size."""
    try:
        data = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        sizes = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or "")
        if buckets := [part for part in sizes.split(",") if part.strip()]:
            return len(buckets)
    except (AttributeError, RuntimeError):
        pass
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.requires_grad)
    return max(1, -(-size // int(model.bucket_bytes_cap)))
