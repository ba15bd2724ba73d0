"""What goes wrong with the numbers of a run is named; healthy runs of different kinds raise no alarm."""

import math
import random
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import HandMade
from workbench.core import run_directory
from workbench.runs.health import changes, exploding, health, not_falling, not_finite, not_seen_to_fall, slow_ranks, spikes
from workbench.runs.run import Run
from workbench.runs.spec import ScriptSpec
from workbench.timeline.analysis.told import Told
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

    assert not [*not_finite(losses, {}), *spikes(losses), *not_falling(losses)]


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
    from workbench.runs.facts import report, run_facts
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
    assert "fault: the loss jumps from" in report(run)
    assert run_facts(run)["faults"][0].startswith("the loss jumps")
    assert any("the loss jumps from" in note for note in Follower(run).snapshot().notes)
    assert "data_wait" not in report(Run.load(by_hand(name="early").ended("failed").path)), "no step was taken, so there are no times"


def test_a_script_gets_no_all_clear_for_what_was_not_looked_for(by_hand: Make) -> None:
    from workbench.runs.facts import report

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
    assert "fault:" not in report(run), "it has the error itself"


def test_an_alarm_of_a_loss_that_is_not_finite_is_that_fault_alone() -> None:
    alarms = [Told(rank=rank, step=260 + 7 * rank, phase="not finite", before=0.4, after=0.4, share=0.0).to_row() for rank in range(2)]
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
        rank: [{"alarm": Told(rank=rank, step=400 + 16 * rank, phase=phase, before=0.02, after=0.03, share=share).to_row()}]
        for rank, phase, share in told
    }
    (fault,) = changes(rows)
    assert expected[0] in fault.message
    assert fault.rank == expected[1]


def test_a_loss_that_rose_is_told_once_for_all_ranks_that_saw_it_and_by_rank_where_one_did() -> None:
    def rose(rank: int, step: int) -> dict[str, object]:
        return {"alarm": Told(rank=rank, step=step, phase="loss", before=2.0, after=2.5, share=0.0).to_row()}

    both, one = changes({0: [rose(0, 1000)], 1: [rose(1, 1016), rose(1, 5000)]})
    assert (both.kind, both.rank, both.step) == ("change", None, 1000)
    assert both.message == "since step 1,000 the loss is 25 % higher (2 → 2.5); on 2 of 2 ranks"
    assert (one.rank, one.message) == (1, "since step 5,000 the loss is 25 % higher on rank 1 (2 → 2.5)")
    assert "Compare them with those of other ranks" in one.hint
