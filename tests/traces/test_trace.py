"""What a trace answers: exact on files written by hand, and planted costs found in real ones."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traced import DEVICE, data, event, launched, on_cpu, on_device, op, profiled, step, write
from workbench.traces.analysis.breakdown import ON_CPU, ON_DEVICE, PARTS, Breakdown, Overlap, breakdown
from workbench.traces.analysis.collectives import Collectives, bus_factor
from workbench.traces.analysis.difference import TraceDifference
from workbench.traces.analysis.event_kinds import KINDS, Label, kind_of
from workbench.traces.analysis.explanation import WAITED, Explanation
from workbench.traces.analysis.operators import Operators
from workbench.traces.analysis.reading import TraceError
from workbench.traces.analysis.trace import Trace
from workbench.traces.analysis.trace_set import TraceSet

US = 1e-6


@pytest.fixture
def cpu(tmp_path: Path) -> Trace:
    return Trace.load(write(tmp_path / "cpu.json", on_cpu()))


@pytest.fixture(params=[True, False], ids=["new names", "old names"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Trace:
    """Written by hand from the documented format: no GPU was at hand."""
    return Trace.load(write(tmp_path / "device.json", on_device(request.param)))


def parts(trace: Trace, at: int = 0) -> dict[str, float]:
    """Microseconds of a step."""
    row = trace.breakdown().to_frame().iloc[at]
    return {part: round(row[part] / US, 6) for part in (*PARTS, "total")}


def test_a_step_of_a_cpu(cpu: Trace) -> None:
    wanted = {"data_wait": 30, "h2d": 0, "compute": 40, "communication": 5, "host": 25, "idle": 0, "other": 0, "total": 100}
    assert parts(cpu) == parts(cpu, 1) == wanted
    assert cpu.breakdown().to_frame()["step"].tolist() == [5, 6]
    assert cpu.breakdown().device == "cpu"


def test_a_step_of_a_device(device: Trace) -> None:
    """It goes from the end of the device's work of one step to that of the next: 20 µs after the marks."""
    wanted = {"data_wait": 0, "h2d": 10, "compute": 50, "communication": 10, "host": 2, "idle": 23, "other": 5, "total": 100}
    assert [one.start for one in device.steps] == pytest.approx([120 * US, 220 * US])
    assert parts(device) == parts(device, 1) == wanted
    assert "step 3 is left out" in device.breakdown().notes[0]


def test_overlap(cpu: Trace, device: Trace) -> None:
    found = device.overlap()
    assert (found.mean("communication"), found.mean("overlapped"), found.mean("exposed")) == pytest.approx((20 * US, 10 * US, 10 * US))
    assert (found.mean("h2d"), found.mean("h2d_exposed")) == pytest.approx((10 * US, 10 * US))
    assert found.hidden == pytest.approx(0.5)
    assert cpu.overlap().mean() == pytest.approx(5 * US)
    with pytest.raises(ValueError, match="no column 'lost': there are communication"):
        found.mean("lost")


def test_operators(cpu: Trace) -> None:
    rows = {one.name: one for one in cpu.ops().rows}
    assert "sums, not per step; share: of the self time of all operators" in str(cpu.ops())
    linear = rows["aten::linear"]
    assert (linear.count, linear.self_seconds, linear.total_seconds) == pytest.approx((2, 20 * US, 40 * US))
    assert sum(one.share for one in rows.values()) == pytest.approx(1)
    shaped = {(one.name, one.shapes) for one in cpu.ops(by_shape=True).rows}
    assert ("aten::linear", "[[32, 8], [8, 8]]") in shaped
    assert cpu.ops("kernel").rows == ()
    assert "no work of a device" in str(cpu.ops("kernel"))
    with pytest.raises(ValueError, match="allowed are 'operator'"):
        cpu.ops("gpu")  # type: ignore[arg-type]


def test_kernels(device: Trace) -> None:
    assert {one.name: round(one.total_seconds / US) for one in device.ops("kernel").rows}["sgemm_128x64"] == 120
    assert {one.name: round(one.device_seconds / US) for one in device.ops().rows} == {"aten::mm": 120}
    assert "not recorded" in device.ops("kernel", by_shape=True).notes[0]


