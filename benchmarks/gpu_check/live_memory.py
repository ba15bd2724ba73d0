"""Lists what lives on the GPU at the peak of some steps, by the allocator's own history, to explain the error of an estimate."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

OPERATOR = re.compile(r"at::_ops::(?!empty|resize)(\w+)::")
KERNEL = re.compile(r"at::native::(?:\(anonymous namespace\)::)?(?!empty|resize)(\w+)")
NODE = re.compile(r"(\w+Backward\d*)::apply|(AccumulateGrad)::apply")
MAX_EVENTS = 500_000
SMALL = 2**20
"""Bytes; smaller pieces are counted together."""


def live_at_peak(steps: Callable[[], object]) -> list[tuple[int, str]]:
    """Run steps with the allocator's history switched on.

    Returns:
        Bytes and origin of what was allocated since and lives at the fullest moment, largest first; the small ones summed up at the end.
    """
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="all", max_entries=MAX_EVENTS)
    try:
        steps()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(None)
    return pieces(events)


def pieces(events: Iterable[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """The blocks that live at the fullest moment of a history, with where they were asked for."""
    live: dict[int, Mapping[str, Any]] = {}
    held = most = 0
    fullest: list[Mapping[str, Any]] = []
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            held += event["size"]
            if held > most:
                most, fullest = held, list(live.values())
        elif event["action"] == "free_completed" and (gone := live.pop(event["addr"], None)):
            held -= gone["size"]
    large = [(event["size"], origin(event.get("frames", ()))) for event in fullest if event["size"] >= SMALL]
    small = [event["size"] for event in fullest if event["size"] < SMALL]
    return [*sorted(large, reverse=True), (sum(small), f"{len(small)} small pieces")]


def origin(frames: Sequence[Mapping[str, Any]]) -> str:
    """What a stack names, the innermost of each: function of a kernel, operator, node of the backward graph, function of Python."""
    names = [str(frame.get("name", "")) for frame in frames]
    parts = [next((match for name in names if (match := pattern.search(name))), None) for pattern in (KERNEL, OPERATOR, NODE)]
    words = [next(filter(None, match.groups())) for match in parts if match]
    python = [frame for frame in frames if str(frame.get("filename", "")).endswith(".py")]
    words += [f"{str(frame['filename']).rpartition('/')[2]}:{frame.get('line')} {frame.get('name')}" for frame in python[:1]]
    return " < ".join(words) or "unknown"
