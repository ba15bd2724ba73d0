"""`python -m workbench.programs.links RUN_DIR`: times collectives between the ranks; rank 0 leaves them in `links.json`, after each round.

torchrun starts one per rank. What is wanted stands in run.json under "experiment".
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from workbench.cluster.analysis.links import LinkPoint, Links
from workbench.cluster.measure.links import time_links
from workbench.core import run_directory
from workbench.programs.experiment import Assignment, carry_out
from workbench.train.ranks import Ranks


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what run.json says."""
    carry_out(sweep, name="workbench.programs.links", about=__doc__, arguments=arguments)


def sweep(mine: Assignment) -> dict[str, Any]:
    """Time what is wanted; what is known is written after each round, so that a stop does not cost it."""
    order, first, began = mine.order, mine.ranks.rank == 0, time.monotonic()
    writer = run_directory.LineWriter(mine.run_dir / run_directory.METRICS) if first else None

    def seen(done: int, rounds: int, points: list[LinkPoint]) -> None:
        if writer is not None:
            run_directory.write_json(mine.run_dir / run_directory.LINKS, found(mine.info, mine.ranks, points).to_json())
            writer.write([{"step": done, "steps": rounds, "seconds": time.monotonic() - began}])

    torch.set_num_threads(1)
    points = time_links(
        order["kinds"], order["sizes"], device=mine.ranks.device, repeats=order["repeats"], budget_s=order["measuring_s"], seen=seen
    )
    if writer is not None:
        writer.close()
    return {run_directory.LINKS: found(mine.info, mine.ranks, points).to_json()} if first else {}


def found(info: Mapping[str, Any], ranks: Ranks, points: Sequence[LinkPoint]) -> Links:
    """What was timed, and what a reader should know of it."""
    device, cores = ranks.device, info.get("cores")
    notes = []
    if device.type == "cpu" and cores and ranks.world_size > cores:
        notes.append(f"oversubscribed: {ranks.world_size} ranks on {cores} cores wait for each other's turns, not for a link")
    if device.type == "cpu":
        notes.append("between processes of one machine, through its memory or loopback: no network of a cluster")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Links(
        points=tuple(points),
        ranks=ranks.world_size,
        backend=str(dist.get_backend()),
        device=name,
        host=str(info.get("host", "")),
        notes=tuple(notes),
    )


if __name__ == "__main__":
    main()
