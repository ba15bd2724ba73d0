"""Choosing: the micro-batch of a run that left it open; asked by its ranks, in a process of its own."""

import contextlib
import dataclasses
import json
import sys
from typing import Any

from workbench.estimating import estimate_memory
from workbench.fitting.largest import NODES, max_micro_batch
from workbench.fitting.places import MARGIN, share_of
from workbench.memory.outside import outside_of
from workbench.memory.whatif import needed
from workbench.spec import RunSpec
from workbench.task import resolve


def choose_micro_batch(spec: RunSpec, *, device: str, room: int, margin: float = MARGIN) -> dict[str, Any]:
    """The largest micro-batch with which a run can start where it is, and for which its dataset has one optimizer step.

    Args:
        spec: of the run; its own `micro_batch` does not count.
        device: "cpu", "cuda" or the name of a GPU: whose memory behaviour.
        room: bytes that a rank can have there; on a GPU beside its context.
        margin: share of them that stays free.

    Returns:
        `micro_batch`; `most`: what the dataset allows; `stream`: it does not say how many samples it has; `bytes`: predicted need;
        `limit`: bytes that may be used.

    Raises:
        ValueError: the program cannot be estimated, not even one sample fits, or the dataset has not enough of them.
    """
    from workbench.estimate.examples import sample_batch
    from workbench.train.choosing import alone, most_samples

    task = resolve(spec.task)
    with alone():  # a stream may ask which rank it is read by
        dataset = task.dataset()
        example = sample_batch(dataclasses.replace(task, dataset=lambda: dataset), NODES[0])
    most, stream = most_samples(dataset, spec)
    context = 0 if device == "cpu" else outside_of(device).mid  # counted as a need of the device, and not in the room
    limit = share_of(room, margin) + context
    found, size = estimate_memory(spec, example, device=device, micro_batch=most), most
    if needed(found) > limit:
        fitted = max_micro_batch(spec, device, capacity=limit, margin=0.0, batch=example)
        found, size = fitted.breakdown, fitted.micro_batch
    figures = {"bytes": needed(found) - context, "limit": limit - context}
    if not size:
        raise ValueError("one sample takes {bytes:,} bytes, and {limit:,} may be used; wb.memory_ladder says what helps".format(**figures))
    return {"micro_batch": size, "most": most, "stream": stream, **figures}


def main() -> None:
    """`python -m workbench.fitting`: `choose_micro_batch` with JSON arguments on its input; prints the answer as JSON, or an "error"."""
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # what a task prints
        try:
            found = choose_micro_batch(RunSpec.from_json(asked["spec"]), device=asked["device"], room=asked["room"])
        except ValueError as error:
            found = {"error": str(error)}
    print(json.dumps(found))
