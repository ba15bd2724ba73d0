"""Calls inside calls: nesting, flames, modules, and who holds memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traced import BACKWARD, event, launched, on_cpu, on_device, op, step, write
from workbench.traces.analysis.flame import Flame
from workbench.traces.analysis.memory_curve import MemoryCurve
from workbench.traces.analysis.modules import Modules
from workbench.traces.analysis.nesting import merge_calls, name_numbers, nest_events
from workbench.traces.analysis.trace import Trace

US = 1e-6
CALLS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.integers(0, 30), st.sampled_from([1, 2])), min_size=1, max_size=12
)


def load(tmp_path: Path, *events: Any, name: str = "a.json") -> Trace:
    return Trace.load(write(tmp_path / name, events))


def module(name: str, start: float, length: float, lane: int = 1) -> dict[str, Any]:
    return event(f"nn.Module: {name}", "python_function", start, length, lane)


def memory(at: float, size: int, total: int, address: int = 1, **args: Any) -> dict[str, Any]:
    told = {"Bytes": size, "Total Allocated": total, "Addr": address, "Device Type": 0, "Device Id": -1, **args}
    return {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": at, "args": told}


@given(CALLS)
def test_time_is_in_one_branch_only(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, int, int, int]]) -> None:
    """Each call lies within the one around it, none overlaps another of the same caller, and own times add up to the time of the roots."""
    trace = load(tmp_path_factory.mktemp("any"), *[event(name, "cpu_op", start, long, lane) for name, start, long, lane in rows])
    calls = nest_events(trace.columns, trace.kinds.where("operator"))
    assert sorted(calls.events.tolist()) == list(range(len(rows)))
    inner = calls.parent >= 0
    around = calls.spans[calls.parent[inner]]
    assert (calls.spans[inner, 0] >= around[:, 0]).all()
    assert (calls.spans[inner, 1] <= around[:, 1]).all()
    assert (calls.depth[inner] == calls.depth[calls.parent[inner]] + 1).all()
    everything = np.array([[0, 10**9]])
    total, own = calls.within(everything)
    assert (own >= 0).all()
    assert own.sum() == total[~inner].sum()
    _, codes = name_numbers(trace.columns)
    tree = merge_calls(calls, codes[trace.columns.label[calls.events]])
    assert tree.summed(own).sum() == own.sum()
    assert (tree.rolled(tree.summed(own)) == tree.summed(total)).all()
    walked = [node for node, _ in tree.walk(tree.summed(total))]
    assert sorted(walked) == list(range(len(tree.name)))
    assert all(walked.index(int(parent)) < walked.index(node) for node, parent in enumerate(tree.parent) if parent >= 0)


def test_a_range_that_a_function_opens_for_its_caller_is_not_inside_that_function(tmp_path: Path) -> None:
    """`record_function.__enter__` begins a range, and ends long before it."""
    enter = event("torch/profiler.py(1): __enter__", "python_function", 10, 4)
    found = load(tmp_path, step(0, 0, 100), enter, event("mine", "user_annotation", 12, 60), op("aten::a", 20, 30)).flame(stacks=True)
    mine = next(one for one in found.nodes if one.name == "mine")
    assert (mine.parent, mine.seconds, mine.self_seconds) == (-1, pytest.approx(58 * US), pytest.approx(28 * US))


def test_a_flame(tmp_path: Path) -> None:
    found = load(tmp_path, *on_cpu()).flame()
    shown = {
        found.path(one): (round(one.start / US), round(one.seconds / US), round(one.self_seconds / US), one.calls) for one in found.nodes
    }
    data, backward = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "autograd::engine::evaluate_function: AddmmBackward0"
    assert shown == {
        (data,): (0, 30, 20, 1),
        (data, "aten::stack"): (0, 10, 10, 1),
        ("aten::linear",): (30, 20, 10, 1),
        ("aten::linear", "aten::addmm"): (30, 10, 10, 1),
        ("Optimizer.step#SGD.step",): (50, 10, 10, 1),
        (backward,): (60, 10, 10, 1),
    }
    assert (found.step_seconds, found.thread, found.threads) == (pytest.approx(100 * US), "1 1", ("1 1", "9 9"))
    assert found.share(found.nodes[0]) == pytest.approx(0.3)
    assert "enumerate(DataLoader)" in str(found)


def test_a_flame_of_another_thread(tmp_path: Path) -> None:
    trace = load(tmp_path, *on_cpu())
    assert [one.name for one in trace.flame("9 9").nodes] == ["gloo:all_reduce"]
    with pytest.raises(ValueError, match=r"flame\(thread='main'\): no such thread; there are '1 1', '9 9'"):
        trace.flame("main")
    assert "with_stack=True" in trace.flame(stacks=True).notes[0]
    only = load(tmp_path, event("k", "kernel", 0, 5, 0), name="b.json").flame()
    assert (only.nodes, only.thread) == ((), "")
    assert "no calls of the host" in str(only)


def test_what_lies_outside_of_the_steps_is_no_part_of_a_flame(tmp_path: Path) -> None:
    found = load(tmp_path, op("aten::a", 0, 50), step(0, 40, 60), op("aten::b", 60, 20), op("aten::c", 200, 50)).flame()
    assert {one.name: round(one.seconds / US) for one in found.nodes} == {"aten::a": 10, "aten::b": 20}


def training() -> list[dict[str, Any]]:
    """Two steps of a net with two layers; the second one's operators have two sequence numbers, one of them told twice."""
    found = []
    for at, number in ((0, 0), (200, 10)):
        found += [
            step(number, at, 200),
            module("Net_0", at + 10, 80),
            module("Linear_0", at + 20, 20),
            op("aten::linear", at + 25, 10, args={"Sequence number": number}),
            module("Linear_1", at + 50, 30),
            op("aten::view", at + 52, 2, args={"Sequence number": number + 1}),
            op("aten::linear", at + 55, 20, args={"Sequence number": number + 1}),
            op("aten::sum", at + 92, 5, args={"Sequence number": number + 2}),
            *(
                event(f"autograd::engine::evaluate_function: {name}", "cpu_op", at + begin, long, BACKWARD, args={"Sequence number": seq})
                for name, begin, long, seq in (("Sum", 100, 5, number + 2), ("L", 110, 30, number + 1), ("L", 150, 10, number))
            ),
            op("LinearBackward0", at + 111, 20, lane=BACKWARD, args={"Sequence number": number + 1}),
        ]
    return found


