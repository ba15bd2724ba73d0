"""The checks before a large run: planted faults are named, sound trainings are not blamed, and nothing is left changed."""

import dataclasses
import json
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import workbench as wb
from workbench.__main__ import main
from workbench.core.brief import BRIEF_BYTES
from workbench.diagnosis.analysis.sanity import CAUSES, CHECKS, Check, SanityReport
from workbench.diagnosis.measure import sanity
from workbench.diagnosis.measure.checked_training import Unjudged, observe, of_task
from workbench.diagnosis.measure.sanity_learning import label_alignment

CLASSES, WIDTH = 4, 6


class Blobs(Dataset[tuple[Tensor, Tensor]]):
    """Points around the centres of classes."""

    def __init__(self, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, y: (x, y), count: int = 2048) -> None:
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(CLASSES, (count,), generator=generator)
        centres = torch.randn(CLASSES, WIDTH, generator=generator) * 1.5
        self.inputs, self.labels = change(centres[labels] + torch.randn(count, WIDTH, generator=generator), labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


class Net(nn.Module):
    """Two branches and a head; faults are planted by its arguments."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.body, self.branch, self.head = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, CLASSES)
        self.act, self.norm = nn.ReLU(), nn.BatchNorm1d(32) if fault == "batch norm" else nn.Identity()
        if fault == "frozen":
            self.body.requires_grad_(False)
        if fault == "dead":
            nn.init.constant_(self.body.bias, -50.0)
            nn.init.constant_(self.branch.bias, -50.0)
        if fault == "large":
            nn.init.normal_(self.head.weight, std=20.0)
        if fault == "unused":
            self.extra = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = (x / 128 - 1) if self.fault == "normalised bytes" else x.float() if self.fault == "bytes" else x
        branch = self.branch(x)
        if self.fault == "detached":
            branch = branch.detach()
        hidden = self.norm(self.act(self.body(x) + branch))
        if self.fault == "batch softmax":
            hidden = hidden * torch.softmax(hidden, 0)
        if self.fault == "standardised by the batch":
            hidden = (hidden - hidden.mean(0)) / hidden.std(0)
        if self.fault == "wrong view":
            hidden = hidden.T.reshape(hidden.shape)
        if self.fault == "dropout in eval":
            hidden = F.dropout(hidden, 0.3)
        if self.fault == "dropout":
            hidden = F.dropout(hidden, 0.1, self.training)
        logits: Tensor = self.head(hidden)
        return logits.softmax(1) if self.fault == "softmax" else logits


def classify(model: nn.Module, batch: Any, **options: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], **options)


def task(fault: str = "", **changes: Any) -> wb.Task:
    made: dict[str, Any] = {"model": lambda: Net(fault), "dataset": Blobs, "loss": classify, "optimizer": "adamw(lr=0.01)"}
    return wb.Task(**made | {"name": fault or "sound"} | changes)


class Impatient:
    """A progress line whose time passes with what it is told."""

    left = 1.0

    def say(self, *_: object) -> None:
        self.left *= 0.8


def shuffled(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return inputs, labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))]


def with_nan(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    inputs[::7, 2] = math.nan
    return inputs, labels


def ignoring(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Of some samples the label is left out, as padding is."""
    return inputs, labels.masked_fill(torch.rand(len(labels), generator=torch.Generator().manual_seed(5)) < 0.4, -100)


def as_bytes(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return (inputs * 30 + 128).clamp(0, 255).byte(), labels


def of_floats(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0].float()), batch[1])


def loses_mode(model: nn.Module, batch: Any) -> Tensor:
    loss = classify(model, batch)
    model.eval()
    return loss


def bare_log(model: nn.Module, batch: Any) -> Tensor:
    return F.nll_loss(model(batch[0]), batch[1])


