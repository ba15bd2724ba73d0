"""What changes do to memory, the largest micro-batch, the ladder: each held against fresh fake runs."""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from torch import Tensor, nn

from workbench import Device
from workbench.core.progress import Waiting
from workbench.memory.analysis.whatif import SAME, MemoryComparison, combinations, needed
from workbench.memory.api import compare_memory, estimate_memory
from workbench.memory.estimate.examples import COLLATED, sample_batch
from workbench.memory.ladder import memory_ladder, timed_estimate
from workbench.memory.max_micro_batch import UnfinishedSearch, max_micro_batch
from workbench.runs.task import Task

WIDTH = 256
SLOW = {"bf16": 100e12, "fp16": 100e12, "fp32": 10e12}


def device(megabytes: float) -> Device:
    return Device(name="imagined", memory=round(megabytes * 1e6), bandwidth=500e9, flops_per_sec=SLOW, source="a test")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    depth = 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(self.depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Shallow(Net):
    depth = 1


class Choosy(Net):
    """Takes another way with large batches."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.exp().log() if len(x) > 5 else x)


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


BATCH = torch.empty(64, 128, WIDTH, device="meta")
GIVEN = {"batch": BATCH, "loss": squared, "optimizer": "sgd(momentum=0.9)"}


@functools.cache
def outside() -> int:
    found = estimate_memory(Net, device=device(1e6), **GIVEN).outside
    assert found is not None
    return found.mid


def test_each_change_is_a_row_and_equals_its_own_estimate() -> None:
    rows = compare_memory(Net, [{"checkpointing": "full"}, {"precision": "amp_bf16", "micro_batch": 32}], **GIVEN)
    assert [row.label for row in rows.rows] == [SAME, "checkpointing=full", "precision=amp_bf16, micro_batch=32"]
    assert rows[1].breakdown is not None
    assert rows[2].breakdown is not None
    assert rows[1].breakdown.total == estimate_memory(Net, checkpointing="full", **GIVEN).total < rows.baseline.total
    assert rows[2].breakdown.total < rows.baseline.total
    assert len(rows.to_frame()) == len(rows) == 3
    assert "fits" not in str(rows)


def test_a_change_that_cannot_be_is_a_row_that_says_why() -> None:
    rows = compare_memory(Net, {"image": [32], "optimizer": ["adamw"]}, device=device(1500), **GIVEN)
    assert rows[1].breakdown is None
    assert "image" in rows[1].complaint
    assert rows[2].breakdown is not None
    assert rows.capacity == 1_425_000_000
    assert "yes" in str(rows)
    again = MemoryComparison.from_json(json.loads(json.dumps(rows.to_json())))
    assert str(again) == str(rows)


def test_a_comparison_is_drawn() -> None:
    rows = compare_memory(Net, {"optimizer": ["adamw"]}, device=device(1500), **GIVEN)
    ax = rows.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == [SAME, "optimizer=adamw"]
    plt.close(ax.figure)


def test_a_knob_that_does_not_exist_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="did you mean 'precision'"):
        compare_memory(Net, [{"precison": "amp_bf16"}], **GIVEN)


@pytest.mark.parametrize("changes", [[], {}, ["precision"], 3, None])
def test_no_change_is_refused(changes: object) -> None:
    with pytest.raises(ValueError, match="precision"):
        compare_memory(Net, changes, **GIVEN)  # type: ignore[arg-type]


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    where = device((outside() + 500 * 2**20) / 1e6)
    found = max_micro_batch(Net, where, margin=0.0, **GIVEN)
    assert 8 < int(found) < 10_000
    assert needed(found.breakdown) <= where.memory < needed(found.next)
    assert found.breakdown.total == estimate_memory(Net, device=where, micro_batch=int(found), **GIVEN).total
    assert found.runs <= 10
    assert "is the largest" in str(found)


def test_a_program_that_depends_on_its_batch_is_bisected_by_fake_runs() -> None:
    where = device((outside() + 100 * 2**20) / 1e6)
    found = max_micro_batch(Choosy, where, margin=0.0, **GIVEN)
    assert needed(found.breakdown) <= where.memory < needed(found.next)
    assert found.runs > 4


def test_the_name_of_a_task_has_its_dataset_too(tmp_path: Path) -> None:
    file = tmp_path / "small_task.py"
    file.write_text(
        "import torch\nimport workbench as wb\n\n\n"
        "def build():\n    return wb.Task(model=lambda: torch.nn.Linear(4, 1), dataset=lambda: [torch.zeros(4)] * 7,\n"
        "                   loss=lambda model, batch: model(batch).sum())\n"
    )
    assert max_micro_batch(f"{file}:build", "H200").micro_batch == 7


def test_the_answer_names_precision_and_optimizer() -> None:
    model, batch = nn.Linear(64, 64), (torch.zeros(8, 64), torch.zeros(8, 64))
    said = "• for a step with fp32, adamw: precision= and optimizer= choose others"
    assert said in str(max_micro_batch(model, batch, device="A100", loss=lambda net, given: net(given[0]).sum()))
    task = Task(model=Net, dataset=lambda: [torch.zeros(2, WIDTH)] * 50, loss=squared)
    assert "for a step with amp_bf16, sgd(lr=0.1), " in str(max_micro_batch(task, "A100", precision="amp_bf16", optimizer="sgd(lr=0.1)"))


def test_a_batch_above_the_dataset_is_not_looked_for() -> None:
    sizes: list[int] = []

    def counted(samples: list[Tensor]) -> Tensor:
        sizes.append(len(samples))
        return torch.stack(samples)

    task = Task(model=Net, dataset=lambda: [torch.zeros(2, WIDTH)] * 2001, loss=squared, collate=counted)
    found = max_micro_batch(task, "H200")
    assert int(found) == 2001
    assert needed(found.next) < found.capacity
    assert found.word.endswith("the dataset has no more for one optimizer step")
    told = re.search(r"^it fits H200.*; memory alone would allow about micro_batch=(\d+)$", found.reason)
    assert told
    alone = max_micro_batch(task.model, "H200", loss=task.loss, batch=torch.zeros(5, 2, WIDTH))
    assert int(told[1]) == pytest.approx(int(alone), rel=0.01)
    assert max(sizes) <= COLLATED
    assert int(max_micro_batch(task, "H200", world_size=4, accumulation=2)) == 250
    small = device((outside() + 120 * 2**20) / 1e6)
    found = max_micro_batch(task, small, margin=0.0)
    assert int(found) < 2001
    assert "one more is" in str(found)
    assert "at once" not in str(dataclasses.replace(found, next=dataclasses.replace(found.next, reserved=found.breakdown.reserved)))
    jump = dataclasses.replace(found.breakdown, reserved=(found.breakdown.reserved or 0) + 2**30)
    said = str(dataclasses.replace(found, next=jump))
    assert "since the allocator reserves 1.00 GiB more at once for it, and tensors only 0 B" in said
    with pytest.raises(ValueError, match="one optimizer step takes at least 4000 samples"):
        max_micro_batch(task, "H200", accumulation=4000)


def test_many_samples_have_the_shapes_of_few() -> None:
    task = Task(model=Net, dataset=lambda: [{"x": torch.zeros(3, 2), "y": 1}] * 5, loss=squared)
    found = sample_batch(task, 1_000_000)
    assert {name: tuple(part.shape) for name, part in found.items()} == {"x": (1_000_000, 3, 2), "y": (1_000_000,)}
    assert found["x"].is_meta
    listed = sample_batch(Task(model=Net, dataset=lambda: [torch.zeros(3)], loss=squared, collate=lambda rows: [rows]), COLLATED + 1)
    assert len(listed[0]) == COLLATED + 1  # where the samples lie cannot be told: all are collated


def test_not_even_one_sample() -> None:
    found = max_micro_batch(Net, device(outside() / 1e6), **GIVEN)
    assert int(found) == 0
    assert found.spare < 0
    assert "not even one" in str(found)


@pytest.mark.slow
def test_several_dry_runs_say_which_of_how_many_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(Waiting, "say", lambda self, now, known=None: lines.append(now) if now not in lines else None)
    start = estimate_memory(Net, device=device(1e6), **GIVEN)
    found = memory_ladder(Net, device(0.5 * needed(start) / 1e6), margin=0.0, **GIVEN)
    changes = [re.fullmatch(r"change (\d+) of (\d+): (.+)", line) for line in lines]
    numbers = [(int(match[1]), int(match[2])) for match in changes if match]
    count = numbers[-1][1]
    assert [number for number, _ in numbers] == list(range(1, count + 1))
    assert any(match and match[3] == "checkpointing=full" for match in changes)
    if found.tried > count + 1:
        assert any(re.fullmatch(r"changes together, 1 of at most \d+: .+, .+", line) for line in lines)
    lines.clear()
    compare_memory(Net, {"checkpointing": ["full"], "micro_batch": [8]}, **GIVEN)
    assert [line for line in lines if line.startswith("change ")] == ["change 1 of 2: checkpointing=full", "change 2 of 2: micro_batch=8"]
    lines.clear()
    most = max_micro_batch(Net, device(3 * needed(start) / 1e6), margin=0.0, **GIVEN)
    assert f"micro_batch={most.micro_batch}" in " ".join(lines)


def test_the_ladder_fits_and_none_of_its_rungs_is_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    start = estimate_memory(Net, device=device(1e6), **GIVEN)
    where = device(0.8 * needed(start) / 1e6)
    tried: list[dict[str, Any]] = []

    def timed(*args: Any, **options: Any) -> Any:
        tried.append(options)
        return timed_estimate(*args, **options)

    monkeypatch.setattr("workbench.memory.ladder.timed_estimate", timed)
    ladder = memory_ladder(Net, where, margin=0.0, **GIVEN)
    most = max(options.get("accumulation", 1) for options in tried)
    alone = [options for options in tried if options.get("accumulation") == most]
    assert [options.get("checkpointing") for options in alone] == [None]  # fits by itself: all together need not be tried
    assert ladder.fits
    assert ladder.rungs
    assert needed(ladder.start) > where.memory >= needed(ladder.end)
    options = {**GIVEN, **ladder.changes}
    assert estimate_memory(Net, device=where, **options).total == ladder.end.total
    faster = {name for rung in ladder.rungs if rung.slowdown < 1 for name in rung.change}
    for left_out in ladder.changes.keys() - faster:
        rest = {name: value for name, value in ladder.changes.items() if name != left_out}
        if not {"micro_batch", "accumulation"} & {left_out}:
            assert needed(estimate_memory(Net, device=where, **{**GIVEN, **rest})) > where.memory
    assert "fits imagined with" in str(ladder)


def test_recomputing_costs_a_third_of_the_time_of_large_products() -> None:
    wide = torch.empty(4096, 1, WIDTH, device="meta")
    of = {"loss": squared, "optimizer": "sgd"}
    fast_memory = Device(name="imagined", memory=10**12, bandwidth=1e18, flops_per_sec=SLOW, source="a test")
    _, plain = timed_estimate(Net, device=fast_memory, batch=wide, **of)
    _, again = timed_estimate(Net, device=fast_memory, batch=wide, checkpointing="full", **of)
    assert 1.15 < again / plain < 1.36  # a third of two products in each backward; the first layer's input needs no gradient


def test_a_step_that_fits_needs_no_ladder() -> None:
    ladder = memory_ladder(Net, "H200", **GIVEN)
    assert ladder.table.title.startswith("It fits H200 as it is: ")  # type: ignore[union-attr]
    assert ladder.fits
    assert not ladder.rungs
    assert ladder.changes == {}
    assert "as it is" in str(ladder)


def test_a_batch_that_is_far_too_large_is_split_as_often_as_it_takes() -> None:
    batch = torch.empty(2**16, 1, WIDTH, device="meta")
    whole = needed(estimate_memory(Net, device="cpu", **{**GIVEN, "batch": batch}))
    least = needed(estimate_memory(Net, device="cpu", **{**GIVEN, "batch": batch[: 2**8]}))
    assert whole > 64 * least, "eight parts are not enough"
    ladder = memory_ladder(Net, "cpu", capacity=2 * least, margin=0.0, **{**GIVEN, "batch": batch})
    assert ladder.fits
    assert ladder.changes["accumulation"] >= 32


def test_a_batch_is_split_into_parts_that_divide_it_by_what_follows_the_batch() -> None:
    """65,000 samples are 2³ · 5⁴ · 13, and most of what there is holds weights, gradients and states."""
    batch = torch.empty(65_000, 1, WIDTH, device="meta")

    def need(samples: int, **how: int) -> int:
        return needed(estimate_memory(Net, device="cpu", **{**GIVEN, "batch": batch[:samples], **how}))

    limit = need(500, accumulation=2)
    assert need(65_000) / limit < 64, "by the whole memory that many parts would do"
    assert need(65_000 // 104, accumulation=2) > limit, "104 is the largest number of parts below 128 and divides it"
    ladder = memory_ladder(Net, "cpu", capacity=limit, margin=0.0, **{**GIVEN, "batch": batch})
    assert ladder.fits
    parts = ladder.changes["accumulation"]
    assert (ladder.changes["micro_batch"], parts) == (500, 130)
    assert f"{parts} micro-batches" in ladder.end.title
    assert needed(ladder.end) == need(65_000 // parts, accumulation=2)


def test_nothing_makes_it_fit() -> None:
    ladder = memory_ladder(Shallow, device(20), **{**GIVEN, "batch": BATCH[:1]})
    assert not ladder.fits
    said = ladder.word
    assert "nothing tried makes it fit" in said
    assert {"offload=optimizer", "offload=activations", "precision=amp_bf16"} <= set(ladder.tried_changes)
    for part in ("offload=optimizer", 'parallel="fsdp", nproc_per_node=8', "wb.plan(build, ", "build().to(torch.bfloat16)"):
        assert part in said


def test_what_fits_only_with_states_in_host_memory_is_found_after_all_else() -> None:
    def heavy() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))

    about = {"batch": torch.zeros(1, WIDTH), "loss": squared, "optimizer": "adamw"}
    whole, moved = (needed(estimate_memory(heavy, device=device(1e6), offload=how, **about)) for how in ("none", "optimizer"))
    assert moved < whole
    ladder = memory_ladder(heavy, device((moved + (whole - moved) / 8) / 1e6), margin=0.0, **about)
    assert ladder.fits
    assert ladder.rungs[-1].change == {"offload": "optimizer"}
    assert math.isnan(ladder.rungs[-1].slowdown)
    assert "optimizer" not in ladder.changes  # a fused kernel is of no use on the host
    assert "offload=optimizer" in ladder.word
    assert "time not predicted" in ladder.word
    enough = memory_ladder(heavy, device(whole / 1e6), margin=0.0, **about)
    assert "offload" not in enough.changes


def test_any_gpu_has_no_capacity_and_the_cpu_has_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the device is 'cuda', whose memory is not known: name one, such as H200 or RTX-4090, or say"):
        max_micro_batch(Net, "cuda", **GIVEN)
    monkeypatch.setattr("workbench.core.system_load.main_memory", lambda: 2**30)
    for ranks in (1, 4):
        given = {**GIVEN, "world_size": ranks}
        found, expected = max_micro_batch(Net, "cpu", **given), max_micro_batch(Net, "cpu", capacity=2**30 // ranks, **given)
        assert int(found) == int(expected) > 0
        assert found.capacity == int(0.95 * 2**30 / ranks)
    assert memory_ladder(Net, "cpu", **GIVEN).capacity == int(0.95 * 2**30)


def test_a_ladders_moments_count_all_micro_batches() -> None:
    """Where a step has more of them than a dry run takes."""
    given = {**GIVEN, "accumulation": 256}
    ladder = memory_ladder(Net, "cpu", capacity=2**30, **given)
    assert "256 micro-batches" in ladder.start.title
    assert " of 64" not in str(ladder)


def test_an_unknown_device_and_a_margin_that_is_none() -> None:
    with pytest.raises(ValueError, match="H200"):
        memory_ladder(Net, "H2000", **GIVEN)
    with pytest.raises(ValueError, match="margin"):
        max_micro_batch(Net, "H200", margin=5, **GIVEN)


def test_no_two_moves_of_a_set_turn_the_same_knob() -> None:
    moves = [{"a": 1}, {"b": 1}, {"b": 2}, {"a": 2, "c": 1}]
    for chosen in combinations(moves):
        names = [name for place in chosen for name in moves[place]]
        assert len(names) == len(set(names))
    assert len(combinations(moves)) == 9


def test_what_is_to_spare_says_of_how_much() -> None:
    """The largest batch and the ladder leave a share of the device free, which `fits` does not."""
    options: dict[str, Any] = {
        "batch": (torch.zeros(4, 64), torch.zeros(4, 64)),
        "loss": lambda model, batch: model(batch[0]).square().mean(),
    }
    for margin, said in (
        (0.25, r"spare of the 768 MiB that may be used \(25 % stays free\)"),
        (0.0, r"spare of the 1\.00 GiB that may be used(;|$)"),
    ):
        fitted = memory_ladder(lambda: nn.Linear(64, 64), "cpu", capacity=2**30, margin=margin, **options)
        assert re.search(said, fitted.word)
        largest = max_micro_batch(lambda: nn.Linear(64, 64), "cpu", capacity=2**30, margin=margin, **options)
        assert re.search(said, str(largest))


def test_the_largest_batch_and_the_ladder_have_the_notes_of_an_estimate() -> None:
    options: dict[str, Any] = {"batch": (torch.zeros(4, 64), torch.zeros(4, dtype=torch.long)), "compile": "model"}
    notes = estimate_memory(lambda: nn.Linear(64, 64), device="A100", **options).notes
    for words in ('compile="model" is left out, so that the eager step is estimated', "cross-entropy", '"A100" alone means A100-40GB'):
        assert any(words in note for note in notes)
    for found in (
        max_micro_batch(lambda: nn.Linear(64, 64), "A100", capacity=2**31, **options),
        memory_ladder(lambda: nn.Linear(64, 64), "A100", **options),
    ):
        assert set(notes) <= set(found.notes)
        assert all(note in str(found) for note in notes)
        html = found._repr_html_()
        assert "is left out, so that the eager step is estimated" in html
        assert "cross-entropy" in html


@pytest.mark.parametrize("model", [Net, Choosy])
def test_what_fits_only_by_the_middle_of_a_range_is_said_to_be_not_certain(model: type[nn.Module]) -> None:
    """Of a GPU that nobody measured the bytes outside of the allocator are a range."""
    where = device((outside() + 3000 * 2**20) / 1e6)
    found = max_micro_batch(model, where, margin=0.0, **GIVEN)
    assert not found.breakdown.fits(where, margin=0.0).certain
    assert 0 < found.surely < found.micro_batch
    at = estimate_memory(model, device=where, micro_batch=found.surely, **GIVEN).fits(where, margin=0.0)
    assert at
    assert at.certain
    if model is Net:  # of a program that depends on its batch only the runs of the bisection are known
        assert found.runs <= 11
        more = estimate_memory(model, device=where, micro_batch=found.surely + 1, **GIVEN).fits(where, margin=0.0)
        assert more
        assert not more.certain
    assert found.word == (
        f"micro_batch={found.micro_batch} is the largest that probably fits {found.device}; up to {found.surely} is certain to fit"
    )
    assert found.reason.endswith("; memory outside of PyTorch's allocator is known as a range only")
    assert "not certain" not in str(found), "once is enough"
    assert "; one more is " in found.reason
    ladder = memory_ladder(model, where, margin=0.0, **{**GIVEN, "micro_batch": found.micro_batch})
    assert "as it is" in ladder.word
    assert "; not certain, since memory outside" in ladder.word
    for sure in (max_micro_batch(model, "cpu", capacity=2**30, **GIVEN), memory_ladder(model, "H200", **GIVEN)):
        assert "certain" not in str(sure)


def test_where_no_number_surely_fits_none_is_named() -> None:
    found = max_micro_batch(Net, device((outside() + 100 * 2**20) / 1e6), margin=0.0, **GIVEN)
    assert found.micro_batch > 0
    assert found.surely == 0
    assert "not certain, since memory outside" in found.word
    assert "certain to fit" not in found.word


class Loop(nn.Module):
    """A Python loop over the samples: the operators of a step are as many as these."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.block(sample) for sample in x])


@pytest.fixture
def seconds_per_sample(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What a dry run takes by the clock of the search, in seconds: at least, and for each sample."""
    now, taken = [0.0], [0.0, 1.0]

    def timed(*args: Any, **options: Any) -> Any:
        now[0] += taken[0] + taken[1] * options["micro_batch"]
        return estimate_memory(*args, **options)

    monkeypatch.setattr("workbench.memory.max_micro_batch.time.monotonic", lambda: now[0])
    monkeypatch.setattr("workbench.memory.max_micro_batch.estimate_memory", timed)
    return taken


def test_a_search_ends_with_its_budget_and_returns_what_it_has(seconds_per_sample: list[float]) -> None:
    """Of a step that loops over its samples in Python, each doubling of the batch doubles the time of a dry run: it went on for minutes."""
    where = {"device": "cpu", "capacity": 48 * 2**20, "margin": 0.0}
    whole = max_micro_batch(Loop, budget_s=None, **where, **GIVEN)
    assert not isinstance(whole, UnfinishedSearch)
    found = max_micro_batch(Loop, budget_s=20.0, **where, **GIVEN)  # 1 + 2 + 4 + 8 s, and 16 s would be too much
    assert isinstance(found, UnfinishedSearch)
    assert (found.micro_batch, found.tried, found.too_many, found.runs) == (8, (1, 2, 4, 8), 0, 6)
    assert found.breakdown.total == found.next.total == estimate_memory(Loop, device="cpu", micro_batch=8, **GIVEN).total
    assert whole.micro_batch <= found.by_line <= 1.25 * whole.micro_batch  # the moment of the peak moves
    assert found.word == "micro_batch=8 fits main memory; larger ones were not tried, since the budget of 20.0 s is over"
    assert f"a line through the memory of 4 and 8 samples predicts at most about micro_batch={found.by_line}, which no" in found.reason
    assert "seems to loop over them in Python" in found.reason
    assert found.reason.endswith("budget_s=None searches to the end")
    assert found.word in str(found)
    for text in (repr(found), found._repr_html_()):
        assert "8" in text


def test_a_search_that_ends_between_two_numbers_says_which(seconds_per_sample: list[float]) -> None:
    seconds_per_sample[:] = [3.0, 0.0]
    whole = max_micro_batch(Loop, "cpu", capacity=48 * 2**20, margin=0.0, budget_s=None, **GIVEN)
    doublings = whole.micro_batch.bit_length() + 1
    found = max_micro_batch(Loop, "cpu", capacity=48 * 2**20, margin=0.0, budget_s=3.0 * doublings + 1, **GIVEN)
    assert isinstance(found, UnfinishedSearch)
    assert found.micro_batch <= whole.micro_batch < found.too_many == 2 * found.micro_batch
    assert needed(found.breakdown) <= found.capacity < needed(found.next)
    assert found.micro_batch <= found.by_line <= whole.micro_batch
    assert f"{found.micro_batch} and {found.too_many} samples predicts at least about micro_batch={found.by_line}" in found.reason
    assert f"and micro_batch={found.too_many} does not; numbers between them were not tried" in found.word
    assert "Python" not in found.reason


def test_a_program_that_does_not_depend_on_the_batch_is_searched_to_the_end(seconds_per_sample: list[float]) -> None:
    found = max_micro_batch(Net, "cpu", capacity=2**30, budget_s=0.1, **GIVEN)
    assert needed(found.breakdown) <= found.capacity < needed(found.next)
    assert not isinstance(found, UnfinishedSearch)
    with pytest.raises(ValueError, match="budget_s=0: seconds above 0"):
        max_micro_batch(Net, "cpu", budget_s=0, **GIVEN)
