"""Two ranks train small models under each set of knobs in a JSON file, name → [task, knobs], and rank 0 writes what came of it beside.

After that they train the specs of run directories, as a launch does.
"""

import contextlib
import dataclasses
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.cluster.estimate.collectives import CollectiveRecorder
from workbench.core import run_directory
from workbench.data.samples import ByteText
from workbench.programs.train import train_all
from workbench.runs.spec import RunSpec
from workbench.runs.task import Task
from workbench.train.models import Gpt, MoeGpt, ResNet
from workbench.train.offload import DryRunHooks, offloading_dry_run
from workbench.train.ranks import Ranks
from workbench.train.sharded_tensors import local_part
from workbench.train.sharding import gathered
from workbench.train.trainer import Trainer

STEPS = 2
"""Of each case that says nothing else: in the second one what the optimizer has kept takes part, and the evaluation sees what it does."""
SIZES = {"length": 16, "width": 32, "layers": 2, "heads": 4}
"""Of the models: with the first part and the head, these are as many parts as two ranks have stages where each has two."""
PLAN = {"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise", "head": "colwise_rep"}


class Dropping(Gpt):
    """With dropout: what is computed anew has to draw the same random numbers again. Unlike from rank to rank when it is built."""

    def __init__(self) -> None:
        super().__init__(**SIZES)
        for layer in self.layers:
            layer.mlp.append(nn.Dropout(0.1))  # type: ignore[operator,union-attr]


