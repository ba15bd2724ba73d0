"""Fixtures of the tests of training: a process group of the test's own process."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from workbench.runs.spec import RunSpec
from workbench.train.ranks import Ranks


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """A process group of this process alone, for the tests of a module."""
    yield Ranks.join(RunSpec(task="text-gpt", device="cpu"))
    dist.destroy_process_group()
