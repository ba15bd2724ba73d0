"""Repeats a run in this process up to a step, takes that step with changes, and finds what is to blame."""

import contextlib
import copy
import dataclasses
import functools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from workbench.core import run_directory
from workbench.diagnosis.analysis.step_replay import (
    StepReplay,
    Trial,
    Usual,
    drift,
    first_bad_step,
    limit,
    ordinary_losses,
    stands_out,
    text,
)
from workbench.diagnosis.measure.divergence import doubled, in_fp64
from workbench.diagnosis.measure.step_batches import Place, StepBatches
from workbench.harness.restore import process_settings
from workbench.runs.errors import is_out_of_memory
from workbench.runs.restarts import checkpoints_of, step_of
from workbench.runs.spec import AUTO, RunSpec
from workbench.runs.task import resolve
from workbench.train import checkpoint_file
from workbench.train.checkpoints import part_path
from workbench.train.loader import build_loader, micro_batches
from workbench.train.named_state import Source
from workbench.train.precision import Precision
from workbench.train.provenance import code_note
from workbench.train.random_numbers import random_state, restore_random_state, seed_all
from workbench.train.ranks import ONE_STAGE, Layout, Ranks, choose_device, layout_knobs
from workbench.train.sample_order import StepSamples, go_on
from workbench.train.step_ring import read_ring
from workbench.train.trainer import Trainer

BACK = 4
"""Steps before the one that is asked for to which the search goes back."""
OTHERS = 2
"""Batches of later steps beside which a step is judged."""
LATER = 4
"""Batches of later steps among which they are chosen."""
RATES = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
"""Factors of the learning rate that are tried where a tenth is too large, too."""
JOINED = (
    "no sample was left out: the batch has no entry for each of its samples, and cannot be collated anew (they are those of a stream, the "
    "dataset gives other ones each time, or collate takes no fewer)"
)
PLACES = "a stream has no indices: samples are counted from 0 in the batch of the step"


@dataclass
class Taken:
    """A step as it was taken: what it began with."""

    step: int
    state: dict[str, Any]
    batches: list[Any]
    samples: list[int]
    random: dict[str, Any]