def test_own_time_of_nested_operators(tmp_path: Path) -> None:
    """Children count once, on their own thread only, and one that outlasts its parent takes no more than the parent has."""
    rows = [op("a", 0, 100), op("b", 10, 30), op("c", 15, 10), op("d", 50, 80), event("e", "cpu_op", 0, 100, lane=5), op("f", 200, 0)]
    found = {one.name: one.self_seconds / US for one in Trace.load(write(tmp_path / "a.json", rows)).ops().rows}
    assert found == pytest.approx({"a": 20, "b": 20, "c": 10, "d": 80, "e": 100, "f": 0})


def test_collectives(tmp_path: Path, cpu: Trace) -> None:
    (row,) = Trace.load(write(tmp_path / "new.json", on_device())).collectives().rows
    assert (row.name, row.count, row.bytes, row.ranks) == ("allreduce", 3, 4000, 2)
    assert row.bus_bandwidth == pytest.approx(4000 / (20 * US))
    old = Trace.load(write(tmp_path / "old.json", on_device(new=False))).collectives()
    assert (old.rows[0].name, old.rows[0].bytes, old.rows[0].bus_bandwidth) == ("ncclKernel_AllReduce_RING_LL_Sum_float", None, None)
    assert "does not" in old.notes[1]
    assert (cpu.collectives().rows[0].name, cpu.collectives().rows[0].count) == ("gloo:all_reduce", 2)


@pytest.mark.parametrize(
    ("name", "dims", "kind", "ranks", "size", "factor"),
    [
        ("gloo:all_reduce", [[84231]], ["float"], 4, 4 * 84231, 1.5),
        ("gloo:all_reduce", [[8, 2], [3]], ["c10::BFloat16", "double"], 2, 2 * 16 + 8 * 3, 1.0),
        ("gloo:all_gather", [[100]], ["int"], 4, 4 * 100 * 4, 0.75),  # what comes out is larger
        ("gloo:all_gather", [[100]], ["int"], None, None, None),
        ("gloo:all_reduce", [[100]], ["int"], None, 400, None),
        ("gloo:all_reduce", [[100]], ["new"], 4, None, None),
        ("gloo:all_reduce", [[[5], [6]]], ["TensorList"], 4, None, None),
        ("gloo:barrier", [], [], 4, None, None),
    ],
)
def test_collectives_of_gloo(
    tmp_path: Path, name: str, dims: Any, kind: Any, ranks: int | None, size: int | None, factor: float | None
) -> None:
    """It has no words for its sizes, but shapes and types, and the file says how many ranks there are."""
    one = event(name, "user_annotation", 10, 20, 9, args={"Input Dims": dims, "Input type": kind})
    header = {"distributedInfo": {"rank": 0, "world_size": ranks}} if ranks else {}
    found = Trace.load(write(tmp_path / "a.json", [step(1, 0, 100), one], **header)).collectives()
    (row,) = found.rows
    assert (row.bytes, row.ranks) == (size, ranks if size else None)
    assert row.bus_bandwidth == (pytest.approx(size * factor / (20 * US)) if size and factor else None)
    assert any("default group, all" in note for note in found.notes) == bool(size and ranks)
    assert any("where bytes are missing" in note for note in found.notes) == (size is None)


@pytest.mark.parametrize(
    ("name", "ranks", "factor"),
    [
        ("allreduce", 2, 1),
        ("all_reduce", 4, 1.5),
        ("_allgather_base", 4, 0.75),
        ("reduce_scatter", 2, 0.5),
        ("broadcast", 8, 1),
        ("send", 2, 1),
    ],
)
def test_bus_factors(name: str, ranks: int, factor: float) -> None:
    assert bus_factor(name, ranks) == factor


