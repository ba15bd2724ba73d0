"""What holds a traced step back: ceilings, pauses, launches, and the roof of the device."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.traced import event, launched, on_cpu, on_device, op, step, write
from workbench.traces.analysis.bottleneck import Bottleneck
from workbench.traces.analysis.flops import FORMULAS, OTHERWISE, work
from workbench.traces.analysis.idle import Idle
from workbench.traces.analysis.launch_queue import Launches, pairs, queue
from workbench.traces.analysis.roofline import Mfu, Roofline
from workbench.traces.analysis.trace import Trace

US = 1e-6


@pytest.fixture
def cpu(tmp_path: Path) -> Trace:
    return Trace.load(write(tmp_path / "cpu.json", on_cpu()))


@pytest.fixture
def device(tmp_path: Path) -> Trace:
    return Trace.load(write(tmp_path / "device.json", on_device()))


def load(tmp_path: Path, *events: Any, **header: Any) -> Trace:
    return Trace.load(write(tmp_path / "a.json", events, **header))


def micro(**values: float) -> dict[str, int]:
    return {name: round(value / US) for name, value in values.items()}


def test_ceilings_on_a_cpu(cpu: Trace) -> None:
    """gloo runs for 10 µs in a thread of its own, 5 of them while the backward pass computes."""
    found = cpu.critical()
    shown = {one.name: (round(one.busy / US), round(one.alone / US), round(one.ceiling / US)) for one in found.rows}
    assert shown == {"device": (40, 35, 65), "data": (30, 30, 70), "host": (25, 25, 75), "communication": (10, 5, 95)}
    assert (found.name, found.speedup, found.nothing, found.device) == ("device", pytest.approx(100 / 65), 0, "cpu")
    assert "device is critical: were it free, the step would be at most 1.54× as fast" in str(found)
    assert found["data"].alone == pytest.approx(30 * US)
    with pytest.raises(KeyError, match="no resource 'gpu': there are device, data"):
        found["gpu"]


def test_ceilings_on_a_device(device: Trace) -> None:
    """The host launches for the next step meanwhile, but in the last one: there the device is alone for 10 µs more."""
    found = device.critical()
    shown = {one.name: (round(one.busy / US), round(one.alone / US)) for one in found.rows}
    assert shown == {"device": (55, (33 + 43) / 2), "communication": (20, 10), "transfer": (10, 6), "host": ((18 + 8) / 2, 2)}
    assert round(found.nothing / US) == 23
    assert "for 23.0 µs of the step nothing recorded is at work" in str(found)


def test_a_resource_is_what_the_step_gets_shorter_by(tmp_path: Path) -> None:
    """On the same steps without the events of one resource that is alone at work, nothing else changes."""
    events = [step(0, 0, 100), op("aten::a", 10, 30), event("gloo:all_reduce", "user_annotation", 30, 40, 9)]
    found = load(tmp_path, *events).critical()
    assert {one.name: round(one.alone / US) for one in found.rows} == {"host": 40, "communication": 30, "device": 20}


def test_no_step_no_ceiling(tmp_path: Path) -> None:
    found = load(tmp_path, step(0, 0, 0)).critical()
    assert (found.rows, found.name) == ((), "")
    assert "no resource is ever alone" in str(found)


def test_pauses_of_a_thread(cpu: Trace) -> None:
    found = cpu.idle()
    assert found.who == "1 1"
    assert micro(**{one.cause: one.seconds for one in found.causes}) == {"data": 30, "communication": 5, "unrecorded": 25}
    assert found.share == pytest.approx(0.6)
    assert found.streams == ()
    assert [(round(one.start / US), round(one.seconds / US), one.cause) for one in found.gaps[:2]] == [(90, 50, "data"), (0, 40, "data")]
    assert (found.gaps[0].before, found.gaps[0].after) == ("Optimizer.step#SGD.step", "aten::linear")
    assert "with_stack=True" in found.notes[-1]


def test_what_python_does_in_a_pause(tmp_path: Path) -> None:
    function = event("train.py(3): prepare", "python_function", 35, 20)
    found = load(tmp_path, step(0, 0, 100), op("aten::a", 0, 30), function, op("aten::b", 60, 40)).idle()
    assert micro(**{one.cause: one.seconds for one in found.causes}) == {"python": 20, "unrecorded": 10}
    assert found.gaps[0].inside == "train.py(3): prepare"
    assert "python in train.py(3): prepare; aten::a → aten::b" in str(found)
    assert not any("with_stack" in note for note in found.notes)


def test_pauses_of_a_device(device: Trace) -> None:
    found = device.idle()
    assert found.who == "device"
    assert micro(**{one.cause: one.seconds for one in found.causes}) == {"launching": 2, "unrecorded": 23}
    assert found.seconds == pytest.approx(device.breakdown().mean("host") + device.breakdown().mean("idle"))
    (stream,) = found.streams
    assert micro(**{name: getattr(stream, name) for name in ("seconds", "host_wait", "kernel_wait", "other")}) == {
        "seconds": 300,
        "host_wait": 0,
        "kernel_wait": 75,
        "other": 0,
    }
    (strict,) = device.idle(gap=12 * US).streams
    assert micro(kernel_wait=strict.kernel_wait, other=strict.other) == {"kernel_wait": 30, "other": 45}
    for none in (-1, float("nan"), "1", None):
        with pytest.raises(ValueError, match=f"gap={none!r}: seconds are allowed"):
            device.idle(gap=none)  # type: ignore[arg-type]


def test_a_host_that_is_late(tmp_path: Path) -> None:
    """The second kernel is launched 40 µs after the first has ended, and the host synchronises for half of that."""
    wait = event("cudaDeviceSynchronize", "cuda_runtime", 20, 20)
    rows = [
        step(0, 0, 100),
        *launched("a", 0, 2, 8, 1),
        wait,
        *launched("b", 50, 60, 30, 2),
        step(1, 100, 50),
        *launched("c", 100, 110, 40, 3),
    ]
    found = load(tmp_path, *rows).idle()
    (stream,) = found.streams
    assert micro(host_wait=stream.host_wait, kernel_wait=stream.kernel_wait) == {"host_wait": 70, "kernel_wait": 0}
    assert micro(**{one.cause: one.seconds for one in found.causes}) == {"launching": 2, "unrecorded": 18}
    assert (found.gaps[0].before, found.gaps[0].after) == ("b", "c")


def test_launches(device: Trace) -> None:
    found = device.launches()
    (row,) = found.rows
    assert (row.launches, row.short, row.queue_most) == (15, 0, 3)
    assert micro(call=row.call_seconds, work=row.work_seconds, median=row.delay_median, most=row.delay_most) == {
        "call": 30,
        "work": 255,
        "median": 33,
        "most": 68,
    }
    moments = np.arange(120, 320) + 0.5
    calls, starts = (np.array([at + one for at in (0, 100, 200) for one in ones]) for ones in ((10, 12, 15, 30, 40), (20, 30, 50, 80, 110)))
    waiting = np.array([((calls <= moment) & (starts > moment)).sum() for moment in moments])
    assert row.queue_mean == pytest.approx(waiting.mean())
    assert row.empty == pytest.approx((waiting == 0).mean())
    assert np.mean(found.queues[0]) == pytest.approx(waiting.mean(), rel=1e-3)
    assert not found.bound


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), min_size=1, max_size=10))
def test_a_queue_is_counted_at_any_time(rows: list[tuple[int, int]]) -> None:
    called = np.array([call for call, _ in rows])
    started = called + np.array([delay for _, delay in rows])
    at, length = queue(called, started)
    assert (np.diff(at) > 0).all()
    for time in range(55):
        place = int(np.searchsorted(at, time, side="right")) - 1
        assert (length[place] if place >= 0 else 0) == sum(call <= time < start for call, start in zip(called, started, strict=True))


def test_a_device_that_launching_holds_up(tmp_path: Path) -> None:
    """Kernels of 1 µs, launched every 10 µs by calls of 2; where the same kernels wait in a full queue, launching is no problem."""
    rows = [one for i in range(20) for one in launched("tiny", 10 * i, 10 * i + 3, 1, i)]
    assert load(tmp_path, *rows).launches().bound
    assert "launching sets the pace" in str(load(tmp_path, *rows).launches())
    full = [one for i in range(20) for one in launched("tiny", i * 2, 100 + 2 * i, 1, i)]
    assert not load(tmp_path, *full).launches().bound


def test_delays_are_never_negative(tmp_path: Path) -> None:
    trace = load(tmp_path, *launched("early", 10, 11, 5, 1), *launched("late", 20, 32, 5, 2))
    assert (pairs(trace.columns, trace.kinds).delay / 1e3).tolist() == [0, 10]


def test_a_graph_is_launched_by_one_call(tmp_path: Path) -> None:
    """Kernels that are each shorter than the call are together longer."""
    call, first = launched("a", 0, 10, 4, 1)
    (row,) = load(tmp_path, {**call, "name": "cudaGraphLaunch", "dur": 6}, first, *({**first, "ts": at} for at in (15, 20))).launches().rows
    assert (row.launches, row.short, micro(call=row.call_seconds)) == (3, 0, {"call": 6})


def test_nothing_is_launched(tmp_path: Path, cpu: Trace) -> None:
    assert "nothing is launched: the trace has no work of a device" in str(cpu.launches())
    alone = load(tmp_path, event("k", "kernel", 0, 10, 0)).launches()
    assert "no correlation" in str(alone)
    lost = load(tmp_path, *launched("k", 0, 5, 5, 1), event("k", "kernel", 20, 10, 0)).launches()
    assert "1 pieces of the device's work have no call" in lost.notes[0]


FLOAT = '["float", "float", "float", "Scalar", "Scalar"]'
BF16 = '["c10::BFloat16", "c10::BFloat16"]'


def mm(start: float, length: float, m: int, k: int, n: int, types: Any = ("float", "float"), **args: Any) -> dict[str, Any]:
    return op("aten::mm", start, length, args={"Input Dims": [[m, k], [k, n]], "Input type": list(types), **args})


def test_a_roof(tmp_path: Path) -> None:
    """Two products per step: one of 2·128³ FLOPs in 40 µs under a roof of 1 TFLOP/s and 10 GB/s, and one that is far smaller."""
    inner = op("aten::mm", 12, 5, args={"Input Dims": [[2, 2], [2, 2]], "Input type": ["float", "float"]})
    rows = [step(0, 0, 100), mm(10, 40, 128, 128, 128), inner, mm(60, 10, 8, 2, 4), op("aten::other", 75, 25)]
    wanted = wb.Device(name="mine", memory=1, bandwidth=10e9, flops_per_sec={"fp32": 1e12, "bf16": 2e12}, source="made up")
    found = load(tmp_path, *rows).roofline(wanted)
    large, small = found.points
    assert (large.flops, large.bytes, large.seconds) == (2 * 128**3, 4 * 3 * 128**2, pytest.approx(40 * US))
    assert (small.flops, small.bytes, small.dtype, small.calls) == (2 * 8 * 2 * 4, 4 * (16 + 8 + 32), "fp32", 1)
    assert large.intensity == pytest.approx(2 * 128**3 / (12 * 128**2))
    assert found.attainable(large) == pytest.approx(10e9 * 2 * 128**3 / (12 * 128**2))
    assert (found.bound(large), found.bound(small)) == ("memory", "memory")
    assert found.unaccounted == pytest.approx(25 / 75)
    ratio = load(tmp_path, *rows).mfu(wanted)
    assert ratio.flops == 2 * 128**3 + 2 * 64
    assert float(ratio) == pytest.approx((2 * 128**3 + 2 * 64) / 1e12 / 100e-6)


def test_compute_bound_and_number_formats(tmp_path: Path) -> None:
    rows = [step(0, 0, 100), mm(0, 50, 4096, 4096, 4096, ("c10::BFloat16",) * 2), mm(50, 50, 8, 8, 8), mm(60, 5, 8, 8, 8, ("double",) * 2)]
    trace = load(tmp_path, *rows)
    found = trace.roofline("A10")
    assert [(one.dtype, found.bound(one)) for one in found.points] == [("bf16", "compute"), ("fp32", "memory")]
    assert any("whether TF32 was allowed" in note for note in found.notes)
    lone = load(tmp_path, step(0, 0, 100), mm(60, 5, 8, 8, 8, ("double",) * 2))
    assert "A10 has no peak for fp64" in str(lone.roofline("A10"))
    assert lone.mfu("A10").value is None
    assert np.isnan(float(lone.mfu("A10")))


def test_kernels_are_the_time_where_a_device_computes(tmp_path: Path) -> None:
    """What an operator launches, itself or by what it calls, is its time; other kernels are unaccounted."""
    outer = op("aten::addmm", 10, 30, args={"Input Dims": [[4], [2, 3], [3, 4]], "Input type": ["float"] * 3})
    rows = [
        step(0, 0, 100), outer, op("aten::expand", 12, 5), *launched("a", 13, 20, 6, 1), *launched("b", 30, 50, 24, 2),
        *launched("c", 60, 80, 10, 3), step(1, 100, 100), *launched("d", 110, 130, 5, 4),
    ]  # fmt: skip
    found = load(tmp_path, *rows, deviceProperties=[{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]).roofline()
    (point,) = found.points
    assert (point.seconds, point.flops, found.device) == (pytest.approx(15 * US), 2 * 2 * 3 * 4 / 2, "A100-80GB")
    assert found.unaccounted == pytest.approx(15 / 45)


@pytest.mark.parametrize(
    ("device", "header", "message"),
    [
        (None, [], "the trace is of a CPU, or lists no device"),
        (None, [{"name": "Some GPU"}], "what Some GPU can do at best is in no table here"),
    ],
)
def test_devices_that_are_not_known(tmp_path: Path, device: Any, header: Any, message: str) -> None:
    """FLOP/s are there all the same."""
    trace = load(tmp_path, step(0, 0, 100), mm(0, 50, 8, 8, 8), deviceProperties=header)
    found = trace.roofline(device)
    assert message in str(found)
    assert found.points[0].flops_per_sec == pytest.approx(1024 / 50e-6)
    assert (found.bound(found.points[0]), trace.mfu().value) == ("", None)
    assert trace.mfu().flops_per_sec == pytest.approx(1024 / 100e-6)
    assert "not known" in str(trace.mfu())


def test_devices_that_are_none(cpu: Trace) -> None:
    with pytest.raises(ValueError, match="unknown device 'H1000': did you mean 'H100'"):
        cpu.roofline("H1000")
    with pytest.raises(ValueError, match="device=3: allowed are a name"):
        cpu.mfu(3)  # type: ignore[arg-type]


def test_without_shapes(tmp_path: Path) -> None:
    found = load(tmp_path, step(0, 0, 100), op("aten::mm", 0, 50))
    assert found.roofline().points == ()
    assert "profile with record_shapes=True" in str(found.roofline())
    assert (found.mfu().flops, found.mfu().flops_per_sec) == (None, None)
    typeless = load(tmp_path, step(0, 0, 100), op("aten::mm", 0, 50, args={"Input Dims": [[2, 2], [2, 2]]})).roofline()
    assert (typeless.points[0].bytes, typeless.points[0].intensity, typeless.points[0].flops) == (None, None, 16)
    assert "their bytes are not known" in str(typeless)


@pytest.mark.parametrize("name", [*FORMULAS, *OTHERWISE])
@pytest.mark.parametrize(
    "dims", ["", "[]", "{}", "[[]]", "[[1], [2]]", "[[[1]], 3, null]", "[[-1, 2], [2, 2]]", "[[1, 2, 3, 4]]", "[" * 5000, "[[1, 1e999]]"]
)
def test_shapes_that_fit_no_formula(name: str, dims: str) -> None:
    found = work(name, dims, FLOAT, '["", "", "", "[1]", "[1]", "[1]", "False", "[0]", "1"]')
    assert found is None or found[0].flops >= 0


NO = ["", "", ""]


@pytest.mark.parametrize(
    ("name", "dims", "concrete", "flops", "elements"),
    [
        ("aten::bmm", [[5, 2, 3], [5, 3, 4]], [], 2 * 5 * 2 * 3 * 4, 40),
        ("aten::baddbmm", [[2, 4], [5, 2, 3], [5, 3, 4]], [], 240, 40),
        ("aten::addmv", [[2], [2, 3], [3]], [], 12, 2),
        ("aten::linear", [[7, 5, 3], [4, 3], [4]], [], 2 * 35 * 3 * 4, 140),
        (
            "aten::convolution",  # 3 × 3 in two groups, of 8 × 8 every other place: 4 × 4
            [[2, 4, 8, 8], [6, 2, 3, 3], [6]],
            [*NO, "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "2"],
            2 * (2 * 6 * 16) * (2 * 9),
            2 * 6 * 16,
        ),
        (
            "aten::convolution",
            [[2, 8, 4], [8, 4, 2], []],
            [*NO, "[2]", "[0]", "[1]", "True", "[0]", "1"],
            2 * 2 * 4 * 8 * 4 * 2,
            2 * 4 * 8,
        ),
        (
            "aten::convolution_backward",
            [[2, 6, 4, 4], [2, 4, 8, 8], [6, 2, 3, 3]],
            [*NO, "[6]", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "2", "[False, True, True]"],
            2 * (2 * 6 * 16) * (2 * 9),
            6 * 2 * 9,
        ),
        ("aten::scaled_dot_product_attention", [[2, 3, 5, 8], [2, 3, 7, 8], [2, 3, 7, 4]], [], 2 * 6 * 5 * 7 * 12, 6 * 5 * 4),
        (
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            [[2, 3, 5, 8], [2, 3, 5, 8], [2, 3, 5, 8], [2, 3, 5, 8]],
            [],
            5 * 2 * 6 * 5 * 5 * 8,
            3 * 6 * 5 * 8,
        ),
        ("aten::add_", [[4, 1, 3], [5, 1], []], [], 60, 60),
    ],
)
def test_formulas(name: str, dims: Any, concrete: Any, flops: int, elements: int) -> None:
    found = work(name, json.dumps(dims), FLOAT, json.dumps(concrete))
    assert found is not None
    assert (found[0].flops, found[0].elements) == (flops, elements)


def test_an_operator_without_a_formula() -> None:
    assert work("aten::relu", "[[2, 2]]", BF16, "") is None


def test_limits_survive_json(cpu: Trace, device: Trace) -> None:
    for trace in (cpu, device):
        answers = (trace.critical(), trace.idle(), trace.launches(), trace.roofline("A10"), trace.mfu("A10"))
        for answer, kind in zip(answers, (Bottleneck, Idle, Launches, Roofline, Mfu), strict=True):
            assert kind.from_json(json.loads(json.dumps(answer.to_json()))) == answer  # type: ignore[attr-defined]
            assert str(answer) == str(answer.table)
            assert len(answer.to_frame().columns) > 2
            assert "\n" not in repr(answer)
