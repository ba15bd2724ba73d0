"""Steps and their statistics."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.vocabulary import PHASES
from workbench.timeline.timeline import Step, Timeline

SECONDS = st.floats(0, 10, allow_subnormal=False)
STEPS = st.lists(st.tuples(*[SECONDS] * len(PHASES)), max_size=40)


def timeline(steps: list[tuple[float, ...]], **more) -> Timeline:  # type: ignore[no-untyped-def]
    return Timeline(steps=tuple(Step(index=i, phases=p, samples=4) for i, p in enumerate(steps)), **more)


@given(STEPS)
def test_means_of_the_phases_add_up_to_the_step(steps: list[tuple[float, ...]]) -> None:
    made = timeline(steps)
    if not made.count:
        assert math.isnan(made.mean())
    else:
        assert sum(made.mean(phase) for phase in PHASES) == pytest.approx(made.mean(), abs=1e-9)
        assert made.mean() == 0 or sum(made.share(phase) for phase in PHASES) == pytest.approx(1)


@given(STEPS, st.integers(0, 5))
def test_json_and_back(steps: list[tuple[float, ...]], warmup: int) -> None:
    made = timeline(steps, warmup=warmup, notes=("said",), rank=3, clock="device", predicted=True)
    assert Timeline.from_json(made.to_json()) == made


@pytest.mark.parametrize(("count", "left_out"), [(0, 0), (1, 0), (4, 0), (5, 1), (20, 4), (50, 10), (500, 10)])
def test_warm_up_is_left_out_and_said(count: int, left_out: int) -> None:
    made = timeline([(1.0, 0, 0, 0, 0, 0)] * count)
    assert (made.left_out, made.count) == (left_out, count - left_out)
    assert ("left out as warm-up" in made.caption) == (left_out > 0)


def test_a_slow_first_step_does_not_count() -> None:
    made = timeline([(9.0, 0, 0, 0, 0, 0)] * 2 + [(0.1, 0, 0.2, 0.5, 0.1, 0.1)] * 8, warmup=2)
    assert made.median() == pytest.approx(1.0)
    assert made.samples_per_sec == pytest.approx(4.0)
    assert made.share("backward") == pytest.approx(0.5)
    assert made.spread("backward") == (0.5, 0.5)


def test_a_wide_spread_is_said() -> None:
    assert "varies" in timeline([(0.1, 0, 0, 0, 0, 0), (0.2, 0, 0, 0, 0, 0)] * 5, warmup=0).caption
    assert "varies" not in timeline([(0.1, 0, 0, 0, 0, 0)] * 10, warmup=0).caption


def test_unknown_samples_are_not_zero() -> None:
    assert math.isnan(Timeline(steps=(Step(index=0, phases=(1.0,) * 6),)).samples_per_sec)


def test_a_phase_that_is_none() -> None:
    with pytest.raises(ValueError, match="no phase 'foward': a step is made of data_wait, h2d"):
        timeline([]).share("foward")


def test_faces() -> None:
    made = timeline([(0.03, 0, 0.01, 0.02, 0.004, 0.001)] * 10)
    assert str(made).splitlines()[0] == "Where the step goes"
    assert "65.0 ms" in str(made)
    assert "46 %" in made._repr_html_()
    assert list(made.to_frame()["warmup"]) == [True] * 2 + [False] * 8
    assert list(made.to_frame().columns) == ["step", *PHASES, "total", "samples", "memory", "warmup"]
    assert repr(made) == "Timeline(rank=0, 10 steps)"


def test_rows_of_a_file_that_is_being_written() -> None:
    assert Timeline.from_lines([]) == Timeline()
    rows = [{"rank": 1, "clock": "device"}, {"note": "slow disk"}, {"step": 0, "forward": 1.0, "memory": 7}]
    made = Timeline.from_lines(rows)
    assert (made.rank, made.clock, made.notes, made.memory) == (1, "device", ("slow disk",), 7)
    assert made.steps[0].seconds == 1.0