def test_modules(tmp_path: Path) -> None:
    found = load(tmp_path, *training()).modules()
    assert [(one.path, one.depth, one.calls) for one in found.rows] == [
        ("Net_0", 0, 1),
        ("Net_0/Linear_1", 1, 1),
        ("Net_0/Linear_0", 1, 1),
    ]
    times = [(one.self_seconds, one.total_seconds, one.backward_seconds) for one in found.rows]
    assert np.allclose(times, np.array([(30, 80, 40), (30, 30, 30), (20, 20, 10)]) * US)
    assert (found.source, found.rows[0].device_seconds, found.rows[1].name) == ("module", None, "Linear_1")


def test_modules_on_a_device(tmp_path: Path) -> None:
    """What a node of the backward graph launches belongs to the module whose operator it differentiates."""
    events = training()
    for at, number in ((0, 1), (200, 11)):
        call, forward = launched("k", at + 60, at + 62, 7, number)
        later, backward = launched("k", at + 120, at + 125, 13, number + 100)
        later |= {"tid": BACKWARD, "pid": BACKWARD}
        _, lost = launched("k", at + 95, at + 96, 50, number + 200)
        events += [call, forward, later, backward, lost]
    found = {one.path: one.device_seconds for one in load(tmp_path, *events).modules().rows}
    assert found == pytest.approx({"Net_0": 20 * US, "Net_0/Linear_1": 20 * US, "Net_0/Linear_0": 0})


def test_without_sequence_numbers(tmp_path: Path) -> None:
    bare = [{**one, "args": {}} for one in training()]
    found = load(tmp_path, *bare).modules()
    assert {one.backward_seconds for one in found.rows} == {None}
    assert "does not join operators and their backward pass" in found.notes[0]