FAULTS: dict[str, tuple[wb.Task, str]] = {
    "frozen layer": (task("frozen"), "frozen"),
    "detached branch": (task("detached"), "detached"),
    "unused layer": (task("unused"), "unused"),
    "sum reduction": (task(loss=lambda m, b: classify(m, b, reduction="sum")), "sum_reduction"),
    "mean divided again": (task(loss=lambda m, b: classify(m, b) / len(b[1])), "wrong_reduction"),
    "softmax before cross entropy": (task("softmax"), "softmax_before_cross_entropy"),
    "softmax over the batch": (task("batch softmax"), "batch_leak"),
    "standardised by the batch": (task("standardised by the batch"), "batch_leak"),
    "wrong view": (task("wrong view"), "batch_leak"),
    "shuffled labels": (task(dataset=lambda: Blobs(shuffled)), "labels_carry_nothing"),
    "dead ReLU": (task("dead"), "dead_units"),
    "dropout in evaluation": (task("dropout in eval"), "random_in_eval"),
    "mode not restored": (task(loss=loses_mode), "mode_not_restored"),
    "unequal micro-batches": (task(dataset=lambda: Blobs(ignoring)), "unequal_micro_batches"),
    "NaN inputs": (task(dataset=lambda: Blobs(with_nan)), "nonfinite_inputs"),
    "bytes as inputs": (task(dataset=lambda: Blobs(lambda x, y: (x * 60 + 128, y))), "input_scale"),
    "bytes turned into floats by the loss": (task(dataset=lambda: Blobs(as_bytes), loss=of_floats), "input_scale"),
    "bytes turned into floats by the model": (task("bytes", dataset=lambda: Blobs(as_bytes)), "input_scale"),
    "one sample again and again": (task(dataset=lambda: Blobs(lambda x, y: (x[y], y))), "duplicate_samples"),
    "sure of wrong answers": (task("large"), "large_logits"),
    "nll_loss on logits": (task(loss=bare_log), "no_log_softmax"),
    "no learning rate": (task(optimizer="sgd(lr=1e-9)"), "learning_rate"),
    "head not in the optimizer": (task(optimizer=lambda weights: torch.optim.Adam(list(weights)[:-2], lr=0.01)), "not_in_optimizer"),
    "a loss of whole numbers": (task(loss=lambda m, b: F.mse_loss(m(b[0]).argmax(1).float(), b[1].float())), "detached"),
    "error": (task(loss=lambda m, b: F.cross_entropy(m(b[0]), b[1] + 7)), "error"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted, cause = FAULTS[name]
    if cause not in ("labels_carry_nothing", "learning_rate"):  # what comes later takes its time, and cannot be the cause
        for later in ("overfitting", "label alignment"):
            monkeypatch.setitem(sanity._JUDGES, later, lambda *_, name=later: Check(name=name, passed=None, figure=""))
    report = wb.sanity(planted)
    assert report.cause == cause, report
    assert CAUSES[cause] in report.verdict


@pytest.mark.parametrize("fault", ["", "batch norm", "dropout"])
def test_a_sound_training_is_not_blamed(fault: str) -> None:
    report = wb.sanity(task(fault))
    assert report.ok, report
    assert sum(check.passed is not None for check in report.checks) == len(CHECKS)
    assert ("batch norm in 1 module mixes" in str(report)) == (fault == "batch norm")
    accumulated = next(check.figure for check in report.checks if check.name == "accumulation")
    assert "in evaluation mode" in accumulated
    assert ("in training mode batch norm makes them differ" in accumulated) == (fault == "batch norm")


@pytest.mark.parametrize(
    ("offset", "scale", "passed", "says"),
    [(0.0, 2.0, True, "the variance of the targets is"), (50.0, 2.0, None, "normalise the targets"), (0.0, 1e-3, None, "last layer")],
)
def test_a_mean_squared_error_is_held_against_the_variance(offset: float, scale: float, passed: bool | None, says: str) -> None:
    def targets(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs[:, :CLASSES] * scale + offset

    torch.manual_seed(0)
    squared = task(dataset=lambda: Blobs(targets), loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]))
    training = of_task(squared, wb.RunSpec(task="squared", device="cpu"), ())
    check = next(each for each in sanity.check(training, Impatient(), ["initial loss"]))
    assert check.passed is passed, check
    assert says in check.figure


def test_inputs_are_judged_as_the_first_layers_get_them() -> None:
    """Bytes that the model itself normalises, by arithmetic or by a first layer, are no fault."""
    normalised = task("normalised bytes", dataset=lambda: Blobs(as_bytes))
    by_a_layer = task(dataset=lambda: Blobs(as_bytes), model=lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), Net()), loss=of_floats)
    for made in (normalised, by_a_layer):
        training = of_task(made, wb.RunSpec(task="bytes", device="cpu"), ())
        (found,) = sanity.check(training, Impatient(), ["inputs"])
        assert found.passed, found