def next_byte(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def squares(model: nn.Module) -> dict[str, float]:
    """Of an evaluation that takes the weights to be whole."""
    assert not model.training
    loss = next_byte(model, torch.arange(34).view(2, 17))
    return {"squares": sum(float(weight.double().square().sum()) for weight in model.parameters()), "loss": float(loss)}


def gpt(**changes: Any) -> Task:
    known: dict[str, Any] = {
        "model": lambda: Gpt(**SIZES),
        "dataset": lambda: ByteText(length=16),
        "loss": next_byte,
        "evaluate": squares,
        "tensor_parallel": PLAN,
        "pipeline": Gpt.pieces,
    }
    return Task(**known | changes)


def dropping() -> Task:
    return gpt(model=Dropping)


def counted(kind: str = "gpt") -> Task:
    """The bytes of its collectives are counted."""
    return dataclasses.replace(globals()[kind](), name="counted")


def counted_mixture() -> Task:
    return counted("mixture")


def compressed() -> Task:
    """The bytes that a hook of DDP reduces in the last step are counted: it goes on in threads that no dispatch mode sees."""
    return dataclasses.replace(gpt(), name="compressed")


@contextlib.contextmanager
def counting_reductions(sizes: list[int]) -> Iterator[None]:
    """Note the bytes of each call of `all_reduce`, of whatever thread."""
    real = dist.all_reduce

    def noted(tensor: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(tensor.nbytes)
        return real(tensor, *args, **options)

    dist.all_reduce = noted
    try:
        yield
    finally:
        dist.all_reduce = real


def ragged_targets(batch: Tensor) -> Tensor:
    """Of each sequence as many as its first byte says; the rest is padding."""
    return torch.where(torch.arange(batch.shape[1] - 1) < 1 + batch[:, :1] % 16, batch[:, 1:], -100)


def ragged() -> Task:
    """The loss is a mean over targets, of which micro-batches have different numbers."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), ragged_targets(batch).flatten(), ignore_index=-100)

    return gpt(loss=loss)


def weighed() -> Task:
    return dataclasses.replace(ragged(), weight=lambda batch: (ragged_targets(batch) != -100).sum())


def unplanned() -> Task:
    return gpt(tensor_parallel=None)


def grouped() -> Task:
    """An optimizer of the user's own, with two groups."""

    def build(weights: Any) -> torch.optim.Optimizer:
        both: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for weight in weights:
            both[weight.ndim > 1].append(weight)
        return torch.optim.AdamW([{"params": both[True], "weight_decay": 0.3}, {"params": both[False], "weight_decay": 0.0}], lr=0.003)

    return gpt(optimizer=build)


def unseeded() -> Task:
    """Each rank would build another model."""

    def build() -> nn.Module:
        torch.manual_seed(dist.get_rank())
        return Gpt(**SIZES)

    return gpt(model=build)


def tied() -> Task:
    """One weight for two layers, and a layer that does not learn."""

    def build() -> nn.Module:
        model = Gpt(**SIZES)
        model.head.weight = model.tokens.weight
        model.layers[1].requires_grad_(False)
        return model

    return gpt(model=build)


def mixture() -> Task:
    """Two layers of four experts; a part of the loss balances them."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        total: Tensor = next_byte(model, batch) + 0.01 * getattr(model, "module", model).imbalance  # type: ignore[operator]
        return total

    return gpt(model=lambda: MoeGpt(**SIZES), loss=loss, tensor_parallel=None, pipeline=None)


def validated_gpt(kind: str = "gpt") -> Task:
    """Its evaluation is shared among the ranks, too."""
    task: Task = globals()[kind]()
    return dataclasses.replace(task, evaluate=None, validation=lambda: ByteText("validation", length=16))


def validated_mixture() -> Task:
    return validated_gpt("mixture")


def denoising() -> Task:
    """A model that gives what it gets, and a loss that asks it for the noise that it was given, by three generators."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        for layer in model:
            nn.init.eye_(layer.weight)  # type: ignore[arg-type]
        return model

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        noise = torch.randn(batch.shape) + float(np.random.rand()) + random.random()
        return F.mse_loss(model(noise), noise)

    return gpt(model=build, dataset=lambda: list(torch.randn(128, 4)), loss=loss, evaluate=None, pipeline=None)


def pictures() -> Task:
    images = [(torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(i)), i % 4) for i in range(128)]
    return gpt(
        model=lambda: ResNet(classes=4, width=8),
        dataset=lambda: images,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        evaluate=None,
        pipeline=ResNet.pieces,
    )


def bypassed() -> Task:
    """Its loss calls the model inside of DistributedDataParallel, which then reduces nothing, after a forward without gradients."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            model(batch[:, :-1])
        return next_byte(model.module, batch)  # type: ignore[arg-type]

    return gpt(loss=loss)


def taught() -> Task:
    """Its loss calls the model twice, and beside that without DistributedDataParallel, and reads an attribute of it."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            target = getattr(model, "module", model)(batch[:, :-1])
        return next_byte(model, batch) + F.mse_loss(model(batch[:, :-1]), target) / len(model.layers)  # type: ignore[arg-type]

    return gpt(loss=loss)


def trained(task: Task, knobs: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """The mean loss of each step over the ranks, the evaluation, this rank's number of parameters."""
    spec = RunSpec(**{"task": "made-here", "device": "cpu", "micro_batch": 4, "steps": STEPS, "nproc_per_node": 2, **knobs})
    on_host: list[int] = []
    hooks = DryRunHooks(on_host=lambda tensor: on_host.append(tensor.nbytes), host_computes=contextlib.nullcontext)
    with offloading_dry_run(hooks) if spec.offload != "none" else contextlib.nullcontext():
        trainer = Trainer(spec, task, ranks)
        losses = []
        sends, hooked = CollectiveRecorder(str, lambda part: "", []), list[int]()
        trainer.phase = lambda phase: contextlib.nullcontext(setattr(sends, "phase", phase))
        if trainer.pipeline:
            trainer.pipeline.announce = sends.announce
        with contextlib.closing(trainer.batches()) as batches:
            for _ in range(spec.steps):
                micro = [next(batches) for _ in range(spec.accumulation)]
                hooked.clear()
                watched = {"counted": sends, "compressed": counting_reductions(hooked)}.get(task.name)
                with watched or contextlib.nullcontext():
                    loss = trainer.step(micro)
                dist.all_reduce(loss)
                losses.append(loss.item() / 2)
        figures = trainer.figures() if task.evaluate else {}
    here = sum(local_part(weight).numel() for weight in trainer.module.parameters())
    states = getattr(trainer.optimizer, "optim", trainer.optimizer).state.values()
    kept = sum(local_part(value).numel() for state in states for value in state.values() if isinstance(value, Tensor) and value.ndim)
    sent = {kind: sum(call.size for call in sends.calls if call.kind == kind) for kind in {call.kind for call in sends.calls}}
    equal: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(equal, [float(local_part(weight).double().sum()) for weight in trainer.module.parameters()])
    uneven = gradients = 0.0
    if spec.expert_parallel > 1:  # ranks may have batches of different sizes
        whole, tokens = task.model(), torch.arange(48).view(3, 16)[: ranks.rank + 1]
        whole.load_state_dict(gathered(trainer.module, keep=True))
        gradients = uneven_step(trainer, task, whole)
        with torch.no_grad():
            uneven = float((trainer.module.eval()(tokens) - whole.eval()(tokens)).abs().max())
        every: list[Any] = [None] * ranks.world_size
        dist.all_gather_object(every, uneven)
        uneven = max(every)
        dist.all_gather_object(every, gradients)
        gradients = max(every)
    found = {
        "uneven": uneven,
        "uneven gradients": gradients,
        "losses": losses,
        "figures": figures,
        "weights": here,
        "states": kept,
        "host": sum(on_host),
    }
    return {**found, "sent": sent, "hooked": sum(hooked), "equal": len(set(map(str, equal))) == 1}


def uneven_step(trainer: Trainer, task: Task, whole: nn.Module) -> float:
    """How far the gradients of this rank are from those of the whole model, where ranks have one sequence and two shorter ones."""
    batches = [(7 * torch.arange(51)).view(3, 17)[: rank + 1, : 17 - 4 * rank] for rank in range(2)]
    trainer.micro_step(batches[trainer.ranks.rank], last=True)
    (sum(task.loss(whole.train(), batch) for batch in batches) / 2 / trainer.spec.accumulation).backward()  # type: ignore[union-attr]
    furthest, expected = 0.0, dict(whole.named_parameters())
    for name, weight in trainer.module.named_parameters():
        gradient = expected[name].grad
        assert gradient is not None
        assert weight.grad is not None
        mine = gradient if gradient.shape == weight.shape else gradient.chunk(2)[trainer.ranks.rank]
        furthest = max(furthest, float((weight.grad - mine).abs().max() / gradient.abs().max()))
    trainer.module.zero_grad()
    return furthest


def main(path: str, *run_dirs: str) -> None:
    cases = json.loads(Path(path).read_text())
    ranks = Ranks.join(RunSpec(task="made-here", device="cpu"))
    results = {}
    for name, (task, knobs) in cases.items():
        try:
            results[name] = trained(globals()[task](), knobs, ranks)
        except ValueError as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    sys.path.append(str(Path(__file__).parents[2]))  # torchrun starts this file from anywhere
    from tests.scripts import checkpoint_ranks

    results["checkpoints"] = checkpoint_ranks.compare(ranks, Path(path).parent, **checkpoint_ranks.IN_MAKE_TEST)
    if ranks.rank == 0:
        Path(path).with_suffix(".out").write_text(json.dumps(results))
    folders = [Path(name) for name in run_dirs]
    if folders:
        train_all(
            [RunSpec.from_json(run_directory.read_json(folder / run_directory.RUN_JSON)["spec"]) for folder in folders], folders, ranks
        )
    ranks.agree(True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
