"""Batches: what is in them, twice as much of it, or without its padding; and whether a step uses them."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_map

from workbench.harness.batches import bytes_of, doubled, padding_of, tensors_of, trimmed
from workbench.harness.observe import uses_batch

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Record:
    x: Tensor
    names: list[str]


X, Y = torch.randn(4, 3), torch.arange(4)


def shapes(batch: Any) -> Any:
    return tree_map(lambda leaf: tuple(leaf.shape) if hasattr(leaf, "shape") else leaf, batch)


@pytest.mark.parametrize(
    ("batch", "wanted"),
    [
        (X, (8, 3)),
        ([X, Y], [(8, 3), (8,)]),
        (
            {"x": X, "names": ["a", "b", "c", "d"], "scale": 2.0, "none": None},
            {"x": (8, 3), "names": [*"abcd"] * 2, "scale": 2.0, "none": None},
        ),
        (Pair(X, torch.tensor(1.0)), Pair((8, 3), ())),
        ((X, np.zeros((4, 2))), ((8, 3), (8, 2))),
        ([X, [torch.zeros(4, 2)] * 4], [(8, 3), [(8, 2)] * 4]),  # crops of the samples, not one for each
        ((X, [torch.zeros(5), torch.zeros(2), torch.zeros(3), torch.zeros(7)]), ((8, 3), [(5,), (2,), (3,), (7,)] * 2)),
        ([{"x": X}, {"x": X}], [{"x": (4, 3)}] * 4),  # a list of samples
        (
            ([torch.zeros(3, 5), torch.zeros(3, 6)], [{"a": 1}, {"a": 2}]),
            ([(3, 5), (3, 6)] * 2, [{"a": 1}, {"a": 2}] * 2),
        ),  # a list of each
        ([(torch.zeros(3, 3), 1), (torch.zeros(3, 3), 2)], [((3, 3), 1), ((3, 3), 2)] * 2),
    ],
)
def test_a_doubled_batch_has_each_sample_twice(batch: Any, wanted: Any) -> None:
    assert shapes(doubled(batch)) == wanted


def test_a_doubled_batch_keeps_its_containers_and_its_samples() -> None:
    record, mapping = doubled(Record(X, [*"abcd"])), doubled(UserDict(x=X))
    assert isinstance(record, Record)
    assert record.names == [*"abcdabcd"]
    assert isinstance(mapping, UserDict)
    assert torch.equal(mapping["x"], torch.cat([X, X]))


@pytest.mark.parametrize(
    "batch",
    [
        (X, torch.zeros(3)),  # indices and offsets, a hidden state: no dimension that all share
        pack_sequence([torch.zeros(3), torch.zeros(2)]),
        (X, object()),
        "text",
        7,
        [],
    ],
)
def test_a_batch_that_is_not_understood_is_not_doubled(batch: Any) -> None:
    assert doubled(batch) is None


def test_bytes_and_tensors_of_a_batch() -> None:
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    assert bytes_of([X, {"y": Y}, np.zeros(2), "text", 3]) == 4 * 3 * 4 + 4 * 8 + 2 * 8
    assert bytes_of(packed) == packed.data.nbytes + packed.batch_sizes.nbytes
    assert len(tensors_of([X, Pair(Y, None), "text"])) == 2
    assert bytes_of("text") == 0


def sequences(rows: int = 8, width: int = 40, *, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Integers and the lengths of their rows."""
    chance = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, width, (rows,), generator=chance)
    lengths[0] = width
    ids = torch.randint(1, 100, (rows, width), generator=chance)
    ids[torch.arange(width) >= lengths[:, None]] = filler
    return ids, lengths


