"""The training loop: a Trainer's optimizer steps, timed, counted and reported, on every rank."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.core import run_directory, units
from workbench.core.energy_counters import record_energy
from workbench.core.machine_usage import record_usage
from workbench.runs import failure
from workbench.runs.out_of_memory import Held
from workbench.runs.restarts import first_step
from workbench.runs.spec import AUTO, SHARDED, RunSpec, check_profile
from workbench.runs.task import Task, TaskError
from workbench.timeline.step_timer import StepTimer
from workbench.traces.measure.profiled_run import RunProfiler, hurry_together
from workbench.train import provenance, sharding
from workbench.train.checkpoints import Checkpoints
from workbench.train.choose_micro_batch import choose
from workbench.train.early_stop import BestFigure, EarlyStop
from workbench.train.expert_parallel import ExpertBalance
from workbench.train.fingerprints import Fingerprints
from workbench.train.gradient_norms import GradientNorms
from workbench.train.preemption import Preemption
from workbench.train.ranks import Ranks
from workbench.train.sample_order import StepSamples
from workbench.train.step_ring import StepRing
from workbench.train.trainer import Trainer
from workbench.train.validation import Evaluations

REPORT_INTERVAL_S = 0.3
"""Seconds between two writes of `metrics.jsonl`: the only moments when the host waits for the losses."""
LOOK_EVERY = 0.3
"""Seconds between two moments at which the host waits for the answer; between them the device counts alone."""
LOG_LINES = 10
"""Lines in the log of rank 0 in a run."""


class GradientLog(Protocol):
    """Logs the gradients of each step."""

    def step(self, step: int) -> None:
        """Called when the gradients of a step (from 1) are complete, before the optimizer uses them."""

    def flush(self) -> None:
        """Write the steps so far."""

    def close(self) -> None:
        """Write the rest."""


@contextlib.contextmanager
def refusing_exit() -> Iterator[None]:
    """Inside, `sys.exit()` with status 0 is an error: the process would end as one that has trained to its end."""
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        text = (
            f"the training was ended before its last step by sys.exit({'' if error.code is None else error.code}). To end one early, "
            'launch it with stop_when=, such as stop_when="validation_loss(patience=3)"'
        )
        raise TaskError(text).with_traceback(error.__traceback__) from None


@refusing_exit()
def train(
    spec: RunSpec,
    task: Task,
    ranks: Ranks,
    run_dir: Path,
    group: dist.ProcessGroup | None = None,
    *,
    held: Callable[[BaseException], Held],
    noise_log: Callable[[Trainer, Path], GradientLog],
    preemptible: bool = False,
) -> nn.Module:
    """Train, and write the steps and the report into a run directory.

    Args:
        spec: every knob. A micro_batch that is "auto" is chosen first, and the figures of the last step have it as `micro_batch`; a run
            that resumes from a checkpoint keeps it.
        run_dir: for `rank<r>.jsonl`, `noise<r>.jsonl` if the spec says so, and, from rank 0, `metrics.jsonl`.
        group: the process group that reduces the gradients; None = that of all.
        held: returns what this rank holds in memory; called if memory has run out.
        noise_log: opens the log of gradient norms, for `spec.noise_scale`.
        preemptible: where checkpoints are written, SIGTERM and SIGUSR1 end the training after the present step, with a checkpoint.

    Returns:
        The trained module, without its DDP wrapper; this rank's part of it where the spec shares or splits it.

    Raises:
        TaskError: the task's functions do not return what they should, or they call `sys.exit()`.
        SpecError: a knob does not fit this machine or this task, or a micro_batch could not be chosen.
        DiskFullError: the steps or the report could not be written.
        DamagedRunError: the run is to be resumed, and none of its checkpoints can be read.
    """
    if spec.evaluate and task.evaluate is None and task.validation is None:
        raise TaskError(
            f"evaluate={spec.evaluate}, and the task {spec.task!r} has no evaluation: try wb.Task(…, evaluate=…), or evaluate=False"
        )
    check_profile(spec)
    checkpoints = Checkpoints(run_dir, ranks, spec.checkpoint_every) if spec.checkpoint_every else None
    checkpoint = checkpoints.latest() if checkpoints else None
    chosen: dict[str, float] = {}
    if spec.micro_batch == AUTO:  # a resumed run keeps its size: its position in the data is counted in micro-batches
        size = checkpoint and checkpoint[1].get("micro_batch")
        if not size:  # no checkpoint, or one of an earlier version
            path, checkpoint = checkpoint and checkpoint[0], None
            if path:
                torch.cuda.empty_cache()  # the device has to be empty while a size is chosen
            size = choose(spec, ranks)
            checkpoint = (path, checkpoints.read(path)) if checkpoints and path else None
        spec = spec.replace(micro_batch=size)
        chosen = {"micro_batch": spec.micro_batch}
    folder = run_dir / run_directory.FINGERPRINTS
    if spec.step_digests:
        folder.mkdir(exist_ok=True)
    if folder.is_dir() and spec.whole_models and group is None:
        group = dist.new_group()  # so that what a task exchanges by itself can be told from reductions of gradients
    trainer = Trainer(spec, task, ranks, group, split_on_oom=bool(chosen))
    weights = sum(weight.numel() for weight in trainer.module.parameters())
    here = units.count(weights) + " parameters" + (f" ({trainer.pipeline})" if trainer.pipeline else "")
    print(f"rank {ranks.rank} of {ranks.world_size} on {ranks.device}: {here}, batches of {spec.micro_batch}")
    samples_per_step = spec.micro_batch * spec.accumulation * trainer.layout.readers.world_size
    done = checkpoints.resume(trainer, checkpoint) if checkpoints else 0  # before the files are opened: it cuts them
    del checkpoint  # as large as the model and its optimizer
    if spec.parallel in SHARDED and spec.compile == "none":  # a compiled block has its hooks in its graph
        sharding.ChangesInForward(trainer.model, forwards=2 * spec.accumulation, parallel=spec.parallel)
    trainer.phase = timer = StepTimer(run_dir / run_directory.rank_file(ranks.rank), device=ranks.device.type)
    trainer.warn = timer.warn
    if checkpoints:
        timer.go_on(done)
    metrics, balance = (
        Metrics(run_dir, steps=spec.steps, readers=trainer.layout.readers.world_size) if ranks.rank == 0 else None,
        ExpertBalance(trainer.module),
    )
    trainer.precision.on_norm = metrics.norm if metrics else None
    noise = noise_log(trainer, run_dir) if spec.noise_scale else None
    norms = GradientNorms(trainer, run_dir / run_directory.GRADIENTS, spec.gradient_norms) if spec.gradient_norms else None
    evaluations = Evaluations(trainer, run_dir, timer) if spec.evaluate else None
    early_stop, stopped = EarlyStop(spec.stop_when, ranks, run_dir, trainer.warn) if spec.stop_when else None, False
    best = BestFigure(spec.best, trainer.warn)
    if early_stop and done:  # it may have been killed before it ended there
        stopped = early_stop.after(done)
    samples = StepSamples(trainer.loader, spec.accumulation)
    ring = StepRing(run_dir / run_directory.ring_file(ranks.rank), trainer, samples, done)
    prints = Fingerprints(folder, trainer, done, samples) if folder.is_dir() else None
    finite = FirstNotFinite(trainer.module, timer.say)
    profiled = None
    if spec.profile:
        about: dict[str, Any] = {"rank": ranks.rank, "queue": spec.queue, "steps": spec.steps}
        about |= {"hurry": hurry_together(run_dir)}
        profiled = RunProfiler(spec.profile, run_dir / run_directory.TRACES, timer.leave_out, **about)
    if spec.compile != "none":
        timer.leave_out(0, 0)
    gpus = spec.nproc_per_node if ranks.device.type == "cuda" else 0
    began = time.perf_counter()
    first, at_end = True, None
    step, waiting, loss_of_step = done, spec.accumulation, torch.zeros((), device=ranks.device)
    with (
        contextlib.closing(metrics) if metrics else contextlib.nullcontext(),
        contextlib.closing(noise) if noise else contextlib.nullcontext(),
        contextlib.closing(norms) if norms else contextlib.nullcontext(),
        contextlib.closing(profiled) if profiled else contextlib.nullcontext(),
        contextlib.closing(prints) if prints else contextlib.nullcontext(),
        checkpoints or contextlib.nullcontext(),
        Preemption(ranks, done, spec.steps) if preemptible and checkpoints else contextlib.nullcontext() as preemption,
        contextlib.closing(ring),
    ):
        with (
            record_energy(run_dir, rank=ranks.rank, gpus=gpus),
            record_usage(run_dir, rank=ranks.rank, gpus=gpus, step=done) as usage,
            contextlib.closing(timer),
            recorded(run_dir, ranks.rank, held),
            contextlib.closing(trainer.batches(done)) as batches,
        ):
            if profiled:
                profiled.step(done)
            for batch in () if done >= spec.steps or stopped else timer.batches(profiled.batches(batches) if profiled else batches):
                waiting -= 1
                if done and step == done and trainer.needs_rehearsal and waiting == spec.accumulation - 1:
                    trainer.rehearse(batch)
                    balance.take()  # its tokens are of no step
                if first and not ranks.rank:
                    provenance.record(run_dir, trainer, batch, resumed=bool(done))
                    if checkpoints and not done:
                        checkpoints.first_samples = provenance.first_samples(trainer, batch)
                first = False
                if prints:
                    prints.batch(batch)
                loss_of_step = loss_of_step + trainer.micro_step(batch, last=not waiting)
                if waiting:
                    continue
                step, lr = step + 1, trainer.lr
                if noise:
                    noise.step(step)
                if norms:
                    norms.step(step)
                if prints:
                    prints.step(loss_of_step)
                trainer.update()
                ring.step(step, loss_of_step)
                if usage:
                    usage.step = step
                finite.step(step, loss_of_step)
                timer.loss(loss_of_step)
                if spec.compile != "none" and step == done + 1:
                    chosen["first_step_seconds"] = time.perf_counter() - began
                    print(f"rank {ranks.rank}: step {step}, in which torch compiled, took {chosen['first_step_seconds']:.1f} s", flush=True)
                if step == done + 1 and not ranks.rank and (restart := first_step(run_dir, done=done, now=time.time())):
                    print(restart, flush=True)
                if metrics:
                    metrics.step(step, loss=loss_of_step, lr=lr, samples=step * samples_per_step, experts=balance.take())
                if timer.failed:
                    raise timer.failed
                if profiled:
                    profiled.step(step)
                score = None
                if evaluations and evaluations.repeated and step == spec.steps and checkpoints and checkpoints.due(step):
                    at_end = evaluations.run(step)  # before the checkpoint: it may be the best
                    score = best.of(at_end)
                elif evaluations and evaluations.due(step):
                    figures = evaluations.run(step)
                    if metrics:
                        metrics.figures(figures, step)
                    score = best.of(figures)
                    stopped = early_stop is not None and early_stop.after(step)
                last = preemption is not None and preemption.reached(step)
                if checkpoints and (last or checkpoints.due(step)):
                    if metrics:  # else rows before this step would be missing when the run goes on
                        metrics.flush()
                    for log in filter(None, (noise, norms)):
                        log.flush()
                    checkpoints.write(step, trainer, timer.unfinished_row(spec.micro_batch * spec.accumulation), wait=False, score=score)
                    if prints and prints.kills:  # a rank that is killed in the next step is to go on from here
                        checkpoints.finish(goes_on=step < spec.steps)
                if checkpoints and preemption and last:
                    checkpoints.finish()
                    preemption.end(run_dir, step, checkpoints.last_step)
                    return trainer.module
                stopped = stopped or (prints is not None and prints.last == step)
                if step == spec.steps or stopped:
                    break
                waiting, loss_of_step = spec.accumulation, torch.zeros_like(loss_of_step)
            finite.look()
            if at_end is None:
                at_end = evaluations.run(spec.steps) if evaluations and not stopped else {}
            figures = chosen | at_end
            if checkpoints:  # before the timer is closed, which writes the warning
                checkpoints.finish()
        if timer.failed:  # at its last flush
            raise timer.failed
        if prints:
            prints.end()
        if metrics:
            metrics.figures(figures, step if stopped else spec.steps)
    skipped = trainer.precision.skipped
    if skipped and ranks.rank == 0:
        print(f"{skipped} of {step} optimizer steps were left out: fp16 gradients overflowed (a few at the start are normal)")
    return trainer.module


@contextlib.contextmanager
def recorded(run_dir: Path, rank: int, held: Callable[[BaseException], Held]) -> Iterator[None]:
    """Leave an error on record before anything is closed: closing waits for the device, and would cover a CUDA error by its own."""
    try:
        yield
    except Exception as error:
        failure.record(error, run_dir=run_dir, rank=rank, held=held)
        raise


class FirstNotFinite:
    """The first bad step of this rank. A rank whose loss is sound writes nothing, so that no rank has to wait for another."""

    def __init__(self, module: nn.Module, say: Callable[[dict[str, Any]], None], *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._module, self._say, self._clock = module, say, clock
        self._first: Tensor | None = None
        self._looked, self._done = clock(), False

    def step(self, step: int, loss: Tensor) -> None:
        """Take the loss of a step (from 1), on its device."""
        if self._done:
            return
        bad = torch.where(torch.isfinite(loss.detach()), 0, step)
        self._first = bad if self._first is None else torch.where(self._first == 0, bad, self._first)
        if self._clock() - self._looked > LOOK_EVERY:
            self.look()

    def look(self) -> None:
        """Write the first bad step, if there was one. Waits for the device."""
        if self._first is None or self._done:
            return
        self._looked, first = self._clock(), int(self._first)
        if first:
            self._done = True
            self._say({"not_finite": {"step": first, "weights": self._weights()}})

    def _weights(self) -> str:
        """Which weights, or their gradients, are not finite now."""
        bad, count = [], 0
        for name, weight in self._module.named_parameters():
            count += 1
            parts = [part for part in (weight.detach(), weight.grad) if part is not None]
            parts = [part.to_local() if hasattr(part, "to_local") else part for part in parts]
            if not all(bool(torch.isfinite(part).all()) for part in parts):
                bad.append(name)
        return f"{len(bad)} of {count} weights are not finite, the first of them {bad[0]}" if bad else ""


class Metrics:
    """Writes `metrics.jsonl`: a line per optimizer step on rank 0, a few times per second."""

    def __init__(self, run_dir: Path, *, steps: int, readers: int = 1) -> None:
        before = run_directory.LineTail(run_dir / run_directory.METRICS).read()  # of a run that goes on
        self._writer = run_directory.LineWriter(run_dir / run_directory.METRICS)
        self._steps, self._whose = steps, " on rank 0" * (readers > 1)  # whose samples it was computed from
        self._flushed = time.perf_counter()
        self._began = self._flushed - max((row.get("seconds", 0.0) for row in before), default=0.0)  # an evaluation's row has none
        self._rows: list[dict[str, Any]] = []
        self._losses: list[Tensor] = []
        self._norms: list[Tensor | None] = []
        self._norm: Tensor | None = None
        self._experts: list[Tensor | None] = []
        self._printed = 0

    def norm(self, norm: Tensor) -> None:
        """Take the norm of the gradients of the step that is reported next."""
        self._norm = norm

    def step(self, step: int, *, loss: Tensor, lr: float, samples: int, experts: Tensor | None = None) -> None:
        """Report an optimizer step; it is written with the next flush.

        Raises:
            DiskFullError: the disk is full; the lines before are whole.
        """
        now = time.perf_counter()
        self._losses.append(loss)
        self._norms.append(self._norm)
        self._norm = None
        self._experts.append(experts)
        self._rows.append({"step": step, "steps": self._steps, "lr": lr, "samples": samples, "seconds": now - self._began})
        if now - self._flushed > REPORT_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Write all that was reported."""
        if self._rows:
            losses = torch.stack(self._losses).tolist()  # one wait for all
            rows = [{**row, "loss": loss} for row, loss in zip(self._rows, losses, strict=True)]
            known = [(row, norm) for row, norm in zip(rows, self._norms, strict=True) if norm is not None]
            for (row, _), norm in zip(known, torch.stack([norm for _, norm in known]).tolist() if known else (), strict=True):
                row["grad_norm"] = norm
            for row, shares in zip(rows, self._experts, strict=True):
                if shares is not None:
                    *row["expert_shares"], row["dropped_tokens"] = shares.tolist()
            self._writer.write(rows)
            step = int(self._rows[-1]["step"])
            if LOG_LINES * step // self._steps > self._printed:
                self._printed = LOG_LINES * step // self._steps
                print(f"step {step} of {self._steps}: loss {losses[-1]:.3f}{self._whose}")
            self._rows.clear()
            self._losses.clear()
            self._norms.clear()
            self._experts.clear()
        self._flushed = time.perf_counter()

    def figures(self, values: dict[str, float], step: int) -> None:
        """Write all that was reported, and the figures of an evaluation after so many steps."""
        self.flush()
        if values:
            self._writer.write([{"step": step, "steps": self._steps, **values}])

    def close(self) -> None:
        """Write the rest, that of a training which failed as well; where the device or the disk has failed, it is lost."""
        with contextlib.suppress(RuntimeError, OSError):
            self.flush()
        self._writer.close()
