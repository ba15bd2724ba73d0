"""Pipeline parallelism: this rank's stages; the micro-batches of a step pass through them in the order of one of torch's schedules.

All ranks of a pipeline read the same micro-batches. The task's loss runs twice: on the rank of the first stage up to where it calls its
model, whose arguments are the stage's inputs; on that of the last stage with the stage's outputs in place of what the model gives.
Both times it draws the same random numbers, so that noise which it adds to the inputs is the noise that it compares the outputs with.

torch's schedules take a batch and cut it; here the micro-batches are given, so that `_step_microbatches` is called, which all of them have.
"""

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from workbench.harness.batches import tensors_of
from workbench.runs.spec import RunSpec, SpecError
from workbench.runs.task import Task, TaskError
from workbench.runs.training_knobs import parse_pipeline
from workbench.train.precision import Precision
from workbench.train.random_numbers import mixed_seed, seeded
from workbench.train.stages import StageModule, Stages, as_tensors, cut

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleZBVZeroBubble,
}
"""Name of a schedule → torch's class."""
Context = Callable[[], AbstractContextManager[Any]]
Announce = Callable[[str, int, Sequence[dist.P2POp]], None]


class Pipeline:
    """The part of a pipeline that is on this rank.

    Attributes:
        entries: names in the state_dict of the whole model.
        modules: of the stages on this rank, by their number.
        steps: taken so far; with `seed`, what the random numbers of the next depend on.
        phase: entered around forwards and backwards, as that of a Trainer.
        announce: called with the phase, the micro-batch and the operators of messages to and from other stages, before they are sent.
    """

    def __init__(
        self,
        spec: RunSpec,
        task: Task,
        stages: Stages,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        seed: int,
        loss: Callable[[Any, Any], Tensor],
        passed: list[tuple[Tensor, ...]] | None = None,
    ) -> None:
        """Nothing is run yet.

        Args:
            stages: the stages of the whole model.
            group: the ranks of this pipeline.
            seed: of this pipeline's random numbers.
            loss: of a model and a micro-batch, as it is to be added to the loss of a step.
            passed: what passes between the stages, in a dry run; None = each is called once to learn it.

        Raises:
            SpecError: the schedules of this torch scale gradients themselves.
        """
        if "scale_grads" not in inspect.signature(SCHEDULES[parse_pipeline(spec.pipeline_schedule)[0]]).parameters:
            raise SpecError(f"pipeline_parallel={spec.pipeline_parallel}: torch {torch.__version__} is too old for it; take 2.7 or newer")
        self.rank, self.group, self.entries = dist.get_rank(group), group, stages.entries
        self.modules = {number: StageModule(stages.pieces[number]) for number, rank in enumerate(stages.ranks) if rank == self.rank}
        self.steps = 0
        self.phase: Callable[[str], AbstractContextManager[None]] = lambda phase: contextlib.nullcontext()
        self.announce: Announce = lambda phase, micro, messages: None
        self._spec, self._task, self._device, self._seed, self._loss = spec, task, device, seed, loss
        self._ranks = stages.ranks
        self._stages: list[_Stage] = []
        self._called: dict[int, nn.Module] = dict(self.modules)
        self._schedule: Any = None
        self._shapes: list[Any] = []
        self._passed = passed

    def __str__(self) -> str:
        """Which stages this rank has, by the classes of their pieces."""
        kinds = {number: [type(piece).__name__.lstrip("_") for piece in module.pieces] for number, module in self.modules.items()}
        return " and ".join(f"stage {number} of {len(self._ranks)}: {', '.join(names)}" for number, names in kinds.items())

    @property
    def called(self) -> list[nn.Module]:
        """The stages on this rank as they are called: their DistributedDataParallel, or they themselves."""
        return list(self._called.values())

    @property
    def kept(self) -> list[nn.Module]:
        """The pieces on this rank."""
        return [piece for module in self.modules.values() for piece in module.pieces]

    def wrap(self, wrapped: Callable[[nn.Module], nn.Module], in_forward: Context) -> None:
        """Have stages called by a wrapper, such as DistributedDataParallel, and forwards run in a context, such as autocast."""
        self._called = {number: wrapped(module) for number, module in self.modules.items()}
        for module in self.modules.values():
            _enter_around(module, in_forward)

    def step(self, batches: Sequence[Any]) -> Tensor:
        """Add the gradients of the micro-batches of a step, reduced across pipelines; returns the loss. All ranks of a pipeline call it.

        Raises:
            TaskError: micro-batches differ in shape, or the task's loss does something with its model that a stage cannot.
        """
        self._check(batches)
        with self._own_random_numbers():
            given = [self._given(number, batch) for number, batch in enumerate(batches)] if 0 in self.modules else [None] * len(batches)
            if self._schedule is None:
                self._schedule = self._build(given[0], batches)
            losses: list[Tensor] = []
            for stage in self._stages:
                stage.has_backward = True
                stage.clear_runtime_states()
            self._schedule._step_microbatches(
                [()] * len(batches), [{"given": each} for each in given], list(enumerate(batches)), losses, return_outputs=False
            )
        self.steps += 1
        total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self._device)
        dist.broadcast(total, dist.get_global_rank(self.group, self._ranks[-1]), group=self.group)
        return total

    def _check(self, batches: Sequence[Any]) -> None:
        shapes = [[(tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(batch)] for batch in batches]
        if not self._shapes:
            self._shapes = shapes[0]
            if self._passed is None:
                answers: list[Any] = [None] * dist.get_world_size(self.group)
                dist.all_gather_object(answers, _digest(batches[0]), group=self.group)
                if len(set(answers)) > 1:
                    raise TaskError(
                        "pipeline_parallel: the ranks of a pipeline read different samples, though the last needs the targets of what the "
                        "first computes; a dataset has to give each index the same sample everywhere, and a stream (IterableDataset) that "
                        "is divided by rank cannot be used"
                    )
        if strange := next((each for each in shapes if each != self._shapes), None):
            raise TaskError(
                f"pipeline_parallel: a micro-batch has tensors of the shapes {[shape for shape, _ in strange]}, and the first had "
                f"{[shape for shape, _ in self._shapes]}: buffers between stages have one size; pad all samples to one length"
            )

    @contextlib.contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Random numbers of the layers of this rank: the others compute other layers, but have to read the same augmented samples."""
        if self._passed is not None:  # a dry run
            yield
            return
        cuda = self._device.type == "cuda"
        with torch.random.fork_rng([self._device] if cuda else []):
            torch.manual_seed(mixed_seed(self._seed, self.rank, self.steps))
            yield

    def _loss_seed(self, number: int) -> AbstractContextManager[None]:
        """Inside, the loss of a micro-batch draws the same random numbers on the ranks of the first and of the last stage."""
        if self._passed is not None:  # a dry run
            return contextlib.nullcontext()
        return seeded(mixed_seed(self._seed, dist.get_world_size(self.group) + number, self.steps), self._device)

    def _given(self, number: int, batch: Any) -> Any:
        with self._loss_seed(number):
            return _arguments(self._task, batch)

    def _loss_of_output(self, output: Any, target: tuple[int, Any]) -> Tensor:
        number, batch = target
        with self._loss_seed(number):
            return self._loss(_ModelCall(output), batch)

    def _build(self, given: Any, batches: Sequence[Any]) -> Any:
        passed = self._passed if self._passed is not None else self._learn_boundaries(given)
        count = len(self._ranks)
        first = tuple(tensor.detach().to("meta") for tensor in tensors_of(given)) if given else ()
        for number, module in self._called.items():
            inputs = passed[number - 1] if number else first
            outputs = passed[number] if number < count - 1 else (torch.zeros((), device="meta"),)
            stage = _Stage(module, number, count, self._device, _like(inputs), _like(outputs), group=self.group)
            stage.phase = lambda phase: self.phase(phase)
            stage.announce = lambda phase, micro, messages: self.announce(phase, micro, messages)
            self._stages.append(stage)
        name, chunks = parse_pipeline(self._spec.pipeline_schedule)
        return SCHEDULES[name](
            self._stages if chunks > 1 else self._stages[0], n_microbatches=len(batches), loss_fn=self._loss_of_output, scale_grads=False
        )

    def _learn_boundaries(self, given: Any) -> list[tuple[Tensor, ...]]:
        """Shapes of what passes between stages: each is called once with zeros, and tells all ranks what it gave. A collective."""
        passed: list[tuple[Tensor, ...]] = []
        for number, rank in enumerate(self._ranks[:-1]):
            shapes: list[Any] = [None]
            if number in self.modules:
                module = self.modules[number]
                with _evaluating(module), torch.no_grad():
                    zeros = [torch.zeros_like(tensor, device=self._device) for tensor in passed[-1]] if passed else []
                    out = as_tensors(module(*zeros) if number else module(given=given))
                shapes = [[(tuple(tensor.shape), tensor.dtype) for tensor in out]]
            dist.broadcast_object_list(shapes, dist.get_global_rank(self.group, rank), group=self.group)
            passed.append(tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes[0]))
        return passed

    def forward(self, *args: Any, **named: Any) -> Any:
        """What the whole model gives, on each rank of the pipeline. A collective, for evaluations: without gradients."""
        out: Any = None
        for number, rank in enumerate(self._ranks):
            shapes: list[Any] = [None]
            if number in self.modules:
                module = self.modules[number]
                given = out if isinstance(out, tuple) else (out,)
                out = module(*given) if number else module(given=(args, named))
                tensors = as_tensors(out) if number < len(self._ranks) - 1 else out if isinstance(out, tuple) else (out,)
                shapes = [[(tuple(tensor.shape), tensor.dtype) for tensor in tensors]]
            source = dist.get_global_rank(self.group, rank)
            dist.broadcast_object_list(shapes, source, group=self.group)
            if number not in self.modules:
                tensors = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes[0])
                out = tensors if len(tensors) > 1 else tensors[0]
            for tensor in tensors:
                dist.broadcast(tensor.contiguous() if number in self.modules else tensor, source, group=self.group)
        return out

    def whole(self, module: nn.Module) -> nn.Module:
        """The whole model as a module in the mode of this rank's part of it, for evaluations: its forward is a collective."""
        model = _WholeModel(self, module)
        return model.train(module.training)

    def gathered(self, values: dict[Any, Any]) -> dict[Any, Any]:
        """Values by name, such as tensors, of all ranks of a pipeline, on its first; the others get none. A collective."""
        parts: list[Any] | None = None if self.rank else [None] * dist.get_world_size(self.group)
        dist.gather_object(values, parts, dist.get_global_rank(self.group, 0), group=self.group)
        return {name: value for part in parts or () for name, value in part.items()}


class _WholeModel(nn.Module):
    def __init__(self, pipeline: Pipeline, module: nn.Module) -> None:
        super().__init__()
        self.part = module
        self._pipeline = pipeline

    def forward(self, *args: Any, **named: Any) -> Any:
        """What the whole model gives."""
        for stage in self._pipeline.modules.values():
            stage.train(self.training)
        return self._pipeline.forward(*args, **named)


class _Stage(PipelineStage):
    """torch's stage, with its phases timed, its messages announced, and errors as they were."""

    phase: Callable[[str], AbstractContextManager[None]]
    announce: Announce

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._announced("forward", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._announced("forward", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._announced("backward", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._announced("backward", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def _announced(self, phase: str, micro: int, messages: list[dist.P2POp]) -> list[dist.P2POp]:
        self.announce(phase, micro, messages)
        return messages

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True) -> Any:
        with self.phase("forward"):
            try:
                return super().forward_one_chunk(fwd_chunk_id, (), kwargs if self.is_first else {}, save_forward_output)
            except RuntimeError as error:
                raise error.__cause__ or error from None

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:  # up to torch 2.12 also to a neighbour on the same rank
        return [message for message in super()._get_init_p2p_neighbors_ops() if message.peer != dist.get_rank()]

    def _validate_fwd_outputs(self, outputs: Any) -> None:  # up to torch 2.12; called also in the last stage, which passes nothing on
        if not self.is_last:
            super()._validate_fwd_outputs(outputs)  # type: ignore[misc]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        with self.phase("backward"):
            super().backward_one_chunk(bwd_chunk_id, *args, **options)
            gradients = self.bwd_cache[bwd_chunk_id]  # to be sent contiguous: images in channels_last are not
            self.bwd_cache[bwd_chunk_id] = tuple(each.contiguous() if isinstance(each, Tensor) else each for each in gradients)

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> Any:
        with self.phase("backward"):
            return super().backward_weight_one_chunk(*args, **options)


class _Called(Exception):
    """The task's loss has called its model."""


class _ModelCall:
    """Stands for the model in the task's loss: keeps the arguments of its call, or answers it."""

    def __init__(self, *output: Any) -> None:
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.training, self._output = True, list(output)
        self._answers = bool(output)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not self._answers:
            self.given = args, named
            raise _Called
        if not self._output:
            raise TaskError("pipeline_parallel: the task's loss(model, batch) calls its model twice; call it once with all that is needed")
        return self._output.pop()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TaskError(
            f"pipeline_parallel: the task's loss(model, batch) uses model.{name}; there it can be called, and nothing else, since no rank "
            "has the whole model: have the model return what the loss needs"
        )


def _arguments(task: Task, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which the task's loss calls its model."""
    model = _ModelCall()
    try:
        task.loss(model, batch)
    except _Called:
        return model.given
    raise TaskError("pipeline_parallel: the task's loss(model, batch) does not call its model")


def passed_between(model: nn.Module, task: Task, spec: RunSpec, batch: Any) -> list[tuple[Tensor, ...]]:
    """What each stage but the last gives to the next, computed here by the whole model."""
    stages = [StageModule(pieces) for pieces in cut(model, task, spec).pieces]
    passed: list[tuple[Tensor, ...]] = []
    with torch.no_grad(), Precision(spec.precision, torch.device("cpu")).autocast():
        for stage in stages[:-1]:
            passed.append(as_tensors(stage(*passed[-1]) if passed else stage(given=_arguments(task, batch))))
    return passed


def _digest(batch: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors_of(batch):
        digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


def _like(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Tensors of the same shapes and types without values, whose gradients are sent back."""
    return tuple(torch.empty(t.shape, dtype=t.dtype, device="meta", requires_grad=t.is_floating_point()) for t in tensors)


def _enter_around(module: nn.Module, context: Context) -> None:
    """Have a module's forward run in a context."""
    forward = module.forward

    def inside(*args: Any, **named: Any) -> Any:
        with context():
            return forward(*args, **named)

    module.forward = inside


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """In evaluation mode inside: batch statistics and random numbers stay."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