@pytest.mark.parametrize(
    ("name", "category", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel", "communication"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "Kernel", "communication"),
        ("void multimem_all_reduce_kernel<c10::BFloat16>", "kernel", "communication"),
        ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8>", "kernel", "communication"),
        ("void tensorrt_llm::kernels::oneShotAllReduceKernel<__nv_bfloat16, 8>", "kernel", "communication"),
        ("void vllm::cross_device_reduce_1stage<__half, 8>", "kernel", "communication"),
        ("quickreduce::allreduce_prototype_twoshot<quickreduce::CodecFP>", "kernel", "communication"),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>", "kernel", "communication"),
        ("void deep_ep::internode_ll::combine<false, 7168>", "kernel", "communication"),
        ("void deep_ep::layout::get_dispatch_layout<256, 4, 2>", "kernel", "kernel"),
        ("void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>", "kernel", "communication"),
        ("void mscclpp::allreduce_packet<float>", "kernel", "communication"),
        ("void softmax<float, warpAllReduce>", "kernel", "kernel"),
        ("void layer_norm<float, BlockAllReduceSum>", "kernel", "kernel"),
        ("event_wait", "mtia_ccp_events", "ignored"),
        ("dma_request", "mtia_ccp_events", "copy"),
        ("fused_addmm", "mtia_ccp_events", "kernel"),
        ("hipMemcpyWithStream", "cuda_runtime", "wait"),
        ("ampere_sgemm_32x32", "kernel", "kernel"),
        ("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", "h2d"),
        ("Memcpy HtoD (Host -> Device)", "gpu_memcpy", "h2d"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy", "h2d"),
        ("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", "copy"),
        ("Memset (Device)", "gpu_memset", "copy"),
        ("cudaLaunchKernel", "cuda_runtime", "runtime"),
        ("hipLaunchKernel", "cuda_runtime", "runtime"),
        ("cudaLaunchKernel", "Runtime", "runtime"),
        ("cudaStreamSynchronize", "cuda_runtime", "wait"),
        ("nccl:all_reduce", "gpu_user_annotation", "ignored"),
        ("nccl:all_reduce", "user_annotation", "range"),
        ("gloo:all_reduce", "user_annotation", "host_communication"),
        ("c10d::allreduce_", "cpu_op", "collective_call"),
        ("record_param_comms", "cpu_op", "collective_call"),
        ("ProfilerStep#3", "user_annotation", "step"),
        ("ProfilerStep*", "cpu_op", "step"),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "user_annotation", "data_wait"),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "Operator", "data_wait"),
        ("Optimizer.step#AdamW.step", "user_annotation", "optimizer"),
        ("autograd::engine::evaluate_function: MmBackward0", "cpu_op", "backward"),
        ("aten::mm", "cpu_op", "operator"),
        ("aten::mm", "Operator", "operator"),
        ("my range", "user_annotation", "range"),
        ("train.py(3): step", "python_function", "range"),
        ("PyTorch Profiler (0)", "Trace", "ignored"),
        ("anything", "", "ignored"),
    ],
)
def test_kinds(name: str, category: str, kind: str) -> None:
    assert kind_of(Label(name, category, False)) == kind
    assert kind in KINDS


def test_what_a_collective_says_of_itself_goes_before_its_name() -> None:
    assert kind_of(Label("my_own_ring_kernel", "kernel", True)) == "communication"


SPANS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 30)), max_size=6)
LAYERS = {
    "operator": ("aten::a", "cpu_op"),
    "data_wait": ("enumerate(DataLoader)#x", "user_annotation"),
    "range": ("mine", "user_annotation"),
}
LAYERS |= {"host_communication": ("gloo:a", "user_annotation")}
DEVICES = {
    "kernel": ("k", "kernel"),
    "communication": ("nccl", "kernel"),
    "h2d": ("Memcpy HtoD", "gpu_memcpy"),
    "copy": ("Memset", "gpu_memset"),
}


@given(st.fixed_dictionaries(dict.fromkeys({**LAYERS, **DEVICES}, SPANS)), st.booleans())
def test_every_moment_counts_once(tmp_path_factory: pytest.TempPathFactory, rows: dict[str, list[tuple[int, int]]], gpu: bool) -> None:
    """Against asking of every microsecond what is the first layer that runs."""
    made = [
        event(*{**LAYERS, **DEVICES}[kind], start, long) for kind, spans in rows.items() for start, long in spans if gpu or kind in LAYERS
    ]
    trace = Trace.load(write(tmp_path_factory.mktemp("any") / "a.json", [op("aten::edge", 0, 0), step(0, 0, 60), step(1, 60, 60), *made]))
    order = ON_DEVICE if trace.kinds.device else ON_CPU
    wanted = dict.fromkeys(PARTS, 0)
    spans = trace.windows.spans // 1000
    for start, end in spans.tolist():
        for tick in range(start, end):
            running = {kind for kind, at in rows.items() if (gpu or kind in LAYERS) and any(a <= tick < a + long for a, long in at)}
            if 0 <= tick < 120:
                running.add("step")
            wanted[next((part for part, kinds in order if running & set(kinds)), "idle" if trace.kinds.device else "other")] += 1
    found = breakdown(trace.kinds, trace.windows)
    assert {part: round(sum(getattr(one, part) for one in found.steps) / US, 6) for part in PARTS} == wanted


