"""Events of a trace of torch's profiler, in columns, and what they say about a step."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from workbench.diagnosis.evidence import SMALL_OP, Inside

COLLECTIVES = re.compile(r"(gloo|nccl|mpi|ucc|xccl):|c10d::")
"""On the host; gloo's run in threads of their own."""
OPERATORS = re.compile(r"(?!autograd::engine::)(.*::|.*Backward\d+$|Torch-Compiled Region|CompiledFunctionBackward)")
"""The operators among what torch records as such: not the Python of an `autograd.Function`, which has no `::` and no number."""
ENGINE = "autograd::engine::"
"""Around each node of the backward graph, and around hooks, which may be Python."""
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Kinds of what runs on a GPU."""
SYNCS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize", "Memcpy")
"""Calls of the CUDA (or HIP) runtime that wait for the device."""

Spans = NDArray[np.int64]
"""Nanoseconds: start and end, in two columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Events by name, kind (as Kineto has it: "cpu_op", "user_annotation", "cuda_runtime", "kernel", …), thread and time."""

    names: tuple[tuple[str, str], ...]
    """Names and kinds that occur."""
    codes: NDArray[np.int64]
    """Of each event: which of them."""
    threads: NDArray[np.int64]
    spans: Spans
    begin: int
    """Nanoseconds: where the steps that count begin."""
    end: int

    def __len__(self) -> int:
        return len(self.codes)

    @classmethod
    def of(cls, rows: Iterable[tuple[str, str, int, int, int]], *, window: str) -> Self:
        """From rows (name, kind, start, end, thread), cut to the annotation called `window`.

        Raises:
            ValueError: there is no such annotation.
        """
        names, kinds, starts, ends, threads = zip(*rows, strict=True) if (rows := list(rows)) else ((),) * 5
        known: dict[tuple[str, str], int] = {}
        codes = np.array([known.setdefault(one, len(known)) for one in zip(names, kinds, strict=True)], dtype=np.int64)
        if (code := known.get((window, "user_annotation"))) is None:
            raise ValueError(f"the trace has no annotation {window!r}")
        at = int(np.flatnonzero(codes == code)[0])
        begin, end = starts[at], ends[at]
        spans = np.array([starts, ends], dtype=np.int64).T
        kept = (spans[:, 0] < end) & (spans[:, 1] > begin) & (codes != code)
        return cls(
            names=tuple(known),
            codes=codes[kept],
            threads=np.array(threads, dtype=np.int64)[kept],
            spans=spans[kept].clip(begin, end),
            begin=begin,
            end=end,
        )

    @classmethod
    def recorded(cls, events: Sequence[Any], *, window: str) -> Self:
        """From the events of Kineto's results."""
        kind = (lambda event: event.activity_type()) if events and hasattr(events[0], "activity_type") else _kind
        rows = ((e.name(), kind(e), (start := e.start_ns()), start + e.duration_ns(), e.start_thread_id()) for e in events)
        return cls.of(rows, window=window)

    def where(self, chosen: Callable[[str, str], object]) -> NDArray[np.bool_]:
        """Which events have a name and a kind that are chosen."""
        answers = np.array([bool(chosen(name, kind)) for name, kind in self.names], dtype=np.bool_)
        return answers[self.codes]


def _kind(event: Any) -> str:
    """The kind of an event, for a torch that does not tell."""
    name = event.name()
    if event.is_user_annotation():
        return "user_annotation"
    if event.device_type() != type(event.device_type()).CPU:
        return "gpu_memcpy" if name.startswith("Memcpy") else "gpu_memset" if name.startswith("Memset") else "kernel"
    return "cuda_runtime" if re.match("cu(da)?[A-Z]|hip[A-Z]", name) else "cpu_op"


