"""A global batch, divided over ranks and micro-batches without a remainder."""

from dataclasses import dataclass

from workbench.batch.scaled import number
from workbench.checks import whole_number

_LITTLE = 2
"""A micro-batch that is less than the largest by more than this wastes the device: a neighbouring global batch is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How a global batch is made up on each rank."""

    micro_batch: int
    """Samples at once."""
    accumulation: int
    """How often."""
    why_micro_batch: str
    """In words."""
    why_accumulation: str
    """In words."""
    notes: tuple[str, ...] = ()
    """What would divide better."""


def divided(global_batch: int, world_size: int, most: int) -> Parts:
    """Divide a global batch over ranks, in as few micro-batches as go, all of one size.

    >>> parts = divided(96, 2, 20)
    >>> parts.micro_batch, parts.accumulation
    (16, 3)

    Args:
        global_batch: samples per optimizer step.
        world_size: ranks.
        most: samples that a rank can take at once.

    Raises:
        ValueError: a number that is not whole and positive, or the ranks do not divide the batch.
    """
    for name, value in {"global_batch": global_batch, "world_size": world_size, "micro_batch": most}.items():
        whole_number(name, value, least=1, numpy=True)
    global_batch, world_size, most = int(global_batch), int(world_size), int(most)
    share, rest = divmod(global_batch, world_size)
    if rest:
        near = [batch for batch in (share * world_size, (share + 1) * world_size) if batch]
        raise ValueError(
            f"global_batch={global_batch} cannot be divided over {world_size} ranks without a remainder: "
            f"try {' or '.join(map(number, near))}, or other ranks"
        )
    micro = next(size for size in range(min(most, share), 0, -1) if share % size == 0)
    notes: tuple[str, ...] = ()
    if micro * _LITTLE < min(most, share):
        near = sorted({_fitting(share, most, way) * world_size for way in (-1, 1)})
        notes = (
            f"{number(share)} samples per rank have no better divisor up to {number(most)} than {number(micro)}: "
            f"a global batch of {' or '.join(map(number, near))} would take larger micro-batches",
        )
    return Parts(
        micro_batch=micro,
        accumulation=share // micro,
        why_micro_batch=f"the largest divisor of the {number(share)} samples per rank that is not above {number(most)}",
        why_accumulation="all of them at once" if micro == share else f"{number(share)} samples per rank / {number(micro)} at once",
        notes=notes,
    )


def _fitting(share: int, most: int, way: int) -> int:
    """The next share of a rank, up or down, that is a whole number of full micro-batches."""
    return most * max(1, share // most + (way > 0))
