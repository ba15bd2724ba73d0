"""Rebuilt: the buckets that DDP has from its second step on, in which gradients lie in the order in which they came."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workbench.cost.overlap import CAP, FIRST
from workbench.cost.sent import Sent


def rebuilt(
    calls: Sequence[Sent],
    places: Sequence[int],
    model: nn.Module,
    order: Sequence[nn.Parameter],
    names: Mapping[int, str],
    *,
    like: Sent,
    looking: bool = False,
) -> list[Sent]:
    """The collectives of a step with the buckets of all later ones in the place of the first's.

    torch's own function fills the buckets. DDP that looks for unused parameters keeps its first ones, in the order of the parameters, and
    tells all ranks which were used: 4 bytes for each.

    Args:
        calls: of a first step.
        places: of the buckets among them; none where a gradient was missing.
        model: whose they are; what is no DDP has no buckets. It does not look for unused parameters.
        order: parameters in the order in which gradients came.
        names: id of a parameter → name of its module.
        like: a bucket.
        looking: does the model that is meant look for unused parameters?
    """
    if not isinstance(model, DistributedDataParallel):
        return list(calls)
    later = next((place for place, one in enumerate(calls) if one.phase == "optimizer"), len(calls))
    begin = min(places, default=later)
    rest = [one for place, one in enumerate(calls) if place not in set(places)]
    known = [weight for weight in model.parameters() if weight.requires_grad] if looking else list(order)
    made = [
        replace(
            like,
            size=sum(known[place].numel() * known[place].element_size() for place in bucket),
            module=common([names.get(id(known[place]), "") for place in bucket]),
        )
        for bucket in filled(known, model, ordered=not looking)
    ]
    if looking:
        made.append(replace(like, size=4 * len(known)))
    if made:
        made[-1] = replace(made[-1], waited=True)  # what comes last is there when nothing is left to compute
    return [*rest[:begin], *made, *rest[begin:]]


def filled(known: Sequence[nn.Parameter], model: DistributedDataParallel, *, ordered: bool) -> list[list[int]]:
    """Places of parameters by bucket, as torch puts them there, by their turn.

    Args:
        known: parameters.
        model: whose limits to use.
        ordered: they stand in the order in which their gradients come; else in that of the model.
    """
    if not known:
        return []
    given = None if getattr(model, "bucket_bytes_cap_default", True) else int(model.bucket_bytes_cap)
    limits = [given or FIRST, given or CAP]
    indices = [list(range(len(known)))] if ordered else []
    buckets, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
        list(known), limits, [False] * len(known), *indices
    )
    found = [list(bucket) for bucket in buckets]
    return found if ordered else found[::-1]


def common(names: Sequence[str]) -> str:
    """The part that names of modules begin with.

    >>> common(["layers.3.mlp", "layers.3.attn"]), common(["a", "b"])
    ('layers.3', '')
    """
    shared: list[str] = []
    for words in zip(*(name.split(".") for name in names), strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared)
