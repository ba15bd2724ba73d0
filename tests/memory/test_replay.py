"""A log is read from begin to end: categories that only the whole log knows, sums per group, the peak and its moment in words."""

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory_logs import Writer, training
from workbench.core.vocabulary import GROUPS
from workbench.memory.analysis.log import Mark, MemoryLog
from workbench.memory.analysis.over_time import MemoryTimeline
from workbench.memory.analysis.replay import Replay, canonical, classify

MIB = 2**20


def test_what_backward_finds_is_an_activation_and_what_does_not_live_so_long_a_temporary() -> None:
    w = Writer()
    w.mark("forward", 0, 0)
    gone, kept, forever = w.alloc(1), w.alloc(1), w.alloc(1)
    w.free(gone)
    w.mark("backward")
    again, grad = w.alloc(1, module="block"), w.alloc(1)
    w.free(kept)
    w.mark("between")
    norm = w.alloc(1)
    w.mark("optimizer")
    step = w.alloc(1)
    w.mark("end")
    late = w.alloc(1)
    classify(w.log)
    found = [w.log.records[i].category for i in (gone, kept, forever, again, grad, norm, step, late)]
    wanted = ["temp_forward", "activation", "activation", "recompute", "temp_backward", "temp_optimizer", "temp_optimizer", "other"]
    assert found == wanted


def test_each_micro_step_has_its_own_backward() -> None:
    w = Writer()
    w.mark("forward", 0, 0)
    w.mark("backward")
    w.mark("forward", 0, 1)
    short = w.alloc(1)
    w.free(short)
    kept = w.alloc(1)
    w.mark("backward")
    w.free(kept)
    classify(w.log)
    assert [record.category for record in w.log.records] == ["temp_forward", "activation"]


def test_a_forward_without_backward_keeps_what_lives_on() -> None:
    w = Writer()
    w.mark("forward", 0, 0)
    gone, lives = w.alloc(1), w.alloc(1)
    w.free(gone)
    classify(w.log)
    assert [w.log.records[i].category for i in (gone, lives)] == ["temp_forward", "activation"]


def test_a_category_that_is_known_stays() -> None:
    w = Writer()
    w.mark("forward")
    w.alloc(1, category="buffer")
    classify(w.log)
    assert w.log.records[0].category == "buffer"


def test_frees_in_any_order_give_one_canonical_log() -> None:
    one, two = Writer(), Writer()
    for writer, order in ((one, (0, 1, 2)), (two, (2, 0, 1))):
        for _ in range(3):
            writer.alloc(8)
        writer.free(*order)
        writer.mark("end")
        writer.free()
    assert one.log.events != two.log.events
    assert canonical(one.log.events) == canonical(two.log.events)


def test_sums_by_hand() -> None:
    w = Writer()
    w.alloc(100, category="parameter")
    w.mark("forward", 0, 0)
    act = w.alloc(1000)
    w.mark("backward")
    w.alloc(600, category="gradient")
    w.free(act)
    w.mark("end")
    replay = Replay(w.log)
    assert replay.total.tolist() == [100, 100, 1100, 1100, 1700, 700, 700]
    assert replay.peak == 4
    assert dict(zip(GROUPS, replay.held[4].tolist(), strict=True)) == {
        **dict.fromkeys(GROUPS, 0),
        "parameters": 100,
        "activations": 1000,
        "gradients": 600,
    }
    assert replay.phases == {"init": 100, "forward": 1100, "backward": 1700, "end": 700}
    assert replay.phase_of(4) == Mark("backward", 0, 0)


def test_each_storage_is_rounded_by_itself() -> None:
    w = Writer()
    for size in (0, 1, 512, 513):
        w.alloc(size)
    assert Replay(w.log, 512).total.tolist() == [0, 512, 1024, 2048]


def test_a_storage_that_shrinks_and_grows_counts_as_it_is_at_each_moment() -> None:
    w = Writer()
    gathered, other = w.alloc(0, category="unsharded_parameter"), w.alloc(10, category="other")
    w.resize(gathered, 100)
    w.resize(gathered, 0)
    w.resize(gathered, 60)
    w.free(gathered, other)
    replay = Replay(w.log)
    assert replay.total.tolist() == [0, 10, 110, 10, 70, 10, 0]
    assert replay.alive(replay.peak) == {gathered: 100, other: 10}
    assert replay.alive(3) == {other: 10}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), granularity=st.sampled_from([1, 512]))