class Sentences(Dataset[Tensor]):
    """Tokens, of which there are more or fewer."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 20, (4 + index % 7,), generator=generator)


class Padded(nn.Module):
    """Torch's encoder of padded sentences, with the right mask, or with none."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.masked, self.words, self.head = masked, nn.Embedding(20, 16), nn.Linear(16, 20)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.words(tokens), src_key_padding_mask=tokens == 0 if self.masked else None))
        return F.pad(logits, (0, 0, 0, tokens.shape[1] - logits.shape[1]))


def own_words(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), (tokens * 7 % 20).flatten(), ignore_index=0)


@pytest.mark.parametrize("masked", [True, False])
def test_padding_that_reaches_a_result_is_told_from_micro_batches_of_unequal_weight(masked: bool) -> None:
    padded = task(
        model=lambda: Padded(masked=masked),
        dataset=Sentences,
        collate=lambda samples: nn.utils.rnn.pad_sequence(samples, batch_first=True),
        loss=own_words,
        weight=lambda tokens: (tokens * 7 % 20 != 0).sum(),
    )
    training = of_task(padded, wb.RunSpec(task="padded", device="cpu"), ())
    found = {check.name: check for check in sanity.check(training, Impatient(), ["batch independence", "modes", "accumulation"])}
    assert found["modes"].passed, found
    assert (found["accumulation"].passed, found["accumulation"].cause) == ((True, "") if masked else (False, "padding_leak"))


def test_a_micro_batch_without_a_gradient_is_not_judged() -> None:
    """Of classes whose weight is zero, the mean is 0 / 0."""
    rare = task(loss=lambda m, b: classify(m, b, weight=torch.tensor([1.0, 0.0, 0.0, 0.0])))
    (found,) = sanity.check(of_task(rare, wb.RunSpec(task="rare", device="cpu"), ()), Impatient(), ["accumulation"])
    assert (found.passed, found.cause) == (None, "")
    assert "not finite" in found.figure


def test_a_class_for_each_sample_is_no_table_of_pairs() -> None:
    """The check takes five samples, and the model knows five classes."""
    leaking = task(model=lambda: nn.Sequential(Net("wrong view"), nn.Linear(CLASSES, 5)))
    (found,) = sanity.check(of_task(leaking, wb.RunSpec(task="leaking", device="cpu"), ()), Impatient(), ["batch independence"])
    assert (found.passed, found.cause) == (False, "batch_leak")


