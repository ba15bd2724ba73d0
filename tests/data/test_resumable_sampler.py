"""A sampler goes on anywhere, on other ranks, workers and batches, without losing or repeating a sample; mixtures too."""

import itertools
import json
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import workbench as wb
from workbench.data.resumable_sampler import Mixture, ResumableSampler, SampleIndex


class Numbers(Dataset[int]):
    """Samples that are their own indices."""

    def __init__(self, samples: int, first: int = 0) -> None:
        self.samples, self.first = samples, first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return self.first + index


KINDS: list[dict[str, Any]] = [{}, {"shuffle": False}, {"blocks": 7, "window": 3}]


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(1, 300),
    parts=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 20), st.integers(0, 9)), max_size=4),
    last=st.tuples(st.integers(1, 6), st.integers(1, 20)),
    kind=st.sampled_from(KINDS),
)
def test_no_history_of_stops_loses_or_repeats_a_sample(
    samples: int, parts: list[tuple[int, int, int]], last: tuple[int, int], kind: dict[str, Any]
) -> None:
    state = ResumableSampler(samples, rank=0, world_size=1, seed=4, **kind).state_dict()
    seen: list[int] = []
    for ranks, batch, steps in [*parts, (*last, samples)]:
        samplers = [ResumableSampler(samples, rank=rank, world_size=ranks, **kind) for rank in range(ranks)]
        for sampler in samplers:
            sampler.load_state_dict(json.loads(json.dumps(state)))  # a state is plain JSON
        orders = [iter(sampler) for sampler in samplers]
        assert len({len(sampler) for sampler in samplers}) == 1
        for _ in range(steps):
            given = [list(itertools.islice(order, batch)) for order in orders]
            assert len({len(each) for each in given}) == 1  # all ranks have equally many
            if not given[0]:
                break
            seen += [index for each in given for index in each]
            for sampler in samplers:
                sampler.advance(ranks * len(given[0]))
        state = samplers[0].state_dict()
    assert len(seen) == len(set(seen)) == state["consumed"]
    assert samples - len(seen) < last[0]  # the tail that the last ranks cannot share
    alone = ResumableSampler(samples, rank=0, world_size=1, seed=4, **kind)
    assert set(list(alone)[: len(seen)]) == set(seen)


@given(samples=st.integers(1, 60), ranks=st.integers(1, 7), consumed=st.integers(0, 60))
def test_a_tail_is_declared(samples: int, ranks: int, consumed: int) -> None:
    for tail in ("drop", "repeat"):
        samplers = [ResumableSampler(samples, rank=rank, world_size=ranks, tail=tail) for rank in range(ranks)]
        for sampler in samplers:
            sampler.consumed = min(consumed, samples)
        declared, left = samplers[0].tail_samples, samples - samplers[0].consumed
        given = [index for sampler in samplers for index in sampler]
        assert len(given) == sum(map(len, samplers)) == left + (-declared if tail == "drop" else declared)
        if tail == "drop" or ranks <= samples:
            assert len(given) - len(set(given)) == (0 if tail == "drop" else declared if consumed == 0 else len(given) - len(set(given)))
        assert declared < ranks


