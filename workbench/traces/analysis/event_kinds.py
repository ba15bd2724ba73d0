"""Classifies the events of a trace by their names: operator, kernel, copy, collective, …; and finds which call launched which work."""

import fnmatch
import re
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from workbench.traces.analysis.columns import Columns, Label
from workbench.traces.analysis.intervals import Numbers, Spans, union
from workbench.traces.analysis.nesting import Nesting

KINDS = (
    *("ignored", "step", "data_wait", "operator", "optimizer", "backward"),
    *("host_communication", "collective_call", "runtime", "wait", "range"),
    *("kernel", "communication", "h2d", "copy"),
)
"""* `step`: a mark around a step.
* `host_communication`: a collective that the CPU runs; `collective_call`: what asks for one: it blocks on a CPU, and launches on a device.
* `range`: a user's annotation or a Python function.
* `runtime`: a call that launches; `wait`: one that waits for the device.
* From `kernel` on: work of a device; `copy` is any other than from host to device.
* `ignored`: the device-side copies of host ranges (that of a range around backward misses backward, which another thread launches), and the
  profiler's own."""

DEVICE = frozenset({"kernel", "communication", "h2d", "copy"})

COLLECTIVE_KERNEL = re.compile(
    r"nccl|rccl|nvshmem|multimem_|cross_device_reduce|oneccl|mscclpp|quickreduce::|userbuffers_|deep_ep::int(er|ra)node"
    r"|(?<!warp)(?<!block)(?<!warp_)(?<!block_)(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)",
    re.IGNORECASE,
)
"""Kernels that carry no "Collective name": every file before torch 2.1, and libraries beside NCCL (vLLM, SGLang, TensorRT-LLM, FlashInfer,
DeepEP, Transformer Engine). `warpAllReduce` and the like stay within a multiprocessor."""
HOST_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):")
COLLECTIVE_CALL = re.compile(r"c10d::|record_param_comms$")
WAITS = re.compile(r"(cuda|hip)(Stream|Device|Event)Synchronize|(cuda|hip)Memcpy$|hipMemcpyWithStream$|cu(Ctx|Stream|Event)Synchronize")
"""`hipMemcpyWithStream` is ROCm's blocking copy: what `.item()` calls there."""
MTIA = ("event_wait", "dma_request")
"""What MTIA's streams do beside computing: wait for each other, and copy."""
LAUNCHES = re.compile(r"(cuda|hip|cu)(Ext)?(Module)?(Launch(Cooperative)?Kernel|GraphLaunch)")


def kind_of(label: Label) -> str:
    """The kind of an event."""
    category, name = label.category.lower(), label.name
    if category == "mtia_ccp_events" and name.startswith(MTIA):
        return "ignored" if name.startswith("event_wait") else "copy"
    if category in ("kernel", "mtia_ccp_events"):
        return "communication" if label.collective or COLLECTIVE_KERNEL.search(name) else "kernel"
    if category in ("gpu_memcpy", "memcpy"):
        return "h2d" if "htod" in name.lower().replace(" ", "") or "host -> device" in name.lower() else "copy"
    if category in ("gpu_memset", "memset"):
        return "copy"
    if category in ("cuda_runtime", "cuda_driver", "runtime", "driver", "mtia_runtime", "xpu_runtime", "privateuse1_runtime"):
        return "wait" if WAITS.match(name) else "runtime"
    if category in ("gpu_user_annotation", "trace", "overhead"):
        return "ignored"
    if name.startswith("ProfilerStep"):
        return "step"
    if "enumerate(DataLoader)" in name or "enumerate(DataPipe)" in name:
        return "data_wait"
    if HOST_COLLECTIVE.match(name):
        return "host_communication"
    if COLLECTIVE_CALL.match(name):
        return "collective_call"
    if name.startswith("Optimizer."):
        return "optimizer"
    if name.startswith("autograd::engine::evaluate_function"):
        return "backward"
    if category in ("cpu_op", "operator"):
        return "operator"
    return "range" if category in ("user_annotation", "python_function", "ac2g_user") else "ignored"


