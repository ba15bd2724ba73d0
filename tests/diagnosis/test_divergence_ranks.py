"""One process against ranks that share the model: rounding where they agree, and the module where they do not."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import workbench as wb
from tests.forked import Forks
from tests.toy_tasks import Numbers
from workbench.diagnosis.measure import divergence
from workbench.diagnosis.measure.divergence_ranks import of_ranks, packed, unpacked
from workbench.train.ranks import Ranks


class Halves(nn.Module):
    """Adds something where it runs on several ranks, as a forgotten branch would."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        several = dist.is_initialized() and dist.get_world_size() > 1
        return torch.tanh(x) + (self.by if several else 0.0)


def built(by: float = 0.0) -> wb.Task:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), Halves(by), nn.Linear(16, 2))

    return wb.Task(model=model, dataset=Numbers, loss=loss, optimizer="adamw(lr=0.01)", tensor_parallel={"0": "colwise", "2": "rowwise"})


def wrong() -> wb.Task:
    return built(1e-3)


def weighted() -> wb.Task:
    """Learns the samples whose first number is above 0; ranks and micro-batches have different numbers of them."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        counts = batch[0][:, 0] > 0
        return F.mse_loss(model(batch[0])[counts], batch[1][counts])

    return dataclasses.replace(built(), loss=loss, weight=lambda batch: (batch[0][:, 0] > 0).sum())


class Words(nn.Module):
    """Returns the mean loss of its words, as Hugging Face's models do; 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(16, 8, padding_idx=0), nn.Linear(8, 16)

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        logits = self.out(self.embed(words[:, :-1]))
        return {"loss": F.cross_entropy(logits.transpose(1, 2), words[:, 1:], ignore_index=0), "logits": logits}


def padded() -> wb.Task:
    """Texts of different lengths, padded to the longest of their batch."""

    def texts() -> list[Tensor]:
        lengths = torch.randint(4, 12, (64,), generator=torch.Generator().manual_seed(1))
        return [torch.randint(1, 16, (int(length),), generator=torch.Generator().manual_seed(i)) for i, length in enumerate(lengths)]

    return wb.Task(
        model=Words,
        dataset=texts,
        collate=lambda samples: nn.utils.rnn.pad_sequence(samples, batch_first=True),
        loss=lambda model, batch: model(batch)["loss"],
        optimizer="adamw(lr=0.01)",
        weight=lambda batch: (batch[:, 1:] != 0).sum(),
    )


class Boxes(nn.Module):
    """Its head is called once for each sample that has a box, so not as often on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        features = torch.tanh(self.body(inputs))
        with_box = [self.head(each).square().sum() for each, own in zip(features, inputs, strict=True) if own[0] > 0]
        unused = features.sum() * 0 + sum(weight.sum() * 0 for weight in self.head.parameters())  # DDP needs a gradient of all on each rank
        total: Tensor = sum(with_box, unused) / len(inputs)
        return total


def boxes() -> wb.Task:
    return dataclasses.replace(built(), model=Boxes, loss=lambda model, batch: model(batch[0]), tensor_parallel=None)


class Graphs(nn.Module):
    """Sums over the edges of each node, then over the nodes of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.out = nn.Embedding(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor, count: int) -> Tensor:
        features = self.embed(nodes)
        features = torch.tanh(self.layer(features)).index_add(0, edges[1], features[edges[0]])
        scores: Tensor = self.out(features.new_zeros(count, 8).index_add(0, graph, features))[:, 0]
        return scores