def test_a_loader_with_workers_is_counted_by_what_it_gave_and_not_by_what_it_reads_ahead() -> None:
    data = Numbers(50)
    sampler = ResumableSampler(data, seed=2)
    loader = DataLoader(data, 8, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    seen: list[int] = []
    for batch in sampler.batches(loader):
        seen += batch.tolist()
        if len(seen) == 24:
            break
    state = sampler.state_dict()
    assert state == {"seed": 2, "epoch": 0, "consumed": 24, "samples": 50, "order": "shuffled"}
    again = ResumableSampler(data, seed=9)
    again.load_state_dict(state)
    rest = [int(each) for batch in again.batches(DataLoader(data, 5, sampler=again)) for each in batch]
    assert sorted(seen + rest) == list(range(50))
    assert (again.epoch, again.consumed) == (1, 0)
    again.set_epoch(1)  # the present one: nothing is lost
    again.consumed = 10
    again.set_epoch(1)
    assert again.consumed == 10
    with pytest.raises(ValueError, match=r"this loader has a SequentialSampler and batch_size=5: try DataLoader"):
        next(again.batches(DataLoader(data, 5)))


def test_what_does_not_fit_is_refused() -> None:
    sampler = ResumableSampler(40, rank=0, world_size=2)
    state = sampler.state_dict()
    with pytest.raises(ValueError, match=r"its samples is 40, this sampler's is 41; build the sampler as it was, or begin a new epoch"):
        ResumableSampler(41).load_state_dict(state)
    with pytest.raises(ValueError, match=r"its order is 'shuffled', this sampler's is 'in 4 blocks"):
        ResumableSampler(40, blocks=10).load_state_dict(state)
    with pytest.raises(ValueError, match=r"not the state of a ResumableSampler: it has no 'seed'; it has yielded"):
        sampler.load_state_dict({"yielded": 3})
    with pytest.raises(ValueError, match=r"samples=41: a whole number"):
        sampler.advance(41)
    with pytest.raises(ValueError, match=r"rank=2: "):
        ResumableSampler(40, rank=2, world_size=2)
    with pytest.raises(ValueError, match=r"tail='pad': allowed are 'drop', 'repeat'"):
        ResumableSampler(40, tail="pad")
    with pytest.raises(ValueError, match=r"a dataset with a length, or the number of samples, is needed; this is a generator"):
        ResumableSampler(x for x in ())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"leave out blocks or shuffle=False"):
        ResumableSampler(40, blocks=10, shuffle=False)
    with pytest.raises(ValueError, match=r"dataset=0: a whole number of at least 1 is allowed \(samples\)"):
        ResumableSampler(0)


def test_seeds_follow_from_the_sample_wherever_it_comes() -> None:
    alone = {int(index): index.seed for index in ResumableSampler(30, seed=1, seeded=True) if isinstance(index, SampleIndex)}
    for rank in range(3):
        for index in ResumableSampler(30, rank=rank, world_size=3, seed=1, seeded=True):
            assert isinstance(index, SampleIndex)
            assert pickle.loads(pickle.dumps(index)).seed == alone[int(index)]
    later = ResumableSampler(30, seed=1, seeded=True)
    later.set_epoch(1)
    assert len({*alone.values(), *(index.seed for index in later if isinstance(index, SampleIndex))}) == 60


def test_a_mixture_gives_its_shares_and_resumes() -> None:
    mixture = Mixture({"web": Numbers(600), "code": Numbers(30, first=10_000)}, {"web": 3, "code": 1}, samples=400, period=100)
    assert mixture.repeats == {"web": 0.5, "code": 400 / 4 / 30}
    assert (len(mixture), mixture[600], mixture.source_of(629)) == (630, 10_000, ("code", 29))
    sampler = ResumableSampler(mixture, seed=5)
    loader = DataLoader(mixture, 20, sampler=sampler)
    first = [int(each) for batch in sampler.batches(loader) for each in batch]
    assert sum(each >= 10_000 for each in first) == 100
    assert sum(each >= 10_000 for each in first[:100]) == 25
    assert sampler.epoch == 1
    second = [int(each) for batch in sampler.batches(loader) for each in batch]
    web = [each for each in (*first, *second) if each < 10_000]
    assert len(web) == 600 == len(set(web))  # two epochs of a half: each sample once
    state = ResumableSampler(mixture, seed=5).state_dict() | {"consumed": 200}
    ranks = [ResumableSampler(mixture, rank=rank, world_size=4) for rank in range(4)]
    for each in ranks:
        each.load_state_dict(state)
    rest = [mixture[index] for sampler in ranks for index in sampler]
    assert sorted(rest) == sorted(first[200:])
    with pytest.raises(ValueError, match=r"a Mixture has an order of its own"):
        ResumableSampler(mixture, blocks=10)
    with pytest.raises(IndexError, match=r"sample 630 of 630"):
        mixture[630]


def test_public_names() -> None:
    assert wb.data.ResumableSampler is ResumableSampler
    assert {"Mixture", "ResumableSampler", "prove_resumable"} <= set(dir(wb.data))
    with pytest.raises(AttributeError, match=r"module 'workbench.data' has no attribute 'lunch'; it offers .*Mixture"):
        wb.data.lunch  # noqa: B018
    assert torch.utils.data.Sampler in ResumableSampler.__mro__
