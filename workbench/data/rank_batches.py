"""How many batches each rank gets from a loader: by a sampler that knows its rank, or as the ranks tell each other."""

import copy
import json
import time
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from workbench.data.resumable_sampler import ResumableSampler

PATIENCE = 20.0
"""Seconds that a rank waits for the others to say how many batches they have; those that are not examined never say it."""
EQUAL = (DistributedSampler, ResumableSampler)
"""Samplers that give all ranks equally many samples by design."""
KEY = "workbench.data.doctor"
ASK_ALL = "call doctor on all ranks"
ALL = "all"
"""How a question ends that all ranks have answered; another one ends with the number of the rank that gave up."""


def batches_of_ranks(loader: "DataLoader[Any]") -> tuple[dict[int, int], str]:
    """The number of batches of each rank, and how it is known; without any, why it is not.

    In a process group of several ranks, each of them has to call it; those that do not are waited for `PATIENCE` seconds.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return _from_all_ranks(loader, dist.get_rank(), dist.get_world_size())
    if isinstance(loader.dataset, IterableDataset):
        return {}, f"nothing says which part of the stream a rank gets: {ASK_ALL}"
    return _by_sampler(loader)


def in_words(batches: int) -> str:
    """A number of batches, as in "1 batch"."""
    return f"{batches} batch{'es' * (batches != 1)}"


def samplers_of(loader: "DataLoader[Any]") -> dict[str, Any]:
    """What decides on the order of a loader, from the outside in: how it is reached → the sampler.

    Batch samplers are looked through: where one is given, `loader.sampler` is another, which torch makes and does not use.
    """
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    place, found = "loader.sampler" if sampler is loader.sampler else "loader.batch_sampler", dict[str, Any]()
    while sampler is not None and len(found) < 5:
        found["loader.sampler" if sampler is loader.sampler else place] = sampler
        place, sampler = f"{place}.sampler", getattr(sampler, "sampler", None)
    return found


def _by_sampler(loader: "DataLoader[Any]") -> tuple[dict[int, int], str]:
    """What a sampler that knows its rank would give the others. Batch samplers are looked through."""
    chain = list(samplers_of(loader).values())
    depth = next((depth for depth, each in enumerate(chain) if _ranks(each) is not None), -1)
    chain, size = chain[: depth + 1], _ranks(chain[depth])
    if size is None:
        return {}, f"nothing in the loader says which rank it is for: {ASK_ALL}"
    samples, counts = set(), {}
    for rank in range(size):
        own = copy.copy(chain[-1])
        own.rank = rank
        samples.add(len(own))
        for outer in reversed(chain[:-1]):
            inner, own = own, copy.copy(outer)
            own.sampler = inner
        counts[rank] = len(own)
    kind = type(chain[-1]).__name__
    if size > 1 and len(samples) == 1 and not isinstance(chain[-1], EQUAL):
        return {}, f"{size} ranks have {in_words(counts[0])} each by the len() of {kind}, which may not follow the rank: {ASK_ALL}"
    return counts, "" if isinstance(chain[-1], EQUAL) else f" (by the len() of {kind})"


def _ranks(sampler: Any) -> int | None:
    """For how many ranks a sampler divides the samples; None = it does not know."""
    size = getattr(sampler, "num_replicas", getattr(sampler, "world_size", None))
    return size if isinstance(size, int) and size > 0 and hasattr(sampler, "rank") else None


def _from_all_ranks(loader: "DataLoader[Any]", rank: int, ranks: int) -> tuple[dict[int, int], str]:
    try:
        mine = len(loader)
    except TypeError:  # it has none, as that of a stream
        mine = -1
    order = loader.sampler if loader.batch_size or loader.batch_sampler is None else loader.batch_sampler
    about = f"{type(loader.dataset).__name__}, batch_size={loader.batch_size}, {type(order).__name__}"
    answers = told_by_all(dist.distributed_c10d._get_default_store(), rank, ranks, json.dumps([about, mine]), PATIENCE)
    if len(answers) < ranks:
        return {}, f"{len(answers)} of {ranks} ranks have been asked: call doctor on all of them"
    told = {each: json.loads(answer) for each, answer in sorted(answers.items())}
    other = next((each for each in told if told[each][0] != told[0][0]), None)
    if other is not None:
        loaders = f"rank 0 about {told[0][0]}; rank {other} about {told[other][0]}"
        return {}, f"ranks were asked about different loaders ({loaders}): call doctor on all of them with the same one"
    counts = {each: int(count) for each, (_, count) in told.items()}
    if min(counts.values()) < 0:
        return {}, "a loader without a length may end sooner on one rank than on another"
    return counts, ""


def told_by_all(store: Any, rank: int, ranks: int, answer: str, patience: float) -> dict[int, str]:
    """The answers of the ranks of a process group, by rank: of all of them, or of fewer where a rank has waited for too long.

    A question ends once, for all ranks: either all have answered it, or one of them has given up, whose answer the others then leave out.
    The first rank that writes how it ends decides, and the others follow. The next call asks the next question.
    """
    ended = f"{KEY}/ended/{rank}"  # in the store, as a new process group begins anew
    number = store.add(ended, 0)
    while store.check([end := f"{KEY}/{number}/end"]):
        number = store.add(ended, 1)
    keys = {each: f"{KEY}/{number}/{each}" for each in range(ranks)}
    store.set(keys[rank], answer)
    limit, told = time.monotonic() + patience, dict[int, str]()
    while True:
        told |= _said(store, {each: key for each, key in keys.items() if each not in told})
        if len(told) == ranks or time.monotonic() > limit or store.check([end]):
            break
        time.sleep(0.01)
    decided = store.compare_set(end, "", ALL if len(told) == ranks else str(rank)).decode()  # what another rank wrote first stays
    if decided == ALL:
        return told | _said(store, keys)
    return {each: said for each, said in told.items() if each == rank or str(each) != decided}


def _said(store: Any, keys: dict[int, str]) -> dict[int, str]:
    return {each: store.get(key).decode() for each, key in keys.items() if store.check([key])}
