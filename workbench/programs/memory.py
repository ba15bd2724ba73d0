"""Records the memory of a few steps of a spec, each rank in `memory/rank<r>.json`.

torchrun starts `python -m workbench.programs.memory RUN_DIR` once per rank. run.json says under "experiment" how many steps.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workbench.core import run_directory
from workbench.core.gc import collected_before
from workbench.core.progress import INTERRUPTED
from workbench.core.units import several
from workbench.memory.analysis.log import ALLOC, Event
from workbench.memory.measure.allocator_counters import allocations
from workbench.memory.measure.memory import UNSEEN, Borders, breakdown, take_in
from workbench.memory.measure.recorder import Recorder
from workbench.programs.experiment import Assignment, progress_writer, run_program
from workbench.runs.entrypoints import MEMORY
from workbench.runs.task import label
from workbench.train.sharding import check_reduced
from workbench.train.trainer import Trainer


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what run.json says."""
    run_program(record_memory, MEMORY, __doc__, arguments)


def record_memory(assignment: Assignment) -> dict[str, Any]:
    """Take steps with the very Trainer of a run; gives the memory breakdown of this rank."""
    spec, ranks, steps = assignment.spec, assignment.ranks, int(assignment.order["steps"])
    progress = progress_writer(assignment.run_dir) if ranks.rank == 0 else None
    if progress:
        progress(f"building the model, then recording {steps} steps", "")
    recorder, cut = Recorder(device=ranks.device.type), ""
    with allocations(ranks.device) as truth, contextlib.ExitStack() as stack:
        trainer = Trainer(spec, assignment.task, ranks)
        stack.enter_context(collected_before())  # the trainer has decided about the collector
        recorder.attach(trainer.module, trainer.averages, hooks=getattr(trainer.model, "_comm_hooks", ()))
        _charge_buckets(recorder, trainer)
        trainer.phase = recorder.phase
        borders = Borders(recorder.log, truth)
        batches = stack.enter_context(contextlib.closing(trainer.batches()))
        stack.enter_context(recorder.hooks())
        for recorder.step in range(steps):
            for left in reversed(range(spec.accumulation)):
                recorder.mark("data")
                batch = next(batches)
                take_in(recorder, batch)
                borders.begin(recorder.step)
                with recorder:
                    trainer.micro_step(batch, last=not left)
            check_reduced(trainer.model)
            with recorder:
                trainer.update()
            recorder.mark("end")
            if recorder.step + 1 < steps and (cut := _cut_short(assignment, recorder.step + 1, progress)):
                break
        recorder.recognise_unsharded(trainer.model)
        _leave_out_seen(recorder, trainer.model)
    held = breakdown(
        recorder,
        borders,
        truth,
        title=f"{label(spec.task)}, {several(recorder.step + 1, 'step')}",
        notes=[f"{cut} after {recorder.step + 1} of {steps} steps{UNSEEN * (not recorder.step)}"] if cut else [],
        device=ranks.device,
        rank=ranks.rank,
        world_size=ranks.world_size,
        drifts=ranks.device.type == "cpu",
    )
    return {f"{run_directory.MEMORY}/rank{ranks.rank}.json": held.to_json()}


def _cut_short(assignment: Assignment, done: int, progress: Callable[[str, str], None] | None) -> str:
    """Why no further step is taken: the budget has ended, or Ctrl-C has come; "" = nothing. All ranks call it, and decide as rank 0."""
    word = ""
    if progress:
        try:
            progress(f"step {done + 1}", f"{several(done, 'step')} recorded")
        except KeyboardInterrupt:
            word = INTERRUPTED
        if time.time() - float(assignment.info["created"]) > float(assignment.order["budget_s"]):
            word = word or "the budget ended"
    return assignment.ranks.share(f"after step {done}", word.encode())[0].decode()


def _charge_buckets(recorder: Recorder, trainer: Trainer) -> None:
    """Count DDP's buckets, as large as all dense gradients that it reduces: they live from its construction on, and no operator shows them.

    Those that are the gradients themselves, with `gradient_as_bucket_view`, are seen as gradients. Sparse ones have no bucket.
    """
    if not isinstance(trainer.model, DistributedDataParallel) or trainer.spec.gradient_as_bucket_view:
        return
    left_out = trainer.model.parameters_to_ignore  # divided experts
    sparse = {id(part.weight) for part in trainer.module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse}
    reduced = [weight for name, weight in trainer.module.named_parameters() if weight.requires_grad and name not in left_out]
    size = sum(weight.nbytes for weight in reduced if id(weight) not in sparse)
    recorder.charge(size, "bucket", "DistributedDataParallel")


def _leave_out_seen(recorder: Recorder, model: nn.Module) -> None:
    """The charged bytes stand for all buckets, so leave out those that operators have shown.

    The first ones are seen when the first backward writes gradients into them. Before the second forward DDP lets go of them, and only then
    makes new ones in the order in which gradients come: never are both alive.
    """
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return
    logger: Any = model.logger
    logger.set_runtime_stats_and_log()  # else a static graph's new buckets, made before the third step, appear in the fourth only
    figures: Any = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    first, rebuilt = (
        Counter(int(size) for size in str(figures.get(name, "")).replace(",", " ").split())
        for name in ("bucket_sizes", "rebuilt_bucket_sizes")
    )
    log = recorder.log
    for index, record in enumerate(log.records):
        if record.phase == "backward" and record.op in _WRITING:
            sizes = first
        elif record.phase == "forward" and record.freed_at is None and record.category is None:
            sizes = rebuilt
        else:
            continue
        if sizes[record.size] > 0:
            sizes[record.size] -= 1
            record.size, record.category = 0, "bucket"
            log.events[record.allocated_at] = Event(ALLOC, index, 0)


_WRITING = ("aten.mul.out", "aten.copy_.default", "aten.zero_.default")
"""Operators that write a gradient into a bucket, which was there before them."""


if __name__ == "__main__":
    main()
