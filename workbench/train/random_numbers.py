"""The random numbers of a training process: seeds its generators, and saves and restores their states for a checkpoint."""

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def mixed_seed(*numbers: int) -> int:
    """A seed from several numbers, such as a seed, an epoch and a position, of 63 bits; neighbours have nothing in common."""
    digest = hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of the generators of torch (on the host and on `device`), numpy and Python, in types that `weights_only` loading takes."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    version, numbers, next_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, torch.tensor(numbers), next_gauss],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators back into a state of `random_state`.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: it is no such state.
    """
    torch.set_rng_state(state["torch"].cpu())
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.cpu().numpy().astype(np.uint32), position, has_gauss, gauss))
    version, numbers, next_gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), next_gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the generators of torch, numpy and Python begin with a seed; afterwards they are as they were."""
    before = random_state(device)
    seed_all(seed)
    try:
        yield
    finally:
        restore_random_state(before, device)