@pytest.mark.parametrize("in_training_mode", [False, True])
def test_an_evaluation_of_validation_batches_is_tried(in_training_mode: bool) -> None:
    def evaluate(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        model.train(in_training_mode)
        return {"logits": model(batch[0]), "targets": batch[1]}

    made = task(validation=lambda: Blobs(count=40), evaluate=evaluate)
    training = of_task(made, wb.RunSpec(task="sound", device="cpu"), ())
    (check,) = sanity.check(training, Impatient(), ["modes"])
    assert check.passed is not in_training_mode, check
    assert f"evaluate runs in {'training' if in_training_mode else 'evaluation'} mode" in check.figure


def test_between_two_checks_the_filters_of_warnings_are_the_caller_s() -> None:
    """The checks had changed filters open over their yields: what the caller set in between was undone at their end."""
    training = of_task(task(), wb.RunSpec(task="sound", device="cpu"), ())
    with warnings.catch_warnings():
        before = warnings.filters[:]
        for _ in sanity.check(training, Impatient(), ["inputs", "modes"]):
            assert warnings.filters == before
            warnings.filterwarnings("ignore", "set by the caller")
            before = warnings.filters[:]
        assert warnings.filters == before


def test_labels_from_which_few_samples_teach_nothing_are_doubtful() -> None:
    """A fault is not proved by so few; right labels of these samples do teach something."""
    checks, most = list[Check](), 40  # classes that the model knows, of which the samples are too few
    for change in (shuffled, lambda *given: given):
        made = task(dataset=lambda change=change: Blobs(change, 1000), model=lambda: nn.Linear(WIDTH, most))
        training = of_task(made, wb.RunSpec(task="sound", device="cpu", micro_batch=8), ())
        line = SimpleNamespace(left=1e3, say=lambda *_: None)
        checks += sanity.check(training, line, ["label alignment"])
    wrong, right = checks
    assert right.passed, right
    assert (wrong.passed, wrong.cause) == (None, "labels_carry_nothing"), wrong
    assert f"with {30 * most} targets this would be a fault" in wrong.figure
    report = SanityReport(target="mine", checks=(wrong,), seconds=1.0)
    assert report.ok
    assert "Label alignment is doubtful: " in report.verdict
    assert CAUSES["labels_carry_nothing"] in report.verdict


def test_what_is_frozen_on_purpose_is_said() -> None:
    report = wb.sanity(task("frozen"), frozen="body.*")
    assert report.ok, report
    assert "all 4 parameters get one" in str(report)  # of those that are judged


def test_a_step_is_checked_and_restored() -> None:
    torch.manual_seed(0)
    model = Net("detached")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(Blobs(), batch_size=32)

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = classify(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    report = wb.sanity(step, loader)
    assert report.cause == "detached"
    assert "branch.weight" in report.verdict
    assert {check.name: check.passed for check in report.checks}["accumulation"] is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not optimizer.state
    assert SanityReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert "<table>" in report._repr_html_()


def test_ctrl_c_and_the_budget_leave_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Check:
        raise KeyboardInterrupt

    monkeypatch.setitem(sanity._JUDGES, "gradient flow", interrupted)
    report = wb.sanity(task())
    passed = {check.name: check.passed for check in report.checks}
    assert list(passed) == list(CHECKS)
    assert passed["inputs"]
    assert passed["gradient flow"] is None is passed["overfitting"]
    assert "Ctrl-C" in str(report)
    assert "no time was left" in str(wb.sanity(task(), budget_s=1e-9))


def test_too_few_steps_have_a_remedy() -> None:
    made = task()
    training = of_task(made, wb.RunSpec(task="sound", device="cpu", optimizer=made.optimizer or "adamw"), ())
    with pytest.raises(Unjudged, match=r"3 steps are too few to tell: give a larger budget_s"):
        label_alignment(training, observe(training), Impatient(), {})


def test_a_brief_fits_into_2_kb_and_keeps_what_is_most_likely_the_cause() -> None:
    causes = list(CAUSES)
    checks = [
        Check(
            name=name,
            passed=(False, None, True)[place % 3],
            figure="é" * 900,
            cause=causes[place] if place % 3 == 0 else "",
            place="head." * 90,
        )
        for place, name in enumerate(CHECKS)
    ]
    report = SanityReport(target="x" * 500, checks=tuple(checks), seconds=1.0, notes=("ß" * 999,) * 9)
    brief = report.brief()
    assert len(json.dumps(brief, ensure_ascii=False).encode()) <= BRIEF_BYTES
    assert (brief["ok"], brief["cause"], brief["failed"][0]["check"]) == (False, report.cause, report.failed[0].name)
    assert brief["left_out"] > 0
    short = dataclasses.replace(
        report, target="mine", checks=tuple(dataclasses.replace(c, figure="1.0", place="head") for c in checks), notes=()
    )
    brief = short.brief()
    assert "left_out" not in brief
    assert len(brief["failed"]) + len(brief["passed"]) + len(brief["not_judged"]) == len(CHECKS)


def test_what_is_no_training_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed are a step function with its loader"):
        wb.sanity(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only goes with a step"):
        wb.sanity(task(), [1])
    with pytest.raises(ValueError, match="a script by the step and the loader in it"):
        wb.sanity("train.py")


@pytest.mark.slow
def test_the_sample_tasks_are_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sanity", "fashion-mlp", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["target"] == "fashion-mlp"
    for spec in (wb.RunSpec(task="text-gpt", micro_batch=8), wb.RunSpec(task="clipart-resnet")):
        report = wb.sanity(spec)
        assert report.ok, report
