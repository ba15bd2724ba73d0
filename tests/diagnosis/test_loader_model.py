"""LoaderModel: from two probes to the whole curve of workers. Exact where arithmetic is, laws for any numbers, the curve's faces."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.statistics import Interval
from workbench.core.system_load import Noise
from workbench.diagnosis.analysis.evidence import Evidence, Inside, Loading
from workbench.diagnosis.analysis.loader_model import (
    MAX_WORKERS,
    TERMS,
    LoaderCurve,
    LoaderModel,
    blind_window,
    delivery_seconds,
    free_cores,
)
from workbench.harness.results import VariantTimes

SLEEPS = LoaderModel(cpu=0.001, blocked=0.039, worker_cpu=0.001, compute=0.010, cores=4)
"""A loader that waits for storage: 40 ms per batch, training 10 ms."""
DECODES = LoaderModel(cpu=0.030, worker_cpu=0.032, handover=0.001, compute=0.010, cores=2)
"""A loader that computes 30 ms, on two cores that training also needs."""

times = st.floats(0.0, 1.0).map(lambda x: round(x, 6))
feedings = st.builds(
    LoaderModel,
    cpu=times,
    blocked=times,
    worker_cpu=st.none() | times,
    handover=times,
    compute=times,
    cores=st.floats(0.25, 64.0),
    ranks=st.integers(1, 8),
    accumulation=st.integers(1, 8),
)


def test_without_workers_loading_and_training_take_turns() -> None:
    assert SLEEPS.loader(0) == pytest.approx(0.040)
    assert SLEEPS.step(0) == pytest.approx(0.050)
    assert SLEEPS.binds(0) == "in turn"
    assert SLEEPS.data_wait(0) == pytest.approx(0.040)


def test_waiting_is_divided_by_the_workers_until_training_binds() -> None:
    assert [SLEEPS.loader(n) for n in (1, 2, 4)] == pytest.approx([0.040, 0.020, 0.010])
    assert [SLEEPS.step(n) for n in (1, 2, 4, 8)] == pytest.approx([0.040, 0.020, 0.010, 0.010])
    assert [SLEEPS.binds(n) for n in (1, 2, 8)] == ["workers", "workers", "compute"]
    assert SLEEPS.recommend() == 4
    assert SLEEPS.data_wait(8) == pytest.approx(0.0)


def test_workers_limit_no_step_that_more_of_them_leave_as_it_is() -> None:
    """The first batch of an epoch is waited for however many there are; near the recommended number, workers were blamed for it."""
    feeding = LoaderModel(cpu=0.003, blocked=0.139, worker_cpu=0.003, compute=0.0142, cores=2, epoch=64)
    steps = {n: feeding.step(n, persistent_workers=True) for n in range(1, 13)}
    assert steps[9] == pytest.approx(steps[12])
    assert feeding.loader(9) > feeding.loader(12) * 1.2
    for n in range(1, 12):
        assert (feeding.binds(n) == "workers") == (steps[n] > 1.001 * steps[n + 1]), n


def test_computing_is_divided_by_the_cores_that_training_leaves() -> None:
    assert DECODES.step(1) == pytest.approx(0.032)
    assert DECODES.step(2) == pytest.approx((0.032 + 0.001 + 0.010) / 2)
    assert DECODES.step(8) == DECODES.step(2)  # the cores bind
    assert DECODES.binds(2) == "cores"
    assert DECODES.recommend() == 2


def test_threads_that_wait_for_each_other_lose_more_than_their_share() -> None:
    alone = dataclasses.replace(DECODES, compute=0.010, compute_cpu=0.010)
    both = dataclasses.replace(DECODES, compute=0.010, compute_cpu=0.020)  # on both cores
    assert both.step(1) > alone.step(1)
    fair = (0.032 + 0.001 + 0.020) / 2
    assert both.step(1) > fair
    assert both.step(2) >= fair


def test_ranks_share_the_cores() -> None:
    two = dataclasses.replace(DECODES, ranks=2)
    assert two.step(4) == pytest.approx(2 * (0.032 + 0.001 + 0.010) / 2)
    assert two.loader(4) == pytest.approx(2 * 0.033 / 2)


def test_transport_can_cost_more_than_it_brings() -> None:
    cheap = LoaderModel(cpu=0.0003, worker_cpu=0.004, handover=0.002, compute=0.010, cores=2)
    assert cheap.step(0) < cheap.step(2)
    assert cheap.recommend() == 0


def test_a_step_of_several_batches() -> None:
    assert dataclasses.replace(SLEEPS, accumulation=3).step(2) == pytest.approx(3 * SLEEPS.step(2))


def test_workers_that_start_anew_in_each_epoch_are_paid_for() -> None:
    short = dataclasses.replace(SLEEPS, epoch=10, start_up=0.2, num_workers=4)
    assert short.step(4) - short.step(4, persistent_workers=True) == pytest.approx(0.02)
    assert short.step(1) - short.step(1, persistent_workers=True) == pytest.approx(0.02 * 2 / 5)  # fewer to start
    assert short.step(0) == SLEEPS.step(0)
    assert short.step(4, persistent_workers=True) > SLEEPS.step(4)  # the first batch of an epoch is waited for
    long = dataclasses.replace(short, epoch=100_000)
    assert long.step(4) == pytest.approx(SLEEPS.step(4), rel=0.01)


def test_the_queue_has_to_fit_into_shared_memory() -> None:
    large = dataclasses.replace(SLEEPS, batch_bytes=10 * 2**20)
    assert large.recommend() == 4
    assert large.recommend(shm_bytes=64 * 2**20) == 2  # 2 workers × 2 batches, and the one in use
    assert large.recommend(shm_bytes=2**20) == 0
    assert large.recommend(most=3) == 3


def test_uneven_batches_need_a_longer_queue() -> None:
    even = LoaderModel(cpu=0.001, blocked=0.029, worker_cpu=0.001, compute=0.016, cores=4, batch_size=8)
    uneven = dataclasses.replace(even, slow_share=0.7)
    assert even.step(2) == pytest.approx(0.016)
    steps = [uneven.step(2, prefetch_factor=queue) for queue in (1, 2, 4, 16)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 1.2 * even.step(2) > 1.1 * steps[-1] > 1.1 * even.step(2) - 1e-9
    assert dataclasses.replace(uneven, batch_size=512).step(2) == pytest.approx(even.step(2), rel=0.05)  # large batches are alike
    assert uneven.step(0) == even.step(0)


@given(st.lists(st.floats(0.1, 3.0), min_size=40, max_size=40), st.integers(1, 5), st.integers(1, 4), st.floats(0.0, 3.0))
def test_batches_in_order_are_never_faster_than_their_makers_or_their_taker(
    making: list[float], workers: int, prefetch: int, training: float
) -> None:
    pace = delivery_seconds(making, workers, workers * prefetch, training)
    assert pace >= training - 1e-9
    assert pace <= sum(making) + training
    assert delivery_seconds([1.0] * 40, workers, workers * prefetch, training) == pytest.approx(max(1 / workers, training), abs=0.05)


def test_the_blind_window() -> None:
    assert blind_window(0.050, 0.020, 8) == pytest.approx(8 / 0.6)
    assert blind_window(0.020, 0.020, 8) == math.inf
    assert blind_window(0.050, 0.020, 0) == 0.0


@given(feedings, st.integers(0, 16))
def test_no_step_is_shorter_than_its_parts(feeding: LoaderModel, workers: int) -> None:
    step = feeding.step(workers) / feeding.accumulation
    assert step >= feeding.compute - 1e-12
    assert step >= feeding.loader(workers) - 1e-12
    assert feeding.data_wait(workers) >= 0
    assert feeding.binds(workers) in TERMS


@given(feedings, st.integers(1, 15))
def test_one_more_worker_does_no_harm_once_there_is_one(feeding: LoaderModel, workers: int) -> None:
    assert feeding.step(workers + 1) <= feeding.step(workers) + 1e-12
    assert feeding.loader(workers + 1) <= feeding.loader(workers) + 1e-12


@given(feedings, st.floats(0.01, 100))
def test_seconds_are_only_a_unit(feeding: LoaderModel, unit: float) -> None:
    scaled = dataclasses.replace(
        feeding,
        cpu=feeding.cpu * unit,
        blocked=feeding.blocked * unit,
        worker_cpu=None if feeding.worker_cpu is None else feeding.worker_cpu * unit,
        handover=feeding.handover * unit,
        compute=feeding.compute * unit,
    )
    for workers in (0, 1, 3):
        assert scaled.step(workers) == pytest.approx(unit * feeding.step(workers), rel=1e-6, abs=1e-9)


@given(feedings)
def test_the_recommended_number_is_near_the_best_and_no_smaller_one_is(feeding: LoaderModel) -> None:
    recommended = feeding.recommend()
    steps = [feeding.step(n, persistent_workers=True) for n in range(MAX_WORKERS + 1)]
    assert 0 <= recommended <= MAX_WORKERS
    assert all(step > 1.05 * min(steps) - 1e-9 for step in steps[:recommended])
    if feeding.cores >= 1:
        assert steps[recommended] <= 1.05 * min(steps) + 1e-9


def evidence(**loading: object) -> Evidence:
    return Evidence(
        step=0.060,
        accumulation=2,
        world_size=2,
        arms={
            "cached": VariantTimes(name="cached", baseline="full", pairs=((0.060, 0.020),)),
            "loader": VariantTimes(name="loader", baseline="full", pairs=((0.060, 0.040),)),
        },
        loading=Loading(kind="DataLoader", **{"cpu": 0.015, "blocked": 0.005, "worker_cpu": 0.018, "handover": 0.001, **loading}),
        inside=Inside(step=0.020, ops=0.018, cpu=0.030),
        noise=Noise(cores=4, foreign=1.0),
    )


def test_from_evidence() -> None:
    feeding = LoaderModel.of(evidence(num_workers=0, epoch=100, batch_bytes=1000))
    assert feeding is not None
    assert (feeding.cpu, feeding.blocked, feeding.worker_cpu, feeding.handover) == pytest.approx((0.015, 0.005, 0.018, 0.001))
    assert (feeding.compute, feeding.compute_cpu, feeding.cores, feeding.ranks, feeding.accumulation) == (
        0.010,
        0.015,
        3.2,
        2,
        2,
    )  # four of ours and one of others share four cores
    assert (feeding.epoch, feeding.batch_bytes) == (100, 1000)


def test_other_processes_share_the_cores_with_ours() -> None:
    assert free_cores(Noise(cores=8)) == Interval(low=8, mid=8, high=8)
    assert free_cores(Noise(cores=2, foreign=1.5)).mid == pytest.approx(2 * 2 / 3.5)  # a rank and a worker beside 1.5 others
    assert free_cores(Noise(cores=2, foreign=2.0)) == Interval(low=2 * 2 / 6, mid=1.0, high=2)
    assert free_cores(Noise(cores=64, foreign=2.0)).mid == 62
    assert free_cores(Noise(cores=4, foreign=4.0), ranks=2).mid == 2.0
    assert free_cores(Noise(cores=2, foreign=1.5, waiting=0.5)).mid == pytest.approx(2 * 2 / 5), "who waits half of the time wants twice"


def test_a_device_hides_what_the_host_loads_meanwhile() -> None:
    behind = dataclasses.replace(SLEEPS, handover=0.002, hidden=1.0)
    assert behind.step(0) == pytest.approx(0.040)
    assert dataclasses.replace(behind, hidden=0.5).step(0) == pytest.approx(0.045)
    assert behind.step(8) == pytest.approx(0.010)
    assert dataclasses.replace(behind, hidden=0.0).step(8) == pytest.approx(0.012)


def test_nothing_can_be_predicted_without_a_probe_or_without_the_step_alone() -> None:
    assert LoaderModel.of(dataclasses.replace(evidence(), loading=None)) is None
    assert LoaderModel.of(dataclasses.replace(evidence(), arms={})) is None
    assert LoaderModel.of(evidence(cpu=None, worker_cpu=None)) is None


def test_the_curve_and_its_faces() -> None:
    curve = SLEEPS.curve()
    assert [point.num_workers for point in curve.points] == [0, 1, 2, 3, 4, 5, 6]
    assert (curve.recommended, curve.current, curve.compute) == (4, 0, 0.010)
    assert [point.step for point in curve.points] == [SLEEPS.step(n) for n in range(7)]
    text = str(curve)
    assert "recommended" in text
    assert "workers too few or too slow" in text
    assert "measured" not in text.replace("measurements", "")
    assert list(curve.to_frame()["step"]) == [point.step for point in curve.points]
    assert "<table" in curve._repr_html_()
    assert repr(curve) == "LoaderCurve(7 points, recommended: num_workers=4)"
    assert [point.num_workers for point in SLEEPS.curve(2).points] == [0, 1, 2]
    with pytest.raises(ValueError, match="0 or more"):
        SLEEPS.curve(-1)


def test_measured_stands_beside_predicted() -> None:
    curve = SLEEPS.curve(4).with_measured(step={0: 0.05, 2: 0.025}, loader={2: 0.02})
    assert curve.errors == pytest.approx({0: 0.0, 2: -0.2})
    assert "25.0 ms" in str(curve)
    again = curve.with_measured(step={1: 0.04})
    assert set(again.errors) == {0, 1, 2}
    with pytest.raises(ValueError, match=r"measured with 7 workers, but the curve goes from 0 to 4: try curve\(7\)"):
        curve.with_measured(step={7: 0.01})


def test_workers_of_now_are_predicted_as_they_are() -> None:
    short = dataclasses.replace(SLEEPS, num_workers=2, epoch=10, start_up=0.5)
    anew, kept = short.curve(4, persistent_workers=False), short.curve(4)
    differ = [a.num_workers for a, b in zip(anew.points, kept.points, strict=True) if a.step != b.step]
    assert (differ, anew.persistent_workers, kept.persistent_workers) == ([2], False, True)
    assert anew.points[2].step == short.step(2)
    assert "workers of now start anew with each pass over the loader, all others persist" in str(anew)
    assert "persist" not in str(kept) + str(SLEEPS.curve(4, persistent_workers=False))
    assert LoaderCurve.from_json(anew.to_json()) == anew


def test_the_curve_travels_as_json() -> None:
    curve = SLEEPS.curve(3).with_measured(step={1: 0.041})
    assert LoaderCurve.from_json(json.loads(json.dumps(curve.to_json()))) == curve


def test_the_curve_draws_itself() -> None:
    axes = DECODES.curve(4).plot()
    assert axes.get_xlabel()
