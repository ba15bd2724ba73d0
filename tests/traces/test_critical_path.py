"""The critical path of a trace, and what follows what in it: exact on files written by hand, and always a whole step."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.traced import BACKWARD, DEVICE, data, event, launched, on_cpu, on_device, op, step, write
from workbench.traces.analysis.critical_path import CriticalPath
from workbench.traces.analysis.sequences import Sequences
from workbench.traces.analysis.trace import Trace

US = 1e-6


def load(tmp_path: Path, *events: Any, **header: Any) -> Trace:
    return Trace.load(write(tmp_path / "a.json", events, **header))


def parts(found: CriticalPath) -> dict[str, int]:
    return {one.part: round(one.seconds / US) for one in found.parts}


def test_on_a_cpu(tmp_path: Path) -> None:
    found = load(tmp_path, *on_cpu()).critical_path()
    assert parts(found) == {"compute": 40, "data_wait": 30, "python": 30}, "what the loader calls is waiting for it"
    assert (found.share("data_wait"), found.share("h2d"), found.device) == (pytest.approx(0.3), 0, "cpu")
    assert [one.handovers for one in found.steps] == [0, 0]
    linear = next(one for one in found.rows if one.name == "aten::linear")
    assert (linear.on_path, round(linear.seconds / US)) == (1, 10), "without what it calls"
    with pytest.raises(ValueError, match="no part 'gpu': there are data_wait"):
        found.share("gpu")


def test_a_device_that_is_never_waited_for(tmp_path: Path) -> None:
    """All is launched in time: the path stays in the stream. Of the collective, the kernel beside it hides 10 µs of itself."""
    found = load(tmp_path, *on_device()).critical_path()
    assert parts(found) == {"compute": 40, "queue": 25, "communication": 20, "h2d": 10, "copy": 5}
    assert [round(sum(one.parts.values()) / US) for one in found.steps] == [100, 100]
    assert next(one for one in found.rows if one.name == "sgemm_128x64").on_path == pytest.approx(30 / 40)


def test_a_host_that_is_late_and_waits(tmp_path: Path) -> None:
    """It launches a, waits for it, and only then launches b."""
    rows = [
        op("aten::a", 0, 10),
        *launched("a", 5, 20, 30, 1),
        event("cudaDeviceSynchronize", "cuda_runtime", 12, 43),
        op("aten::b", 60, 10),
        *launched("b", 62, 70, 20, 2),
    ]
    found = load(tmp_path, *rows).critical_path()
    assert parts(found) == {"compute": 50, "launch": 19, "host": 11, "python": 5, "waking": 5}
    assert found.steps[0].handovers == 3
    shown = {one.name: (round(one.seconds / US), round(one.own_seconds / US)) for one in found.rows}
    assert shown == {"a": (30, 30), "b": (20, 20), "aten::a": (5, 8), "aten::b": (2, 8), "cudaLaunchKernel": (4, 4)}
    assert "host; 25 % of its 8.00 µs is on the path" in str(found)


def test_a_copy_that_blocks(tmp_path: Path) -> None:
    """The host copies the result of a kernel to pageable memory: the call returns when that is over."""
    call, copy = launched("Memcpy DtoH (Device -> Pageable)", 10, 50, 5, 2, "gpu_memcpy")
    rows = [*launched("k", 0, 5, 45, 1), {**call, "name": "cudaMemcpyAsync", "dur": 50}, copy, op("aten::after", 60, 40)]
    found = load(tmp_path, *rows).critical_path()
    assert parts(found) == {"compute": 45, "host": 42, "copy": 5, "waking": 5, "launch": 3}


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_waits_for_another(tmp_path: Path, waits: bool) -> None:
    """Only where the host had it wait, between the launches, is it taken for that."""
    barrier = [event("cudaStreamWaitEvent", "cuda_runtime", 4, 1)] if waits else []
    call, work = launched("y", 6, 105, 45, 2)
    rows = [*launched("x", 0, 10, 90, 1), *barrier, call, {**work, "tid": 20}]
    found = load(tmp_path, *rows).critical_path()
    expected = {"compute": 135, "launch": 8, "queue": 5, "host": 2} if waits else {"compute": 45, "launch": 97, "host": 4, "python": 4}
    assert parts(found) == expected


def test_autograd_in_a_thread_of_its_own(tmp_path: Path) -> None:
    rows = [
        step(0, 0, 700),
        op("aten::forward", 0, 100),
        event("autograd::engine::evaluate_function: B", "cpu_op", 150, 450, BACKWARD),
        event("Optimizer.step#SGD.step", "user_annotation", 650, 50),
    ]
    found = load(tmp_path, *rows).critical_path()
    assert parts(found) == {"compute": 600, "python": 100}
    assert found.steps[0].handovers == 2


def test_what_ends_by_chance_in_a_short_pause(tmp_path: Path) -> None:
    """A collective that the main thread did not wait for is beside the path."""
    rows = [step(0, 0, 700), op("aten::a", 0, 300), op("aten::b", 350, 350), event("gloo:all_reduce", "user_annotation", 100, 230, 9)]
    assert parts(load(tmp_path, *rows).critical_path()) == {"compute": 650, "python": 50}
    waited = [step(0, 0, 700), op("aten::a", 0, 150), op("aten::b", 350, 350), event("gloo:all_reduce", "user_annotation", 160, 180, 9)]
    assert parts(load(tmp_path, *waited).critical_path()) == {"compute": 500, "communication": 180, "python": 20}


def test_no_step_and_no_links(tmp_path: Path) -> None:
    assert load(tmp_path, step(0, 0, 0)).critical_path().parts == ()
    alone = load(tmp_path, event("k", "kernel", 0, 10, 0), op("aten::a", 0, 10)).critical_path()
    assert parts(alone) == {"compute": 10}
    assert "does not link work of the device" in str(alone)


@st.composite
def traces(draw: st.DrawFn) -> list[Any]:
    """Launches into two streams, operators of two threads, waits, and marks, at any times."""
    rows: list[Any] = [step(i, 40 * i, 40) for i in range(draw(st.integers(0, 3)))]
    for number in range(draw(st.integers(0, 8))):
        at, length = draw(st.integers(0, 100)), draw(st.integers(0, 20))
        call, work = launched("k", at, at + draw(st.integers(0, 30)), length, number)
        stream = draw(st.sampled_from([DEVICE, 20]))
        names = draw(st.sampled_from(["cudaLaunchKernel", "cudaMemcpyAsync"]))
        rows += [{**call, "name": names, "dur": draw(st.integers(0, 40))}, {**work, "tid": stream}]
    for _ in range(draw(st.integers(0, 8))):
        name = draw(st.sampled_from(["cudaStreamSynchronize", "cudaStreamWaitEvent", "aten::a", "aten::b"]))
        category = "cpu_op" if name.startswith("aten") else "cuda_runtime"
        rows.append(event(name, category, draw(st.integers(0, 100)), draw(st.integers(0, 400)), draw(st.sampled_from([1, BACKWARD]))))
    rows += [data(draw(st.integers(0, 100)), draw(st.integers(0, 30))), op("aten::z", 0, 1)]
    return rows


@given(rows=traces())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_a_path_is_the_whole_step(tmp_path: Path, rows: list[Any]) -> None:
    trace = load(tmp_path, *rows)
    found = trace.critical_path()
    assert [sum(one.parts.values()) for one in found.steps] == pytest.approx([one.seconds for one in trace.steps], abs=1e-12)
    assert all(one.seconds <= one.own_seconds + 1e-12 for one in found.rows)


def stream(*names: str, gap: int = 5) -> list[Any]:
    """Kernels of 10 µs with pauses between, launched by calls of 2 µs."""
    return [one for i, name in enumerate(names) for one in launched(name, 2 * i, 1000 + (10 + gap) * i, 10, i)]


def test_sequences_of_a_stream(tmp_path: Path) -> None:
    found = load(tmp_path, *stream(*"xabcabcyabc")).sequences()
    (row,) = found.rows
    assert (row.names, row.count, round(row.seconds / US), round(row.gaps / US)) == (("a", "b", "c"), 3, 90, 30)
    assert (round((row.host_seconds or 0) / US), row.share, row.ceiling) == (18, pytest.approx(9 / 11), pytest.approx(0.25))
    assert "a ceiling" in str(found)
    assert [one.names for one in load(tmp_path, *stream(*"abab")).sequences(length=2).rows] == [("a", "b")]


def test_no_kernel_is_in_two_sequences(tmp_path: Path) -> None:
    """Four a's in a row are two pairs, not three."""
    (row,) = load(tmp_path, *stream(*"aaaaa")).sequences(length=2).rows
    assert (row.count, round(row.seconds / US)) == (2, 40)
    assert "2 × a" in str(load(tmp_path, *stream(*"aaaaa")).sequences(length=2))


