"""`ddp_twin`: DDP's real reducer over an emulated network, with the closed form beside it."""

from collections.abc import Sequence
from typing import Any

from workbench.cluster.analysis.collectives import CostError, checked_ranks
from workbench.cluster.analysis.twin_run import Network, TwinLayer, TwinRun, closed_form, seconds_on
from workbench.core import units
from workbench.core.checks import real_number, whole_number

MOST_BYTES = 2**30
"""Bytes of gradients that the twin takes; it has as many again for the parameters, and for the buckets."""


def ddp_twin(
    model: Any,
    network: Network,
    *,
    ranks: int,
    forward: float | None = None,
    backward: float | None = None,
    bucket_cap_mb: float | None = None,
    real: float | None = None,
    steps: int = 5,
    title: str = "",
) -> TwinRun:
    """Run torch's real DDP, on one process, over a network of any number of ranks that is only reckoned.

    Buckets, their order and the moments at which they go are those of torch's reducer; how long computing and sending take is pretended.
    On the virtual clock the result is exact and takes milliseconds, whatever the emulated times; in real time threads sleep, so that other
    threads of this machine (and its noise) take part, and the closed form is told how long computing took without the network.

    Args:
        model: a list of `TwinLayer`, or a torch.nn.Module (only the sizes of its parameters count; they compute at a steady pace of bytes).
        network: a Link, a measured Sweep, a Cluster or its name, or a function from bytes to the seconds of their all-reduce.
        ranks: emulated ones.
        forward: seconds of the forward, with a module.
        backward: seconds of the backward, with a module.
        bucket_cap_mb: of DDP; None = torch's own: 1 MiB for the first bucket, 25 for the others.
        real: seconds of this machine for each emulated one, such as 0.1; None = a virtual clock.
        steps: of which the median counts; two more come before.
        title: for people.

    Raises:
        ValueError: something else was given, or this process has a process group already.
    """
    if checked_ranks(ranks) < 2:
        raise CostError(f"ranks={ranks}: a twin of at least 2 is wanted; one alone sends nothing")
    for name, value in (("bucket_cap_mb", bucket_cap_mb), ("real", real)):
        if value is not None:
            real_number(name, value, above=0, also=", or None", error=CostError)
    whole_number("steps", steps, least=1, error=CostError)
    layers = _layers(model, forward, backward)
    whole = sum(one.size for one in layers)
    if whole > MOST_BYTES:
        raise CostError(
            f"{units.bytes_(whole)} of gradients: the twin really has them, and takes up to {units.bytes_(MOST_BYTES)}. Try fewer layers, "
            "or smaller ones with as much smaller a bandwidth and bucket_cap_mb: what matters is their ratio"
        )
    seconds_of = seconds_on(network, ranks)
    cap = None if bucket_cap_mb is None else int(bucket_cap_mb * 2**20)
    closed = closed_form(layers, seconds_of, cap)  # before anything starts: a function of the user's may fail
    from workbench.cluster.estimate.ddp_twin import middle, steps_of

    found = middle(
        steps_of(
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
        buckets=tuple(found.buckets),
        forward=found.forward,
        backward=found.backward,
        step=found.forward + found.end,
        closed=closed if real is None else closed_form(_as_long(layers, found.forward, found.backward), seconds_of, cap),
        real=None if real is None else float(real),
        title=title or ("" if isinstance(model, list | tuple) else type(model).__name__),
    )


def _as_long(layers: Sequence[TwinLayer], forward: float, backward: float) -> list[TwinLayer]:
    """The layers as long as they really took without the network: sleeping ends late, the more so on a busy machine."""
    asked = [sum(getattr(one, name) for one in layers) for name in ("forward", "backward")]
    longer = [took / whole if whole else 1.0 for took, whole in zip((forward, backward), asked, strict=True)]
    return [TwinLayer(size=one.size, forward=one.forward * longer[0], backward=one.backward * longer[1]) for one in layers]


def _layers(model: Any, forward: float | None, backward: float | None) -> Sequence[TwinLayer]:
    if isinstance(model, list | tuple):
        if not model or not all(isinstance(one, TwinLayer) for one in model):
            raise CostError(f"{model!r:.80}: a list of TwinLayer(size=…, forward=…, backward=…) is wanted, with at least one")
        if forward is not None or backward is not None:
            raise CostError("forward= and backward= go with a module; each TwinLayer has its own")
        return model
    if not hasattr(model, "parameters"):
        raise CostError(f"{model!r:.80}: a list of TwinLayer, or a torch.nn.Module, is wanted, not a {type(model).__name__}")
    if forward is None or backward is None or min(forward, backward) < 0:
        raise CostError(
            f"forward={forward!r}, backward={backward!r}: seconds of at least 0 are wanted with a module, such as of its Timeline"
        )
    sizes = [weight.numel() * 4 for weight in model.parameters() if weight.requires_grad]
    if not sizes:
        raise CostError(f"the {type(model).__name__} has no parameter that wants a gradient")
    whole = sum(sizes)
    return [TwinLayer(size=size, forward=forward * size / whole, backward=backward * size / whole) for size in sizes]