IDS, LENGTHS = sequences()
MASK = (torch.arange(40) < LENGTHS[:, None]).long()
PADDED = {
    "integers": IDS,
    "integers and labels": [IDS, torch.arange(8)],
    "another filler": sequences(filler=-100)[0],
    "filled on the left": IDS.flip(1),
    "mask": {"input_ids": torch.randint(1, 100, (8, 40)), "attention_mask": MASK},
    "mask on the left": {"input_ids": IDS.flip(1), "attention_mask": MASK.flip(1)},
    "lengths": (torch.randn(8, 40, 3) * MASK[:, :, None], LENGTHS),
}


@pytest.mark.parametrize("batch", PADDED.values(), ids=PADDED)
def test_padding_is_seen_and_cut(batch: Any) -> None:
    kept = round(float(LENGTHS.double().mean()))
    assert padding_of(batch) == pytest.approx(1 - float(LENGTHS.double().mean()) / 40)
    cut = tensors_of(trimmed(batch))
    assert {tensor.shape[1] for tensor in cut if tensor.ndim > 1} == {kept}
    assert [tensor.shape[0] for tensor in cut] == [tensor.shape[0] for tensor in tensors_of(batch)]


def test_what_is_cut_is_the_padding() -> None:
    right, left = trimmed(IDS), trimmed(IDS.flip(1))
    assert torch.equal(right, IDS[:, : right.shape[1]])
    assert torch.equal(left, right.flip(1))


def test_a_mask_of_pairs_and_lengths_are_cut_too() -> None:
    pairs = (MASK[:, None, :, None] * MASK[:, None, None, :]).bool()
    cut = trimmed({"input_ids": IDS, "pairs": pairs, "lengths": LENGTHS, "features": torch.randn(8, 40, 40 // 2)})
    kept = cut["input_ids"].shape[1]
    assert cut["pairs"].shape == (8, 1, kept, kept)
    assert int(cut["lengths"].max()) == kept
    assert cut["features"].shape == (8, kept, 20)


@pytest.mark.parametrize(
    "batch",
    [
        torch.randint(0, 100, (8, 40)),
        torch.randint(0, 2, (8, 40)),  # zeros and ones: their last ones are often alike
        torch.zeros(8, 40, dtype=torch.long),
        torch.randn(8, 3, 32, 32),
        (torch.randn(8, 40), torch.randint(1, 41, (8,))),  # numbers that happen to be in the range of lengths
        {"x": X, "attention_mask": torch.ones(4, 12)},
        "text",
    ],
)
def test_no_padding_where_there_is_none(batch: Any) -> None:
    assert padding_of(batch) is None
    assert trimmed(batch) is None


NET = nn.Linear(3, 2)


def test_a_step_that_uses_its_batch() -> None:
    assert uses_batch(lambda batch: NET(batch[0]).sum().backward(), [X, Y]) is True
    assert uses_batch(lambda batch: batch["y"].tolist(), {"x": X, "y": Y}) is True
    assert uses_batch(lambda batch: np.asarray(batch), X) is True
    assert uses_batch(lambda batch: batch.data + 1, pack_sequence([torch.zeros(3)])) is True


def test_a_step_that_does_not_use_its_batch() -> None:
    again = X.clone()
    assert uses_batch(lambda batch: NET(again).sum().backward(), [X, Y]) is False
    assert uses_batch(lambda batch: NET(torch.randn(batch.shape).to(batch.device, batch.dtype)), X) is False
    assert uses_batch(lambda batch: NET(torch.randn(len(batch), batch.size(1))), X) is False


def test_without_tensors_it_cannot_be_told_whether_a_batch_is_used() -> None:
    assert uses_batch(lambda batch: None, ["a", 3]) is None


def test_a_compiled_step_is_seen_through_and_not_compiled_again() -> None:
    compilations = []

    def backend(graph: Any, _inputs: Any) -> Any:
        compilations.append(graph)
        return graph

    torch._dynamo.reset()  # after eight compilations, which other tests may have made, it compiles no further `nn.Module`
    compiled = torch.compile(NET, backend=backend)
    compiled(X)
    assert uses_batch(compiled, X) is True
    compiled(X)
    assert len(compilations) == 1
