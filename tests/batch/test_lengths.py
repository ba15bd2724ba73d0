"""`batch_lengths`: the step that will run out of memory is the loader's own, padding is counted, what-ifs hold the same tokens."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from workbench.batch.analysis.lengths import BatchLengths, DryRuns, LengthGrid, LengthsError, LengthsProof
from workbench.batch.lengths import _measure, _unit, length_of
from workbench.batch.measure.length_proof import joined
from workbench.core.progress import Waiting
from workbench.runs import task as tasks

TASK = """
import torch
from torch import nn
from torch.nn import functional
import workbench as wb

LENGTHS = torch.randint(4, 60, (64,), generator=torch.Generator().manual_seed(3)).tolist()
LENGTHS[41] = 400


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return torch.ones(LENGTHS[index], dtype=torch.long)


def pad(samples):
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def fixed(samples):
    return torch.stack([functional.pad(sample, (0, len(samples[0]) - len(sample))) for sample in samples])


def loss(model, batch):
    return functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def build():
    model = lambda: nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 50))
    return wb.Task(model=model, dataset=Words, loss=loss, collate=pad)


class Texts(Words):
    def __getitem__(self, index):
        return " ".join(["words"] * LENGTHS[index])


def tokens(samples):
    return pad([torch.ones(len(text.split()), dtype=torch.long) for text in samples])


def texts():
    model = lambda: nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 50))
    return wb.Task(model=model, dataset=Texts, loss=loss, collate=tokens)


def cut():
    model = lambda: nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 50))
    return wb.Task(model=model, dataset=Words, loss=loss, collate=fixed)
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> wb.RunSpec:
    path = tmp_path_factory.mktemp("lengths") / "words_of_lengths.py"
    path.write_text(TASK)
    return wb.RunSpec(task=f"{path}:build", micro_batch=4, accumulation=2, seed=5, precision="fp32")


@pytest.fixture(scope="module")
def roomy(spec: wb.RunSpec) -> BatchLengths:
    return wb.batch_lengths(spec, device="cpu", capacity=10**10, steps=16)


def test_the_longest_batches_are_those_that_the_loader_gives(spec: wb.RunSpec, roomy: BatchLengths) -> None:
    """Two epochs: their orders differ."""
    import itertools

    from workbench.train.loader import build_loader, micro_batches
    from workbench.train.ranks import Ranks

    for ranks in (1, 2):
        found = roomy if ranks == 1 else wb.batch_lengths(spec, device="cpu", capacity=10**10, steps=8, nproc_per_node=2)
        real = []
        for rank in range(ranks):
            here = Ranks(rank=rank, world_size=ranks, device=torch.device("cpu"), store=None)
            loader = build_loader(tasks.resolve(spec.task), spec, here, seed=0)
            given = itertools.islice(micro_batches(loader, spec.accumulation, here), 2 * found.steps)
            real.append([batch.shape[1] for batch in given])
        steps = np.array(real).reshape(ranks, found.steps, 2).max((0, 2))
        assert found.lengths == tuple(steps.tolist())
    assert max(roomy.lengths) == 400
    assert roomy.lengths.count(400) == 2  # one step in each epoch


def test_the_step_that_runs_out_of_memory_is_named(spec: wb.RunSpec, roomy: BatchLengths) -> None:
    assert (roomy.first_over, roomy.over) == (None, 0)
    assert "all 16 steps fit" in str(roomy)
    capacity = int(roomy.memory[400] * 0.9)
    found = wb.batch_lengths(spec, device="cpu", capacity=capacity, steps=16, margin=0.0)
    assert found.first_over == roomy.lengths.index(400) + 1
    assert (found.over, found.fitting) == (2, sorted({*found.lengths})[-2])
    assert f"step {found.first_over} will run out of memory: its longest batch has 400 tokens" in str(found)
    assert f"a sample, and {found.fitting} is the longest in the data that fits main memory; so will 1 more of 16 steps" in found.word
    once = dataclasses.replace(found, steps=8, lengths=found.lengths[:8])
    assert "it is the only one of 8 steps" in once.word
    assert "none in the data fits main memory" in dataclasses.replace(found, fitting=0).word
    assert found.to_frame()["fits"].tolist() == [length < 400 for length in found.lengths]
    assert not found["as it is"].fits
    assert list(found.memory.values()) == sorted(found.memory.values())
    assert BatchLengths.from_json(found.to_json()) == found


