"""Chooses the micro-batch of a run that left it open, in a process beside its ranks.

`python -m workbench.programs.choose_micro_batch` reads JSON from its input and prints JSON; `train.choose_micro_batch` starts it.
"""

import contextlib
import dataclasses
import json
import sys
from typing import Any

from workbench.core.device import Device
from workbench.memory.analysis.fit import MARGIN, less_margin
from workbench.memory.analysis.non_pytorch import non_pytorch_memory
from workbench.memory.analysis.whatif import needed
from workbench.memory.api import estimate_memory
from workbench.memory.max_micro_batch import NODES, max_micro_batch
from workbench.runs.spec import RunSpec
from workbench.runs.task import resolve


def choose_micro_batch(spec: RunSpec, *, device: str | Device, room: int, margin: float = MARGIN) -> dict[str, Any]:
    """The largest micro-batch with which a run can start on this device, and for which its dataset has one optimizer step.

    Args:
        spec: of the run; its own `micro_batch` does not count.
        device: "cpu", "cuda", the name of a GPU or a Device: whose memory behaviour.
        room: bytes that a rank can have there; on a GPU beside its context.
        margin: share of them that stays free.

    Returns:
        `micro_batch`; `most`: what the dataset allows; `stream`: the dataset has no length; `bytes`: predicted need;
        `limit`: bytes that may be used.

    Raises:
        ValueError: the program cannot be estimated, not even one sample fits, or the dataset has not enough of them.
    """
    from workbench.memory.estimate.examples import sample_batch
    from workbench.train.choose_micro_batch import max_samples, single_process_group

    task = resolve(spec.task)
    with single_process_group():  # a stream may ask for its rank
        dataset = task.dataset()
        example = sample_batch(dataclasses.replace(task, dataset=lambda: dataset), NODES[0])
    most, stream = max_samples(dataset, spec)
    context = (
        0 if device == "cpu" else non_pytorch_memory(device if isinstance(device, str) else device.name).mid
    )  # a need on the device, but no part of `room`
    limit = less_margin(room, margin) + context
    estimate, size = estimate_memory(spec, example, device=device, micro_batch=most), most
    if needed(estimate) > limit:
        largest = max_micro_batch(spec, device, capacity=limit, margin=0.0, budget_s=None, batch=example)
        estimate, size = largest.breakdown, largest.micro_batch
    figures = {"bytes": needed(estimate) - context, "limit": limit - context}
    if not size:
        raise ValueError("one sample takes {bytes:,} bytes, and {limit:,} may be used; wb.memory_ladder says what helps".format(**figures))
    return {"micro_batch": size, "most": most, "stream": stream, **figures}


def main() -> None:
    """Read JSON arguments of `choose_micro_batch` from standard input and print its answer, or an "error", as JSON."""
    given = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # what a task prints
        try:
            device = given["device"] if isinstance(given["device"], str) else Device(**given["device"])
            answer = choose_micro_batch(RunSpec.from_json(given["spec"]), device=device, room=given["room"])
        except ValueError as error:
            answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
