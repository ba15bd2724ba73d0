"""The evidence of an experiment from times by hand: what a new pass costs is spread over its steps, stalls are counted apart."""

from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.played_steps import laps
from workbench.diagnosis.measure.evidence import EvidenceBuilder
from workbench.harness.blocks import Block, StepTimes, Timings


def sums_of(first: StepTimes, *, forks: bool = False, start_up: float = 0.0, accumulation: int = 1) -> EvidenceBuilder:
    """Rounds of a full block with a pass of 8 steps and of replayed steps, on one rank."""
    found = Timings()
    for i in range(5):
        for arm, start, some in (("full", 1, first), ("cached", 9, laps(*[0.01] * 40))):
            found.add(Block(arm=arm, first=start + 48 * i, laps=(some,)))
    peers = SimpleNamespace(rank=0, world_size=1)
    bench = SimpleNamespace(timings=found, peers=peers, sampler=SimpleNamespace(places=lambda _: {}))
    rounds = SimpleNamespace(pairs=5, steps_per_pass=8, start_up=start_up, whole_passes=False)
    return EvidenceBuilder(bench, SimpleNamespace(forks=forks, accumulation=accumulation), rounds)  # type: ignore[arg-type]


@pytest.mark.parametrize(("forks", "extra", "stalls"), [(True, 0.19, 0), (False, 0.1, 5)])
def test_what_a_new_pass_costs_is_spread_over_its_steps(forks: bool, extra: float, stalls: int) -> None:
    """After a fork also what training copies in the call that follows; elsewhere a call that is long has stalled."""
    sums = sums_of(replace(laps(0.1, *[0.01] * 7, fresh=(0,)), waits=array("d", [0.102, *[0.002] * 7])), forks=forks)
    assert [base for base, _ in sums.pairs("full", "cached")] == pytest.approx([0.012 + extra / 8] * 5)
    assert len(sums.stalls().at) == stalls


def test_stalls_take_nothing_from_what_a_new_pass_costs() -> None:
    first = replace(laps(0.1, *[0.01] * 14, 0.5, fresh=(0,)), waits=array("d", [0.102, *[0.002] * 15]))
    assert [base for base, _ in sums_of(first, forks=True).pairs("full", "cached")] == pytest.approx([0.012 + 0.19 / 8] * 5)


def test_a_new_pass_that_no_block_saw_costs_what_starting_took_beyond_a_usual_wait() -> None:
    sums = sums_of(laps(*[0.01] * 8, wait=0.002), start_up=0.082)
    assert [base for base, _ in sums.pairs("full", "cached")] == pytest.approx([0.012 + 0.08 / 8] * 5)
    sums = sums_of(laps(*[0.01] * 8, wait=0.004), start_up=0.082, accumulation=2)  # it gives one batch, and a step takes two
    assert [base for base, _ in sums.pairs("full", "cached")] == pytest.approx([0.014 + 0.08 / 8] * 5)