@pytest.mark.parametrize("end", ["budget", "Ctrl-C"])
def test_the_steps_that_were_read_are_kept_where_the_budget_or_ctrl_c_ends_it(
    spec: wb.RunSpec, roomy: BatchLengths, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    read = 0
    monkeypatch.setattr(Waiting, "seconds", property(lambda self: float(read)))

    def length(sample: Any) -> int:
        nonlocal read
        read += 1
        if end == "Ctrl-C" and read == last:
            raise KeyboardInterrupt
        return len(sample)

    last = 51
    given: dict[str, Any] = {"device": "cpu", "steps": 16, "length": length, "budget_s": 100.0 if end == "budget" else None}
    found = wb.batch_lengths(spec, capacity=10**10, **given)
    assert found.lengths == roomy.lengths[:6]  # of 8 samples each
    why = "the budget ended" if end == "budget" else "stopped by Ctrl-C"
    assert re.match(rf"{why} after 5[01] of \d+ samples were read: 6 of 16 steps are looked at", found.notes[0])
    assert found.notes[0] in str(found)
    read, last = 0, 4
    with pytest.raises(LengthsError, match="before the first step's were read: give a larger budget_s"):
        wb.batch_lengths(spec, capacity=10**10, **given | {"budget_s": 6.0})


def test_a_border_that_no_time_is_left_for_is_said(spec: wb.RunSpec, roomy: BatchLengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waiting, "left", property(lambda self: 0.0))
    found = wb.batch_lengths(spec, device="cpu", capacity=int(roomy.memory[400] * 0.9), margin=0.0)
    assert found.fitting < max(length for length in roomy.lengths if length < 400)
    assert found.notes[0].startswith(f"the budget ended: whether lengths from {found.fitting + 1} to {found.unsure} ")
    step = found.first_unsure
    assert step is not None
    assert found.fitting < found.lengths[step - 1] <= found.unsure
    assert found.word.startswith(f"step {step} may run out of memory")
    assert [found.fits(length) for length in (found.fitting, found.unsure, found.unsure + 1)] == [True, None, False]
    assert found.over == sum(length > found.unsure for length in found.lengths)
    assert found.to_frame()["fits"][step - 1] is None


def test_the_rows_are_of_all_ranks_and_of_the_steps_that_are_asked_for() -> None:
    sizes = [2] * 8
    sizes[5] = 90  # rank 1's, in step 2 of 2
    grid = LengthGrid.of(sizes, [[0, 2, 4, 6], [1, 3, 5, 7]], ranks=2, accumulation=1, micro_batch=2)
    dry = DryRuns(nodes={2: 1.0, 30: 1.0, 60: 1.0, 90: 1.0}, bytes_at=lambda size: size)
    assert grid.of_steps(2) == (2, 90)
    assert [(plan.longest, plan.fits) for plan in grid.plans(2, dry, room=50)] == [(90, False)] * 3
    assert [(plan.longest, plan.fits) for plan in grid.plans(1, dry, room=50)] == [(2, True)] * 3
    assert [plan.seconds for plan in grid.plans(2, dry, room=50)[:2]] == pytest.approx([2.0, 2.0])  # of a rank


def test_what_does_not_fit_is_not_recommended(spec: wb.RunSpec, roomy: BatchLengths) -> None:
    assert "faster" in roomy.word
    tight = wb.batch_lengths(spec, device="cpu", capacity=int(roomy.memory[400] * 0.9), steps=16, margin=0.0)
    assert "faster" not in tight.word


def test_padding_and_what_ifs_hold_the_same_tokens(roomy: BatchLengths) -> None:
    plain, bucketed, packed = (roomy[name] for name in ("as it is", "bucketed", "packed"))
    tokens = [plan.tokens * (1 - plan.padding) for plan in (plain, bucketed, packed)]
    assert tokens == pytest.approx([tokens[0]] * 3)
    assert plain.padding > bucketed.padding > 0
    assert plain.padding > packed.padding
    assert roomy.gain("bucketed") > 1.1
    assert roomy.gain("as it is") == 1
    assert plain.longest == bucketed.longest == 400
    with pytest.raises(KeyError, match="there are as it is, bucketed, packed"):
        roomy["sorted"]


def test_wrong_lengths_and_devices_are_refused_in_words(spec: wb.RunSpec) -> None:
    """As are numbers that are none: they used to end in a TypeError of a comparison."""
    for length, said in (
        (lambda sample: None, "returned None"),
        (lambda sample: 1.5, "returned 1.5"),
        (7, "length=7: a function of a sample"),
    ):
        with pytest.raises(LengthsError, match=said):
            wb.batch_lengths(spec, device="cpu", length=length)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"device=None: \"cuda\" \(any GPU\), \"cpu\", a name such as"):
        wb.batch_lengths(spec, device=None)  # type: ignore[arg-type]


