"""Comparing: what changes of a spec do to its memory, each a fake run of its own.

Fitting: what changes of a spec do to its memory, the largest micro-batch that fits a device, and the cheapest changes that make it fit.

Every answer is a fake run of the changed program, or exact between fake runs (`memory.family`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workbench.core.device import Device
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.whatif import MemoryComparison, WhatIf
from workbench.memory.api import estimate_memory
from workbench.memory.capacity import MARGIN, device_of, room_on
from workbench.runs.spec import RunSpec, check_names

_ARGUMENTS = ("sequence", "image", "world_size", "rank", "batch", "loss")  # of estimate_memory, beside the knobs


def compare_memory(
    target: Any,
    changes: Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any]],
    *,
    device: str | Device = "cuda",
    margin: float = MARGIN,
    **options: Any,
) -> MemoryComparison:
    """Predict what each of several changes does to the memory of a step.

    Args:
        target: as `estimate_memory` takes it.
        changes: one mapping of knobs per row, `[{"precision": "amp_bf16"}, {"checkpointing": "full", "micro_batch": 64}]`; or knob →
            values, one row each, `{"optimizer": ["sgd", "adamw"], "sequence": [512, 1024]}`. Knobs are those of a RunSpec, and the
            arguments `sequence`, `image`, `world_size` and `optimizer` of `estimate_memory`.
        device: as there; a name or a Device adds whether it fits.
        margin: share of the device that stays free.
        options: of all rows, as `estimate_memory` takes them.

    Raises:
        ValueError: no change, a knob that does not exist, or a baseline that cannot be estimated. A change that cannot be estimated is a
            row that says why.
    """
    rows = _rows(changes)
    for row in rows:
        check_names(RunSpec, {name: value for name, value in row.items() if name not in _ARGUMENTS})
    found = [WhatIf(changes={}, breakdown=estimate_memory(target, device=device, **options))]
    for change in rows:
        try:
            found.append(WhatIf(changes=change, breakdown=_changed(target, change, device=device, **options)))
        except ValueError as error:
            found.append(WhatIf(changes=change, breakdown=None, complaint=str(error)))
    room = None if device in ("cuda", "cpu") else room_on(device_of(device), margin)
    return MemoryComparison(rows=tuple(found), capacity=room, device=device.name if isinstance(device, Device) else device)


def _changed(target: Any, change: Mapping[str, Any], **options: Any) -> MemoryBreakdown:
    return estimate_memory(target, **{**options, **change})


def _rows(changes: Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any]]) -> list[Mapping[str, Any]]:
    if isinstance(changes, Mapping):
        listed = {
            name: [values] if isinstance(values, str) or not isinstance(values, Sequence) else values for name, values in changes.items()
        }
        rows: list[Mapping[str, Any]] = [{name: value} for name, values in listed.items() for value in values]
    else:
        rows = list(changes)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(
            f"compare_memory(changes={changes!r:.80}): give what is to be compared: [{{'precision': 'amp_bf16'}}, {{'micro_batch': 8}}] "
            "or {'micro_batch': [8, 16, 32]}"
        )
    return rows


def _values(values: Any) -> Sequence[Any]:
    return values if isinstance(values, Sequence) and not isinstance(values, str) else [values]