def test_sums_agree_with_counting_one_by_one(seed: int, granularity: int) -> None:
    log = wild(seed)
    replay = Replay(log, granularity)
    now: dict[int, int] = {}
    for position, event in enumerate(replay.events):
        if event.kind:
            now[event.index] = -(-event.size // granularity) * granularity
        assert replay.total[position] == sum(now.values())
    assert (replay.held.sum(1) == replay.total).all()
    assert replay.alive(replay.peak) == {i: n for i, n in replay.alive(replay.peak).items() if n}
    assert sum(replay.alive(replay.peak).values()) == replay.total.max()
    assert max(replay.steps.values()) == max(replay.phases.values()) == replay.total.max()


def wild(seed: int, count: int = 80) -> MemoryLog:
    draw = random.Random(seed)
    w, live = Writer(), []
    w.alloc(draw.randrange(5000), category="parameter")
    for micro in range(2):
        for phase in ("data", "forward", "backward", "between", "optimizer", "end"):
            w.mark(phase, micro, micro)
            for _ in range(count // 12):
                roll = draw.random()
                if live and roll < 0.4:
                    w.free(live.pop(draw.randrange(len(live))))
                elif live and roll < 0.5:
                    w.resize(draw.choice(live), draw.randrange(4 * MIB))
                else:
                    live.append(w.alloc(draw.choice([0, 1, 511, 4096, MIB, 3 * MIB, 11 * MIB + 5]), module=draw.choice(["", "a.b"])))
    return w.log


@pytest.mark.parametrize(
    ("place", "words"), [(1, "start of backward, step 2"), (50, "middle of backward, step 2"), (99, "end of backward, step 2")]
)
def test_the_moment_in_a_phase(place: int, words: str) -> None:
    w = Writer()
    w.mark("backward", 1, 1)
    for i in range(100):
        big = w.alloc(1000 if i == place else 1)
        if i == place:
            w.free(big)
    replay = Replay(w.log)
    assert replay.moment(replay.peak) == words


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("optimizer", "optimizer step, step 1"),
        ("between", "after backward, step 1"),
        ("data", "while a batch is fetched, step 1"),
        ("end", "after the step, step 1"),
        ("init", "while the model is built"),
    ],
)
def test_other_moments(phase: str, words: str) -> None:
    w = Writer()
    w.mark(phase, 0, 0)
    w.alloc(1)
    assert Replay(w.log).moment(1) == words


def test_a_micro_step_is_named_where_there_are_several() -> None:
    several, one = Replay(training(4096, micros=3)), Replay(training(4096))
    assert several.moment(several.peak) == "middle of backward of micro-step 2 of 3, step 2"
    assert one.moment(one.peak) == "middle of backward, step 2"


def test_accumulated_activations_do_not_add_up() -> None:
    one, four = Replay(training(64)), Replay(training(64, micros=4))
    column = GROUPS.index("activations")
    assert one.held[:, column].max() == four.held[:, column].max() > 0


def test_optimizer_states_are_born_in_the_first_step() -> None:
    steps = Replay(training(1024)).steps
    assert steps[1] > steps[0]


def test_nothing_in_it() -> None:
    with pytest.raises(ValueError, match="the log holds no storage: nothing was run"):
        Replay(MemoryLog())
    with pytest.raises(ValueError, match="granularity=0: bytes to round each storage up to"):
        Replay(training(2), 0)


def test_a_long_log_costs_little_more_than_reading_it() -> None:
    log = wild(1, 60_000)
    began = time.thread_time()  # not the time that passes: others compute here
    sum(1 for event in log.events for _ in event)
    read, began = time.thread_time() - began, time.thread_time()
    Replay(log, 512)
    assert time.thread_time() - began < 60 * read  # columns and sums, no loop per event and group


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_thinned_timeline_keeps_marks_and_the_peaks_between_them(seed: int) -> None:
    replay = Replay(wild(seed, 600))
    thin = MemoryTimeline.from_replay(replay, most=100)
    assert len(thin.position) <= 150
    assert thin.position[thin.peak] == replay.peak
    assert max(thin.total) == replay.total.max()
    assert set(replay.mark_positions.tolist()) <= set(thin.position)
    for a, b, mark in replay.stretches:
        inside = [total for p, total in zip(thin.position, thin.total, strict=True) if a <= p < b]
        assert max(inside) == replay.total[a:b].max(), mark
    assert [thin.phase[thin.position.index(a)] for a, _, _ in replay.stretches] == [mark.phase for _, _, mark in replay.stretches]
    assert list(thin.position) == sorted(set(thin.position))
    assert np.array_equal(np.array(thin.total), replay.total[list(thin.position)])


def test_a_timeline_goes_out_and_in_and_into_a_frame() -> None:
    thin = MemoryTimeline.from_replay(Replay(training(8)))
    assert MemoryTimeline.from_json(thin.to_json()) == thin
    frame = thin.to_frame()
    assert list(frame.columns) == ["position", "phase", "step", "micro", *GROUPS, "total"]
    assert frame["total"].max() == max(thin.total)
    assert [span[0] for span in thin.spans][:4] == ["init", "data", "forward", "backward"]
    assert repr(thin).endswith("points, 2 steps)")