def read(events: Events, steps: int, *, ranks: bool = False) -> Inside:
    """What a trace of some steps says.

    On a CPU an operator is what torch records as one, in whatever thread, backward nodes included; what a Python function or hook does in
    backward is none. On a GPU it is a kernel or a copy.

    Args:
        events: of the steps.
        steps: how many there were.
        ranks: do others compute along?
    """
    on_device = events.where(lambda name, kind: kind in DEVICE)
    optimizer = union(events.spans[events.where(lambda name, kind: kind == "user_annotation" and name.startswith("Optimizer.step"))])
    if on_device.any():
        collective = on_device & events.where(lambda name, kind: re.search("nccl|rccl", name, re.IGNORECASE))
        ops = events.spans[on_device & ~collective]
        busy = union(ops)
        syncs = events.where(lambda name, kind: kind == "cuda_runtime" and name.endswith(SYNCS)).sum()
    else:
        collective = events.where(lambda name, kind: COLLECTIVES.match(name))
        found = ~collective & events.where(lambda name, kind: kind == "cpu_op" and OPERATORS.match(name))
        nodes = events.where(lambda name, kind: name.startswith(ENGINE))
        tops, around = [], []
        for thread in np.unique(events.threads[found]):
            here = events.threads == thread
            tops.append(outermost(events.spans[found & here]))
            around.append(_around(tops[-1], outermost(events.spans[nodes & here])))
        ops = np.concatenate([*tops, _NONE])
        busy = union(np.concatenate([ops, *around]))
        items = events.spans[events.where(lambda name, kind: name == "aten::_local_scalar_dense"), 0]
        syncs = len(items) - (_covered(items, optimizer)).sum()
    own = optimizer if not on_device.any() else _NONE  # on a GPU its kernels run later than its Python
    lengths = (ops[:, 1] - ops[:, 0])[~_covered(ops[:, 0], own)]
    both = _length(busy) + _length(own) - _length(union(np.concatenate([busy, own])))
    exposed = _length(union(np.concatenate([busy, events.spans[collective]]))) - _length(busy)
    nano = 1e-9 / steps
    return Inside(
        step=(events.end - events.begin) * nano,
        ops=_length(busy) * nano,
        op_count=len(ops) / steps,
        small_ops=int(lengths[lengths < SMALL_OP * 1e9].sum()) * nano,
        optimizer=_length(optimizer) * nano if len(optimizer) else None,
        optimizer_ops=both * nano if len(own) else None,
        collectives=exposed * nano if ranks else None,
        syncs=int(syncs) / steps,
    )


_NONE: Spans = np.empty((0, 2), dtype=np.int64)


def union(spans: Spans) -> Spans:
    """The same time as spans that do not touch, in order."""
    if not len(spans):
        return _NONE
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    until: NDArray[np.int64] = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > until[:-1]])
    last = np.concatenate([first[1:], [True]])
    joined: Spans = np.stack([spans[first, 0], until[last]], axis=1)
    return joined


def outermost(spans: Spans) -> Spans:
    """The spans of one thread that lie in no other one of it."""
    spans = spans[np.lexsort((-spans[:, 1], spans[:, 0]))]
    until: NDArray[np.int64] = np.maximum.accumulate(spans[:, 1])
    kept: Spans = spans[np.concatenate([[True], spans[1:, 0] >= until[:-1]])[: len(spans)]]
    return kept


def _around(ops: Spans, nodes: Spans) -> Spans:
    """What lies around the operators of the nodes of the backward graph belongs to them if it is short; else it is a hook."""
    edges = np.concatenate([ops, nodes[:, [0, 0]], nodes[:, [1, 1]]])  # the borders of a node, as operators of no length
    edges = edges[np.lexsort((edges[:, 1], edges[:, 0]))]
    gaps: Spans = np.stack([np.maximum.accumulate(edges[:-1, 1]), edges[1:, 0]], axis=1)
    lengths = gaps[:, 1] - gaps[:, 0]
    return gaps[(lengths > 0) & (lengths < SMALL_OP * 1e9) & _covered(gaps[:, 0], nodes)]


def _covered(times: NDArray[np.int64], spans: Spans) -> NDArray[np.bool_]:
    """Which times lie in one of some spans that do not overlap."""
    at = np.searchsorted(spans[:, 0], times, side="right") - 1
    return (at >= 0) & (times < spans[np.maximum(at, 0), 1]) if len(spans) else np.zeros(len(times), dtype=np.bool_)


def _length(spans: Spans) -> int:
    return int((spans[:, 1] - spans[:, 0]).sum())