def test_the_memory_of_this_machines_cpu_is_shared_by_its_ranks(spec: wb.RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.core.system_load.main_memory", lambda: 10**10)
    capacities = [wb.batch_lengths(spec, device="cpu", steps=1, nproc_per_node=ranks).capacity for ranks in (1, 2)]
    assert capacities == [int(0.95 * 10**10), int(0.95 * 10**10 / 2)]


@pytest.mark.parametrize(
    ("sample", "unit"),
    [(torch.zeros(5), "values"), ((torch.zeros(5, 80, dtype=torch.bfloat16), 1), "rows"), (torch.zeros(5, dtype=torch.long), "tokens")],
)
def test_floats_are_no_tokens(sample: Any, unit: str) -> None:
    assert _unit(sample) == unit
    assert length_of(sample) == 5


def test_a_text_has_characters_unless_its_tokens_are_counted(spec: wb.RunSpec, roomy: BatchLengths) -> None:
    assert roomy.unit == "tokens"
    texts = spec.replace(task=spec.task.replace(":build", ":texts"))
    given: dict[str, Any] = {"device": "cpu", "capacity": 10**10, "steps": 2}
    letters = wb.batch_lengths(texts, **given)
    assert letters.unit == "characters"
    for words in ("characters a sample", "longest (characters)", "no tokens", "tokenizer="):
        assert words in str(letters)
    counted = wb.batch_lengths(texts, tokenizer=str.split, **given)
    assert counted.unit == "tokens"
    assert "no tokens" not in str(counted)
    assert max(letters.lengths) == 6 * max(counted.lengths) - 1  # five letters and a space each
    assert counted.memory[max(counted.lengths)] == letters.memory[max(letters.lengths)]  # the same batch, however it is measured
    assert counted.lengths == wb.batch_lengths(texts, length=lambda text: len(text.split()), **given).lengths


def test_tokenizers_are_called_as_they_are_made() -> None:
    class Encoder:
        def encode(self, text: str) -> list[int]:
            return [0] * (len(text) + 2)

    counts = [
        _measure(["abc"], 1, None, tokenizer)[1](sample)
        for tokenizer, sample in (
            (Encoder(), "abc"),
            (lambda text: {"input_ids": [1] * 7, "attention_mask": [1] * 7}, {"label": 3, "text": "abc"}),
            (str.split, ("a b c", 1)),
        )
    ]
    assert counts == [5, 7, 3]
    with pytest.raises(LengthsError, match=r"a sample, a Tensor, has no text; give length="):
        _measure(["abc"], 1, None, str.split)[1](torch.zeros(3))
    with pytest.raises(LengthsError, match=r"both count tokens: give one of them"):
        _measure(["abc"], 1, len, str.split)
    unit, count = _measure(["abc", torch.zeros(3)], 2, None, None)
    assert (unit, count("abcd")) == ("characters", 4)
    with pytest.raises(LengthsError, match=r"a sample has values, the first one characters"):
        count(torch.zeros(3))


def test_samples_in_a_row_keep_what_has_no_length() -> None:
    row = joined([(torch.arange(3), 7), (torch.arange(2), 8)], [3, 2])
    assert row[0].tolist() == [0, 1, 2, 0, 1]
    assert row[1] == 7
    ids = joined([{"input_ids": [1, 2], "label": 0}, {"input_ids": [3], "label": 1}], [2, 1])
    assert ids == {"input_ids": [1, 2, 3], "label": 0}
    assert joined(["ab", "c"], [2, 1]) == "abc"
    assert joined([np.zeros((2, 5)), np.ones((1, 5))], [2, 1]).shape == (3, 5)
    with pytest.raises(LengthsError, match=r"samples such as <object.* cannot be put into one row"):
        joined([object(), object()], [1, 2])


def test_what_is_proved_has_the_same_samples_and_is_shown_beside_the_prediction(
    roomy: BatchLengths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times are made; what runs is counted."""
    from workbench.harness import ab_test
    from workbench.harness.results import VariantTimes

    sides: list[Any] = []

    def timed(*both: Any, budget_s: float, peers: Any) -> VariantTimes:
        sides.append(both)
        for side in both:
            side.step()
        return VariantTimes(name="changed", baseline="full", pairs=((2.0, 1.0), (2.2, 1.1), (1.8, 0.9)), note="busy")

    monkeypatch.setattr(ab_test, "run_ab_test", timed)
    threads = torch.get_num_threads()
    for name in ("bucketed", "packed"):
        proof = roomy.prove(name)
        plain, made = (sum(int((batch > 0).sum()) for batch in side.batches) for side in sides[-1])
        assert plain == made > 0
        assert proof.measured.mid == pytest.approx(2.0)
        assert proof.measured_places == pytest.approx(proof.places)
        assert proof.places < 1 < proof.predicted
        assert f"{name}: predicted" in str(proof)
        assert "busy" in str(proof)
        assert list(proof.held_bytes) == [sorted(proof.held_bytes)[0], max(roomy.lengths)]
        for predicted, measured in proof.held_bytes.values():
            assert predicted == pytest.approx(measured, rel=0.03)
        assert 0.9 * roomy.memory[400] < proof.held_bytes[400][0] < roomy.memory[400]  # a launched run has DDP's buckets, too
        assert "memory of a step of length 400" in str(proof)
        assert LengthsProof.from_json(proof.to_json()) == proof
    assert roomy.prove().name == roomy.best.name
    assert torch.get_num_threads() == threads
    with pytest.raises(LengthsError, match=r"which='sorted': allowed are 'bucketed', 'packed'"):
        roomy.prove("sorted")
    with pytest.raises(LengthsError, match=r"read from JSON, without their samples"):
        BatchLengths.from_json(roomy.to_json()).prove()
    with pytest.raises(LengthsError, match=r"a proof takes 4"):
        dataclasses.replace(roomy, fitting=4).prove("bucketed")
    with pytest.raises(LengthsError, match=r"budget_s=1e-06: a micro-batch takes"):
        roomy.prove("bucketed", budget_s=1e-6)
    alike = dataclasses.replace(roomy, plans=tuple(dataclasses.replace(plan, seconds=1.0) for plan in roomy.plans))
    with pytest.raises(LengthsError, match=r"nothing to prove: of bucketed and packed none is faster and fits"):
        alike.prove()


@pytest.mark.slow
@pytest.mark.alone
def test_sorted_batches_are_as_much_faster_as_predicted(roomy: BatchLengths) -> None:
    """Proved by real steps of both, in turns."""
    proof = roomy.prove("bucketed", budget_s=10)
    assert proof.measured.low > 1
    assert abs(proof.error) < 0.4


def test_what_is_refused(spec: wb.RunSpec) -> None:
    with pytest.raises(LengthsError, match=r"expected a RunSpec.*did you mean 'text-gpt'"):
        wb.batch_lengths("text-gtp", device="H100")
    with pytest.raises(LengthsError, match=r"takes 1024 samples, and the dataset has 64"):
        wb.batch_lengths(spec, device="H100", micro_batch=512)
    with pytest.raises(LengthsError, match=r"pads to the longest sample of the batch"):
        wb.batch_lengths(spec.replace(task=spec.task.replace(":build", ":cut")), device="H100")
    assert (length_of({"input_ids": [1, 2, 3], "mask": [1]}), length_of(("abc", 1)), length_of(np.zeros((5, 2)))) == (3, 3, 5)
    with pytest.raises(LengthsError, match=r"not known from a int: give length="):
        length_of(7)
    with pytest.raises(LengthsError, match=r"3 × 32 × 24, such as an image, and no length: give length="):
        length_of((np.zeros((3, 32, 24)), 1))
