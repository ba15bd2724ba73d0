"""What goes wrong with the numbers of a run is named; healthy runs of different kinds raise no alarm."""

import contextlib
import itertools
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.conftest import HandMade
from workbench.__main__ import main
from workbench.core import run_directory
from workbench.core.brief import BRIEF_BYTES
from workbench.runs.health import Health, changes, health, not_finite, slow_ranks
from workbench.runs.loss_faults import (
    Fault,
    explodes_at_once,
    exploding,
    growing,
    jumps_at_once,
    not_falling,
    not_seen_to_fall,
    rises_of,
    spikes,
)
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec, ScriptSpec
from workbench.timeline.analysis.alarm_events import AlarmEvent, digest
from workbench.timeline.timeline import Step, Timeline

Make = Callable[..., HandMade]
Losses = list[tuple[int, float]]


def classifier(r: random.Random, n: int) -> Losses:
    """Falls exponentially, with even noise."""
    return [(i + 1, 0.3 + 2 * math.exp(-i / (n / 4)) + r.gauss(0, 0.05)) for i in range(n)]


def language_model(r: random.Random, n: int) -> Losses:
    """A power law, noise in proportion."""
    return [(i + 1, (1.7 + 6 * (1 + i) ** -0.3) * math.exp(r.gauss(0, 0.02))) for i in range(n)]


def tiny_batches(r: random.Random, n: int) -> Losses:
    """Skewed noise, as of single samples."""
    return [(i + 1, (0.5 + math.exp(-i / n * 3)) * math.exp(r.gauss(0, 0.8))) for i in range(n)]