def test_work_before_the_first_mark_and_after_the_last_belongs_to_no_step(tmp_path: Path) -> None:
    rows = [*launched("early", 1, 5, 10, 90), *on_device(), *launched("late", 390, 400, 50, 91)]
    trace = Trace.load(write(tmp_path / "a.json", rows))
    assert len(trace.steps) == 2
    assert trace.breakdown().mean() == pytest.approx(100 * US)


def test_a_mark_without_work_of_the_device_is_no_step(tmp_path: Path) -> None:
    trace = Trace.load(write(tmp_path / "a.json", [*on_device(), step(6, 300, 5)]))
    assert [one.index for one in trace.steps] == [4, 5]


def test_work_that_no_call_launched(tmp_path: Path) -> None:
    rows = [step(0, 0, 100), step(1, 100, 100), event("kernel", "kernel", 10, 50, DEVICE)]
    trace = Trace.load(write(tmp_path / "a.json", rows))
    assert [one.seconds for one in trace.steps] == pytest.approx([100 * US, 100 * US])
    assert "not linked" in trace.breakdown().notes[0]


def test_two_devices_in_a_file(tmp_path: Path) -> None:
    rows = [*on_device(), *launched("k", 120, 130, 5, 77)]
    rows[-1]["pid"] = 1
    assert "2 devices work in this file" in Trace.load(write(tmp_path / "a.json", rows)).breakdown().notes[0]


def test_one_step_of_a_device(tmp_path: Path) -> None:
    trace = Trace.load(write(tmp_path / "a.json", [step(0, 0, 100), *launched("k", 10, 20, 100, 1)]))
    assert parts(trace)["total"] == 120
    assert "one step only" in trace.breakdown().notes[0]


def test_marks_of_two_threads(tmp_path: Path) -> None:
    rows = [*on_cpu(), event("ProfilerStep#1", "user_annotation", 20, 30, lane=4)]
    trace = Trace.load(write(tmp_path / "a.json", rows))
    assert [one.index for one in trace.steps] == [5, 6]
    assert "2 threads mark steps" in trace.breakdown().notes[0]


def test_without_marks(tmp_path: Path) -> None:
    rows = [one for one in on_cpu() if not one["name"].startswith("ProfilerStep")]
    trace = Trace.load(write(tmp_path / "a.json", [op("aten::first", 0, 5), *rows]))
    assert len(trace.breakdown().steps) == 1
    assert "no step marks" in trace.breakdown().notes[0]
    assert trace.explain().verdict in ("inconclusive", "input-bound")
    assert any("no step marks" in one for one in trace.explain().cannot)
    more = [event("Optimizer.step#SGD.step", "user_annotation", 300 + 50 * i, 10) for i in range(2)]
    trace = Trace.load(write(tmp_path / "b.json", [*rows, *more]))
    assert [round(one.seconds / US) for one in trace.steps] == [100, 120, 50]
    assert "from the end of one Optimizer.step" in trace.breakdown().notes[0]


def test_old_files_with_microseconds_since_1970(tmp_path: Path) -> None:
    shifted = [{**one, "ts": one["ts"] + 1_700_000_000_000_000} for one in on_device(new=False)]
    assert parts(Trace.load(write(tmp_path / "a.json", shifted)))["compute"] == 50


def answers(trace: Trace, other: Trace) -> list[Any]:
    return [trace.breakdown(), trace.ops(), trace.ops("kernel"), trace.overlap(), trace.collectives(), trace.diff(other), trace.explain()]


def test_answers_show_themselves_and_survive_json(cpu: Trace, device: Trace) -> None:
    types = [Breakdown, Operators, Operators, Overlap, Collectives, TraceDifference, Explanation]
    for trace, other in ((cpu, device), (device, cpu)):
        for answer, kind in zip(answers(trace, other), types, strict=True):
            assert kind.from_json(json.loads(json.dumps(answer.to_json()))) == answer
            assert str(answer) == str(answer.table)
            assert answer._repr_html_() == answer.table._repr_html_()
            assert len(answer.to_frame().columns) > 0
            assert "\n" not in repr(answer)
            assert kind.__dataclass_params__.frozen


def test_no_such_part(cpu: Trace) -> None:
    with pytest.raises(ValueError, match="no part 'gpu': a step is made of data_wait"):
        cpu.breakdown().mean("gpu")
    with pytest.raises(ValueError, match=r"diff\(str\): a Trace is needed"):
        cpu.diff("other.json")  # type: ignore[arg-type]


