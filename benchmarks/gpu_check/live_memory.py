"""What lives on the GPU at the fullest moment of some steps, by the allocator's own history: it explains where an estimate is off."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

OPERATOR = re.compile(r"at::_ops::(\w+)::")
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


def origin(frames: Iterable[Mapping[str, Any]]) -> str:
    """Operator, node of the backward graph and function of Python that a stack names, the innermost of each."""
    operator = node = function = ""
    for frame in frames:
        name = str(frame.get("name", ""))
        if not operator and (match := OPERATOR.search(name)):
            operator = match[1]
        if not node and (match := NODE.search(name)):
            node = match[1] or match[2]
        file = str(frame.get("filename", ""))
        if not function and file.endswith(".py"):
            function = f"{file.rpartition('/')[2]}:{frame.get('line')} {name}"
    return " < ".join(filter(None, (operator or "no operator", node, function)))