def graphs(sizes: tuple[int, int] = (3, 8)) -> wb.Task:
    """Graphs that a collate joins into one: the numbers of their nodes begin at 0 in each micro-batch."""

    def samples() -> list[tuple[Tensor, Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        numbers = [int(torch.randint(*sizes, (1,), generator=generator)) for _ in range(64)]
        nodes = [torch.randint(0, 6, (number,), generator=generator) for number in numbers]
        edges = [torch.randint(0, number, (2, 2 * number), generator=generator) for number in numbers]
        return [(each, pairs, each.float().mean()) for each, pairs in zip(nodes, edges, strict=True)]

    def joined(batch: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, ...]:
        counts = torch.tensor([len(nodes) for nodes, _, _ in batch])
        edges = [pairs + begin for (_, pairs, _), begin in zip(batch, counts.cumsum(0) - counts, strict=True)]
        graph = torch.arange(len(batch)).repeat_interleave(counts)
        return torch.cat([nodes for nodes, _, _ in batch]), torch.cat(edges, 1), graph, torch.stack([target for _, _, target in batch])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nodes, edges, graph, targets = batch
        return F.mse_loss(model(nodes, edges, graph, len(targets)), targets)

    return wb.Task(model=Graphs, dataset=samples, collate=joined, loss=loss, optimizer="adamw(lr=0.01)")


def meshes() -> wb.Task:
    """Graphs that all have as many nodes."""
    return graphs((5, 6))


def other_graphs() -> wb.Task:
    """With other targets."""
    task = graphs()
    collate = task.collate
    assert collate is not None

    def joined(batch: Any) -> Any:
        *graph, targets = collate(batch)
        return *graph, targets + 1

    return dataclasses.replace(task, collate=joined)


class Uneven(nn.Module):
    """Uses its second head on the first rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, inputs: Tensor) -> Tensor:
        used = self.heads[:1] if dist.is_initialized() and dist.get_rank() else self.heads
        return torch.stack([head(inputs) for head in used]).sum(0)


def uneven() -> wb.Task:
    return dataclasses.replace(built(), model=Uneven, tensor_parallel=None)


def deep() -> wb.Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2))

    return dataclasses.replace(built(), model=model, tensor_parallel=None)


ONE = wb.RunSpec(task=f"{__file__}:built", device="cpu", micro_batch=8, steps=2)
STAGES: dict[str, Any] = {"pipeline_parallel": 2, "nproc_per_node": 2}


def record_a_pipeline() -> None:
    """On two ranks, of which each has two stages that do not follow each other."""
    spec = ONE.replace(task=f"{__file__}:deep", accumulation=4, pipeline_schedule="interleaved(chunks=2)", **STAGES)
    ranks = Ranks.join(spec)
    found = [packed(of_ranks(spec, deep(), ranks, 2, double)) for double in (False, True)]
    if not ranks.rank:
        Path("recorded.json").write_text(json.dumps(found))
    split = ONE.replace(task=f"{__file__}:built", tensor_parallel=2, nproc_per_node=2)
    assert bool(of_ranks(split, built(), ranks, 1, False)) == (not ranks.rank)  # the others keep nothing
    ranks.agree(True)
    Ranks.leave()


def test_one_rank_that_shards_is_recorded_as_a_process_is() -> None:
    ranks = Ranks.join(ONE)
    try:
        for knobs in ({"parallel": "fsdp"}, {"parallel": "zero1"}, {}):
            for double in (False, True):
                entries = of_ranks(ONE.replace(**knobs), built(), ranks, 2, double)
                again = unpacked(json.loads(json.dumps(packed(entries))))
                assert again == entries
                points, by = divergence._points(divergence.of_spec(ONE, built(), 2, double), again)
                assert by == "modules"
                assert {entry.module for entry in again if entry.kind == "options"} == {"0.weight", "0.bias", "2.weight", "2.bias"}
                assert {point.phase for point in points} == {"start", "forward", "backward", "optimizer"}
                assert {point.module for point in points if point.phase == "forward"} == {"0", "1", "2", "the model", "the loss"}
                assert max(point.difference for point in points) < (1e-12 if double else 1e-4)
        points, _ = divergence._points(divergence.of_spec(ONE, weighted(), 2, True), of_ranks(ONE, weighted(), ranks, 2, True))
        assert max(point.difference for point in points) < 1e-12
        several = ONE.replace(accumulation=2)
        points, _ = divergence._points(divergence.of_spec(several, built(), 2, True), of_ranks(several, built(), ranks, 2, True))
        assert max(point.difference for point in points) < 1e-12  # each micro-batch is compared with the same of the other
        assert len([point for point in points if point.phase == "forward" and point.module == "1"]) == 2 * 2
    finally:
        dist.destroy_process_group()


def test_the_stages_of_a_pipeline_are_recorded_as_the_layers_of_one_process_are(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = forks.ranks(2, tmp_path, "-c", f"from {__name__} import record_a_pipeline\nrecord_a_pipeline()")
    assert done.returncode == 0, done.stderr
    for double, rows in zip((False, True), json.loads(Path("recorded.json").read_text()), strict=True):
        one, several = divergence.of_spec(ONE.replace(accumulation=4), deep(), 2, double), unpacked(rows)
        points, by = divergence._points(one, several)
        assert by == "modules"
        assert max(point.difference for point in points) < (1e-12 if double else 1e-4)
        outputs = "".join(entry.module for entry in several if (entry.kind, entry.step) == ("module", 1))
        assert sorted(outputs) == sorted("012345" * 4)
        assert [outputs.index(name) for name in "012345"] == sorted(outputs.index(name) for name in "012345")
        assert outputs.rindex("1") < outputs.index("2")  # stage by stage
        for phase in ("start", "backward", "optimizer", "after"):
            mine, its = ([entry.key for entry in both if (entry.kind, entry.phase) == ("value", phase)] for both in (one, several))
            assert sorted(mine) == sorted(its)
            assert phase != "backward" or [key for key in mine if key[0] == 1] == [key for key in its if key[0] == 1]


def test_micro_batches_of_a_model_that_returns_its_loss_differ_by_rounding() -> None:
    """The mean loss of a micro-batch was held against that of the whole batch: a "bug" of every model of Hugging Face."""
    one = ONE.replace(task=f"{__file__}:padded")
    found = wb.diverge(one, one.replace(accumulation=2, micro_batch=4), budget_s=600)
    assert found.verdict == "rounding", found
    assert found.exact is not None
    assert found.exact < 1e-12


@pytest.mark.parametrize("task", ["graphs", "meshes"])
def test_micro_batches_of_joined_graphs_are_the_same_batch(task: str) -> None:
    """The numbers of the nodes begin at 0 in the second micro-batch, which was taken for another batch: the verdict was "start"."""
    one = ONE.replace(task=f"{__file__}:{task}")
    found = wb.diverge(one, one.replace(accumulation=2, micro_batch=4), budget_s=600)
    assert found.verdict == "rounding", found
    both = one.replace(accumulation=2, micro_batch=4)
    assert wb.diverge(both, both, budget_s=600).verdict == "identical"


def test_joined_graphs_that_differ_are_other_batches() -> None:
    one = ONE.replace(task=f"{__file__}:graphs")
    other = ONE.replace(task=f"{__file__}:other_graphs", accumulation=2, micro_batch=4)
    assert wb.diverge(one, other, budget_s=600).verdict == "start"
    assert wb.diverge(one.replace(accumulation=2, micro_batch=4), other, budget_s=600).verdict == "start"


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("call", ["diverge", "diagnose", "measure_memory"])
def test_a_rank_that_leaves_a_parameter_without_gradient_ends_an_experiment_with_its_error(tmp_path: Path, call: str) -> None:
    """The other rank waited in its backward, this one for what the ranks exchange, and nothing was known after the whole budget."""
    one = ONE.replace(task=f"{__file__}:uneven")
    two = one.replace(nproc_per_node=2, micro_batch=4)
    with pytest.raises(wb.RunError, match=r"(?s)Expected to have finished reduction.*find_unused_parameters=True"):
        getattr(wb, call)(*[one] * (call == "diverge"), two, budget_s=300, runs_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    "knobs",
    [
        {"parallel": "fsdp", "micro_batch": 4, "task": f"{__file__}:padded"},
        {"parallel": "fsdp", "micro_batch": 4},
        {"tensor_parallel": 2},
        {"micro_batch": 2, "accumulation": 2},
        STAGES,
        {"micro_batch": 4, "task": f"{__file__}:weighted"},
        {"micro_batch": 4, "task": f"{__file__}:boxes"},
        {"micro_batch": 4, "task": f"{__file__}:graphs"},
        {"micro_batch": 4, "task": f"{__file__}:meshes"},
        {"micro_batch": 2, "accumulation": 2, "task": f"{__file__}:meshes"},
    ],
    ids=["padded", "fsdp", "tp", "ddp", "pp", "weighted", "boxes", "graphs", "meshes", "accumulated meshes"],
)
def test_ranks_that_agree_with_one_process_differ_by_rounding(tmp_path: Path, knobs: dict[str, Any]) -> None:
    one = ONE.replace(micro_batch=4, accumulation=2) if "pipeline_parallel" in knobs else ONE.replace(task=knobs.get("task", ONE.task))
    found = wb.diverge(one, one.replace(**{"nproc_per_node": 2, **knobs}), budget_s=600, runs_dir=tmp_path)
    assert found.verdict in ("rounding", "identical"), found
    assert found.exact is not None
    assert found.exact < 1e-12
    assert found.by == "modules"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("knobs", [{"local_sgd": "periodic(start=0)"}, {"gradient_compression": "fp16"}], ids=["local_sgd", "fp16"])
def test_ranks_that_are_not_meant_to_agree_are_no_bug(tmp_path: Path, knobs: dict[str, Any]) -> None:
    two = ONE.replace(nproc_per_node=2, micro_batch=4)
    found = wb.diverge(two, two.replace(**knobs), budget_s=600, runs_dir=tmp_path)
    assert found.verdict == "design", found
    assert found.notes[0].startswith(f"{next(iter(knobs))}: ")
    assert found.exact is not None
    assert found.exact > 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_the_option_of_the_optimizer_that_differs_on_several_ranks_is_named(tmp_path: Path) -> None:
    spec = ONE.replace(optimizer="adamw(lr=0.01)")
    sharded = ONE.replace(optimizer="adamw(lr=0.01, eps=1e-3)", parallel="fsdp", nproc_per_node=2, micro_batch=4)
    found = wb.diverge(spec, sharded, budget_s=600, runs_dir=tmp_path)
    assert found.first is not None
    assert (found.verdict, found.first.step, found.first.phase) == ("bug", 1, "optimizer"), found
    assert found.notes == ("options of the optimizer that differ for 0.weight: eps: 1e-08 and 0.001",)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("knobs", [{"nproc_per_node": 2, "parallel": "fsdp", "micro_batch": 4}, STAGES], ids=["fsdp", "pp"])
def test_the_module_that_differs_on_several_ranks_is_named(tmp_path: Path, knobs: dict[str, Any]) -> None:
    spec = ONE.replace(task=f"{__file__}:wrong", micro_batch=8, accumulation=2)
    found = wb.diverge(spec, spec.replace(**knobs), budget_s=600, runs_dir=tmp_path)
    assert found.verdict == "bug", found
    assert found.first is not None
    assert (found.first.step, found.first.phase, found.first.module) == (1, "forward", "1"), found