def test_difference(tmp_path: Path, cpu: Trace) -> None:
    faster = [{**one, "dur": 10} if one["name"] == "aten::linear" else one for one in on_cpu()]
    found = cpu.diff(Trace.load(write(tmp_path / "b.json", faster)))
    rows = {(one.kind, one.what): one for one in found.changes}
    assert rows["operator", "aten::linear"].change < 0
    assert rows["part", "total"].change == 0
    assert found.speedup == 1
    assert found.to_frame().shape[1] == 5
    assert any("on a CPU" in note for note in cpu.diff(Trace.load(write(tmp_path / "c.json", on_device()))).notes)


def test_operators_per_step_are_those_of_the_steps(tmp_path: Path) -> None:
    """The same operator of 1 ms in each step: in a file without marks, whose first step has no beginning, and where two threads mark."""
    unmarked = [
        one
        for at in (0, 10_000, 20_000)
        for one in (op("aten::mm", at + 1000, 1000), event("Optimizer.step#SGD.step", "user_annotation", at + 8000, 1000))
    ]
    twice = [event(f"ProfilerStep#{i}", "user_annotation", 10_000 * i + lane, 9990, lane) for lane in (1, 2) for i in range(3)]
    marked = [*twice, *(op("aten::mm", 10_000 * i + 1000, 1000) for i in range(3))]
    around = [op("aten::mm", 0, 900), step(1, 1000, 5000), op("aten::mm", 2000, 1000), op("aten::mm", 6500, 900)]
    for name, events in (("unmarked", unmarked), ("marked", marked), ("around", around)):
        trace = Trace.load(write(tmp_path / f"{name}.json", events))
        (found,) = (one for one in trace.diff(trace).changes if one.what == "aten::mm")
        assert found.before == pytest.approx(1e-3)
        assert trace.per_step()["aten::mm"] == (pytest.approx(1e-3), 1)
    kernels = Trace.load(write(tmp_path / "device.json", on_device()))
    assert all(calls <= 1.5 for _, calls in kernels.per_step("kernel").values())


def test_what_it_cannot_tell(tmp_path: Path) -> None:
    exchange = event("gloo:all_reduce", "user_annotation", 50, 30, 9)
    frame = event("train.py(1): step", "python_function", 5, 90)
    alone = Trace.load(write(tmp_path / "a.json", [step(1, 0, 100), exchange, frame], distributedInfo={"rank": 0, "world_size": 1}))
    said = " ".join(alone.explain().cannot)
    assert "with_stack=True" not in said
    assert "trace.idle()" in said
    assert "slower rank" not in said
    of_two = Trace.load(write(tmp_path / "b.json", [step(1, 0, 100), exchange], distributedInfo={"rank": 0, "world_size": 2}))
    assert "with_stack=True" in " ".join(of_two.explain().cannot)
    assert "slower rank" in " ".join(of_two.explain().cannot)


def test_steps_of_a_busy_cpu_are_not_taken_for_computing_alone(tmp_path: Path, device: Trace) -> None:
    """Operators that took 0.4 to 1.8 s, as two threads waited for cores, were "compute-bound" without a word on it."""

    def traced(*lengths: int) -> Trace:
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        steps = [step(i, start, length) for i, (start, length) in enumerate(zip(starts, lengths, strict=True))]
        ops = [op("aten::mm", start, length - 1) for start, length in zip(starts, lengths, strict=True)]
        return Trace.load(write(tmp_path / "a.json", [*steps, *ops]))

    busy, even = traced(500, 1900, 900).explain(), traced(500, 600, 550).explain()
    assert busy.verdict == even.verdict == "compute-bound"
    assert "; steps take from 500 µs to 1.90 ms: operators may have waited for cores that other processes had" in busy.why
    assert busy.next.endswith("; trace again on a quiet machine, or after torch.set_num_threads(1)")
    assert "steps take" not in even.why
    assert all(any(f"whether operators {WAITED}" in one for one in told.cannot) for told in (busy, even))
    assert not any(WAITED in one for one in device.explain().cannot)