MARKS = ("user_annotation", "cpu_op", "operator", "python_function")
"""Categories of events of the host that may mark steps."""


def kinds_by(steps: str | None, communication: Sequence[str]) -> Callable[[Label], str]:
    """`kind_of`, but by patterns of names as well, such as "execute_*".

    Args:
        steps: which events of the host mark the steps; then none else do. None = the profiler's own.
        communication: which kernels are communication besides those that `kind_of` knows.
    """
    matches = re.compile(fnmatch.translate(steps)).match if steps is not None else None
    exchanges = re.compile("|".join(map(fnmatch.translate, communication))).match if communication else None

    def kind(label: Label) -> str:
        if matches and label.category.lower() in MARKS and matches(label.name):
            return "step"
        usual = kind_of(label)
        if matches and usual == "step":
            return "ignored"
        return "communication" if exchanges and usual == "kernel" and exchanges(label.name) else usual

    return kind


class Kinds:
    """The kind of every event of a trace."""

    def __init__(self, columns: Columns, of: Callable[[Label], str] = kind_of) -> None:
        self._columns = columns
        codes = {kind: code for code, kind in enumerate(KINDS)}
        self._of = np.array([codes[of(label)] for label in columns.labels] or [0], dtype=np.int8)
        self._code = self._of[columns.label]
        self._codes = codes
        self._covers: dict[str, Spans] = {}
        recorded = np.isin(self._code, [codes[kind] for kind in DEVICE]).any()
        self.unrecorded = 0 if recorded else int(columns.where(lambda label: bool(LAUNCHES.match(label.name))).sum())
        """Number of launches whose work the file lacks: CUPTI failed, or only the host was profiled."""
        self.device = bool(recorded or self.unrecorded)
        """Did a device other than the CPU work?"""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the file lacks."""
        if not self.unrecorded:
            return ()
        count = f"{self.unrecorded:,} launch{'es were' if self.unrecorded > 1 else ' was'} recorded"
        return (f"{count}, but no work of the device: what it computes is not known",)

    @property
    def codes(self) -> NDArray[np.int8]:
        """Number of each event's kind, in the order of KINDS."""
        return self._code

    def where(self, *kinds: str) -> NDArray[np.bool_]:
        """Which events are of one of some kinds."""
        mask: NDArray[np.bool_] = np.isin(self._code, [self._codes[kind] for kind in kinds])
        return mask

    def spans(self, *kinds: str) -> Spans:
        """Start and end of the events of some kinds, in the order of the file."""
        chosen = self.where(*kinds)
        return np.stack([self._columns.start[chosen], self._columns.end[chosen]], axis=1)

    def cover(self, *kinds: str) -> Spans:
        """The time in which an event of one of some kinds runs."""
        for kind in kinds:
            if kind not in self._covers:
                self._covers[kind] = union(self.spans(kind))
        return union(*(self._covers[kind] for kind in kinds)) if len(kinds) != 1 else self._covers[kinds[0]]


def calling_places(columns: Columns, kinds: Kinds, calls: Nesting, work: Numbers) -> Numbers:
    """Place, among some calls of the host, of the call that launched each of some events of a device; -1 = none of them, or unknown."""
    call = callers(columns, kinds, work)
    place = np.full(len(columns), -1, dtype=np.int64)
    place[calls.events] = np.arange(len(calls.events))
    return np.where(call >= 0, place[call], -1)


def callers(columns: Columns, kinds: Kinds, work: Numbers) -> Numbers:
    """Number of the call that launched each of some events of a device, by correlation; -1 where the file does not tell."""
    calls = np.flatnonzero(kinds.where("runtime", "wait") & (columns.correlation >= 0))
    if not len(calls):
        return np.full(len(work), -1, dtype=np.int64)
    keys, at = np.unique(columns.correlation[calls], return_index=True)
    correlation = columns.correlation[work]
    place = np.minimum(np.searchsorted(keys, correlation), len(keys) - 1)
    launch: Numbers = np.where((keys[place] == correlation) & (correlation >= 0), calls[at][place], -1)
    return launch
