"""Reading traces: real files, hand-written ones, and files in any state."""

import gc
import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.traced import event, on_cpu, on_device, op, profiled, step, torn, write
from workbench.traces.analysis import reading
from workbench.traces.analysis.reading import TraceError
from workbench.traces.analysis.trace import Trace
from workbench.traces.analysis.trace_set import TraceSet


def test_a_real_trace(tmp_path: Path) -> None:
    """What torch.profiler writes is read as Python's json reads it."""
    path = profiled(tmp_path / "real.json")
    trace = Trace.load(path)
    events = [one for one in json.loads(path.read_text())["traceEvents"] if one["ph"] == "X"]
    assert len(trace.columns) == len(events)
    assert [trace.columns.labels[code].name for code in trace.columns.label] == [str(one["name"]) for one in events]
    assert [trace.columns.labels[code].category for code in trace.columns.label] == [one["cat"] for one in events]
    first = min(one["ts"] for one in events)
    assert np.abs(trace.columns.start - np.array([round((one["ts"] - first) * 1e3) for one in events])).max() <= 1
    assert (trace.columns.end - trace.columns.start).tolist() == [round(one["dur"] * 1e3) for one in events]
    assert trace.columns.external.tolist() == [one["args"].get("External id", -1) for one in events]
    shapes = [json.loads(trace.columns.shapes[code] or "null") for code in trace.columns.shape]
    assert shapes == [one["args"].get("Input Dims") for one in events]
    assert trace.notes == ()
    assert [one.index for one in trace.steps] == [2, 3, 4]


def test_what_the_file_says_of_itself(tmp_path: Path) -> None:
    header = {"distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8}, "deviceProperties": [{"id": 0, "name": "Some GPU"}]}
    trace = Trace.load(write(tmp_path / "a.json.gz", on_device(), **header))
    assert (trace.rank, trace.world_size, trace.devices) == (3, 8, ("Some GPU",))
    assert "Some GPU" in str(trace)
    assert "rank" in trace._repr_html_()
    assert repr(trace) == "Trace('a.json.gz', 39 events, 2 steps)"


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "without_a_suffix"])
def test_pieces_of_any_size_give_the_same(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / name, on_cpu())
    whole = Trace.load(path)
    for size in (64, 300, 1111):
        monkeypatch.setattr(reading, "PIECE", size)
        found = Trace.load(path)
        assert found.notes == ()
        assert found.columns.start.tolist() == whole.columns.start.tolist()
        assert found.columns.labels == whole.columns.labels


def test_names_that_look_like_the_end_of_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ['}, {"ph": "X"', "}]}", '"traceEvents": [', "\\", '\\"}, {"', "∂ü🙂", "a\nb"]
    events = [op(name, 10 * i, 5, args={"list": [{"name": 1}, {"name": 2}], "Input Dims": [[i]]}) for i, name in enumerate(names)]
    path = write(tmp_path / "a.json", events)
    monkeypatch.setattr(reading, "PIECE", 128)
    trace = Trace.load(path)
    assert [label.name for label in trace.columns.labels] == names
    assert trace.notes == ()


def test_an_array_without_anything_around_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(on_cpu()))
    assert Trace.load(path).notes == ()
    path.write_text(json.dumps(on_cpu())[:-1])  # Chrome's format allows it
    trace = Trace.load(path)
    assert len(trace.columns) == len(on_cpu())
    assert "ends in the middle" in trace.notes[0]


def test_one_file_in_a_directory(tmp_path: Path) -> None:
    write(tmp_path / "host_1.2.pt.trace.json.gz", on_cpu())
    (tmp_path / "notes.txt").write_text("mine")
    assert len(Trace.load(tmp_path).steps) == 2
    write(tmp_path / "host_2.2.pt.trace.json.gz", on_cpu())
    with pytest.raises(TraceError, match=r"host_1.*does not say of which rank it is.*load it alone"):
        Trace.load(tmp_path)