def test_verdicts(tmp_path: Path, cpu: Trace, device: Trace) -> None:
    assert cpu.explain().verdict == "input-bound"
    assert "30 %" in cpu.explain().why
    assert device.explain().verdict == "idle"
    busy = Trace.load(
        write(tmp_path / "busy.json", [step(0, 0, 100), data(0, 5), op("aten::mm", 5, 90), step(1, 100, 100), op("aten::mm", 100, 95)])
    )
    assert busy.explain().verdict == "compute-bound"
    assert "nothing" not in busy.explain().why
    empty = Trace.load(write(tmp_path / "empty.json", [step(0, 0, 0)]))
    assert empty.explain().verdict == "inconclusive"
    waits = [
        one
        for number in (0, 1)
        for one in (step(number, 100 * number, 100), event("gloo:all_reduce", "user_annotation", 100 * number, 80, 9))
    ]
    assert Trace.load(write(tmp_path / "waits.json", waits)).explain().verdict == "communication-bound"


@pytest.mark.parametrize(("wait", "sleep", "verdict"), [(0.01, 0.0, "input-bound"), (0.0, 0.04, "host-bound")])
def test_planted_costs_in_real_traces(tmp_path: Path, wait: float, sleep: float, verdict: str) -> None:
    """A slow loader of torch's is seen, and so is Python that sleeps."""
    trace = Trace.load(profiled(tmp_path / "real.json", wait=wait, sleep=sleep))
    assert trace.explain().verdict == verdict
    found = trace.breakdown()
    assert found.mean("data_wait" if wait else "host") > 0.5 * found.mean()
    frame = found.to_frame()
    assert np.allclose(frame[list(PARTS)].sum(axis=1), frame["total"], rtol=1e-9)
    marks = [one for one in json.loads((tmp_path / "real.json").read_text())["traceEvents"] if one["name"].startswith("ProfilerStep")]
    assert frame["total"].sum() == pytest.approx((marks[-1]["ts"] + marks[-1]["dur"] - marks[0]["ts"]) / 1e6, rel=1e-6)
    assert {"aten::linear", "aten::addmm"} <= {one.name for one in trace.ops().rows}


def test_a_real_trace_without_marks(tmp_path: Path) -> None:
    trace = Trace.load(profiled(tmp_path / "real.json", marks=False))
    assert "end of one Optimizer.step" in trace.breakdown().notes[0]
    assert len(trace.steps) == 4


def host_only() -> list[dict[str, Any]]:
    """What is left of a device's trace where CUPTI failed: the calls of the host."""
    return [one for one in on_device() if one["tid"] != DEVICE]


def test_launches_without_work_are_no_cpu_that_computes(tmp_path: Path) -> None:
    """Only the host was profiled: it was once said that the CPU computes 99 %."""
    trace = Trace.load(write(tmp_path / "a.json", host_only(), deviceProperties=[{"name": "NVIDIA A100-SXM4-80GB"}]))
    said = "15 launches were recorded, but no work of the device: what it computes is not known"
    assert trace.kinds.unrecorded == 15
    assert "NVIDIA A100-SXM4-80GB (not recorded)" in str(trace.table)
    assert trace.breakdown().mean("compute") == 0
    for answer in (trace, trace.breakdown(), trace.critical(), trace.critical_path(), trace.idle(), trace.launches(), trace.overlap()):
        assert said in str(answer), type(answer)
    assert trace.explain().verdict == "inconclusive"
    assert "15 launches were recorded, but no work of the device" in trace.explain().why
    assert trace.critical().name == ""
    assert math.isnan(trace.idle().share)
    for quiet in (trace.kernels(), trace.modules(), trace.sequences(), trace.roofline(), trace.copies(), trace.collectives()):
        str(quiet)
    again = Breakdown.from_json(json.loads(json.dumps(trace.breakdown().to_json())))
    assert again.unrecorded == 15
    cpu = Trace.load(write(tmp_path / "b.json", on_cpu(), deviceProperties=[{"name": "NVIDIA A100-SXM4-80GB"}]))
    assert "the CPU" in str(cpu.table)
    assert cpu.explain().verdict == "input-bound"


