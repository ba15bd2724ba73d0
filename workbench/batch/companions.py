"""What goes along with a learning rate when the batch changes: warm-up, momentum, weight decay, the size of the data."""

import math
from collections.abc import Iterator

from workbench.batch.described import Described
from workbench.batch.scaled import number
from workbench.optimizer_table import OPTIMIZERS

WARMUP_EPOCHS = 5
"""Over which Goyal et al. 2017 (arXiv 1706.02677, section 2.2) raise the learning rate of a large batch."""
FEW_STEPS = 10
"""An epoch of fewer steps than this is no longer "batch far below the data", which all of the rules assume (Smith et al. 2018)."""


def warmup(given: int | None, batch: int, to_batch: int, *, rises: bool, dataset_size: int | None) -> tuple[int, str]:
    """Steps of the warm-up at the new batch, and why.

    A warm-up that there is keeps its length in samples. Where there is none and the learning rate rises it takes WARMUP_EPOCHS, if it is
    known how long an epoch is.

    Args:
        given: steps at the old batch; None or 0 = no warm-up.
        batch: samples per step, before.
        to_batch: after.
        rises: the learning rate becomes larger.
        dataset_size: samples of an epoch; None = not known.
    """
    if given:
        steps = max(1, math.ceil(given * batch / to_batch - 1e-9))
        return steps, f"warm-up: {number(given * batch)} samples as before, which are {number(steps)} steps now"
    if not rises:
        return 0, "warm-up: none, as before"
    if dataset_size is None:
        return 0, (
            f"warm-up: none, as before; a larger learning rate is safer with one: {WARMUP_EPOCHS} epochs are usual (give dataset_size=…), "
            "or your own warmup_steps"
        )
    steps = max(1, math.ceil(WARMUP_EPOCHS * dataset_size / to_batch))
    return steps, f"warm-up: {WARMUP_EPOCHS} epochs of {number(dataset_size)} samples (Goyal et al. 2017) are {number(steps)} steps"


def momentum(optimizer: Described, ratio: float) -> Iterator[str]:
    """What becomes of momentum: nothing; but it averages over more samples."""
    kept = optimizer.get("momentum")
    if not kept or ratio == 1:
        return
    if optimizer.name == "lars":
        yield f"momentum={number(kept)} is kept; the learning rate stands inside its average here, so a change takes some steps to arrive"
    elif optimizer.name == "sgd":
        yield (
            f"momentum={number(kept)} is kept: torch's SGD multiplies with the learning rate outside of the average, so no momentum "
            "correction is needed when it changes (Goyal et al. 2017). What counts is lr / (1 - momentum): more momentum would be more "
            "learning rate (Smith et al. 2018)"
        )
    else:
        yield f"momentum={number(kept)} is kept; the rule was derived without it"


def decay(optimizer: Described, ratio: float, factor: float) -> Iterator[str]:
    """What becomes of the time over which weights are forgotten: batch / (lr × weight_decay) samples."""
    kept, longer = optimizer.get("weight_decay"), ratio / factor
    if not kept or math.isclose(longer, 1, rel_tol=0.01):
        return
    decoupled = OPTIMIZERS[optimizer.name].decoupled
    if decoupled or optimizer.name == "sgd":
        source = " (Wang and Aitchison 2024)" if decoupled else ""
        yield (
            f"weight_decay={number(kept)} is kept: weights are forgotten over {number(longer)} times as many samples "
            f"(batch / (lr × weight_decay)); weight_decay={number(kept * longer)} would keep that time{source}"
        )


def data(batch: int, dataset_size: int | None) -> Iterator[str]:
    """What a batch means beside the data."""
    if dataset_size is None or batch * FEW_STEPS <= dataset_size:
        return
    if batch > dataset_size:
        yield (
            f"a batch of {number(batch)} is more than the {number(dataset_size)} samples there are: no step takes fresh samples only; "
            "no rule reaches here"
        )
    else:
        yield (
            f"an epoch of {number(dataset_size)} samples is {dataset_size / batch:.1f} steps: the rules assume a batch far below the data"
        )
