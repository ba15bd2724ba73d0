"""Pipelines: the share of time in which a stage has nothing to do."""

from workbench.checks import choice
from workbench.cost.collectives import CostError, checked_ranks

BUBBLES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
"""Schedules whose bubble is known."""


def bubble(stages: int, micro_batches: int, schedule: str = "1f1b", chunks: int = 1) -> float:
    """Idle time over the ideal time of a step, r; its share of the whole step is r / (1 + r).

    gpipe, 1f1b: (p−1)/m. interleaved, v chunks per stage: (p−1)/(m v). zb-h1: (p−1)/(3 m). zb-h2 (at twice the activations) and zb-v
    (at the activations of 1f1b, and twice the messages): about 0.
    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2; Qi et al. 2023 and 2024, arXiv 2401.10241 and 2405.15362.
    Left out: messages between stages, uneven stages, and a norm of all gradients, which makes zero-bubble schedules wait after all.

    Args:
        stages: p.
        micro_batches: m of a step and pipeline.
        schedule: one of "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v".
        chunks: v, of "interleaved".

    Raises:
        CostError: a schedule that is not known, or numbers that do not fit it.

    >>> bubble(8, 64, "interleaved", chunks=3) == 7 / 64 / 3
    True
    """
    p, m, v = (checked_ranks(value) for value in (stages, micro_batches, chunks))
    choice("schedule", schedule, BUBBLES, error=CostError)
    if v > 1 and schedule != "interleaved":
        raise CostError(f'chunks={v} with schedule="{schedule}": only "interleaved" has several chunks of layers on a stage')
    if schedule == "interleaved" and v > 1 and m % p:
        raise CostError(f'schedule="interleaved" takes micro-batches by groups of {p} (its stages), and {m} is no multiple of it')
    if schedule in ("zb-h2", "zb-v"):
        return 0.0
    return (p - 1) / (m * v * (3 if schedule == "zb-h1" else 1))
