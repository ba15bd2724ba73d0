"""A dry run knows what follows from the batch's whole numbers: lengths, masks, labels that are left out."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import workbench as wb
from tests import toy_tasks
from workbench.memory.estimate.examples import resized
from workbench.memory.estimate.values import GREATEST, LIMIT, tells

X, LENGTHS = torch.zeros(4, 64, 32), torch.tensor([8, 16, 32, 8])


class Program(nn.Module):
    """Does with a batch what it is told to."""

    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(32, 32), does

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out: Tensor = self.does(self.layer, x, lengths)
        return out.sum()


def estimate(does: Callable[..., Any], lengths: Tensor = LENGTHS, **knobs: Any) -> Any:
    return wb.estimate_memory(lambda: Program(does), (X, lengths), device="cpu", loss=lambda model, batch: model(*batch), **knobs)


def cut(layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """Pads to the longest of a batch only."""
    out: Tensor = layer(x[:, : int(lengths.max())]).tanh()
    return out


def note_of(found: Any) -> str:
    return " ".join(note for note in found.notes if "asked for the value" in note)


def in_loss(model: nn.Module, batch: Any) -> Tensor:
    loss = toy_tasks.larger_of_two(model, batch)
    return loss * loss.item()


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_what_torch_asks_between_the_stages_of_a_pipeline_is_no_question_of_the_program(schedule: str) -> None:
    """Its schedules begin with a message, whose value they read. What is received is an input of the stage, as in a measurement."""
    knobs: dict[str, Any] = {
        "micro_batch": 4,
        "nproc_per_node": 2,
        "pipeline_parallel": 2,
        "accumulation": 4,
        "pipeline_schedule": schedule,
    }
    spec = wb.RunSpec(task="tests.toy_tasks:any_knob", device="cpu", **knobs)
    found = wb.estimate_memory(spec, device="cpu")
    assert not note_of(found)
    assert found.largest["other"] == 0
    asking = [wb.estimate_memory(toy_tasks.any_knob(loss=in_loss), device="cpu", rank=rank, **knobs) for rank in range(2)]
    assert sum("first in test_values.py" in note_of(each) for each in asking) == 1  # where the last stage is


@pytest.mark.parametrize("longest", [1, 8, 32, 64])
def test_a_batch_is_as_long_as_its_lengths_say(longest: int) -> None:
    found = estimate(cut, torch.tensor([1, longest, 1, 1]))
    assert found.largest == estimate(lambda layer, x, lengths: layer(x[:, :longest]).tanh()).largest
    assert not note_of(found)


@pytest.mark.parametrize("lengths", [torch.zeros(4, dtype=torch.int64), torch.tensor([GREATEST, 1, 1, 1]), torch.ones(4).long().to("meta")])
def test_what_only_stands_for_a_shape_tells_nothing(lengths: Tensor) -> None:
    found = estimate(cut, lengths)
    assert "answered 1" in note_of(found)
    assert found.total == estimate(cut, torch.ones(4, dtype=torch.int64)).total


def _questions(layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.zeros(4, 64, dtype=torch.bool)
    mask[:, :16] = True
    assert int(mask.sum()) == 64
    changed = lengths.clone()
    changed[0] = 5
    assert changed.add_(1).tolist() == [6, 17, 33, 9]
    own = torch.tensor([1, 2])
    own += 1
    assert own.tolist() == [2, 3]
    assert torch.unique(lengths).tolist() == [8, 16, 32]
    assert lengths.nonzero().shape == (4, 1)
    assert torch.repeat_interleave(lengths).shape == (64,)
    assert [len(part) for part in x[0].split(lengths.tolist())] == [8, 16, 32, 8]
    assert torch.equal(lengths, lengths.clone())
    assert not torch.equal(lengths, lengths + 1)
    assert torch.zeros(2, dtype=torch.int64)[lengths].shape == (4,), "where values cannot be had, it goes on without"
    picked: Tensor = layer(x[mask])
    return picked


def test_values_are_followed_through_operators() -> None:
    before = LENGTHS.clone()
    found = estimate(_questions)
    assert not note_of(found)
    assert torch.equal(LENGTHS, before)


def _unknown(layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    written = lengths.clone()
    tail = written[1:]
    tail[0] = layer(x).sum().long()  # known to the GPU only
    asked = written.sum().item()
    assert asked == 1, "what was written to by somebody unknown is not known, by whatever view"
    assert torch.randint(0, 9, (4,)).add(5).max().item() == 1, "chance is not known"
    assert torch.empty(3, dtype=torch.int64).sum().item() == 1
    return layer(x) * asked


def test_what_is_not_known_is_not_guessed() -> None:
    assert "3 times" in note_of(estimate(_unknown, steps=1))


def test_nothing_of_the_users_is_written_to() -> None:
    array, number = np.ones(3), torch.tensor(5)

    def writes(layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        weights = torch.as_tensor(array)
        weights[0] = 77
        weights /= weights.sum()
        number.view(1).fill_(9)
        number.unsqueeze(0).add_(1)
        out: Tensor = layer(x)
        return out * weights[0]

    estimate(writes)
    assert array.tolist() == [1, 1, 1]
    assert number.item() == 5


def _written_elsewhere(layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    unknown = layer(x).sum().long()
    out = lengths.clone()
    torch.add(lengths, unknown, out=out)
    assert out.sum().item() == 1
    values, places = lengths.clone(), lengths.clone()
    torch.sort(unknown.expand(4), out=(values, places))
    assert values.sum().item() == 1
    other = lengths.clone()
    other.data = unknown.expand(4).clone()
    assert other.sum().item() == 1
    sparse = torch.diag(lengths).to_sparse()
    layer(x).mul_(2)
    del sparse
    return layer(x)


def test_whatever_way_something_unknown_is_written_it_is_not_known() -> None:
    estimate(_written_elsewhere)


def test_what_other_ranks_say_is_not_known() -> None:
    def gathers(layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        mine = lengths.sum()
        every = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
        dist.all_gather(every, mine)
        dist.all_reduce(mine)
        assert [one.item() for one in (*every, mine)] == [1, 1, 1]
        out: Tensor = layer(x)
        return out

    assert "answered 1" in note_of(estimate(gathers, world_size=2, parallel="ddp"))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint8, torch.int16])
def test_whole_numbers_of_any_size(dtype: torch.dtype) -> None:
    batch = X, torch.tensor([64, 32, 8, 8]).to(dtype)
    assert estimate(lambda layer, x, lengths: layer(x), batch[1]).total
    assert resized(batch, sequence=1024)[1].tolist() == [64, 32, 8, 8]  # too small a type to be stretched: as it is


def test_a_batch_may_be_sparse() -> None:
    assert estimate(lambda layer, x, lengths: layer(x), torch.eye(4).long().to_sparse()).total


def test_values_do_not_come_from_a_default_device() -> None:
    with torch.device("meta"):
        other = resized((X, LENGTHS), samples=6)
    assert other[1].tolist() == [8, 16, 32, 8, 8, 16]


def test_what_a_mask_selects() -> None:
    def selects(layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(64)[None] < lengths[:, None])[..., None].expand(4, 64, 32)
        assert layer(x).masked_select(mask).shape == (64 * 32,)
        return layer(x).masked_select(mask)

    assert not note_of(estimate(selects))


def test_a_mask_with_gaps_is_not_taken_for_a_full_one() -> None:
    def attend(layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(64)[None] < lengths[:, None]
        hidden = layer(x).unsqueeze(1)
        shown = None if mask.all() else mask[:, None, None].expand(4, 1, 64, 64)  # as Hugging Face's models do
        return nn.functional.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=shown)

    full, gaps = (
        wb.estimate_memory(
            lambda: Program(attend), (X, lengths), loss=lambda model, batch: model(*batch), device="L4", precision="amp_bf16"
        )
        for lengths in (torch.full((4,), 64), LENGTHS)
    )
    assert gaps.total > full.total


@given(st.integers(1, 40), st.integers(1, 70), st.lists(st.integers(0, 9), min_size=2, max_size=6))
def test_other_sizes_repeat_samples_and_stretch_sequences(samples: int, length: int, filled: list[int]) -> None:
    filled = [*filled, 10]
    lengths = torch.tensor(filled)
    mask = (torch.arange(10)[None] < lengths[:, None]).long()
    other = resized({"mask": mask, "lengths": lengths}, samples=samples, sequence=length)
    assert other["mask"].shape == (samples, length)
    if not other["lengths"].is_meta:
        assert other["lengths"].tolist() == [filled[row % len(filled)] * length // 10 for row in range(samples)]
    for row, part in enumerate(other["mask"].tolist()):
        assert abs(sum(part) - filled[row % len(filled)] * length / 10) < 1
        assert part == sorted(part, reverse=True)


def test_more_than_is_worth_knowing_has_a_shape_only() -> None:
    lengths = torch.tensor([4, 64])
    assert resized((torch.zeros(2, 64, 8), lengths), samples=LIMIT + 1)[1].is_meta
    assert not tells(torch.ones(LIMIT + 1, dtype=torch.int64))
    assert not tells(torch.ones(3))


def test_knobs_change_it_as_they_change_a_run() -> None:
    def activations(**knobs: Any) -> int:
        return int(estimate(cut, torch.tensor([64, 32, 8, 8]), **knobs).largest["activations"]) - 4  # without the loss

    assert activations(micro_batch=16) == 4 * activations()
    assert activations(sequence=32) * 2 == activations()