def test_a_directory_of_ordinary_names(tmp_path: Path) -> None:
    """What other programs call their files: what is a trace, their text tells."""
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "broken.json.gz").write_bytes(b"nonsense")
    write(tmp_path / "rank_0.json.gz", on_cpu())
    assert Trace.load(tmp_path).path.name == "rank_0.json.gz"
    (tmp_path / "rank_1.json").write_text(json.dumps(on_cpu()))
    found = Trace.load(tmp_path)
    assert isinstance(found, TraceSet)
    assert list(found) == [0, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"hello", "is not JSON"),
        (b"\x89PNG\r\n", "is not JSON"),
        (b'{"a": 1}', 'has no list of "traceEvents"'),
        (b'{"traceEvents": 3}', 'has no list of "traceEvents"'),
        (b'{"traceEvents": []}', "has no events"),
        (b'{"traceEvents": [}', "has no events"),
        (b'{"traceEvents": [1, 2]}', "has no events"),
        (b'{"traceEvents": [' + b"[" * 100_000, "has no events"),
        (b'{"traceEvents": [' + b'{"a":' * 100_000, "has no events"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:12], "is empty|was cut"),
        (b"\x1f\x8bnonsense", "empty|damaged|not JSON"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        Trace.load(path)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"No such file.*torch.profiler exported"):
        Trace.load(tmp_path / "a.json")
    with pytest.raises(TraceError, match=r"has no traces: such files end in \.json or \.json\.gz"):
        Trace.load(tmp_path)


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    """Every event before the end is there, and a note says that there were more."""
    events = on_cpu()
    whole = write(tmp_path / "whole.json", events).read_bytes()
    third = whole.index(b"aten::linear")
    path = tmp_path / "a.json"
    path.write_bytes(whole[:third])
    trace = Trace.load(path)
    assert len(trace.columns) == 3
    assert "later ones are missing" in trace.notes[0]
    packed = tmp_path / "a.json.gz"
    packed.write_bytes(gzip.compress(whole)[:-120])
    trace = Trace.load(packed)
    assert 0 < len(trace.columns) < len(events)
    assert "ends early or is damaged" in trace.notes[0]