@given(names=st.lists(st.sampled_from("abc"), min_size=1, max_size=25), length=st.integers(2, 4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_times_of_sequences_add_up(tmp_path: Path, names: list[str], length: int) -> None:
    found = load(tmp_path, *stream(*names)).sequences(length=length)
    assert all(one.count >= 2 and len(one.names) == length for one in found.rows)
    assert sum(one.count for one in found.rows) * length <= len(names)
    assert len({one.names for one in found.rows}) == len(found.rows)
    text = "".join(names)
    assert all(text.count("".join(one.names)) >= 1 for one in found.rows)
    assert found.rows or not any(text.count(text[i : i + length]) > 1 for i in range(len(text) - length + 1))


def test_sequences_end_at_steps_and_streams(tmp_path: Path) -> None:
    rows = [step(0, 0, 2), step(1, 2, 2000), *stream("a", "b", "a", "b")]
    assert load(tmp_path, *rows).sequences(length=2).rows == (), "the first is work of another step"
    other = [{**one, "tid": 20} if one["cat"] == "kernel" and one["name"] == "b" else one for one in stream("a", "b", "a", "b")]
    assert load(tmp_path, *other).sequences(length=2).rows == ()


def test_sequences_of_an_operator(tmp_path: Path) -> None:
    """What each call launches, itself or by what it calls; one inside another of that name is a part of it."""
    rows = []
    for i in range(2):
        at = 100 * i
        rows += [
            op("aten::linear", at, 50),
            op("aten::linear_inner", at + 5, 40),
            *launched("gemm", at + 10, at + 20, 10, 10 * i),
            *launched("bias", at + 20, at + 32, 10, 10 * i + 1),
            *launched("relu", at + 30, at + 45, 10, 10 * i + 2),
        ]
    trace = load(tmp_path, *rows, *launched("bias", 500, 510, 10, 99))
    (row,) = trace.sequences("linear").rows
    assert (row.names, row.count) == (("aten::linear", "gemm", "bias", "relu"), 2)
    assert [round((one or 0) / US) for one in (row.seconds, row.gaps, row.host_seconds)] == [60, 10, 100]
    assert trace.sequences("linear", length=4).rows == ()
    assert "none of its calls launches 4 or more" in str(trace.sequences("linear", length=4))


def test_sequences_of_a_cpu(tmp_path: Path) -> None:
    """Outermost operators of a thread, or the operators that one calls itself."""
    rows = [step(0, 0, 300)]
    for i in range(3):
        rows += [
            op("aten::linear", 100 * i, 40),
            op("aten::t", 100 * i + 5, 5),
            op("aten::addmm", 100 * i + 20, 10),
            op("aten::relu", 100 * i + 60, 20),
        ]
    trace = load(tmp_path, *rows)
    (row,) = trace.sequences(length=2).rows
    assert (row.names, row.count, row.host_seconds) == (("aten::linear", "aten::relu"), 3, None)
    assert (round(row.seconds / US), round(row.gaps / US)) == (180, 60)
    (inside,) = trace.sequences("aten::linear", length=2).rows
    assert (inside.names, inside.count) == (("aten::linear", "aten::t", "aten::addmm"), 3)
    assert (round(inside.seconds / US), round(inside.gaps / US)) == (45, 30)


def test_sequences_that_are_none(tmp_path: Path) -> None:
    trace = load(tmp_path, *on_cpu())
    for length in (1, -3, 2.5, 3.0, True, "3", None):
        with pytest.raises(ValueError, match=re.escape(f"length={length!r}): a whole number is allowed, from 2 on; try length=3")):
            trace.sequences(length=length)  # type: ignore[arg-type]
    assert trace.sequences(length=np.int64(2)) == trace.sequences(length=2)  # type: ignore[arg-type]
    for operator in (3, "", ["aten::mm"]):
        with pytest.raises(ValueError, match="a name or a part of one is allowed; try 'aten::linear', or None"):
            trace.sequences(operator)  # type: ignore[arg-type]
    assert "too little" in str(load(tmp_path, op("aten::a", 0, 1)).sequences())
    assert "no 3 in a row come twice" in str(load(tmp_path, *stream(*"abcd")).sequences())


@pytest.mark.parametrize(
    ("wanted", "first"), [("liner", "aten::Linear"), ("ADDMMM", "aten::addmm"), ("Activity Buffer", None), ("cudaLaunchKernel", None)]
)
def test_names_that_no_operator_has(tmp_path: Path, wanted: str, first: str | None) -> None:
    """Those that are offered are accepted, the nearest first; a call that launches is no operator."""
    others = [op(name, 400, 5) for name in ("aten::addmm", "aten::Linear", *(f"aten::o{i}" for i in range(20)))]
    trace = load(tmp_path, event("Activity Buffer Request", "cuda_runtime", 1, 1), *on_device(), *others)
    with pytest.raises(ValueError, match="no operator has that in its name; the nearest that there are: ") as failed:
        trace.sequences(wanted)
    offered = str(failed.value).partition("there are: ")[2].split(", ")
    assert len(offered) == 8
    assert [trace.sequences(one).operator for one in offered] == offered
    assert offered[0] == (first or offered[0])


def test_names_where_there_is_no_operator(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no operator has that in its name; the trace has none at all"):
        load(tmp_path, *stream(*"abc")).sequences("a")


def test_they_survive_json(tmp_path: Path) -> None:
    for events in (on_cpu(), on_device(), stream(*"abab")):
        trace = load(tmp_path, *events)
        for answer, kind in ((trace.critical_path(), CriticalPath), (trace.sequences(length=2), Sequences)):
            assert kind.from_json(json.loads(json.dumps(answer.to_json()))) == answer  # type: ignore[attr-defined]
            assert str(answer) == str(answer.table)
            assert len(answer.to_frame().columns) > 2
            assert "\n" not in repr(answer)
