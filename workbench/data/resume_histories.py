"""ResumeHistories: whether a sampler loses or repeats samples when a training stops and resumes on other ranks, workers and batches."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from workbench.core.checks import whole_number
from workbench.core.codec import JsonDataclass
from workbench.core.display.table import Shown, Table
from workbench.core.synonyms import accept_synonyms
from workbench.data.resumable_sampler import ResumableSampler

MakeSampler = Callable[[int, int, int], Any]
"""Makes a sampler with `state_dict` and `load_state_dict` of (samples, rank, world_size)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeHistories(JsonDataclass, Shown):
    """What random histories of stops and resumes show about a sampler."""

    sampler: str
    """Its class."""
    histories: int
    """Histories of an epoch that were tried."""
    stops: int
    """Stops in them, each followed by another number of ranks, workers, or another batch."""
    given: int
    """Samples that were given, by all ranks."""
    repeated: int
    """Samples that came again in their epoch."""
    lost: int
    """Samples that did not come, beyond the tail that the last layout of ranks and batches cannot share."""
    tail: int
    """Samples left out as the tail, less than a step's."""
    uneven: int
    """Histories in which a rank had fewer batches than another, where DDP would hang."""
    worst: str = ""
    """The history with most faults: samples, then ranks × batch, workers and steps of each part; "" = no fault."""
    error: str = ""
    """What the sampler raised first; such a history ends there."""

    @property
    def exact(self) -> bool:
        """Whether no sample was lost or repeated, and all ranks got equally many batches."""
        return not (self.repeated or self.lost or self.uneven or self.error)

    @property
    def verdict(self) -> str:
        """The answer in a sentence."""
        if self.exact:
            found = f"{self.sampler}: exact in {self.histories} histories with {self.stops} stops"
            return f"{found}; {self.tail} samples left out as declared tail."
        faults = [f"{self.repeated} of {self.given} samples repeated" * bool(self.repeated), f"{self.lost} lost" * bool(self.lost)]
        faults += [f"ranks with unequal batches in {self.uneven} histories" * bool(self.uneven), self.error]
        return f"{self.sampler}: {', '.join(filter(None, faults))}. Worst: {self.worst}."

    @property
    def table(self) -> Table:
        """The counts, and the verdict."""
        names = ("histories", "stops", "given", "repeated", "lost", "tail", "uneven")
        return Table(
            columns=names, rows=[tuple(getattr(self, name) for name in names)], title=f"Resume of {self.sampler}", note=self.verdict
        )

    def __repr__(self) -> str:
        return f"ResumeHistories({self.sampler!r}, exact={self.exact}, histories={self.histories})"


class _Numbers(Dataset[int]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return int(index)


@accept_synonyms
def prove_resumable(
    make: MakeSampler | None = None, *, histories: int = 100, samples: int = 300, workers: int = 0, seed: int = 0
) -> ResumeHistories:
    """Stop and resume trainings at random, with other ranks, workers and batch sizes, and count which samples they get.

    All ranks are in this process. Each history is an epoch over a random number of samples in one to five parts. Between two parts, the
    state of rank 0 is saved and all samplers are created anew, for other numbers of ranks.

    Args:
        make: a function from (samples, rank, world_size) to a sampler; None = a `ResumableSampler`.
        histories: number of epochs.
        samples: the largest number of samples in an epoch.
        workers: the largest number of worker processes of a loader; 0 = none.
        seed: seed of the histories.

    Raises:
        ValueError: a number is out of range.
    """
    whole_number("histories", histories, least=1)
    whole_number("samples", samples, least=1)
    whole_number("workers", workers, least=0)
    rng = random.Random(seed)
    make = make or (lambda samples, rank, world_size: ResumableSampler(samples, rank=rank, world_size=world_size, seed=seed))
    name, total, worst, error = "", Counter[str](), (0, ""), ""
    for _ in range(histories):
        count = rng.randint(1, samples)
        parts = [(rng.randint(1, 6), rng.randint(1, 16), rng.randint(0, workers), rng.randint(0, 12)) for _ in range(rng.randint(0, 4))]
        parts.append((rng.randint(1, 6), rng.randint(1, 16), rng.randint(0, workers), samples))
        try:
            name, found = _history(make, count, parts)
        except Exception as raised:  # of any sampler
            error = error or f"{type(raised).__name__}: {raised}".rstrip(": ")[:200]
            found = Counter(stops=len(parts) - 1)
        total += found
        faults = found["repeated"] + found["lost"] + found["uneven"]
        if faults > worst[0] or (error and not worst[1]):
            told = ", ".join(f"{ranks} × {batch} with {loaders} workers for {steps} steps" for ranks, batch, loaders, steps in parts)
            worst = faults, f"{count} samples: {told}"
    kinds = {kind: total[kind] for kind in ("stops", "given", "repeated", "lost", "tail", "uneven")}
    return ResumeHistories(sampler=name or "sampler", histories=histories, worst=worst[1], error=error, **kinds)


def _history(make: MakeSampler, count: int, parts: list[tuple[int, int, int, int]]) -> tuple[str, Counter[str]]:
    """The class of the sampler, and what one epoch has given."""
    seen: Counter[int] = Counter()
    state, name, uneven, step = None, "", 0, 1
    for ranks, batch, workers, steps in parts:
        samplers = [make(count, rank, ranks) for rank in range(ranks)]
        name = type(samplers[0]).__name__
        loaders = [
            DataLoader(_Numbers(count), batch, sampler=sampler, num_workers=workers, multiprocessing_context="fork" if workers else None)
            for sampler in samplers
        ]
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(state)
        streams = [
            iter(sampler.batches(loader) if hasattr(sampler, "batches") else loader)
            for sampler, loader in zip(samplers, loaders, strict=True)
        ]
        state, step = samplers[0].state_dict(), ranks
        for _ in range(steps):
            given = [next(stream, None) for stream in streams]
            if any(each is None for each in given):
                uneven += any(each is not None for each in given)
                break
            uneven += len({len(each) for each in given if each is not None}) > 1
            for each in given:
                seen.update(each.tolist() if each is not None else ())
            state = samplers[0].state_dict()
        del streams
    missing = count - len(seen)
    tail = min(missing, step - 1)
    return name, Counter(
        stops=len(parts) - 1, given=seen.total(), repeated=seen.total() - len(seen), lost=missing - tail, tail=tail, uneven=bool(uneven)
    )