@pytest.mark.parametrize("pieces", [2**10, 4 * 2**20])
def test_a_wrong_bit_in_a_packed_file(tmp_path: Path, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is there up to the bit, and all of it where only the checksum at the end is wrong, also of a file that is one piece."""
    monkeypatch.setattr(reading, "PIECE", pieces)
    names = [f"aten::op{hashlib.sha256(str(i).encode()).hexdigest()}" for i in range(2000)]  # which do not pack well
    packed = gzip.compress(json.dumps({"traceEvents": [op(name, 10 * i, 5) for i, name in enumerate(names)]}).encode())
    path = tmp_path / "a.json.gz"
    for place, least in ((len(packed) - 6, 2000), (len(packed) * 9 // 10, 1600), (len(packed) // 2, 800)):
        wrong = bytearray(packed)
        wrong[place] ^= 1
        path.write_bytes(wrong)
        trace = Trace.load(path)
        found = [label.name for label in trace.columns.labels]
        assert len(trace.columns) >= least
        assert len(set(names[:least]) & set(found)) == least
        assert any("ends early or is damaged" in note or "checksum" in note for note in trace.notes)
        if least == 2000:
            assert trace.notes == (
                "the checksum of the packed file does not fit its text: none of it is missing, but something in it was changed",
            )


def test_a_packed_file_without_text(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"traceEvents": []}'))
    packed[10] = 0xFF  # no kind of block that there is
    (tmp_path / "a.json.gz").write_bytes(packed)
    with pytest.raises(TraceError, match=r"has no text: the file ends early or is damaged") as caught:
        Trace.load(tmp_path / "a.json.gz")
    assert "is empty" not in str(caught.value)
    assert "not finished" not in str(caught.value)


def test_events_within_another_value(tmp_path: Path) -> None:
    """Those of the trace itself count, wherever they stand; where there are none but others, that is said."""
    path = tmp_path / "a.json"
    inner = {"a": ']} " [', "traceEvents": [op("wrong", 0, 1)] * 3}
    for content in (
        {"x": inner, "traceEvents": [op("right", 0, 1)]},
        {"x": [[inner, inner]], "y": inner, "traceEvents": [op("right", 0, 1)]},
    ):
        path.write_text(json.dumps(content))
        trace = Trace.load(path)
        assert [label.name for label in trace.columns.labels] == ["right"]
        assert trace.notes == ()
    path.write_text(json.dumps({"x": inner}))
    trace = Trace.load(path)
    assert [label.name for label in trace.columns.labels] == ["wrong"]
    assert any("only within another value" in note for note in trace.notes)


@pytest.mark.parametrize("bad", ["[" * 5000 + "]" * 5000, '"' + "\\ud800" + '"', "5"])
def test_a_whole_file_whose_last_event_cannot_be_read(tmp_path: Path, bad: str) -> None:
    """It is damaged, and does not end in the middle."""
    good = json.dumps(op("aten::mm", 0, 1))
    path = tmp_path / "a.json"
    path.write_text(f'{{"traceEvents": [{good}, {{"ph": {bad}}}], "host_name": "here"}}')
    trace = Trace.load(path)
    assert trace.host == "here"
    assert len(trace.columns) == 1
    assert not any("ends in the middle" in note for note in trace.notes)
    path.write_text('{"traceEvents": [1, 2]}')
    with pytest.raises(TraceError, match="damaged at 1 place"):
        Trace.load(path)


def test_damage_in_the_middle(tmp_path: Path) -> None:
    path = torn(tmp_path / "a.json", lambda text: text.replace(b'"aten::addmm"', b'"aten::\x00\x00mm', 1), on_cpu())
    trace = Trace.load(path)
    assert len(trace.columns) == len(on_cpu()) - 1
    assert trace.notes == ("the file is damaged at 1 place: the events there are missing",)
    assert trace.breakdown().notes[-1] == trace.notes[0]


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = torn(tmp_path / "a.json", lambda text: text.replace(b"aten::addmm", b"aten::\xff\xfe", 1), on_cpu())
    trace = Trace.load(path)
    assert trace.notes == ()
    assert "aten::\ufffd\ufffd" in [label.name for label in trace.columns.labels]


def test_times_that_cannot_be(tmp_path: Path) -> None:
    odd = [op("a", t, d) for t, d in ((1e300, 1), (0, -1), (0, 1e300), (-1e17, 1))]
    odd += [{**op("a", 0, 0), "ts": "NaN"}, {**op("a", 0, 0), "dur": "inf"}, {**op("a", 0, 0), "ts": None}]
    trace = Trace.load(write(tmp_path / "a.json", [*odd, *on_cpu()]))
    assert len(trace.columns) == len(on_cpu())
    assert trace.notes == ("7 events have invalid times (no number, or a negative length): they are left out",)


def test_values_of_other_types(tmp_path: Path) -> None:
    odd: list[Any] = [
        {**op("a", 0, 1), "args": "text"},
        op("b", 0, 1, correlation="x"),
        {**op("c", 0, 1), "ts": "0.5", "tid": "main"},
        op("d", 0, 1, correlation=2**70, args={"External id": -(2**80)}),
        {**op("e", 0, 1), "ts": [1]},
        7,
        None,
        "text",
        {},
        {**op("f", 0, 1), "cat": None, "name": 3, "pid": 1.5, "tid": None},
    ]
    trace = Trace.load(write(tmp_path / "a.json", [*odd, *on_cpu()]))
    names = [label.name for label in trace.columns.labels]
    assert names[:5] == ["a", "b", "c", "d", "3"]
    assert trace.columns.correlation[:5].tolist() == [-1] * 5
    assert any("args of 2 events" in note for note in trace.notes)
    assert any("damaged at" in note for note in trace.notes)
    assert len(trace.breakdown().steps) == 2


def test_keys_that_stand_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"traceEvents": [{"ph": "X", "name": "a", "name": "b", "ts": 1, "ts": 2, "dur": 3, "cat": "cpu_op"}]}')
    assert Trace.load(path).columns.labels[0].name == "b"


def test_a_bomb_among_events(tmp_path: Path) -> None:
    """One value is nested without end: it is missing, the rest is there."""
    bomb = b'{"ph": "X", "name": "bomb", "args": {"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}}, "
    path = torn(tmp_path / "a.json", lambda text: text.replace(b'"traceEvents": [', b'"traceEvents": [' + bomb), on_cpu())
    trace = Trace.load(path)
    assert len(trace.columns) == len(on_cpu())
    assert "damaged at 1 place" in trace.notes[0]


@pytest.mark.parametrize("filling", [b" ", b"{", b"[", b'{"a":', b"},"])
def test_a_small_file_that_unpacks_to_much(tmp_path: Path, filling: bytes) -> None:
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + filling * (20_000_000 // len(filling)), 1))
    with pytest.raises(TraceError, match="has no events"):
        Trace.load(path)


def test_beginnings_and_ends(tmp_path: Path) -> None:
    pair = [{"ph": ph, "name": "a", "cat": "cpu_op", "ts": 1, "pid": 1, "tid": 1} for ph in "BE"]
    trace = Trace.load(write(tmp_path / "a.json", [*pair, *on_cpu()]))
    assert trace.notes[0].startswith("2 events are beginnings or ends only")


def test_names_of_threads(tmp_path: Path) -> None:
    names = [{"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "thread 1 (python)"}}]
    trace = Trace.load(write(tmp_path / "a.json", [*names, *on_cpu()]))
    assert [lane.name for lane in trace.columns.lanes] == ["thread 1 (python)", "9 9"]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_bytes_that_are_changed_anywhere(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever happens to a file, there is an answer or a clear error."""
    text = bytearray(write(tmp_path / "a.json", on_device()).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 40))] = data.draw(
            st.binary(max_size=6) | st.sampled_from([b"}", b"]", b"{", b'"', b",", b"1e9"])
        )
    path = tmp_path / "b.json"
    path.write_bytes(bytes(text))
    try:
        trace = Trace.load(path)
    except TraceError:
        return
    check_every_answer(trace)