def test_ranges_where_there_are_no_modules(tmp_path: Path) -> None:
    found = load(tmp_path, *on_cpu(), event("forward", "user_annotation", 38, 30), event("a/b", "user_annotation", 40, 10)).modules()
    assert [one.path for one in found.rows] == ["forward", "forward/a∕b"]
    assert (found.source, found.rows[0].calls) == ("range", 0.5)
    assert "ranges of record_function" in str(found)


def test_no_modules_at_all(tmp_path: Path) -> None:
    found = load(tmp_path, *on_cpu()).modules()
    assert (found.rows, found.source) == ((), "")
    assert "profile with_stack=True (wb.trace(step, loader, stacks=True))" in str(found)


def test_memory(tmp_path: Path) -> None:
    requests = [
        memory(5, 100, 600, 1),
        memory(15, 400, 1000, 2),
        memory(18, -400, 600, 2),
        memory(30, 900, 1500, 2),
        memory(60, 50, 1550, 3),
        memory(70, -900, 650, 2),
    ]
    events = [step(3, 0, 100), module("Net_0", 10, 50), op("aten::linear", 12, 30), op("aten::empty", 29, 5), *requests]
    (found,) = load(tmp_path, *events).memory_curve().devices
    assert (found.device, found.peak, found.at, found.step, found.first, found.last) == ("CPU", 1550, pytest.approx(60 * US), 3, 600, 650)
    assert [(one.name, one.bytes, one.requests) for one in found.holders] == [
        ("Net_0 › aten::linear", 900, 1),
        ("held since before the trace", 500, 0),
        ("outside of every recorded call", 150, 2),
    ]
    assert found.allocated == (600, 1000, 600, 1500, 1550, 650)


def test_memory_of_two_devices_and_old_files(tmp_path: Path) -> None:
    """Without totals they are summed; what was held before is not seen then."""
    events = [op("aten::a", 0, 50)]
    for at, size in ((1, 10), (2, 30), (3, -40), (4, -5), (5, 15)):
        told = memory(at, size, 0, at, **{"Device Type": 1, "Device Id": 0})
        del told["args"]["Total Allocated"]
        events += [told, memory(at, 1, 7, at)]
    cuda, cpu = load(tmp_path, *events).memory_curve().devices
    assert (cuda.device, cuda.allocated, cuda.peak) == ("CUDA 0", (15, 45, 5, 0, 15), 45)
    assert (cpu.device, cpu.peak) == ("CPU", 7)
    assert cuda.step == 0, "the whole file is one step"


def test_a_long_curve_keeps_its_peak(tmp_path: Path) -> None:
    events = [memory(i, 1, 9_999 if i == 3_333 else i % 7, i) for i in range(5_000)]
    (found,) = load(tmp_path, op("aten::a", 0, 5_000), *events).memory_curve().devices
    assert len(found.times) <= 1_502
    assert max(found.allocated) == found.peak == 9_999
    assert found.requests == 5_000


def test_memory_that_was_not_recorded(tmp_path: Path) -> None:
    found = load(tmp_path, *on_cpu()).memory_curve()
    assert (found.devices, "profile with profile_memory=True" in str(found)) == ((), True)


def test_a_file_that_is_gone_or_another_one(tmp_path: Path) -> None:
    """Details are read when they are asked for: by then the file may have changed. What needs none is answered still."""
    for number in (0, 1):
        path = write(tmp_path / f"{number}.json", training())
        trace = Trace.load(path)
        path.unlink() if number else write(path, on_cpu())
        assert "could not be read" in trace.memory_curve().notes[0]
        assert ("changed since it was loaded", "No such file")[number] in trace.memory_curve().notes[0]
        assert len(trace.modules().rows) == 3
        assert trace.modules().rows[0].backward_seconds is None


def test_trees_survive_json(tmp_path: Path) -> None:
    for trace in (load(tmp_path, *training(), memory(5, 100, 600)), load(tmp_path, *on_device(), name="b.json")):
        for answer, kind in ((trace.modules(), Modules), (trace.flame(), Flame), (trace.memory_curve(), MemoryCurve)):
            assert kind.from_json(json.loads(json.dumps(answer.to_json()))) == answer  # type: ignore[attr-defined]
            assert str(answer) == str(answer.table)
            assert len(answer.to_frame().columns) > 2
            assert "\n" not in repr(answer)
