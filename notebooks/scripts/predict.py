"""Predicts a step from what was measured without workers; notebook 01 asks for this formula, so try it yourself first."""


def step_with_workers(compute: float, wait: float, processor: float, workers: int, cores: float) -> float:
    """Seconds of a step whose batches are made by workers: the largest of three.

    Args:
        compute: seconds of the step without its wait for data.
        wait: seconds that making a batch takes.
        processor: seconds of the whole step, making the batch included, in which a processor works.
        workers: processes that make batches.
        cores: cores that this rank has.
    """
    return max(compute, wait / workers, processor / cores)