def test_a_copy_that_blocks_on_rocm_is_a_wait(tmp_path: Path) -> None:
    """`.item()` calls hipMemcpyWithStream, which returns when all before it and the copy are over: 26 % were once the host's."""
    rows: list[dict[str, Any]] = []
    for number, at in ((1, 0), (2, 1000)):
        call, copy = launched("CopyDeviceToHost", at + 20, at + 905, 5, 10 * number + 1, "gpu_memcpy")
        launch, kernel = launched("Cijk_Ailk_Bljk_BBS_BH", at + 5, at + 20, 870, 10 * number)
        launch["name"] = "hipLaunchKernel"
        rows += [step(number, at, 1000), op("aten::mm", at, 10), launch, kernel, {**call, "name": "hipMemcpyWithStream", "dur": 900}, copy]
    trace = Trace.load(write(tmp_path / "a.json", rows))
    path = trace.critical_path()
    assert path.share("host") < 0.03
    assert path.share("launch") < 0.03
    assert path.share("compute") == pytest.approx(0.87, abs=0.02)
    assert trace.critical().name == "device"
    assert next(cause.seconds for cause in trace.idle().causes if cause.cause == "waiting") == pytest.approx(25 * US)


def test_steps_that_other_annotations_mark(tmp_path: Path) -> None:
    """A server's traces have marks of their own."""
    rows = [{**one, "name": one["name"].replace("ProfilerStep#", "execute_context_")} for one in on_device()]
    path = write(tmp_path / "a.json", [*rows, step(1, 0, 300)])
    plain = Trace.load(write(tmp_path / "plain.json", on_device()))
    trace = Trace.load(path, steps="execute_*")
    assert [one.seconds for one in trace.steps] == [one.seconds for one in plain.steps]
    assert trace.windows.marked
    assert parts(trace) == parts(plain)
    assert trace.explain().verdict == plain.explain().verdict
    assert len(Trace.load(path).steps) == 1
    with pytest.raises(TraceError, match=r"steps='decode' names no annotation of .*a.json: it has execute_context_3, execute_context_4"):
        Trace.load(path, steps="decode")
    bracket = write(tmp_path / "b.json", [{**one, "name": one["name"].replace("ProfilerStep", "step[DECODE bs=32] ")} for one in on_cpu()])
    assert [one.index for one in Trace.load(bracket, steps="step[DECODE*").steps] == [5, 6]
    (tmp_path / "ranks").mkdir()
    for rank in (0, 1):
        write(tmp_path / "ranks" / f"rank{rank}.json", rows)
    assert [len(one.steps) for one in TraceSet.load(tmp_path / "ranks", steps="execute_*").values()] == [2, 2]


def test_a_gap_at_the_start_is_no_slow_loader_without_marks(tmp_path: Path) -> None:
    """The whole file is one step then, and the first batch is always waited for."""
    rows = [data(0, 41), op("aten::mm", 41, 59)]
    found = Trace.load(write(tmp_path / "a.json", rows)).explain()
    assert found.verdict == "inconclusive"
    assert "without step marks that may lie before or after training" in found.why
    assert Trace.load(write(tmp_path / "b.json", [*rows, step(1, 0, 100)])).explain().verdict == "input-bound"


def test_kernels_that_the_user_calls_communication(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", [step(1, 0, 100), step(2, 100, 100), *launched("my_exchange_v2", 5, 10, 80, 1)])
    assert Trace.load(path).breakdown().share("communication") == 0
    for pattern in ("my_exchange*", ["other", "*exchange_v?"]):
        trace = Trace.load(path, communication=pattern)
        assert trace.breakdown().mean("compute") == 0
        assert trace.breakdown().share("communication") > 0.5
        assert trace.collectives().rows[0].name == "my_exchange_v2"


def test_collectives_by_process_group(tmp_path: Path) -> None:
    """Those of tensor parallelism and of data parallelism are as large, and go over other links."""
    about = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float"}
    groups = [
        {"Group size": 8, "Process Group Name": "3", "Process Group Description": "tp"},
        {"Group size": 8, "Process Group Name": "4", "Process Group Description": "undefined"},
        {"Group size": 8},
    ]
    rows = [
        one for i, group in enumerate(groups) for one in launched("ncclDevKernel_AllReduce", 10 * i, 10 * i + 5, i + 1, i, **about, **group)
    ]
    found = Trace.load(write(tmp_path / "a.json", [step(1, 0, 100), *rows])).collectives()
    assert [(row.group, row.count) for row in found.rows] == [(None, 1), ("4", 1), ("tp", 1)]
    assert "group" in str(found)
    assert Collectives.from_json(json.loads(json.dumps(found.to_json()))) == found
    alone = Trace.load(write(tmp_path / "b.json", [step(1, 0, 100), *rows[:2]])).collectives()
    assert "group" not in str(alone.table).splitlines()[1]
