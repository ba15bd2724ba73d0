"""Histories of stops find what a sampler loses and repeats, and find nothing in one that is exact."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

import workbench as wb
from workbench.data.resume_histories import ResumeHistories


class CountsOfRank(DistributedSampler[int]):
    """Resumes as several libraries do: by the samples that a rank was given, whatever the number of ranks is now."""

    yielded = 0

    def __iter__(self) -> Iterator[int]:
        for place, index in enumerate(super().__iter__()):
            if place >= self.yielded:
                self.yielded += 1
                yield index

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.yielded = state["yielded"]


class Broken(Sampler[int]):
    """It cannot be resumed."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_the_resumable_sampler_is_exact_with_workers_too() -> None:
    proof = wb.data.prove_resumable(histories=40, samples=200)
    assert proof.exact
    assert (proof.repeated, proof.lost, proof.uneven, proof.error) == (0, 0, 0, "")
    assert proof.stops > 40 < proof.given
    assert "exact in 40 histories" in str(proof)
    assert ResumeHistories.from_json(proof.to_json()) == proof
    assert list(proof.to_frame()["lost"]) == [0]
    assert wb.data.prove_resumable(histories=2, samples=60, workers=1, seed=1).exact


def test_a_sampler_that_counts_what_a_rank_got_is_found_out() -> None:
    data = range(10_000)

    def make(samples: int, rank: int, world_size: int) -> CountsOfRank:
        return CountsOfRank(data[:samples], world_size, rank)  # type: ignore[arg-type]

    proof = wb.data.prove_resumable(make, histories=30, samples=200)
    assert not proof.exact
    assert proof.repeated > 100
    assert proof.lost > 0
    assert "CountsOfRank: " in proof.verdict
    assert "samples repeated" in proof.verdict
    assert " with 0 workers for " in proof.worst


def test_an_error_of_a_sampler_is_told() -> None:
    proof = wb.data.prove_resumable(lambda samples, rank, world_size: Broken(), histories=5)
    assert (proof.exact, proof.error) == (False, "AssertionError")
    assert "AssertionError" in proof.verdict