class Replayer:
    """A run that is repeated on one process: the batches of all its ranks, one after the other."""

    def __init__(self, run_dir: Path, spec: RunSpec, before: int, time_left: Callable[[], float]) -> None:
        """It starts from a checkpoint earlier than the step `before`, at best `BACK` steps."""
        self.notes: list[str] = []
        self.errors: list[str] = []
        device, self.time_left = choose_device(whole(spec).replace(nproc_per_node=1), 0, 1), time_left
        folder = run_dir / run_directory.CHECKPOINTS
        steps = [step_of(path) for path in checkpoints_of(run_dir)]
        early = [step for step in steps if step < before - BACK] or [step for step in steps if step < before]
        state = checkpoint_file.load(folder / f"step{early[-1]:08d}.pt", device) if early else None
        self.start = f"the checkpoint of step {early[-1]}" if early else "the first step"
        written, split = layout_knobs(spec), spec.tensor_parallel
        spec = whole(spec)
        if spec.micro_batch == AUTO:
            size = (state or {}).get("micro_batch")
            if not size:
                raise ValueError('replay: the run has micro_batch="auto" and no checkpoint before that step, which would tell the size')
            spec = spec.replace(micro_batch=size)
        self.spec, self.world = spec, spec.world_size
        task = resolve(spec.task)
        ranks = [Ranks(rank=rank, world_size=self.world, device=device, store=HashStore()) for rank in range(self.world)]
        self.trainer = Trainer(spec, task, ranks[0], layout=Layout(readers=ranks[0], data=None), alone=True)
        self.trainer.warn = self.notes.append
        self.done = 0
        loaders, self._random = [self.trainer.loader], [random_state(device)]
        for rank in ranks[1:]:
            seed_all(own := spec.seed * self.world + rank.rank)
            loaders.append(build_loader(task, spec, rank, own))
            self._random.append(random_state(device))
        if state:
            path = folder / f"step{early[-1]:08d}.pt"
            self.trainer.load_state(state, Source(state, functools.partial(_verified_part, path)) if state.get("shards") else None)
            self.done = int(state["step"])
            for loader in loaders[1:]:
                go_on(loader, state)
            for number in range(self.world) if state.get("layout") not in (None, written) else ():
                seed_all(self.trainer.resumed_seed(self.done, number))
                state["random"][number * split] = random_state(device)  # as the run went on, whose ranks had other parts of the work
            self._random = [state["random"].get(rank * split, known) for rank, known in enumerate(self._random)]
        self.loaders = loaders
        self._samples = [StepSamples(loader, spec.accumulation) for loader in loaders]
        self._streams = [
            micro_batches(loader, spec.accumulation, rank, self.done, self.notes.append, ready=self._restore(number))
            for number, (loader, rank) in enumerate(zip(loaders, ranks, strict=True))
        ]
        self._rings = [read_ring(run_dir / run_directory.ring_file(rank * split)) for rank in range(self.world)]

    def _restore(self, rank: int) -> Callable[[], None]:
        return lambda: restore_random_state(self._random[rank], self.trainer.ranks.device)

    def next(self) -> Taken:
        """The batches of the next step, with what it begins with."""
        step, device = self.done + 1, self.trainer.ranks.device
        batches: list[Any] = []
        samples: list[int] = []
        for rank, stream in enumerate(self._streams):
            known = self._rings[rank].get(step - 1, {}).get("random")
            self._random[rank] = known or self._random[rank]
            restore_random_state(self._random[rank], device)
            batches += [next(stream) for _ in range(self.spec.accumulation)]
            self._random[rank] = random_state(device)
            given = self._samples[rank].of(step) or []
            recorded = self._rings[rank].get(step, {}).get("samples")
            if recorded and recorded != given:
                self.notes.append(f"step {step} had other samples in the run: the dataset or its order has changed")
            samples += given
        restore_random_state(self._random[0], device)
        return Taken(step, copy.deepcopy(self.trainer.state()), batches, samples, random_state(device))

    def take(self, taken: Taken) -> float:
        """Take the step; its loss on rank 0, or nan, and `done` is as before, where the task raises an error."""
        loss = math.nan
        with self.noting_errors():
            loss = self._gradients(self.trainer, taken.batches, ranks=True)
            self.trainer.update()
            self.done = taken.step
        return loss

    def _gradients(self, trainer: Trainer, batches: Sequence[Any], *, ranks: bool = False) -> float:
        """Add the gradients of a step's batches; the loss of rank 0, or of all."""
        losses: list[float] = []
        divisor, first = trainer.divisor(batches), trainer.divisor(batches[: self.spec.accumulation])
        for number, batch in enumerate(copy.deepcopy(list(batches))):
            if ranks and number % self.spec.accumulation == 0:
                restore_random_state(self._random[number // self.spec.accumulation], trainer.ranks.device)
            loss = trainer.forward(trainer.placed(batch))
            trainer.backward(loss / divisor)
            losses.append(float(loss.detach()))
            if ranks and (number + 1) % self.spec.accumulation == 0:
                self._random[number // self.spec.accumulation] = random_state(trainer.ranks.device)
        return math.fsum(losses[: self.spec.accumulation]) / first if ranks else sum(losses) / divisor

    def loss(self, batches: Sequence[Any]) -> float:
        """The loss of batches with the present weights, in training mode. Buffers stay."""
        buffers = {name: value.clone() for name, value in self.trainer.module.named_buffers()}
        losses = [math.nan]
        with torch.no_grad():
            with self.noting_errors():
                losses = [float(self.trainer.forward(self.trainer.placed(batch))) for batch in copy.deepcopy(list(batches))]
            for name, value in self.trainer.module.named_buffers():
                value.copy_(buffers[name])
        return sum(losses) / self.trainer.divisor(batches)

    @contextlib.contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Inside, an error of the task ends the block, and is noted: what it would have computed counts as not finite."""
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):  # replaying takes more memory than the run did
                raise
            self.errors.append(f"{type(error).__name__} ({error!s:.200})")
            self.notes.append(f"the task raised {self.errors[-1]}: a loss that is not computed counts as not finite")

    def begin(self, taken: Taken) -> None:
        """Put the weights, optimizer and random numbers back to those before a step."""
        trainer, state = self.trainer, copy.deepcopy(taken.state)
        trainer.module.load_state_dict(state["module"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer._scheduler.load_state_dict(state["scheduler"])
        trainer.precision.scaler.load_state_dict(state["scaler"])
        trainer.optimizer.zero_grad()
        restore_random_state(taken.random, trainer.ranks.device)

    def trial(
        self,
        name: str,
        window: Sequence[Taken],
        others: Sequence[Sequence[Any]],
        *,
        batches: Sequence[Any] | None = None,
        rate: float = 1.0,
        higher: bool = False,
    ) -> Trial:
        """Take the steps of a window, with changes: other batches, a factor of the learning rate, or a `higher` precision.

        That is fp32 if the run's is lower, else fp64. The loss of `others` is taken after the last update.
        """
        self.begin(window[0])
        trainer, precision = self.trainer, self.trainer.precision
        double = higher and self.spec.precision == "fp32"
        dtypes = {each: value.dtype for each, value in (*trainer.module.named_parameters(), *trainer.module.named_buffers())}
        loss, norm, after, done, factor = math.nan, math.nan, math.nan, True, 1.0
        try:
            if higher:
                trainer.precision = Precision("fp32", trainer.ranks.device)
            if double:
                trainer.module.double()
                trainer.optimizer.load_state_dict(copy.deepcopy(window[0].state["optimizer"]))
                others = [[doubled(batch) for batch in other] for other in others]
            with self.noting_errors(), in_fp64(double):
                for taken in window:
                    chosen = taken.batches if batches is None else list(batches)
                    loss = self._gradients(trainer, [doubled(batch) for batch in chosen] if double else chosen)
                    scale = trainer.precision.loss_scale()
                    factor = 1.0 if scale is None else float(scale)
                    grads = [weight.grad.detach().double() for weight in trainer.module.parameters() if weight.grad is not None]
                    norm = math.hypot(*(float(grad.norm()) for grad in grads)) / factor
                    for group, was in zip(trainer.optimizer.param_groups, taken.state["optimizer"]["param_groups"], strict=True):
                        group["lr"] = was["lr"] * rate
                    done = trainer.precision.step(trainer.optimizer, trainer.model, clip_grad_norm=self.spec.clip_grad_norm)
                after = statistics.fmean(map(self.loss, others)) if others else math.nan
        finally:
            trainer.precision = precision
            trainer.optimizer.zero_grad()
            if double:
                for each, value in (*trainer.module.named_parameters(), *trainer.module.named_buffers()):
                    value.data = value.data.to(dtypes[each])  # by name: buffers are other objects now
        skipped = not done and factor > 1.0  # at a scale of 1 the gradients themselves overflow
        return Trial(name=name, loss=_finite(loss), gradient=_finite(norm), others=_finite(after), skipped=skipped)


def whole(spec: RunSpec) -> RunSpec:
    """The spec of the same training with the whole model in one process, which takes the samples of all data-parallel ranks in turn."""
    alone = {**ONE_STAGE, "parallel": "ddp", "shard_ranks": None, "tensor_parallel": 1, "compile": "none", "nnodes": 1, "local_sgd": "none"}
    on_host = {"offload": "none"} if spec.offload == "optimizer" else {}
    return spec.replace(**alone, **on_host, nproc_per_node=spec.data_ranks)


def _verified_part(path: Path, rank: int) -> Path:
    """The file of a rank of a checkpoint, after its checksum was compared."""
    with open(part := part_path(path, rank), "rb") as file:
        checkpoint_file.verify(file)
    return part


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def replay(
    run_dir: Path, spec: RunSpec, step: int, losses: Mapping[int, float], say: Callable[[str], object], time_left: Callable[[], float]
) -> StepReplay:
    """Repeat a run up to a step, and find what is to blame for what it did.

    If the weights were bad before the steps that were looked at, the search goes on at the first step whose loss stands out.

    Raises:
        ValueError: the step cannot be reached.
    """
    found = _replay(run_dir, spec, step, losses, say, time_left)
    first = first_bad_step(losses)
    if found.verdict == "earlier" and first is not None and first <= found.step and first < step:
        with contextlib.suppress(ValueError):  # no time is left
            return dataclasses.replace(_replay(run_dir, spec, first, losses, say, time_left), asked=step)
    return found


def _replay(
    run_dir: Path, spec: RunSpec, step: int, losses: Mapping[int, float], say: Callable[[str], object], time_left: Callable[[], float]
) -> StepReplay:
    with process_settings():
        player = Replayer(run_dir, spec, step, time_left)
        history: deque[Taken] = deque(maxlen=BACK + 1)
        while player.done < step:
            say(f"repeating step {player.done + 1} of {step}, from {player.start}")
            if time_left() <= 0:
                raise ValueError(
                    f"replay: no time was left after step {player.done}, from {player.start}: give a larger budget_s, or write checkpoints "
                    "more often (checkpoint_every)"
                )
            history.append(player.next())
            replayed = player.take(history[-1])
            if player.done < history[-1].step < step:
                raise ValueError(f"replay: step {step} is not reached, since step {history[-1].step} fails here; {player.notes[-1]}")
            player.done = history[-1].step
        recorded = losses.get(step, replayed)
        finite = math.isfinite(recorded), math.isfinite(replayed)
        if (all(finite) and abs(replayed - recorded) > 1e-3 * max(abs(recorded), 1e-6)) or finite[0] != finite[1]:
            why = "; the layers of a pipeline draw random numbers (dropout) of their own on each rank" * (spec.pipeline_parallel > 1)
            why += "; gradients are not compressed here" * spec.gradient_compression.startswith("powersgd")
            was, here = text(_finite(recorded)), text(_finite(replayed))
            cause = code_note(run_dir, player.trainer.task, spec.schedule) or f"the training is not repeatable{why}"
            player.notes.append(f"the loss was {was} in the run and is {here} here: {cause}")
        later = []
        for _ in range(LATER):
            later.append(player.next().batches)
            player.done += 1
        return _Judge(run_dir, player, list(history), later, losses, say).judge()


class _Judge:
    """Takes a step with changes, and finds what is to blame for it."""

    def __init__(
        self,
        run_dir: Path,
        player: Replayer,
        history: list[Taken],
        later: list[list[Any]],
        losses: Mapping[int, float],
        say: Callable[[str], object],
    ) -> None:
        self.run_dir, self.player, self.history, self.losses, self.say = run_dir, player, history, losses, say
        self.higher = "in fp64" if player.spec.precision == "fp32" else "in fp32"
        self.known = [ordinary_losses(losses, taken.step) for taken in history]
        player.begin(history[0])
        tried = [(batch, player.loss(batch)) for batch in later]
        finite = [loss for _, loss in tried if math.isfinite(loss)]
        most = limit([statistics.median_low(finite)]) if finite else math.nan
        self.others = [batch for batch, _ in sorted(tried, key=lambda each: not each[1] <= most)][:OTHERS]  # those that stand out come last
        self.before: list[list[float]] = []
        for taken in history:
            say(f"other batches before step {taken.step}")
            player.begin(taken)
            self.before.append([player.loss(batch) for batch in self.others])

    def judge(self) -> StepReplay:
        """The step to blame, and for what."""
        usual = [self._usual(at, math.inf) for at in range(len(self.history))]
        last = len(usual) - 1
        place = next((at for at in range(last, -1, -1) if usual[at].sound(self.known[at], usual[0].others if at else math.nan)), None)
        if place is not None and not usual[0].worse(usual[last].others):
            place = last  # in the steps before it, other batches became no worse
        self.taken, known = self.history[place or 0], self.known[place or 0]
        self.say(f"step {self.taken.step} with changes")
        trial = functools.partial(self.player.trial, window=[self.taken])
        other = trial("with the batch of a later step", others=self.others[1:], batches=self.others[0])
        plain = trial("as it was", others=self.others)
        higher = trial(self.higher, others=self.others, higher=True)
        slower = trial("a tenth of the learning rate", others=self.others, rate=0.1)
        self.trials = [plain, higher, slower, other]
        self.usual = here = self._usual(place or 0, other.gradient if math.isfinite(other.gradient) else math.inf)
        in_higher = f"{self.higher} the same step has a loss of {text(higher.loss)} and a gradient of norm {text(higher.gradient)}"
        if place is None and not math.isfinite(here.others) and here.mends(higher, plain, known):
            return self._result("numerics", f"other batches have no finite loss either, and {in_higher}")
        if place is None:
            why = f"replay an earlier one, such as wb.replay(run, {self.taken.step - 1})" if self.taken.step > 1 else ""
            return self._result("earlier" if why else "every batch", why)
        if plain.skipped and math.isfinite(higher.gradient) and plain.loss <= here.largest:
            return self._result("nothing", "gradients overflowed at this loss scale, and the scaler left the update out, as it should")
        if not here.ordinary(plain):
            if here.mends(higher, plain, [loss for step, loss in self.losses.items() if step < self.taken.step and math.isfinite(loss)]):
                data, beside = here.ordinary(other), ", and with the batch of a later step it is an ordinary one in the run's precision"
                return self._result("numerics", in_higher + beside * data, also=["data"] * data)
            if not here.ordinary(other):
                return self._result("every batch")
            if here.harms_alike(other, plain):
                found = self._update([self.taken], here, plain, higher, slower)
                if found.verdict == "learning rate":
                    return found
            also = {}
            if here.worse(other.others, here.rest):
                rise = f"the update with another batch raises the loss of other batches from {text(here.rest)} to {text(other.others)}"
                also["learning rate"] = f"updates are too large as well, since {rise}"
            if not plain.finite and higher.finite:
                also["numerics"] = f"it overflows as well, since {in_higher}"
            samples = self._blamed(here.ordinary)
            return self._result("data", "; ".join(also.values()), samples=samples, also=list(also))
        if here.worse(plain.others):
            return self._update([self.taken], here, plain, higher, slower)
        if place < last:
            return self._window([self.history[: place + 1], self.history])
        recorded = self.losses.get(self.taken.step)
        if recorded is None or not stands_out(recorded, known):
            return self._result("nothing")
        if last and usual[0].worse(usual[last].others):
            return self._window([self.history[:-1]])
        return self._result("unclear", "its loss stands out in the run, and does not here")

    def _usual(self, at: int, gradient: float) -> Usual:
        """What is usual before a step of the history, with the gradient of another batch."""
        others, known = statistics.fmean(self.before[at]), self.known[at]
        beside = [*known, others] if math.isfinite(others) else known
        largest = limit(beside) if beside else math.inf
        return Usual(others=others, rest=statistics.fmean(self.before[at][1:]), largest=largest, gradient=gradient, drift=drift(known))

    def _update(self, window: list[Taken], usual: Usual, plain: Trial, higher: Trial, slower: Trial) -> StepReplay:
        """The verdict on an update, or on several, that made other batches worse, though its own batch is an ordinary one."""
        first, last = window[0].step, window[-1].step
        what = f"the update of step {first} raises" if first == last else f"the updates of steps {first} to {last} raise"
        rise = f"{what} the loss of other batches from {text(usual.others)} to {text(plain.others)}"
        if usual.cures(higher, plain):
            return self._result("numerics", f"{rise}; {self.higher} it becomes {text(higher.others)}")
        for factor in RATES:
            if usual.cures(slower, plain) or self.player.time_left() <= 0:
                break
            self.say(f"step {self.taken.step} at {factor:g} of the learning rate")
            slower = self.player.trial(f"{factor:g} of the learning rate", window, self.others, rate=factor)
            self.trials.insert(-1, slower)
        if usual.cures(slower, plain):
            return self._result("learning rate", f"{rise}; with {slower.name} it becomes {text(slower.others)}")
        why, other = f"{rise}; none of the changes keeps it from rising", self.trials[-1]
        if first == 1 and slower.name.startswith(f"{RATES[-1]:g} ") and usual.worse(other.others, usual.rest):
            return self._result("every batch", f"{why}, and the update with the batch of a later step raises it as well")
        return self._result("unclear", why)

    def _window(self, windows: Sequence[list[Taken]]) -> StepReplay:
        """The verdict where it takes several steps to make other batches worse: those of the first window that does."""
        usual = self._usual(0, math.inf)
        for window in windows:
            steps = f"steps {window[0].step} to {window[-1].step}"
            self.say(f"{steps} with changes")
            plain = self.player.trial(f"as they were, {steps}", window, self.others)
            if usual.worse(plain.others):
                break
        higher = self.player.trial(f"{self.higher}, {steps}", window, self.others, higher=True)
        slower = self.player.trial(f"a tenth of the learning rate in {steps}", window, self.others, rate=0.1)
        self.trials = [*self.trials[:-1], plain, higher, slower, self.trials[-1]]
        return self._update(window, usual, plain, higher, slower)

    def _blamed(self, ordinary: Callable[[Trial], bool]) -> list[int]:
        """The samples without which the step is an ordinary one; empty = it takes more than a few, or they cannot be left out."""
        player, taken, spec = self.player, self.taken, self.player.spec
        loaders = [loader for loader in player.loaders for _ in range(spec.accumulation)]
        batches = StepBatches(
            taken.batches, taken.samples, loaders, int(spec.micro_batch), collated=player.trainer.task.collate is not None
        )
        notes, before = list(player.notes), len(player.errors)

        def trial(out: Sequence[Place], changed: Sequence[Any]) -> Trial:
            name = f"without sample {', '.join(str(batches.number(place)) for place in out)}"
            self.say(name)
            return player.trial(name, [taken], self.others, batches=changed)

        blame = batches.blame(trial, ordinary, player.time_left)
        player.notes[:] = notes  # the step as it was has said what it raised
        if blame.unknown:
            player.notes.append(JOINED)
        if blame.none_finite and len(errors := set(player.errors[before:]) - set(player.errors[:before])) == 1:
            player.notes.append(f"without a sample, the task raised {errors.pop()}")
        self.trials += blame.trials
        return [batches.number(place) for place in blame.places]

    def _result(self, verdict: str, why: str = "", *, samples: Sequence[int] = (), also: Sequence[str] = ()) -> StepReplay:
        return StepReplay(
            run=str(self.run_dir),
            asked=self.history[-1].step,
            step=self.taken.step,
            verdict=verdict,
            samples=tuple(samples),
            usual=self.usual.others,
            recorded=self.losses.get(self.taken.step),
            trials=tuple(self.trials),
            start=self.player.start,
            why=why,
            also=tuple(also),
            notes=tuple(dict.fromkeys([*self.player.notes, *[PLACES] * (bool(samples) and not self.taken.samples)])),
        )