def converged(r: random.Random, n: int) -> Losses:
    """Falls in the first tenth, flat after that."""
    return [(i + 1, (2.3 if i < n // 20 else 0.4) + r.gauss(0, 0.03)) for i in range(n)]


def contrastive(r: random.Random, n: int) -> Losses:
    """A loss that is noisier than it falls, and periodic over an epoch."""
    return [(i + 1, 5 - i / n + 0.3 * math.sin(i / 9) + r.gauss(0, 0.3)) for i in range(n)]


HEALTHY = (classifier, language_model, tiny_batches, converged, contrastive)


@given(seed=st.integers(0, 10**6), n=st.sampled_from([20, 60, 150, 400, 1000]), kind=st.sampled_from(HEALTHY))
@settings(max_examples=80, deadline=None)
def test_healthy_losses_raise_no_alarm(seed: int, n: int, kind: Callable[[random.Random, int], Losses]) -> None:
    losses = kind(random.Random(seed), n)

    early = [*explodes_at_once(losses), *jumps_at_once(losses)]
    assert not [*not_finite(losses, {}), *early, *spikes(losses), *not_falling(losses), *growing(losses)]


def test_a_loss_that_noise_hides_is_told_to_be_hidden() -> None:
    r = random.Random(1)
    noisy = [(i + 1, 2.0 * math.exp(r.gauss(0, 0.3))) for i in range(400)]
    assert not not_falling(noisy)  # it may have fallen by some percent
    note = not_seen_to_fall(noisy)
    assert re.fullmatch(r"in the last 200 of 400 steps no fall of the loss can be told from its noise: it fell by -?\d+ ± \d+ %", note), (
        note
    )
    steady = [(i + 1, 2.3 + 0.001 * (i % 2)) for i in range(400)]
    assert not_falling(steady)
    assert not_seen_to_fall(steady) == ""  # that is a fault
    for losses in (classifier(r, 400)[:200], language_model(r, 1000)[:400], noisy[:80], [(i, math.nan) for i in range(200)]):
        assert not_seen_to_fall(losses) == ""
    risen = [(i + 1, (1.0 if i < 300 else 1.6) * math.exp(r.gauss(0, 0.05)) + 3 * math.exp(-i / 20)) for i in range(400)]
    assert re.fullmatch(r"in the last 200 of 400 steps the loss rose by \d+ ± \d+ %: is the .*", not_seen_to_fall(risen))
    assert not_seen_to_fall(converged(r, 400)).startswith("in the last 200 of 400 steps no fall")


@given(seed=st.integers(0, 10**6), at=st.integers(60, 340), kind=st.sampled_from([classifier, language_model, contrastive]))
@settings(max_examples=40, deadline=None)
def test_a_spike_is_found_at_its_step(seed: int, at: int, kind: Callable[[random.Random, int], Losses]) -> None:
    losses = kind(random.Random(seed), 400)
    usual = losses[at][1]
    losses[at : at + 15] = [(step, loss + 3 * usual * 0.8**i) for i, (step, loss) in enumerate(losses[at : at + 15])]

    (fault,) = spikes(losses)

    assert fault.step is not None
    assert at - 1 <= fault.step <= at + 2
    assert "back in step" in fault.message


@given(seed=st.integers(0, 10**6), at=st.integers(1, 25))
@settings(max_examples=40, deadline=None)
def test_a_loss_that_explodes_in_the_first_steps_is_found(seed: int, at: int) -> None:
    r = random.Random(seed)
    losses = [(i + 1, (2.3 if i < at else 1e4) * math.exp(r.gauss(0, 0.3))) for i in range(60)]

    (fault,) = explodes_at_once(losses)

    assert fault.step == at + 1


def test_losses_of_single_samples_do_not_explode() -> None:
    draws = [[(i + 1, r.gauss(0, 1) ** 2) for i in range(60)] for r in map(random.Random, range(300))]
    assert sum(bool(explodes_at_once(losses)) for losses in draws) <= 3
    assert not any(explodes_at_once(losses[:length]) for losses in draws for length in (2, 4, 8))  # too few to tell
    assert not any(jumps_at_once(losses) or growing(losses) for losses in draws)
    assert not explodes_at_once([(i + 1, 1e300 if i % 2 else 1e-300) for i in range(40)])


@given(seed=st.integers(0, 10**6), at=st.integers(1, 29), kind=st.sampled_from([classifier, language_model, contrastive]))
@settings(max_examples=40, deadline=None)
def test_a_single_huge_loss_among_the_first_is_found(seed: int, at: int, kind: Callable[[random.Random, int], Losses]) -> None:
    losses = kind(random.Random(seed), 40)
    losses[at] = (at + 1, 30 * max(loss for _, loss in losses[:at]))
    (fault,) = explodes_at_once(losses) or jumps_at_once(losses)
    assert (fault.kind, fault.step) == ("spike", at + 1)
    before = f"{max(loss for _, loss in losses[:at]):.4g}"
    assert fault.message == f"the loss jumps from {before} at most to {losses[at][1]:.4g} in step {at + 1}, back in step {at + 2}"


@pytest.mark.parametrize(("level", "size"), [(-3.0, 200.0), (0.0, 200.0), (-3.0, 5.0)])
def test_among_losses_below_0_a_single_huge_one_is_found(level: float, size: float) -> None:
    r = random.Random(0)
    losses = [(i + 1, level + 2 * math.exp(-i / 10) + r.gauss(0, 0.2)) for i in range(40)]
    assert jumps_at_once(losses) == []
    losses[11] = (12, size)
    assert [fault.step for fault in jumps_at_once(losses)] == ([12] if size > 100 else [])


def test_losses_around_0_that_begin_near_0_do_not_explode() -> None:
    """As those of a policy gradient; where they really explode and stay there, they jump."""
    r = random.Random(0)
    first = [0.0027, -0.19, 0.13, -0.32, 0.16, 0.41, 0.29]
    losses = [*enumerate(first, 1), *((i, r.gauss(0, 0.2)) for i in range(8, 300))]
    assert explodes_at_once(losses) + jumps_at_once(losses) == []
    (fault,) = explodes_at_once(grown := [(step, loss if step < 12 else 200 + loss) for step, loss in losses]) or jumps_at_once(grown)
    assert fault.step == 12


def test_losses_that_do_not_vary_jump_where_they_are_far_above_the_largest_before() -> None:
    hinge = [(i + 1, max(0.0, random.Random(i).gauss(0, 1) - 1.5)) for i in range(400)]  # 0 in most steps
    largest = max(loss for _, loss in hinge)
    assert not spikes(hinge)
    assert not spikes([(step, 7 * largest if step == 300 else loss) for step, loss in hinge])  # one step alone may be chance
    for later, back in ((hinge[301:], "back in step "), ([(step, 20.0 + loss) for step, loss in hinge[301:]], "not back yet")):
        (fault,) = spikes([*hinge[:300], (301, 40.0), *later])
        assert fault.step == 301
        assert (
            f"jumps from 0 to 40 in step 301 ({40 / max(loss for _, loss in hinge[:300]):.0f} times the largest before), {back}"
            in fault.message
        )


@pytest.mark.parametrize(("factor", "count"), [(1.1, 80), (1.3, 35), (3.0, 10)])
def test_a_loss_that_grows_steadily_is_found_in_a_short_run(by_hand: Make, factor: float, count: int) -> None:
    run = by_hand()
    writer = run_directory.LineWriter(run.path / run_directory.METRICS)
    writer.write([{"step": i + 1, "lr": 0.1, "loss": 2.3 * factor**i} for i in range(count)])
    writer.close()
    (fault,) = health(run.ended("finished").path).faults
    assert (fault.kind, fault.step) == ("rise", 1), fault


def test_a_loss_that_stays_is_found_in_its_noise() -> None:
    found = dict.fromkeys((0.0, 0.4), 0)
    for lr in found:
        for seed in range(40):
            r = random.Random(seed)
            losses = [(i + 1, 2.3 * (1 - lr * i / 500) + r.gauss(0, 0.2)) for i in range(500)]
            found[lr] += bool(not_falling(losses))
    assert found[0.0] >= 20
    assert found[0.4] == 0


def test_a_hint_names_what_a_run_does_not_have_yet(by_hand: Make) -> None:
    run = by_hand(spec=RunSpec(task="text-gpt", clip_grad_norm=0.5, warmup_steps=10).to_json())
    writer = run_directory.LineWriter(run.path / run_directory.METRICS)
    writer.write([{"step": i + 1, "lr": 0.1, "loss": math.nan if i > 4 else 2.0} for i in range(8)])
    writer.close()
    run.ended("finished")
    (fault,) = health(run.path).faults
    assert fault.hint.startswith("a smaller learning rate, a longer warm-up, a clip_grad_norm below 0.5; ")


# --- a loss that rises and stays up

Floats = NDArray[np.float64]
Shape = Callable[[np.random.Generator, Floats], Floats]
"""The losses of steps 0, 1, …"""


def varied(level: Floats | float, r: np.random.Generator, steps: Floats, noise: float = 0.05) -> Floats:
    values: Floats = level * np.exp(r.normal(0, noise, len(steps)))
    return values


def falling(steps: Floats, over: float = 5.0) -> Floats:
    values: Floats = 1 + 2 * np.exp(-steps / (len(steps) / over))
    return values


def correlated(r: np.random.Generator, steps: Floats, noise: float, memory: float) -> Floats:
    return np.array(list(itertools.accumulate(r.normal(0, noise, len(steps)), lambda before, new: memory * before + new)))


def cyclic(steps: Floats, cycles: float, *, restarts: bool) -> Floats:
    """A learning rate as a part of its largest."""
    place = steps * cycles / len(steps) % 1
    return (1 + np.cos(np.pi * place)) / 2 if restarts else 1 - np.abs(2 * place - 1)


SHAPES: dict[str, Shape] = {
    "exponential": lambda r, i: 0.3 + 2 * np.exp(-i / (len(i) / 4)) + r.normal(0, 0.05, len(i)),
    "power law": lambda r, i: varied(1.7 + 6 * (1 + i) ** -0.3, r, i, 0.02),
    "tiny batches": lambda r, i: varied(falling(i), r, i, 0.8),
    "converged at once": lambda r, i: np.where(i < 20, 2.3, 0.4) + r.normal(0, 0.03, len(i)),
    "contrastive": lambda r, i: 5 - i / len(i) + 0.3 * np.sin(i / 9) + r.normal(0, 0.3, len(i)),
    "flat": lambda r, i: 2.3 + r.normal(0, 0.1, len(i)),
    "flat, noisy": lambda r, i: varied(2.3, r, i, 0.4),
    "constant": lambda r, i: np.full(len(i), 2.3),
    "without noise": lambda r, i: falling(i),
    "steps of the rate": lambda r, i: varied(0.5 + 1.5 * 0.6 ** (3 * i // len(i)) + np.exp(-i / (len(i) / 20)), r, i, 0.06),
    "cosine": lambda r, i: varied(2 + 3 * np.exp(-i / (len(i) / 15)) + 0.5 * (1 + np.cos(np.pi * i / len(i))), r, i),
    "warm-up": lambda r, i: varied(8 - 1.5 * np.minimum(i / 100, 1) - 4 * (1 - np.exp(-np.maximum(i - 100, 0) / 200)), r, i, 0.03),
    "a hump in the warm-up": lambda r, i: varied(3 + np.exp(-(((i - 80) / 40) ** 2)) + 3 * np.exp(-i / 30), r, i),
    "epochs": lambda r, i: varied(0.3 + 2 * 0.8 ** (i // (len(i) // 8)), r, i, 0.06),
    "epochs that end higher": lambda r, i: varied(2 * 0.8 ** (i // 125) * (1 + 0.06 * (i % 125) / 125) + 0.3, r, i),
    "not shuffled": lambda r, i: varied(falling(i) * (1 + 0.3 * (i % (len(i) // 10) > len(i) // 20)), r, i),
    "the same order in each epoch": lambda r, i: varied(falling(i) * np.exp(correlated(r, i[:150], 0.03, 0.9))[i.astype(int) % 150], r, i),
    "correlated": lambda r, i: 1 + falling(i) + correlated(r, i, 0.02, 0.95),
    "strongly correlated": lambda r, i: 1 + falling(i) + correlated(r, i, 0.01, 0.99),
    "heavy tails": lambda r, i: falling(i) * np.exp(0.05 * r.standard_t(2, len(i))),
    "outliers": lambda r, i: varied(falling(i) * np.exp(np.where(r.random(len(i)) < 0.02, r.exponential(0.7, len(i)), 0)), r, i),
    "memorised": lambda r, i: varied(2 * np.exp(-i / (len(i) / 12)), r, i, 0.3) + 1e-4 * r.random(len(i)),
    "seldom large": lambda r, i: varied(np.where(r.random(len(i)) < 0.9, 1e-3, 1.0), r, i, 0.2),
    "rounded to bf16": lambda r, i: np.round(varied(1.7 + 6 * (1 + i) ** -0.3, r, i, 0.02) * 64) / 64,
    "two tasks in turns": lambda r, i: varied(np.where(r.random(len(i)) < 0.5, 1.0, 3.0) * falling(i), r, i),
    "noise that grows": lambda r, i: falling(i) + r.normal(0, 1, len(i)) * (0.02 + 0.2 * i / len(i)),
    "noise that shrinks": lambda r, i: falling(i) + np.abs(r.normal(0, 1, len(i))) * (0.3 - 0.27 * i / len(i)),
    "late fall": lambda r, i: varied(2 - 1.8 / (1 + np.exp(-(i - 0.6 * len(i)) / 25)), r, i),
    "edge of stability": lambda r, i: varied(falling(i) * (1 + 0.2 * (i % 2)), r, i, 0.03),
    "below 0": lambda r, i: -5 + falling(i) + r.normal(0, 0.2, len(i)),
}


@pytest.mark.parametrize("count", [300, 1000, 4000])
def test_healthy_losses_have_no_rise(count: int) -> None:
    steps = np.arange(float(count))
    for seed, (name, shape) in itertools.product(range(3), SHAPES.items()):
        losses = shape(np.random.default_rng(seed), steps)
        assert rises_of(list(enumerate(losses.tolist(), 1))) == ([], []), (name, seed)


@pytest.mark.parametrize("cycles", [1.5, 3.1, 4.0, 6.0])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_loss_that_rises_with_the_learning_rate_is_no_fault(cycles: float, restarts: bool) -> None:
    for seed, count in itertools.product(range(3), (300, 1000, 4000)):
        steps = np.arange(float(count))
        rates = cyclic(steps, cycles, restarts=restarts)
        losses = varied((0.5 + falling(steps)) * (1 + 0.4 * rates), np.random.default_rng(seed), steps)
        faults, notes = rises_of(list(enumerate(losses.tolist(), 1)), (1e-3 * rates).tolist())
        assert faults == []
        assert not notes or cycles % 1  # where the last cycle ends high
        assert all(re.search(r"higher \(.* → .*\), where the learning rate went from .* to .*: is it too large\?$", note) for note in notes)


@given(
    seed=st.integers(0, 10**6),
    deviations=st.sampled_from([4, 6, 8]),
    noise=st.sampled_from([0.03, 0.05, 0.1]),
    count=st.sampled_from([1000, 4000]),
)
@settings(max_examples=30, deadline=None)
def test_a_lasting_rise_of_a_few_deviations_is_found_at_its_step(seed: int, deviations: int, noise: float, count: int) -> None:
    """By `health.spikes` alone, all rises of 4 deviations and half of those of 6 were missed."""
    losses = 2 * (1 + noise * np.random.default_rng(seed).normal(0, 1, count))
    losses[count // 2 :] += 2 * noise * deviations
    (fault,), notes = rises_of(list(enumerate(losses.tolist(), 1)), [1e-3] * count)

    assert (fault.kind, notes) == ("rise", [])
    assert fault.step is not None
    assert abs(fault.step - count // 2) <= 32
    assert re.search(r"^since step [\d,]+ the loss is \d+ % higher \(\S+ → \S+\)$", fault.message)


def test_a_rise_that_ends_is_told_with_its_end_if_it_was_long() -> None:
    losses = varied(1.0, np.random.default_rng(0), np.arange(2000.0))
    losses[600:1400] *= 1.3
    (fault,), _ = rises_of(list(enumerate(losses.tolist(), 1)))
    assert (ended := re.search(r"\), until step ([\d,]+)$", fault.message))
    assert abs(int(ended[1].replace(",", "")) - 1400) <= 32
    losses[800:1400] /= 1.3
    assert rises_of(list(enumerate(losses.tolist(), 1))) == ([], [])


def test_a_run_tells_a_rise_once(by_hand: Make) -> None:
    """A jump is told as such, and what a rank told while it ran is not repeated."""
    noise = np.random.default_rng(0).normal(0, 0.1, 1000)
    found = []
    for size, alarm in ((0.5, False), (0.5, True), (4.0, False)):
        run = by_hand()
        writer = run_directory.LineWriter(run.path / run_directory.METRICS)
        rows = [{"step": at, "lr": 0.1, "loss": 2 + value + size * (at > 500)} for at, value in enumerate(noise.tolist(), 1)]
        writer.write([*rows, {"step": 1000, "accuracy": 0.5}])
        writer.close()
        told = AlarmEvent(rank=0, step=490, phase="loss", before=2.0, after=2.5, share=0.0)
        run.steps(2)
        if alarm:
            run_directory.LineWriter(run.path / run_directory.rank_file(0)).write([{"alarm": told.to_row()}])
        found.append([fault.kind for fault in health(run.ended("finished").path).faults if fault.kind != "not falling"])
    assert found == [["rise"], ["change"], ["spike"]]


@pytest.mark.parametrize(("slope", "least", "most"), [(0.0, 0, 3), (0.3, 54, 60)])
def test_slow_waves_of_a_loss_are_told_from_a_rise(slope: float, least: int, most: int) -> None:
    """Correlated noise as of 5 % of the level, r = 0.98: by the standard error of independent values, 22 of 60 flat losses "rise"."""
    told = 0
    for seed, count in itertools.product(range(20), (300, 500, 1000)):
        waves = correlated(np.random.default_rng(seed), steps := np.arange(float(count)), 0.02, 0.98)
        losses = list(enumerate((2 + waves + 2 * slope * steps / count).tolist(), 1))
        told += any("rises from" in fault.message or fault.kind == "rise" for fault in [*not_falling(losses), *rises_of(losses)[0]])
    assert least <= told <= most


@given(seed=st.integers(0, 10**6), rising=st.booleans())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_loss_that_does_not_fall_is_said_to_stay_or_rise(seed: int, rising: bool) -> None:
    r = random.Random(seed)
    (fault,) = not_falling([(i + 1, 2.3 + r.gauss(0, 0.02) + i / 400 * rising) for i in range(400)])

    assert ("rises" if rising else "stays at 2.") in fault.message


@given(seed=st.integers(0, 10**6), at=st.integers(40, 90))
@settings(max_examples=20, deadline=None)
def test_gradients_that_explode_are_found_and_noisy_ones_are_not(seed: int, at: int) -> None:
    r = random.Random(seed)
    norms = [math.exp(r.gauss(0, 0.4)) for _ in range(120)]
    rows = [{"step": step, "big": norm**2} for step, norm in enumerate(norms, 1)]
    assert not exploding([{"every": 1}, *rows, {"step": 121, "big": None}])

    (fault,) = exploding([row | {"big": row["big"] * 9.0 ** (2 * max(0, row["step"] - at))} for row in rows])

    assert fault.step is not None
    assert at < fault.step <= at + 4


def test_exploding_gradients_are_found_where_each_step_clips_them(by_hand: Make) -> None:
    noise, kinds = random.Random(0), []
    for factor in (1.0, 40.0):
        made = by_hand()
        norms = [math.exp(noise.gauss(0, 0.3)) * (factor if step >= 60 else 1.0) for step in range(1, 101)]
        norms[20] = math.inf  # a step of fp16 that was left out
        rows = [{"step": step, "loss": 2.0 / step, "lr": 0.1, "grad_norm": norm} for step, norm in enumerate(norms, 1)]
        run_directory.LineWriter(made.path / run_directory.METRICS).write(rows)
        kinds.append([(fault.kind, fault.step) for fault in health(made.ended("finished").path).faults])
    assert kinds == [[], [("exploding gradients", 60)]]


def test_exploding_gradients_are_found_in_the_norms_of_layers(by_hand: Callable[..., HandMade]) -> None:
    """A run with `gradient_norms=10` has a row each tenth step."""
    at, noise = 400, random.Random(0)
    usual = [(step, {"embed": 0.5 + 0.1 * noise.random(), "head": 1.0 + 0.2 * noise.random()}) for step in range(10, 600, 10)]
    grown = [(step, {layer: norm * (40.0 if step >= at else 1.0) for layer, norm in norms.items()}) for step, norms in usual]
    damaged = [(600 + step, {"head": norm}) for step, norm in enumerate((math.nan, "damaged", 1e200, 1e308, 10**400, -1.0))]
    damaged += [(600 + step, {"head": norm, "tail": norm}) for step, norm in ((8, 1.7e308), (9, math.inf))]
    found = []
    for rows in (usual, grown, [*usual[:45], *grown[30:]]):  # the last one went on from a checkpoint
        run = by_hand().losses(3)
        writer = run_directory.LineWriter(run.path / run_directory.GRADIENTS)
        writer.write({"step": step, "norms": norms} for step, norms in [*rows, *damaged])
        writer.close()
        found.append(health(run.ended("finished").path).faults)
    assert found[0] == ()
    assert found[1] == found[2]
    assert not exploding([{"step": step, "big": 10**400} for step in range(50)])
    (fault,) = found[1]
    assert (fault.kind, fault.step) == ("exploding gradients", at)
    assert re.search(r"grows from 1\.\d+ to 4\d\.\d within 30 steps, from step 400 on", fault.message), fault


def ranks(r: random.Random, slow: Callable[[int, int], float], *, count: int = 3, n: int = 160) -> list[Timeline]:
    """Steps of 100 ms of which the others wait in backward for the slowest; `slow(rank, step)` is what a rank takes longer."""
    own = [[0.05 * math.exp(r.gauss(0, 0.1)) + slow(rank, step) for step in range(n)] for rank in range(count)]
    slowest = [max(times) for times in zip(*own, strict=True)]
    return [
        Timeline(
            rank=rank,
            clock="host",
            steps=tuple(Step(index=i, phases=(0.0, 0.0, own[rank][i], 0.05 + slowest[i] - own[rank][i], 0.0, 0.0)) for i in range(n)),
        )
        for rank in range(count)
    ]


@given(seed=st.integers(0, 10**6), count=st.integers(1, 4))
@example(seed=154, count=3)  # a single quick step made two stretches of one
@settings(max_examples=15, deadline=None)
def test_a_rank_that_is_slow_for_a_while_is_named_and_even_ranks_are_not(seed: int, count: int) -> None:
    r = random.Random(seed)
    assert slow_ranks(ranks(r, lambda rank, step: 0.0, count=count)) == []

    came = slow_ranks(ranks(r, lambda rank, step: 0.1 * (rank == 1 and (40 <= step < 60 or 100 <= step < 130)), count=3))
    ever = slow_ranks(ranks(r, lambda rank, step: 0.1 * (rank == 2), count=3))

    assert [(fault.rank, "and once more" in fault.message) for fault in came] == [(1, True)]
    assert came[0].step is not None
    assert 36 <= came[0].step <= 45
    assert [(fault.rank, "all the time" in fault.message) for fault in ever] == [(2, True)]


def test_the_first_nan_of_any_rank_counts() -> None:
    rows = {
        0: [{"note": "x"}],
        1: [{"not_finite": {"step": 7, "weights": "2 of 4 weights are not finite, first 0.weight"}}, {"not_finite": 3}],
    }
    losses = [(step, math.nan if step >= 9 else 1.0) for step in range(1, 20)]

    (fault,) = not_finite(losses, rows)

    assert (fault.step, fault.rank) == (7, 1)
    assert "from step 7 on, on rank 1" in fault.message
    assert "first 0.weight" in fault.message
    (alone,) = not_finite(losses, {})
    assert (alone.step, alone.rank) == (9, None)


def test_a_run_tells_its_faults_in_report_and_panel(by_hand: Make) -> None:
    from workbench.runs.page import run_facts, run_text
    from workbench.runs.panel.follow import Follower

    made = by_hand()
    r = random.Random(1)
    losses = classifier(r, 400)
    losses[200:206] = [(step, 30.0) for step, _ in losses[200:206]]
    rows = [{"step": step, "steps": 400, "loss": loss, "lr": 0.1, "samples": step, "seconds": step / 10} for step, loss in losses]
    run_directory.LineWriter(made.path / run_directory.METRICS).write(rows)

    run = Run.load(made.ended("finished").path)
    found = health(made.path)

    assert [fault.kind for fault in found.faults] == ["spike"]
    assert not found.ok
    assert "fault: the loss jumps from" in str(found)
    assert "fault: the loss jumps from" in run_text(run)
    assert run_facts(run)["faults"][0].startswith("the loss jumps")
    assert any("the loss jumps from" in note for note in Follower(run).snapshot().notes)
    assert "data_wait" not in run_text(Run.load(by_hand(name="early").ended("failed").path)), "no step was taken, so there are no times"


def test_a_script_gets_no_all_clear_for_what_was_not_looked_for(by_hand: Make) -> None:
    from workbench.runs.page import run_text

    spec = ScriptSpec(script="/x/train.py", watch=True).to_json()
    found = health(by_hand(spec=spec, name="fine").steps(60).ended("finished").path)
    assert found.ok
    assert "the loss of this run was not recorded" in found.notes[0]
    assert found.notes[0] in str(found)
    error = {"rank": 1, "kind": "exception", "message": "ValueError: bad sample", "hint": "look at it"}
    error["traceback"] = '  File "/x/train.py", line 75, in main\nValueError: bad sample'
    run = Run.load(by_hand(spec=spec, name="crashed").steps(60).ended("failed", error=error).path)
    faults = health(run).faults
    assert [(fault.kind, fault.rank) for fault in faults] == [("failed", 1)]
    assert faults[0].message == "rank 1: ValueError: bad sample, at /x/train.py:75 in main"
    assert faults[0].hint == run.error.hint  # type: ignore[union-attr]
    assert "fault:" not in run_text(run), "it has the error itself"


@pytest.mark.parametrize(("share", "said"), [({}, True), ({"tensor_parallel": 2}, False)])
def test_whose_losses_were_looked_at_is_said_where_nothing_is_wrong(by_hand: Make, share: dict[str, Any], said: bool) -> None:
    found = health(by_hand(spec=RunSpec(task="text-gpt", nproc_per_node=2, **share).to_json()).losses(20).ended("finished").path)
    assert ("one on another rank alone is not seen" in str(found)) == said


def test_a_report_tells_an_alarm_once(by_hand: Make) -> None:
    from workbench.runs.page import run_text

    made = by_hand(spec=ScriptSpec(script="/x/train.py", watch=True).to_json()).steps(60)
    alarm = AlarmEvent(rank=0, step=1200, phase="forward", before=0.001, after=0.002, share=0.5)
    notes = [{"note": f"warning: {alarm.words()}"}, {"note": f"alarms: {digest([alarm])}"}, {"note": "timed by hand"}]
    with contextlib.closing(run_directory.LineWriter(made.path / run_directory.rank_file(0))) as writer:
        writer.write([{"alarm": alarm.to_row()}, *notes])
    text = run_text(Run.load(made.ended("finished").path))
    assert text.count("since step 1,200 the forward takes 100 % longer") == 1, text
    assert "1 change in all" not in text
    assert "timed by hand" in text


def test_alarms_of_ranks_about_one_event_are_one_note(by_hand: Make) -> None:
    spec = ScriptSpec(script="/x/train.py", watch=True, nproc_per_node=3)
    made = by_hand(spec=spec.to_json()).steps(60)
    events = {0: [(700, "other", 4.2)], 1: [(708, "other", 4.4), (90, "memory", 2e9)], 2: [(700, "other", 0.1), (900, "other", 4.0)]}
    for rank, alarms in events.items():
        told = [AlarmEvent(rank=rank, step=step, phase=phase, before=1.0, after=after, share=0.5) for step, phase, after in alarms]
        with contextlib.closing(run_directory.LineWriter(made.path / run_directory.rank_file(rank))) as writer:
            writer.write([row for alarm in told for row in ({"note": f"warning: {alarm.words(3)}"}, {"alarm": alarm.to_row()})])
    notes = [note.partition(" (")[0] for note in Run.load(made.ended("finished").path).notes]
    assert [note for note in notes if "since step" in note] == [
        "since step 700 what lies between the phases takes 320 % longer on ranks 0, 1",
        "more memory on rank 1 since step 90 or earlier: 1.86 GiB, 1 B before",
        "since step 700 what lies between the phases takes 90 % less on rank 2",
        "since step 900 what lies between the phases takes 300 % longer on rank 2",
    ]


def test_the_command_has_a_status_and_a_brief_for_programs(by_hand: Make, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = by_hand(name="wrong").steps(60)
    rows = [{"step": i + 1, "steps": 60, "loss": math.nan if i > 40 else 1.0, "lr": 0.1, "samples": i, "seconds": i} for i in range(60)]
    run_directory.LineWriter(made.path / run_directory.METRICS).write(rows)
    wrong = str(made.ended("finished").path)
    assert main(["health", wrong]) == 1
    assert "fault: the loss is NaN or infinite from step 42 on" in capsys.readouterr().out
    assert main(["health", wrong, "--json"]) == 1
    brief = json.loads(capsys.readouterr().out)
    assert (brief["ok"], brief["faults"][0]["kind"], brief["faults"][0]["step"], brief["faults"][0]["hint"][:9]) == (
        False,
        "not finite",
        42,
        "a smaller",
    )
    nothing = str(by_hand(spec=ScriptSpec(script="/x/train.py", watch=True).to_json(), name="script").steps(9).ended("finished").path)
    assert main(["health", nothing]) == 1, "no all-clear where nothing was looked at"
    assert "nothing to look at yet" in capsys.readouterr().out
    assert main(["health", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
    fault = Fault(kind="change", step=1, rank=None, message="é" * 900, hint="ü" * 900)
    many = Health(faults=(fault,) * 40, losses=9, ranks=2, notes=("ö" * 900,) * 9).brief()
    assert len(json.dumps(many, ensure_ascii=False).encode()) <= BRIEF_BYTES
    assert many["left_out"] > 30


@pytest.mark.parametrize(("nodes", "said"), [(16, False), (17, True)])
def test_more_than_128_ranks_get_no_all_clear_for_files_that_are_not_read(by_hand: Make, nodes: int, said: bool) -> None:
    made = by_hand(spec=RunSpec(task="text-gpt", nproc_per_node=8, nnodes=nodes).to_json()).losses(20).steps(2)
    row = {"not_finite": {"step": 9, "weights": ""}}
    run_directory.LineWriter(made.path / run_directory.rank_file(3)).write([row])
    found = health(made.ended("finished").path)
    assert [fault.rank for fault in found.faults] == [3] * (not said)
    assert ("a loss that is NaN on another rank than 0 were not looked for" in str(found)) == said


def test_an_alarm_of_a_loss_that_is_not_finite_is_that_fault_alone() -> None:
    alarms = [
        AlarmEvent(rank=rank, step=260 + 7 * rank, phase="not finite", before=0.4, after=0.4, share=0.0).to_row() for rank in range(2)
    ]
    rows: dict[int, list[dict[str, object]]] = {rank: [{"alarm": alarm}] for rank, alarm in enumerate(alarms)}
    assert [(f.kind, f.step, f.rank) for f in not_finite([], rows)] == [("not finite", 260, None)]
    assert changes(rows) == []
    assert not_finite([], {0: [], 1: rows[1]})[0].rank == 1
    assert not_finite([(260, 0.4), (261, math.nan)], rows)[0].step == 261, "a task's own steps are counted from 1"


def test_what_ranks_told_is_a_fault_of_the_rank_that_is_slow() -> None:
    """The others wait for it in their backward; what comes again is one fault."""

    def row(rank: int, step: int, phase: str, before: float = 0.02, after: float = 0.03, share: float = 0.15) -> dict[str, object]:
        told = {
            "rank": rank,
            "step": step,
            "phase": phase,
            "before": before,
            "after": after,
            "share": share,
            "circumstances": ["its clock fell"],
        }
        return {"alarm": told}

    rows = {
        0: [row(0, 41_208, "backward"), row(0, 50_000, "forward", 0.03, 0.02)],
        3: [row(3, 41_200, "forward"), row(3, 60_000, "forward"), row(3, 100, "memory", 1e9, 2e9), {"alarm": {"rank": "x"}}, {"note": "n"}],
    }
    faults = changes(rows)
    assert [(fault.kind, fault.rank, fault.step) for fault in faults] == [("change", 3, 41_200), ("change", 3, 100)]
    assert faults[0].message.startswith("since step 41,200 the forward takes 50 % longer on rank 3")
    assert "its clock fell" in faults[0].message
    assert "; and once more, at step 60,000" in faults[0].message
    assert "find_leaks" in faults[1].hint
    everywhere = {rank: [row(rank, 900 + rank, "reduction")] for rank in range(3)}
    assert [fault.message.partition(" (")[0] for fault in changes(everywhere)] == [
        "since step 900 the reduction of gradients takes 50 % longer on all ranks"
    ]
    (late,) = changes(everywhere | {1: []})
    assert (late.rank, late.message.endswith("; the others wait for rank 1")) == (1, True)
    (slow,) = changes(everywhere | {1: [row(1, 903, "computing")]})
    assert slow.message.startswith("since step 903 computing the gradients takes 50 % longer on rank 1")
    alone = changes({0: rows[0]})
    assert [fault.rank for fault in alone] == [0], "nobody else is slow: its own backward is"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([(0, "step", 0.31), (1, "data_wait", 0.3)], ("since step 416 the wait for data takes 50 % longer on rank 1 ", 1)),
        ([(0, "forward", 0.08), (1, "data_wait", 0.3)], ("since step 416 the wait for data takes 50 % longer on rank 1 ", 1)),
        ([(0, "data_wait", 0.3), (1, "forward", 0.31)], ("since step 400 the wait for data takes 50 % longer on rank 0 ", 0)),
        ([(0, "reduction", 0.32), (1, "step", 0.31)], ("; the others wait for rank 1", 1)),
        ([(0, "forward", 0.3), (1, "forward", 0.28)], ("since step 400 the forward takes 50 % longer on all ranks ", None)),
        ([(0, "step", 0.3), (1, "step", 0.3)], ("since step 400 a step takes 50 % longer on all ranks ", None)),
    ],
    ids=lambda value: value[0] if isinstance(value[0], str) else " ".join(f"{phase}{rank}" for rank, phase, _ in value),
)
def test_of_ranks_that_became_slower_together_the_one_with_a_reason_is_named_once(
    told: list[tuple[int, str, float]], expected: tuple[str, int | None]
) -> None:
    rows = {
        rank: [{"alarm": AlarmEvent(rank=rank, step=400 + 16 * rank, phase=phase, before=0.02, after=0.03, share=share).to_row()}]
        for rank, phase, share in told
    }
    (fault,) = changes(rows)
    assert expected[0] in fault.message
    assert fault.rank == expected[1]


def test_a_loss_that_rose_is_told_once_for_all_ranks_that_saw_it_and_by_rank_where_one_did() -> None:
    def rose(rank: int, step: int) -> dict[str, object]:
        return {"alarm": AlarmEvent(rank=rank, step=step, phase="loss", before=2.0, after=2.5, share=0.0).to_row()}

    both, one = changes({0: [rose(0, 1000)], 1: [rose(1, 1016), rose(1, 5000)]})
    assert (both.kind, both.rank, both.step) == ("change", None, 1000)
    assert both.message == "since step 1,000 the loss is 25 % higher (2 → 2.5); on 2 of 2 ranks"
    assert (one.rank, one.message) == (1, "since step 5,000 the loss is 25 % higher on rank 1 (2 → 2.5)")
    assert "Compare them with those of other ranks" in one.hint
