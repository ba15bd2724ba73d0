"""The learning rate over the steps is that of the real scheduler, which stays as it was; and the picture shows it."""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from matplotlib import pyplot
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as of_torch

from workbench import plot
from workbench.batch.analysis.lr_scaling_rules import scale_lr
from workbench.batch.analysis.plan import BatchPlan
from workbench.batch.analysis.schedule import Schedule
from workbench.batch.measure.schedule import schedule_of, scheduled
from workbench.runs.spec import RunSpec
from workbench.runs.training_knobs import lr_factor

STEPS = 30


class Own:
    """A scheduler that is not one of torch's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.seen = optimizer, 0

    def step(self) -> None:
        self.seen += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.seen)


def sequence(optimizer: Optimizer) -> of_torch.SequentialLR:
    parts: list[Any] = [of_torch.LinearLR(optimizer, 0.1, total_iters=5), of_torch.CosineAnnealingLR(optimizer, 25)]
    return of_torch.SequentialLR(optimizer, parts, milestones=[5])


def chain(optimizer: Optimizer) -> of_torch.ChainedScheduler:
    return of_torch.ChainedScheduler([of_torch.ConstantLR(optimizer, 0.5, total_iters=4), of_torch.ExponentialLR(optimizer, 0.95)])


MAKERS: dict[str, Callable[[Optimizer], Any]] = {
    "one cycle": lambda optimizer: of_torch.OneCycleLR(optimizer, 0.3, total_steps=50),
    "cyclic": lambda optimizer: of_torch.CyclicLR(optimizer, 0.01, 0.1, step_size_up=10),
    "cosine": lambda optimizer: of_torch.CosineAnnealingLR(optimizer, 50),
    "warm restarts": lambda optimizer: of_torch.CosineAnnealingWarmRestarts(optimizer, 10),
    "lambda": lambda optimizer: of_torch.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "steps": lambda optimizer: of_torch.MultiStepLR(optimizer, [10, 20]),
    "polynomial": lambda optimizer: of_torch.PolynomialLR(optimizer, 20, power=2),
    "product": lambda optimizer: of_torch.MultiplicativeLR(optimizer, lambda step: 0.9),
    "sequence": sequence,
    "chain": chain,
    "own": Own,
}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    pyplot.close("all")


def optimizer() -> SGD:
    return SGD(nn.Linear(3, 3).parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("already", [0, 4])
def test_it_is_that_of_the_real_scheduler(name: str, already: int) -> None:
    stepper = optimizer()
    real = MAKERS[name](stepper)
    for _ in range(already):
        stepper.step()
        real.step()
    groups = copy.deepcopy(stepper.state_dict()["param_groups"])
    state = repr(real.state_dict()) if name != "own" else real.seen
    found = scheduled(real, STEPS)
    assert stepper.state_dict()["param_groups"] == groups
    assert (repr(real.state_dict()) if name != "own" else real.seen) == state
    rates = []
    for _ in range(STEPS):
        rates.append(float(stepper.param_groups[0]["lr"]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stepper.step()
            real.step()
    assert found.lrs == tuple(rates)
    assert found.steps[0] == (already if name != "own" else 0)


def test_a_scheduler_without_a_warning() -> None:
    """That the optimizer did not step is said of the user's own loop, and still is."""
    stepper = optimizer()
    real = of_torch.StepLR(stepper, 2)
    scheduled(real, 5)
    with pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`"):
        real.step()


def test_groups_and_tensors() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    stepper = SGD([{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "lr": torch.tensor(0.5)}])
    real = of_torch.ExponentialLR(stepper, 0.5)
    assert scheduled(real, 2).lrs == (0.1, 0.05)
    assert scheduled(real, 2, group=1).lrs == (0.5, 0.25)
    assert float(stepper.param_groups[1]["lr"]) == 0.5
    with pytest.raises(ValueError, match="group=2: the optimizer has 2 groups of parameters, 0 to 1"):
        scheduled(real, 2, group=2)


@pytest.mark.parametrize(("name", "steps"), [("one cycle", 50), ("cosine", 50), ("polynomial", 20), ("sequence", 30), ("steps", 40)])
def test_how_long_it_is(name: str, steps: int) -> None:
    assert len(scheduled(MAKERS[name], lr=0.1).steps) == steps


def test_one_that_ends() -> None:
    found = scheduled(lambda stepper: of_torch.OneCycleLR(stepper, 0.3, total_steps=10), 20)
    assert len(found.steps) == 11
    assert found.end.startswith("it ends after 11 steps: Tried to step 11 times")
    assert "it ends after 11 steps" in str(found)


def test_what_has_no_schedule() -> None:
    stepper = optimizer()
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau goes by the loss, .* wb\.plot\.metrics\(run\)"):
        scheduled(of_torch.ReduceLROnPlateau(stepper), 5)
    with pytest.raises(ValueError, match=r"0\.1: a torch scheduler is allowed, or a function that makes one: lambda optimizer"):
        scheduled(0.1, 5)
    with pytest.raises(ValueError, match="a torch scheduler is allowed"):
        scheduled(lambda stepper: stepper, 5)
    with pytest.raises(ValueError, match="the ExponentialLR does not say how many steps it is made for: give steps=…"):
        scheduled(of_torch.ExponentialLR(stepper, 0.9))
    with pytest.raises(ValueError, match="steps=0: a whole number of at least 1 is allowed"):
        scheduled(of_torch.ExponentialLR(stepper, 0.9), 0)

    class Unlike(Own):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("it holds a lock")

    with pytest.raises(ValueError, match=r"the Unlike cannot be copied \(it holds a lock\).*give a function that makes one instead"):
        scheduled(Unlike(stepper), 5)


# --- the noun


def test_of_a_spec() -> None:
    spec = RunSpec(task="text-gpt", micro_batch=4, accumulation=2, steps=20, warmup_steps=5, schedule="cosine", lr=0.2)
    found = schedule_of(spec)
    assert found.lrs == tuple(0.2 * lr_factor(step, steps=20, warmup_steps=5, schedule="cosine") for step in range(20))
    assert (found.batch, found.label) == (8, "text-gpt")
    assert found.peak == (4, 0.2)
    assert found.warmup_steps == 4  # the fifth step has the peak
    assert found.samples is not None
    assert found.samples[-1] == 19 * 8
    assert "warm-up of 4 steps" in str(found)
    assert schedule_of(spec.replace(lr=None)).peak[1] == 1
    assert schedule_of(spec.replace(micro_batch="auto")).batch is None


def test_its_faces() -> None:
    found = Schedule(steps=(0, 1, 2), lrs=(0.1, 0.2, 0.1), batch=4, label="<mine>")
    assert "&lt;mine&gt;" in found._repr_html_()
    assert found.to_frame()["samples"].tolist() == [0, 4, 8]
    assert Schedule.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert repr(found) == "Schedule(3 steps, peak 0.2)"
    assert not found.constant
    unsteady = Schedule(steps=(0, 1, 2, 3), lrs=(0.2, 0.1, 0.3, 0.1))
    assert (unsteady.warmup_steps, unsteady.peak) == (0, (2, 0.3))
    with pytest.raises(ValueError, match="a schedule of 1 steps and 0 learning rates"):
        Schedule(steps=(1,), lrs=())
    with pytest.raises(ValueError, match="batch=0: a whole number of samples per optimizer step of at least 1"):
        Schedule(steps=(1,), lrs=(0.1,), batch=0)


# --- the picture

SPEC = RunSpec(task="text-gpt", micro_batch=4, steps=20, warmup_steps=5, schedule="cosine", lr=0.2)


def test_one_plan() -> None:
    ax = plot.schedule(SPEC)
    line, peak = ax.get_lines()
    found = schedule_of(SPEC)
    assert line.get_ydata().tolist() == pytest.approx(found.lrs)  # type: ignore[union-attr]
    assert (list(peak.get_xdata()), list(peak.get_ydata())) == ([4], [0.2])  # type: ignore[arg-type]
    assert [text.get_text() for text in ax.texts] == ["peak 0.2, after 4 steps of warm-up"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("optimizer step", "learning rate")
    above = ax.child_axes[0]
    ax.figure.draw_without_rendering()
    assert above.get_xlabel() == "samples, 4 a step"
    assert above.get_xlim() == pytest.approx([4 * end for end in ax.get_xlim()])


def test_old_and_new_plan() -> None:
    """Beside each other they go by samples: the same place has seen as much."""
    ax = plot.schedule({"old": SPEC, "new": SPEC.replace(micro_batch=16, lr=0.4, steps=5, warmup_steps=2)})
    old, _, new, _ = ax.get_lines()
    assert [one.get_text() for one in ax.get_legend().get_texts()] == ["old, batch 4", "new, batch 16"]  # type: ignore[union-attr]
    assert old.get_xdata()[-1] == 19 * 4  # type: ignore[index]
    assert new.get_xdata()[-1] == 4 * 16  # type: ignore[index]
    assert ax.get_xlabel() == "samples"
    assert not ax.child_axes
    assert old.get_linestyle() != new.get_linestyle()
    by_steps = plot.schedule([SPEC, SPEC.replace(micro_batch=16)], by="steps")
    assert by_steps.get_xlabel() == "optimizer step"


def test_a_scheduler_of_ones_own_in_given_axes() -> None:
    _, given = pyplot.subplots()
    ax = plot.schedule(of_torch.CosineAnnealingLR(optimizer(), 10), given, batch=32)
    assert ax is given
    assert ax.child_axes[0].get_xlabel() == "samples, 32 a step"
    assert len(plot.schedule(MAKERS["one cycle"], steps=7, lr=0.1).get_lines()[0].get_xdata()) == 7  # type: ignore[arg-type]
    assert plot.schedule(scheduled(MAKERS["cosine"], 5)).get_xlabel() == "optimizer step"
    assert scheduled(MAKERS["cosine"], 5).plot().get_ylabel() == "learning rate"


def test_a_part_of_the_peak() -> None:
    assert plot.schedule(SPEC.replace(lr=None)).get_ylabel() == "learning rate / peak"
    flat = plot.schedule(SPEC.replace(warmup_steps=0, schedule="constant"))
    assert [text.get_text() for text in flat.texts] == ["constant 0.2"]
    assert len(flat.get_lines()) == 1


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="no schedule to draw: a RunSpec, a torch scheduler or a Schedule is allowed"):
        plot.schedule([])
    with pytest.raises(ValueError, match="by='time': allowed are 'auto', 'steps', 'samples'"):
        plot.schedule(SPEC, by="time")
    with pytest.raises(ValueError, match="by='samples' needs to know the samples per step: give batch=…"):
        plot.schedule(of_torch.CosineAnnealingLR(optimizer(), 10), by="samples")
    with pytest.raises(ValueError, match="a torch scheduler is allowed"):
        plot.schedule("text-gpt")


# --- the rules, over the batch


def test_what_each_rule_makes_of_it() -> None:
    found = scale_lr(0.1, batch=32, to_batch=512, noise_scale=200)
    ax = found.plot()
    lines = {str(line.get_label()): line for line in ax.get_lines()}
    assert [name for name in lines if name[0] != "_"] == [
        "linear",
        "square root",
        "damped",
        "none",
        "as it is",
        "predicted",
        "noise scale or critical batch",
    ]
    assert lines["damped"].get_color() != lines["linear"].get_color() == lines["none"].get_color()
    before, after = (line for line in ax.get_lines() if line.get_marker() == "D")
    assert (list(before.get_xdata()), list(before.get_ydata())) == ([32], [0.1])
    assert (list(after.get_xdata()), list(after.get_ydata())) == ([512], [found.lr])
    assert [text.get_text() for text in ax.texts] == ["0.5213 at 512: at the edge of the rule's domain"]
    ax.figure.draw_without_rendering()
    assert "1,024" in [label.get_text() for label in ax.get_xticklabels()]


def test_a_rule_without_the_noise() -> None:
    adam = scale_lr(1e-3, batch=32, to_batch=8, optimizer="adam")
    assert plot.scaled_lr(adam).get_legend_handles_labels()[1] == [
        "linear",
        "square root, with betas and epsilon",
        "none",
        "as it is",
        "predicted",
    ]
    plan = BatchPlan(micro_batch=32, lr=0.1, optimizer="sgd")
    assert plan.scaled_to(global_batch=64).plot().get_ylabel() == "learning rate"
    with pytest.raises(ValueError, match="was not scaled from another one, so there is nothing to draw"):
        plan.plot()


def test_chained_schedulers_are_walked_however_deep() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    outer = of_torch.ChainedScheduler([chain(optimizer)])
    optimizer.step()
    outer.step()
    assert plot.schedule(outer, steps=STEPS)
    assert scheduled(outer, STEPS).steps[0] == 1


def test_a_combination_that_torch_cannot_step_is_refused_in_words() -> None:
    class Broken(Own):
        def step(self) -> None:
            raise AttributeError("'ChainedScheduler' object has no attribute 'last_epoch'")

    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(
        ValueError, match=r"the scheduler \(Broken\) cannot take step 1 by itself.*no attribute 'last_epoch'.*another order"
    ):
        plot.schedule(Broken(optimizer), steps=STEPS)