RATES = ["memory bandwidth (GB/s)", "blocks per SM", "est. achieved occupancy %"]
DETAILS = ["Sequence number", "Input Dims", "Input type", "Concrete Inputs", "Bytes", "Total Allocated", "Device Type", "Device Id", "Addr"]
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2) | st.just({})
NAMES = st.sampled_from(
    [
        *("ProfilerStep#1", "ProfilerStep#", "ncclKernel", "enumerate(DataLoader)#", "Memcpy HtoD", "gloo:a", "Optimizer.step#A"),
        *("[memory]", "nn.Module: A_0", "aten::mm", "aten::convolution", "autograd::engine::evaluate_function: A"),
    ]
)
EVENTS = st.fixed_dictionaries(
    {
        "ph": st.sampled_from(["X", "X", "X", "i"]) | VALUES,
        "name": NAMES | VALUES,
        "cat": st.sampled_from(["cpu_op", "kernel", "gpu_memcpy", "user_annotation", "cuda_runtime", "python_function"]) | VALUES,
    },
    optional={
        "ts": st.integers(0, 99) | VALUES,
        "dur": st.integers(0, 99) | VALUES,
        "pid": VALUES,
        "tid": VALUES,
        "args": VALUES
        | st.dictionaries(st.sampled_from(["correlation", "External id", "Collective name", "bytes", "dtype", *RATES, *DETAILS]), VALUES),
    },
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(EVENTS | VALUES, max_size=8))
def test_events_that_nobody_writes(tmp_path: Path, events: list[Any]) -> None:
    try:
        trace = Trace.load(write(tmp_path / "a.json", [*events, step(0, 0, 50), op("aten::a", 1, 2)]))
    except TraceError:
        return
    check_every_answer(trace)


def check_every_answer(trace: Trace) -> None:
    for one in trace.breakdown().steps:
        parts = (one.data_wait, one.h2d, one.compute, one.communication, one.host, one.idle, one.other)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(one.total, rel=1e-9, abs=1e-12)
    for answer in (
        trace,
        trace.ops(),
        trace.ops("kernel", by_shape=True),
        trace.overlap(),
        trace.collectives(),
        trace.explain(),
        trace.diff(trace),
        trace.modules(),
        trace.flame(stacks=True),
        trace.critical(),
        trace.roofline(),
        trace.mfu("A100-80GB"),
        trace.launches(),
        trace.idle(),
        trace.memory_curve(),
        trace.critical_path(),
        trace.kernels(),
        trace.copies(),
        trace.sequences(length=2),
    ):
        assert str(answer)
        assert answer._repr_html_()


def test_the_collector_is_as_it_was(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", on_cpu())
    Trace.load(path)
    assert gc.isenabled()
    gc.disable()
    try:
        Trace.load(path)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """Of three times the file it takes little more: columns, not text."""
    path = tmp_path / "a.json.gz"
    rows = [event("aten::mm", "cpu_op", 10 * i, 5, args={"External id": i, "pad": "x" * 600}) for i in range(8_000)]
    code = "import sys, workbench.traces.analysis.trace as t; t.Trace.load(sys.argv[1]); print(open('/proc/self/status').read())"

    def peak(times: int) -> int:
        text = b",".join([json.dumps(rows).encode()[1:-1]] * times)
        path.write_bytes(gzip.compress(b'{"traceEvents": [' + text + b"]}", 1))
        said = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True).stdout
        return int(said.split("VmHWM:")[1].split()[0])

    small, large = peak(4), peak(12)
    assert large - small < 0.4 * 45_000, "KiB, of 45 MB of text more"
