"""Derives remedies that no experiment tries: fewer micro-batches, sparse gradients of embedding tables, less code of the step's own."""

import math
from collections.abc import Iterator

from workbench.core import units
from workbench.diagnosis.analysis.causes import own_code
from workbench.diagnosis.analysis.costs import widened
from workbench.diagnosis.analysis.remedy import MIN_BATCH_SPEEDUP, Case, Remedy, ceiling, if_worthwhile
from workbench.runs.spec import RunSpec

ROW_COST = {"fused": 50.0, "": 8.0}
"""Implementation of the optimizer → how many times as long as it SparseAdam takes for a row. Measured on one core with 200,000 rows of 32
numbers, of which 0.1 to 20 % have a gradient: 4 to 8 times, and beside the fused Adam 24 to 47 times; not measured on GPUs. With half or
twice as much, the gain is that of half or twice the rows; where few rows are used it hardly changes."""
TAKERS = ("Adam", "NAdam")
"""How the names of optimizers begin for whose tables SparseAdam can take over. For others nothing is known: the momentum of SGD grows with
every row that was ever used, and fused SGD and Adagrad refuse sparse gradients."""
COSTS = (
    "a row's moments change only in steps that use it, so the weights differ; weight decay and clip_grad_norm_ do not take sparse "
    "gradients: leave the tables out of both; a second optimizer to zero, step and save"
)


def sparse_tables(case: Case) -> Iterator[Remedy | None]:
    """Sparse gradients for embedding tables, where the optimizer updates many rows that the step does not use.

    At least: backward no longer writes a gradient as large as the table, and that saving is not counted. On a GPU what a row
    costs is not known: there it is a ceiling of what the optimizer saves.
    """
    e, c = case.evidence, case.costs
    kind, _, implementation = (e.optimizer or "").partition("(")
    if e.tables is None or not e.parameters or not kind.startswith(TAKERS) or e.world_size > 1 or c.optimizer.mid <= 0:
        return
    cpu = e.device == "cpu"
    cost = ROW_COST.get(implementation.removesuffix(")"), ROW_COST[""]) if cpu else 1.0
    saved = min(1.0, e.tables.numbers / e.parameters) * max(0.0, 1 - cost * e.tables.touched)
    speedup, low = (case.model.without(saved * seconds) for seconds in (c.optimizer.mid, c.optimizer.low))
    if speedup < MIN_BATCH_SPEEDUP:
        return
    names = ", ".join(e.tables.names[:3]) + ", …" * (len(e.tables.names) > 3)
    share = units.percent(e.tables.touched)
    yield Remedy(
        name="sparse gradients",
        what=f"Give the embedding table{'s' * (len(e.tables.names) > 1)} {names} sparse gradients, sparse=True in nn.Embedding or "
        f"nn.EmbeddingBag: update them with torch.optim.SparseAdam, and everything else with {kind} as "
        f"now. A step uses {share} of the rows, and only these are then updated.",
        speedup=speedup,
        low=min(low, speedup) if cpu else 1.0,
        high=math.inf if cpu else speedup,
        ceiling=not cpu,
        formula=f"the optimizer takes {units.seconds(c.optimizer.mid)}, {units.percent(e.tables.numbers / e.parameters)} of the parameters "
        f"are in the tables, {share} of their rows have a gradient, and updating such a row takes "
        f"{f'{cost:g} times as long' if cpu else 'as long as now'}; what backward saves is not counted",
        costs=COSTS,
    )


def fewer_micro_batches(case: Case) -> Iterator[Remedy | None]:
    """The samples of a step in one micro-batch, where forward and backward of a micro-batch take time that does not grow with it."""
    e, c, count = case.evidence, case.costs, case.evidence.micro_batches
    arm = e.arm("doubled")
    if arm is None or count < 2 or math.isnan(c.fixed):
        return
    slope = c.cached / (arm.samples - 1)  # of `fixed` with what the arm saved
    saved, gone = widened(e, arm), 1 - 1 / count
    seconds = [gone * max(0.0, c.fixed + slope * (end - saved.mid)) for end in (saved.low, saved.mid, saved.high)]
    low, speedup, high = (case.model.without(each) for each in seconds)
    size = case.model.knobs["micro_batch"] if isinstance(case.spec, RunSpec) else None
    yield if_worthwhile(
        Remedy(
            name="fewer micro-batches",
            change=case.turnable({"micro_batch": size * count, "accumulation": 1}) if size else {},
            what=f"Put the samples of the {count} micro-batches of a step into one, or into as few as memory allows.",
            speedup=speedup,
            low=min(low, speedup),
            high=max(high, speedup),
            formula=f"measured: with {units.times(arm.samples)} the samples in each micro-batch, the step without its loader takes "
            f"{units.times(1 - arm.saved.mid)} as long, so that {units.seconds(c.fixed)} of it do not grow with them; in one micro-batch "
            f"1/{count} of that is left; in half as many, the step would be {units.times(case.model.without(c.fixed / 2))} as fast",
            costs="memory for the activations of more samples at once; batch norm sees larger batches",
        )
    )


def less_own_code(case: Case) -> Iterator[Remedy | None]:
    """Less work in the step's own code, such as a loop over the samples of a batch."""
    if case.evidence.observed or (own := own_code(case.evidence, case.costs)) is None:
        return
    yield ceiling(
        case,
        f"less work in {own.function}",
        f"Make {own.function} cheaper: it takes {units.percent(own.share)} of the step, outside of model, backward and optimizer, most of "
        f"it in {own.line}. Work on whole batches instead of sample by sample, or move it into the dataset.",
        own.share,
        f"all of {own.function} is gone",
    )
