"""Records what the first steps of a spec compute on several ranks, in the form in which one process records them (`divergence`).

What belongs to samples is put together over the data-parallel ranks, in the order in which one process has the samples; gradients and
updates are whole tensors, wherever their parts lie. In a pipeline each stage records its modules by their names in the whole model. So the
recording can be compared with that of one process that has the whole batch.
"""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workbench.diagnosis.measure.divergence import CHANGE, batch_values, doubled, in_fp64, tensors_in
from workbench.diagnosis.measure.operator_recorder import Entry, Sketch, modes_of, options_of, sketch, uncompiled
from workbench.harness.batches import tensors_of
from workbench.harness.restore import process_settings
from workbench.runs.spec import RunSpec
from workbench.runs.task import Task
from workbench.train.random_numbers import seed_all
from workbench.train.ranks import Ranks
from workbench.train.sharded_tensors import dtensor_spec, from_local_part, full_tensor, is_dtensor
from workbench.train.sharding import check_reduced
from workbench.train.step_weights import weight_of
from workbench.train.trainer import Trainer, build_model


class RanksRecorder:
    """Records inside `on`. The ranks of a stage record the same in the same order, since they communicate; the first of them keeps it."""

    def __init__(self, trainer: Trainer) -> None:
        self.entries: list[Entry] = []
        self.step, self.samples = 0, 0
        self._model, self._readers, self._group = trainer.module, trainer.layout.readers, trainer.layout.data
        split = trainer.layout.tensor
        self.keeps = not self._readers.rank and (split is None or not split.get_local_rank())
        self._calls: Counter[str] = Counter()
        self._waiting: dict[tuple[str, int], list[Tensor]] = {}
        self._forward = False
        trainer.phase = self._phase

    @contextlib.contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        before, self._forward = self._forward, phase == "forward"  # in a backward forwards may be computed again
        yield
        self._forward = before

    def alike(self, *described: Any) -> bool:
        """Is the same true of all data-parallel ranks? A collective, which no rank may leave out."""
        if self._readers.world_size == 1:
            return True
        others: list[Any] = [None] * self._readers.world_size
        dist.all_gather_object(others, described, group=self._group)
        return all(other == described for other in others)

    def whole_batch(self, batch: Any) -> list[Tensor]:
        """The tensors of a batch, whole; none where they have other shapes on other ranks, such as by padding."""
        tensors = tensors_of(batch)
        if not self.alike([(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]):
            return []
        return [self.whole(tensor) if tensor.ndim else tensor for tensor in tensors]

    def whole(self, tensor: Tensor) -> Tensor:
        """What all data-parallel ranks have of a tensor of samples, in the order of one process: a sampler deals them out in turn."""
        if self._readers.world_size == 1:
            return tensor.detach()
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self._readers.world_size)]
        dist.all_gather(parts, tensor.detach().contiguous(), group=self._group)
        return torch.stack(parts, 1).flatten(0, 1)

    def mean(self, value: Tensor, weight: Tensor) -> Tensor:
        """The mean of a number over the data-parallel ranks, each with its weight."""
        both = torch.stack([torch.where(weight == 0, 0.0, value.detach() * weight), weight.to(value.dtype)])
        if self._readers.world_size > 1:
            dist.all_reduce(both, group=self._group)
        return both[0] / both[1]

    def add(self, kind: str, key: tuple[Any, ...], phase: str, module: str, tensors: Sequence[Tensor]) -> None:
        """Keep the sketches of tensors that are whole."""
        if self.keeps and tensors:
            sketches = tuple(sketch(tensor) for tensor in tensors if tensor.numel() and not tensor.is_complex())
            self.entries.append(Entry(kind, key, self.step, phase, module, "", sketches))

    def begin(self, step: int) -> None:
        """A step begins: its calls of a module are counted over all of its micro-batches, as in one process."""
        self.step = step
        self._calls.clear()
        if self.keeps:
            self.entries.append(modes_of(self._model, step))

    def value(self, phase: str, name: str, *tensors: Tensor) -> None:
        """Keep a value of the training by its name."""
        self.add("value", (self.step, phase, name), phase, name, tensors)

    def _output(self, name: str, call: int, rows: Sequence[Tensor]) -> None:
        self.add("module", (self.step, "output", name, call), "forward", name, [self.whole(tensor) for tensor in rows])

    def outputs(self) -> None:
        """Put together what modules gave in a micro-batch, if all ranks called them as often and with the same shapes. A collective."""
        if self._readers.world_size == 1:
            return
        calls: dict[str, list[Any]] = {}
        for (name, _), rows in self._waiting.items():
            calls.setdefault(name, []).append([(tuple(tensor.shape), str(tensor.dtype)) for tensor in rows])
        of_ranks: list[Any] = [None] * self._readers.world_size
        dist.all_gather_object(of_ranks, (calls, list(self._waiting)), group=self._group)
        for name, call in of_ranks[0][1]:  # the order of the first rank: others may have another
            if all(of_rank.get(name) == of_ranks[0][0][name] for of_rank, _ in of_ranks):
                self._output(name, call, self._waiting[name, call])
        self._waiting.clear()

    @contextlib.contextmanager
    def on(self) -> Any:
        """Record what modules give in the forward; call `outputs` after it."""
        names = {id(part): uncompiled(name) for name, part in self._model.named_modules()}

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not self._forward:
                return
            name = names[id(module)]
            given = [full_tensor(tensor) if is_dtensor(tensor) else tensor for tensor in tensors_of(output)]
            rows = [tensor for tensor in given if tensor.ndim and len(tensor) == self.samples and tensor.is_floating_point()]
            self._calls[name] += 1
            if self._readers.world_size == 1:
                self._output(name, self._calls[name], rows)
            else:
                self._waiting[name, self._calls[name]] = [tensor.detach().clone() for tensor in rows]

        handles = [part.register_forward_hook(leave) for part in self._model.modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def of_ranks(spec: RunSpec, task: Task, ranks: Ranks, steps: int, double: bool) -> list[Entry]:
    """What the first steps of a spec compute, on all ranks together. All call it; rank 0 gets it, the others nothing."""
    spec = spec.replace(precision="fp32") if double else spec
    with process_settings():
        seed_all(spec.seed)
        trainer = Trainer(spec, task, ranks, module=build_model(task).double() if double else None)
        module, recorder = trainer.module, RanksRecorder(trainer)
        with contextlib.closing(trainer.batches()) as batches, in_fp64(double):
            for name, value in tensors_in(module).items():
                recorder.value("start", name, full_tensor(value))
            for step in range(1, steps + 1):
                recorder.begin(step)
                taken = [next(batches) for _ in range(spec.accumulation)]
                taken = [doubled(batch) for batch in taken] if double else taken
                columns = [recorder.whole_batch(batch) for batch in taken]
                samples, readers = int(spec.micro_batch), trainer.layout.readers.world_size
                for name, tensors in batch_values(columns, samples * readers, readers).items():
                    recorder.value("start", name, *tensors)
                total: Any = 0.0
                for left, batch in zip(reversed(range(len(taken))), taken, strict=True):
                    recorder.samples = _rows_of_samples(batch, samples)
                    with recorder.on():
                        total = total + trainer.micro_step(batch, last=not left)
                    check_reduced(trainer.model)
                    recorder.outputs()
                counts = [weight_of(task, batch, ranks.device) if task.weight else torch.ones((), device=ranks.device) for batch in taken]
                recorder.value("forward", "the loss", recorder.mean(total, sum(counts[1:], counts[0])))
                scale = trainer.precision.loss_scale()
                for name, weight in reversed(list(module.named_parameters())):
                    if weight.grad is not None:
                        recorder.value("backward", name, _whole_gradient(weight) / (1.0 if scale is None else float(scale)))
                before = {name: full_tensor(value).detach().clone() for name, value in tensors_in(module).items()}
                if recorder.keeps:
                    recorder.entries += options_of(trainer.optimizer, module, step)
                trainer.update()
                for name, value in tensors_in(module).items():
                    now = full_tensor(value).detach()
                    recorder.value("optimizer", CHANGE + name, now - before[name] if now.is_floating_point() else now)
                for name, buffer in module.named_buffers():
                    recorder.value("after", name, full_tensor(buffer))
    return _of_all_stages(recorder.entries, trainer) if trainer.pipeline else recorder.entries


def _of_all_stages(entries: Sequence[Entry], trainer: Trainer) -> list[Entry]:
    """Of a pipeline: the entries of all stages on its first rank, in the order in which one process computes them. A collective."""
    assert trainer.pipeline
    own = {id(part): number for number, stage in trainer.pipeline.modules.items() for part in stage.modules()}
    stages: dict[str, float] = {}  # of modules, parameters and buffers
    for name, part in trainer.module.named_modules():
        if id(part) in own:
            tensors = (f"{name}.{tensor}" for tensor in (*part._parameters, *part._buffers))
            stages |= dict.fromkeys((uncompiled(name), *tensors), own[id(part)])

    def place(entry: Entry) -> float:
        stage = stages.get(entry.module.removeprefix(CHANGE), math.inf)
        return -stage if entry.phase == "backward" else stage

    found = trainer.pipeline.gathered({entry.key: (place(entry), entry) for entry in entries})
    return [entry for _, entry in sorted(found.values(), key=itemgetter(0))]


def _rows_of_samples(batch: Any, micro_batch: int) -> int:
    """Rows of a tensor that has one or more for each sample of a batch; 0 = not known, as of graphs that are joined."""
    lengths = [len(tensor) for tensor in tensors_of(batch) if tensor.ndim]
    if micro_batch in lengths:
        return micro_batch
    return lengths[0] if len(set(lengths)) == 1 else 0


def _whole_gradient(weight: Tensor) -> Tensor:
    """The gradient of a parameter, wherever its parts lie."""
    assert weight.grad is not None
    spec = dtensor_spec(weight)
    return full_tensor(weight.grad if spec is None or is_dtensor(weight.grad) else from_local_part(weight.grad, spec))


def packed(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """As JSON values."""
    return [dataclasses.asdict(entry) for entry in entries]


def unpacked(rows: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Inverse of `packed`, after JSON."""
    return [Entry(**{**row, "key": tuple(row["key"]), "sketches": tuple(_sketch(value) for value in row["sketches"])}) for row in rows]


def _sketch(value: Mapping[str, Any]) -> Sketch:
    return Sketch(tuple(value["shape"]), float(value["norm"]), tuple(map(float, value["projections"])))
