"""What an event is: one kind per name and category, from the names that torch, Kineto and the collectives' libraries have had."""

import re
from typing import NamedTuple

KINDS = (
    "ignored",
    "step",
    "data_wait",
    "operator",
    "optimizer",
    "backward",
    "host_communication",
    "collective_call",
    "runtime",
    "wait",
    "range",
    "kernel",
    "communication",
    "h2d",
    "copy",
)
"""* `step`: a mark around a step.
* `host_communication`: a collective that the CPU runs; `collective_call`: what asks for one: it blocks on a CPU, and launches on a device.
* `range`: a user's annotation or a Python function.
* `runtime`: a call that launches; `wait`: one that waits for the device.
* From `kernel` on: work of a device; `copy` is any other than from host to device.
* `ignored`: the device-side copies of host ranges (that of a range around backward misses backward, which another thread launches), and the
  profiler's own."""

DEVICE = frozenset({"kernel", "communication", "h2d", "copy"})

COLLECTIVE_KERNEL = re.compile(r"nccl|rccl|nvshmem|multimem_|_shot_all_reduce|cross_device_reduce|oneccl", re.IGNORECASE)
"""Kernels that carry no "Collective name": every file before torch 2.1, and libraries beside NCCL."""
HOST_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):")
COLLECTIVE_CALL = re.compile(r"c10d::|record_param_comms$")
WAITS = re.compile(r"(cuda|hip)(Stream|Device|Event)Synchronize|(cuda|hip)Memcpy$")


class Label(NamedTuple):
    """What an event is called."""

    name: str
    category: str
    """As Kineto has it: "cpu_op", "user_annotation", "kernel", "cuda_runtime", …"""
    collective: bool
    """Does it carry the arguments of a collective?"""


def kind_of(label: Label) -> str:
    """The kind of an event."""
    category, name = label.category.lower(), label.name
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
