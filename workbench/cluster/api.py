"""Public functions about collectives: `measure_collectives` times them between real ranks, `ddp_twin` simulates DDP over a network."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from workbench.cluster.analysis.collective_cost import BUS_FACTORS, CostError, checked_ranks
from workbench.cluster.analysis.links import Links
from workbench.cluster.analysis.twin_run import Network, TwinLayer, TwinRun, closed_form, seconds_on
from workbench.core import run_directory, units
from workbench.core.checks import is_whole, real_number, whole_number
from workbench.core.progress import INTERRUPTED, say_what_was_interrupted
from workbench.core.synonyms import accept_synonyms
from workbench.runs.launch import environment
from workbench.runs.launch.experiments import run_link_sweep
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
"""Collectives that data parallelism uses."""
SIZES = tuple(4**power for power in range(6, 14))
"""Bytes: 4 KiB to 64 MiB, in steps of 4."""
REPEATS = 9
"""Timed blocks of each collective and size; their median counts."""
SECONDS = 15.0
"""Time for all blocks together; they take longer where single collectives do."""
MAX_TWIN_BYTES = 2**30
"""Most bytes of gradients that the simulator takes; it allocates as many again for the parameters, and for the buckets."""


@accept_synonyms
def measure_collectives(
    nproc_per_node: int | None = None,
    *,
    sizes: Sequence[int] = SIZES,
    kinds: Sequence[str] = KINDS,
    device: str = "auto",
    backend: str = "auto",
    repeat: int = REPEATS,
    budget_s: float = SECONDS,
    runs_dir: str | os.PathLike[str] | None = None,
) -> Links:
    """Time collectives between ranks of this machine: medians of interleaved blocks, and the latency and bandwidth fitted to them.

    Each round is written into a run directory. After Ctrl-C the result has the finished rounds, and `links_of(run)` reads those of a run
    that was stopped in another way.

    Args:
        nproc_per_node: number of ranks, 2 or more; None = one per GPU, or two without GPUs.
        sizes: sizes of messages in bytes, at least two.
        kinds: names of collectives, from `collective_cost.BUS_FACTORS`.
        device: "auto", "cuda" or "cpu".
        backend: "auto", "nccl" or "gloo".
        repeat: number of blocks of each kind and size.
        budget_s: seconds to share among all blocks (repeat × kinds × sizes). Each block does at least one collective, and five precede the
            first. So slow links, such as gloo with large messages on few cores, take several times as long; smaller `sizes` or a smaller
            `repeat` help. Starting the ranks is not included.
        runs_dir: where run directories go; None = `runs` in the current folder.

    Raises:
        ValueError: an argument is invalid, or there are more ranks than GPUs. Nothing was written.
        RunError: the run failed; its directory stays.
    """
    gpus = 0 if device == "cpu" else environment.gpu_count() or 0
    ranks = max(2, gpus) if nproc_per_node is None else nproc_per_node
    _check(ranks, sizes, kinds, repeat, budget_s)
    spec = RunSpec(task="fashion-mlp", nproc_per_node=ranks, device=device, backend=backend)  # its task is not looked at
    if gpus and ranks > gpus and backend != "gloo":
        raise CostError(
            f"nproc_per_node={ranks}, and this machine has {units.several(gpus, 'GPU')}, of which each takes one rank: try "
            f'nproc_per_node={gpus}, or device="cpu" to see how it works'
        )
    order = {"kinds": list(kinds), "sizes": [int(size) for size in sizes], "repeats": repeat, "measuring_s": float(budget_s)}
    with say_what_was_interrupted("measure_collectives"):
        run = run_link_sweep(spec, order, runs_dir=runs_dir)
    links = links_of(run)
    if run.ok:
        return links
    rounds = max(len(point.seconds) for point in links.points)
    return replace(links, notes=(*links.notes, f"{INTERRUPTED} after {rounds} of {repeat} rounds"))


def links_of(run: Run | str | os.PathLike[str]) -> Links:
    """What a run of `measure_collectives` has measured so far.

    Raises:
        DamagedRunError: its first round has not ended, or it is another kind of run.
    """
    known = run if isinstance(run, Run) else Run.load(run)
    return Links.from_json(run_directory.read_json(known.path / run_directory.LINKS))


def _check(ranks: object, sizes: Sequence[int], kinds: Sequence[str], repeat: object, budget_s: object) -> None:
    for name, value, least in (("nproc_per_node", ranks, 2), ("repeat", repeat, 1)):
        whole_number(name, value, least=least, error=CostError)
    real_number("budget_s", budget_s, above=0, what="seconds", error=CostError)
    if isinstance(kinds, str) or not kinds or any(kind not in BUS_FACTORS for kind in kinds):
        raise CostError(f"kinds={kinds!r}: expected a list of {', '.join(BUS_FACTORS)}")
    if len(set(sizes)) < 2 or not all(is_whole(size, least=1) for size in sizes):
        raise CostError(f"sizes={sizes!r:.80}: expected at least two different numbers of bytes, such as 4096 and 16777216")


@accept_synonyms
def ddp_twin(
    model: Any,
    network: Network,
    *,
    world_size: int,
    forward: float | None = None,
    backward: float | None = None,
    bucket_cap_mb: float | None = None,
    real: float | None = None,
    steps: int = 5,
    title: str = "",
) -> TwinRun:
    """Run torch's real DDP, in one process, over a simulated network of any number of ranks.

    Buckets, their order and the moments at which they are sent are those of torch's reducer; computing and sending are simulated. With a
    virtual clock, the result is exact and takes milliseconds, whatever the emulated times. In real time, threads sleep, so that this
    machine's other threads (and its noise) affect the result; the closed form then uses the computing time that was measured without the
    network.

    Args:
        model: a list of `TwinLayer`, or a torch.nn.Module (only the sizes of its parameters count; computing time is proportional to their
            bytes).
        network: a Link, a measured Sweep, a Cluster or its name, or a function from bytes to the seconds of their all-reduce.
        world_size: number of simulated ranks.
        forward: seconds of the forward, with a module.
        backward: seconds of the backward, with a module.
        bucket_cap_mb: DDP's bucket size; None = torch's default: 1 MiB for the first bucket, 25 MiB for the others.
        real: seconds of this machine for each emulated one, such as 0.1; None = a virtual clock.
        steps: number of steps, of which the median counts; two warm-up steps precede them.
        title: title of the result.

    Raises:
        ValueError: an argument is invalid, or this process already has a process group.
    """
    ranks = checked_ranks(world_size)
    if ranks < 2:
        raise CostError(f"world_size={ranks}: expected at least 2, since a single rank sends nothing")
    for name, value in (("bucket_cap_mb", bucket_cap_mb), ("real", real)):
        if value is not None:
            real_number(name, value, above=0, also=", or None", error=CostError)
    whole_number("steps", steps, least=1, error=CostError)
    layers = _layers(model, forward, backward)
    whole = sum(layer.size for layer in layers)
    if whole > MAX_TWIN_BYTES:
        raise CostError(
            f"{units.bytes_(whole)} of gradients: the simulation allocates them, up to {units.bytes_(MAX_TWIN_BYTES)}. Try fewer "
            "layers, or smaller ones with as much smaller a bandwidth and bucket_cap_mb: what matters is their ratio"
        )
    seconds_of = seconds_on(network, ranks)
    cap = None if bucket_cap_mb is None else int(bucket_cap_mb * 2**20)
    closed = closed_form(layers, seconds_of, cap)  # before anything starts: a function of the user's may fail
    from workbench.cluster.estimate.ddp_twin import median_step, simulate_steps

    step = median_step(
        simulate_steps(
            layers,
            ranks=ranks,
            seconds_of=seconds_of,
            bucket_cap_mb=bucket_cap_mb,
            scale=None if real is None else float(real),
            steps=1 if real is None else steps,
        )
    )
    return TwinRun(
        ranks=ranks,
        buckets=tuple(step.buckets),
        forward=step.forward,
        backward=step.backward,
        step=step.forward + step.end,
        closed=closed if real is None else closed_form(_stretched(layers, step.forward, step.backward), seconds_of, cap),
        real=None if real is None else float(real),
        title=title or ("" if isinstance(model, list | tuple) else type(model).__name__),
    )


def _stretched(layers: Sequence[TwinLayer], forward: float, backward: float) -> list[TwinLayer]:
    """The layers as long as they really took without the network: sleeping ends late, the more so on a busy machine."""
    nominal = [sum(getattr(layer, name) for layer in layers) for name in ("forward", "backward")]
    longer = [took / whole if whole else 1.0 for took, whole in zip((forward, backward), nominal, strict=True)]
    return [TwinLayer(size=layer.size, forward=layer.forward * longer[0], backward=layer.backward * longer[1]) for layer in layers]


def _layers(model: Any, forward: float | None, backward: float | None) -> Sequence[TwinLayer]:
    if isinstance(model, list | tuple):
        if not model or not all(isinstance(layer, TwinLayer) for layer in model):
            raise CostError(f"{model!r:.80}: expected a list of TwinLayer(size=…, forward=…, backward=…), with at least one")
        if forward is not None or backward is not None:
            raise CostError("forward= and backward= go with a module; each TwinLayer has its own")
        return model
    if not hasattr(model, "parameters"):
        raise CostError(f"{model!r:.80}: expected a list of TwinLayer, or a torch.nn.Module, not a {type(model).__name__}")
    if forward is None or backward is None or min(forward, backward) < 0:
        raise CostError(
            f"forward={forward!r}, backward={backward!r}: expected seconds of at least 0 with a module, such as of its Timeline"
        )
    sizes = [weight.numel() * 4 for weight in model.parameters() if weight.requires_grad]
    if not sizes:
        raise CostError(f"the {type(model).__name__} has no parameter that requires a gradient")
    whole = sum(sizes)
    return [TwinLayer(size=size, forward=forward * size / whole, backward=backward * size / whole) for size in sizes]
