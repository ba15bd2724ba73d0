"""Communicating: what ranks send each other, before there are any.

`collectives` counts those of your own module on any number of ranks, in this process, without hardware: a `cost.Traffic`.
`measure_collectives` times them between real ranks: `cost.Links`, of which a cluster is made. `ddp_twin` runs DDP's real reducer over a
network that is only reckoned: a `cost.TwinRun`.

`measure_collectives`: collectives timed between ranks of this machine, as a `cost.Links`.
"""

import os
from collections.abc import Sequence

from workbench.cluster.analysis.collectives import BUS_FACTORS, CostError
from workbench.cluster.analysis.links import Links
from workbench.core import run_directory
from workbench.core.checks import is_whole, real_number, whole_number
from workbench.runs.launch import environment
from workbench.runs.launch.experiments import run_link_sweep
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
"""What data parallelism uses."""
SIZES = tuple(4**power for power in range(6, 14))
"""Bytes: 4 KiB to 64 MiB, in steps of 4."""
REPEATS = 9
"""Blocks of each, whose median counts."""
SECONDS = 15.0
"""That blocks are made for, all together; they take longer where single collectives do."""


def measure_collectives(
    nproc_per_node: int | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    kinds: Sequence[str] = KINDS,
    device: str = "auto",
    backend: str = "auto",
    repeats: int = REPEATS,
    seconds: float = SECONDS,
    runs_dir: str | os.PathLike[str] | None = None,
) -> Links:
    """Time collectives between ranks of this machine: medians of blocks that take turns, and the latency and bandwidth behind them.

    Kept in a run directory, round by round: `links_of(run)` reads what one that was stopped had learnt.

    Args:
        nproc_per_node: ranks, 2 or more; None = one per GPU, two without.
        sizes: bytes of messages, at least two.
        kinds: collectives, of `cost.BUS_FACTORS`.
        device: "auto", "cuda" or "cpu".
        backend: "auto", "nccl" or "gloo".
        repeats: blocks of each kind and size.
        seconds: to share among all blocks, repeats × kinds × sizes of them. Each does one collective at least, and five come before
            the first, so that slow links take several times as long: large messages over gloo do, on few cores. Smaller `sizes` or fewer
            `repeats` help. The start comes beside.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        ValueError: something else was given, or more ranks than GPUs. Nothing was written.
        RunError: it failed; the run directory stays.
    """
    gpus = 0 if device == "cpu" else environment.gpu_count() or 0
    ranks = max(2, gpus) if nproc_per_node is None else nproc_per_node
    _check(ranks, sizes, kinds, repeats, seconds)
    spec = RunSpec(task="fashion-mlp", nproc_per_node=ranks, device=device, backend=backend)  # its task is not looked at
    if gpus and ranks > gpus and backend != "gloo":
        raise CostError(
            f"nproc_per_node={ranks}, and this machine has {gpus} GPU{'s' * (gpus > 1)}, of which each takes one rank: try "
            f'nproc_per_node={gpus}, or device="cpu" to see how it works'
        )
    order = {"kinds": list(kinds), "sizes": [int(size) for size in sizes], "repeats": repeats, "measuring_s": float(seconds)}
    return links_of(run_link_sweep(spec, order, runs_dir=runs_dir))


def links_of(run: Run | str | os.PathLike[str]) -> Links:
    """What a run of `measure_collectives` has measured, ended or not.

    Raises:
        DamagedRunError: its first round has not ended, or it is another run.
    """
    known = run if isinstance(run, Run) else Run.load(run)
    return Links.from_json(run_directory.read_json(known.path / run_directory.LINKS))


def _check(ranks: object, sizes: Sequence[int], kinds: Sequence[str], repeats: object, seconds: object) -> None:
    for name, value, least in (("nproc_per_node", ranks, 2), ("repeats", repeats, 1)):
        whole_number(name, value, least=least, error=CostError)
    real_number("seconds", seconds, above=0, error=CostError)
    if isinstance(kinds, str) or not kinds or any(kind not in BUS_FACTORS for kind in kinds):
        raise CostError(f"kinds={kinds!r}: a list of {', '.join(BUS_FACTORS)} is wanted")
    if len(set(sizes)) < 2 or not all(is_whole(size, least=1) for size in sizes):
        raise CostError(f"sizes={sizes!r:.80}: at least two different numbers of bytes are wanted, such as 4096 and 16777216")
