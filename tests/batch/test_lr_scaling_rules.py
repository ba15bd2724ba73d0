"""Rules for the learning rate of another batch: what they promise holds for all numbers, and their limits are said."""

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.batch.analysis.lr_scaling_rules import scale_lr, worst_validity
from workbench.batch.analysis.optimizer_description import OptimizerDescription
from workbench.batch.analysis.scaled_lr import RULES, ScaledLr
from workbench.core import optimizer_table
from workbench.runs.spec import RunSpec
from workbench.train.optimizers import OPTIMIZERS

LINES = {
    "linear": ("sgd(momentum=0.9)", {}),
    "sqrt": ("adamw", {}),
    "adam": ("adam(betas=(0.999, 0.9999))", {}),
    "damped": ("sgd", {"noise_scale": 100.0}),
    "none": ("lamb", {}),
}
"""Rule → an optimizer it is for, and what it needs."""
BUILT = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], betas=(0.8, 0.9))
SAMPLES = st.integers(1, 200)
RATE = st.floats(1e-6, 10.0)


def line(rule: str, **more: Any) -> Callable[..., ScaledLr]:
    optimizer, needs = LINES[rule]
    return lambda lr, batch, to_batch, optimizer=optimizer: scale_lr(
        lr, batch=batch, to_batch=to_batch, optimizer=optimizer, rule=rule, **needs, **more
    )


@pytest.mark.parametrize("rule", LINES)
@given(lr=RATE, batch=SAMPLES)
def test_the_same_batch_changes_nothing(rule: str, lr: float, batch: int) -> None:
    found = line(rule, warmup_steps=10)(lr, batch, batch)
    assert found.lr == pytest.approx(lr, rel=1e-12)
    assert (found.factor, found.valid, found.warmup_steps) == (1.0, "inside", 10)
    assert found.betas == OptimizerDescription.of(found.base).betas
    assert found.optimizer() == found.base


@pytest.mark.parametrize("rule", LINES)
@given(lr=RATE, batch=SAMPLES, between=SAMPLES, end=SAMPLES)
def test_two_ways_there_are_one(rule: str, lr: float, batch: int, between: int, end: int) -> None:
    scale = line(rule)
    once = scale(lr, batch, end)
    stop = scale(lr, batch, between)
    twice = scale(stop.lr, between, end, stop.optimizer())
    assert twice.lr == pytest.approx(once.lr, rel=1e-9)
    if once.betas is not None:
        assert twice.betas is not None
        assert [1 - beta for beta in twice.betas] == pytest.approx([1 - beta for beta in once.betas], rel=1e-6)
        assert twice.eps == pytest.approx(once.eps, rel=1e-5)  # six digits each time


@pytest.mark.parametrize("rule", LINES)
@given(batch=SAMPLES, one=SAMPLES, other=SAMPLES)
def test_more_samples_never_want_less(rule: str, batch: int, one: int, other: int) -> None:
    low, high = (line(rule)(0.1, batch, size) for size in sorted((one, other)))
    assert low.lr <= high.lr * (1 + 1e-12)
    for found in (low, high):
        assert all(0 <= beta < 1 for beta in found.betas or ())
        assert found.factor <= max(1.0, found.ratio) * (1 + 1e-12)  # no rule goes beyond the linear one


@given(
    optimizer=st.sampled_from(["sgd", "adam", "adamw(betas=(0.9, 0.95))", "rmsprop(alpha=0.9)", "lamb", "lars", "adagrad", "nadam"]),
    batch=st.integers(1, 10**6),
    to_batch=st.integers(1, 10**6),
    noise=st.none() | st.floats(0.1, 1e6),
)
def test_auto_always_has_an_answer(optimizer: str, batch: int, to_batch: int, noise: float | None) -> None:
    found = scale_lr(0.01, batch=batch, to_batch=to_batch, optimizer=optimizer, noise_scale=noise, dataset_size=50_000)
    assert found.rule in RULES[1:]
    assert 0 < found.lr < math.inf
    assert all(0 <= beta < 1 for beta in found.betas or ())
    assert found.why
    assert ScaledLr.from_json(json.loads(json.dumps(found.to_json()))) == found


# --- the formulas


def test_linear() -> None:
    found = scale_lr(0.1, batch=256, to_batch=8192, rule="linear", dataset_size=1_281_167)
    assert found.lr == pytest.approx(3.2)  # Goyal et al. 2017
    assert found.warmup_steps == math.ceil(5 * 1_281_167 / 8192)


def test_malladi() -> None:
    found = scale_lr(1e-3, batch=64, to_batch=256, optimizer="adamw(betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1)")
    assert found.rule == "adam"
    assert found.lr == pytest.approx(2e-3)
    assert found.betas == pytest.approx((0.6, 0.92))
    assert found.eps == pytest.approx(5e-7)
    assert found.changes() == {"lr": 0.002, "warmup_steps": 0, "optimizer": "adamw(betas=(0.6, 0.92), eps=5e-07, weight_decay=0.1)"}
    assert "weight_decay=0.2 would keep that time" in str(found)


def test_malladi_for_rmsprop() -> None:
    found = scale_lr(1e-3, batch=64, to_batch=1024, optimizer="rmsprop(alpha=0.99, eps=1e-08)")
    assert (found.rule, found.lr, found.betas, found.eps) == ("adam", 0.004, (0.84,), 2.5e-9)
    assert found.optimizer() == "rmsprop(alpha=0.84, eps=2.5e-09)"


def test_damped() -> None:
    """lr(B) = lr_max / (1 + noise / B)."""
    lrs = [scale_lr(1 / (1 + 28 / 8), batch=8, to_batch=batch, rule="damped", critical_batch=28).lr for batch in (2, 8, 32, 10**6)]
    assert lrs == pytest.approx([1 / (1 + 28 / batch) for batch in (2, 8, 32, 10**6)])
    by_root = scale_lr(1.0, batch=8, to_batch=32, optimizer="adam", rule="damped", critical_batch=28)
    assert by_root.factor == pytest.approx(((1 + 28 / 8) / (1 + 28 / 32)) ** 0.5)


def test_the_smaller_of_two_noises_counts() -> None:
    both = scale_lr(0.1, batch=8, to_batch=64, noise_scale=84, critical_batch=28)
    assert both.lr == scale_lr(0.1, batch=8, to_batch=64, critical_batch=28).lr
    assert any("the smaller of the two (noise scale 84, critical batch 28)" in note for note in both.notes)


def test_a_measurement_can_be_given_as_it_is() -> None:
    @dataclass
    class Scale:
        b_simple: float = 28.0
        enough: bool = False

    found = scale_lr(0.1, batch=8, to_batch=64, noise_scale=Scale())
    assert found.lr == scale_lr(0.1, batch=8, to_batch=64, noise_scale=28).lr
    assert any("too few steps: 28 is not certain yet" in note for note in found.notes)


# --- what is chosen, and why


@pytest.mark.parametrize(
    ("optimizer", "more", "rule", "why"),
    [
        ("sgd", {}, "linear", "depends on the noise, which is not known"),
        ("sgd", {"noise_scale": 50}, "damped", "the noise is known"),
        ("adamw(betas=(0.99, 0.999))", {}, "adam", "divides each step by the gradients' size"),
        ("adamw(betas=(0.99, 0.999))", {"noise_scale": 5000}, "adam", "divides each step by the gradients' size"),
        ("adamw(betas=(0.99, 0.999))", {"noise_scale": 50}, "damped", "the rule for Adam would be 2.901 times this one"),
        ("adamw", {}, "sqrt", "the full rule is not defined here"),
        ("adamw", {"noise_scale": 50}, "damped", "with the batch's square root, for adamw,"),
        ("lamb", {}, "sqrt", "no rule was derived"),
        ("lars", {}, "linear", "in proportion to its weights, so no rule was derived for it"),
        ("adagrad", {"critical_batch": 50}, "damped", "with the batch's square root, for adagrad,"),
    ],
)
def test_auto_says_why(optimizer: str, more: dict[str, Any], rule: str, why: str) -> None:
    found = scale_lr(0.01, batch=32, to_batch=640, optimizer=optimizer, **more)
    assert found.rule == rule
    assert why in found.why


def test_what_a_built_optimizer_has_can_be_given() -> None:
    built = {"name": "adamw", "lr": 0.5, "betas": (0.9, 0.95), "eps": 1e-8, "momentum": None, "weight_decay": 0.1}
    found = scale_lr(1e-3, batch=8, to_batch=16, optimizer=built)
    assert found.optimizer() == "adamw(betas=(0.8, 0.9), weight_decay=0.1, eps=" + repr(found.eps) + ")"
    assert found.optimizer("adam(amsgrad=True)") == f"adam(amsgrad=True, betas=(0.8, 0.9), eps={found.eps!r})"


def test_auto_does_not_take_adams_rule_where_the_noise_forbids_it() -> None:
    found = scale_lr(1e-3, batch=16, to_batch=144, optimizer="adam", noise_scale=1)
    assert (found.rule, found.valid, found.betas) == ("damped", "inside", (0.9, 0.999))
    assert found.lr == pytest.approx(1.027e-3, rel=1e-3)
    assert scale_lr(1e-3, batch=144, to_batch=16, optimizer="adam", noise_scale=1).rule == "damped"  # downwards as well


def test_where_adams_rule_leaves_little_of_an_average_the_first_line_names_the_rule_that_keeps_betas() -> None:
    given: dict[str, Any] = {"batch": 32, "to_batch": 256, "optimizer": "adamw"}
    fading = scale_lr(3e-4, **given)
    other = scale_lr(3e-4, **given, rule="sqrt")
    assert (fading.valid, fading.betas[0]) == ("edge", 0.2)  # type: ignore[index]
    assert (other.lr, other.betas) == (fading.lr, (0.9, 0.999))
    for text in (str(fading).splitlines()[0], fading.notes[0]):
        assert 'rule="sqrt" gives the same learning rate and keeps the betas' in text
    assert "keeps the betas" not in str(other)
    assert "keeps the betas" not in str(scale_lr(3e-4, batch=32, to_batch=64, optimizer="adamw"))


def test_the_worse_cause_comes_first() -> None:
    asked = scale_lr(1e-3, batch=16, to_batch=144, optimizer="adam", rule="adam", noise_scale=1)
    assert asked.notes[0].startswith("outside the rule's domain: at a noise of 1 samples this learning rate is 2.921 times")
    assert asked.notes[1].startswith("besides: kappa × (1 - beta) is 0.9")
    fading = scale_lr(1e-3, batch=16, to_batch=144, optimizer="adam", rule="adam", noise_scale=1e5)
    assert fading.notes[0].startswith("at the edge of the rule's domain: kappa × (1 - beta) is 0.9")
    root = scale_lr(1e-3, batch=16, to_batch=1600, optimizer="adam", rule="sqrt", noise_scale=1)
    assert "at a noise of 1 samples" in root.notes[0]
    beside = scale_lr(0.1, batch=32, to_batch=1001, rule="linear", noise_scale=1e7, dataset_size=1000)
    assert not any("at a noise of" in note for note in beside.notes)  # the data alone are the cause


def test_so_large_a_factor_is_outside_whatever_the_noise() -> None:
    found = scale_lr(0.1, batch=1, to_batch=10**9)
    assert found.notes[0].startswith("outside the rule's domain: batches 1e+09 times apart; linear was shown to hold over 128 times")


def test_a_new_eps_has_six_digits() -> None:
    assert scale_lr(1e-3, batch=32, to_batch=64, optimizer="adam").optimizer() == "adam(betas=(0.8, 0.998), eps=7.07107e-09)"


def test_the_options_are_those_of_the_real_optimizers() -> None:
    for name, row in optimizer_table.OPTIMIZERS.items():
        options = row.options
        real = set(inspect.signature(OPTIMIZERS[name]).parameters) - {"params"}
        assert real <= set(options), name
        assert set(options) - real <= {"fused", "capturable"}, name  # which newer versions of torch may have


def test_numbers_of_numpy_become_plain() -> None:
    numbers = {"batch": np.int64(32), "to_batch": np.int64(64), "warmup_steps": np.int32(8), "dataset_size": np.int64(10**6)}
    options = {"name": "adam", "betas": [np.float64(0.9), np.float32(0.5)], "eps": np.float64(1e-8), "lr": torch.tensor(0.5)}
    found = scale_lr(np.float32(0.5), optimizer=options, noise_scale=np.float32(1e6), **numbers)  # type: ignore[arg-type]
    assert found == ScaledLr.from_json(json.loads(json.dumps(found.to_json())))
    assert found == scale_lr(
        0.5, batch=32, to_batch=64, warmup_steps=8, dataset_size=10**6, noise_scale=1e6, optimizer="adam(betas=(0.9, 0.5))"
    )
    assert found.base == "adam(betas=(0.9, 0.5))"


def test_what_the_error_says_to_try_works() -> None:
    found = scale_lr(1e-3, batch=32, to_batch=64, optimizer={"name": "adamw", **BUILT.param_groups[0]})
    assert found.base == "adamw(betas=(0.8, 0.9))"


# --- where it holds


@pytest.mark.parametrize(
    ("optimizer", "rule", "to_batch", "noise", "valid"),
    [
        ("sgd", "linear", 34, None, "inside"),  # whatever the noise
        ("sgd", "linear", 128, None, "unknown"),
        ("sgd", "linear", 32 * 1024, None, "unknown"),
        ("sgd", "linear", 32 * 10**9, None, "outside"),
        ("lamb", "sqrt", 32 * 10**9, None, "outside"),
        ("sgd", "linear", 128, 10_000, "inside"),
        ("sgd", "linear", 128, 100, "edge"),
        ("sgd", "linear", 4096, 100, "outside"),
        ("sgd", "none", 4096, 1, "inside"),
        ("sgd", "none", 4096, 10_000, "outside"),
        ("sgd", "sqrt", 128, 10_000, "edge"),
        ("sgd", "damped", 48, 100, "inside"),
        ("sgd", "damped", 4096, 1000, "outside"),
        ("adam(betas=(0.99, 0.999))", "adam", 128, 1e5, "inside"),
        ("adam(betas=(0.99, 0.999))", "adam", 128, None, "unknown"),
        ("adam(betas=(0.99, 0.999))", "adam", 32 * 64, 1e5, "edge"),  # a beta of 0.36
        ("adam(betas=(0.99, 0.999))", "adam", 32 * 64, 100, "outside"),
        ("adam", "adam", 32 * 10, 1e5, "outside"),  # exactly where the first beta would be 0
        ("adam", "linear", 32 * 16, None, "outside"),
    ],
)
def test_the_light(optimizer: str, rule: str, to_batch: int, noise: float | None, valid: str) -> None:
    found = scale_lr(0.1, batch=32, to_batch=to_batch, optimizer=optimizer, rule=rule, noise_scale=noise)
    assert found.valid == valid
    assert (valid == "inside") is not any("domain" in note or "not known whether" in note for note in found.notes)


def test_a_critical_batch_is_believed() -> None:
    assert scale_lr(0.1, batch=32, to_batch=4096, rule="damped", critical_batch=1000).valid == "inside"


def test_lights_in_order() -> None:
    assert worst_validity("inside", "edge", "outside", "unknown") == "outside"
    assert worst_validity("inside", "unknown") == "unknown"
    assert worst_validity("edge", "unknown") == "edge"
    assert worst_validity("unknown") == "unknown"


def test_beyond_malladis_domain() -> None:
    found = scale_lr(1e-3, batch=32, to_batch=512, optimizer="adam", rule="adam")
    assert (found.rule, found.lr, found.betas, found.valid) == ("sqrt", 0.004, (0.9, 0.999), "outside")
    assert found.why.startswith("sqrt instead of adam")
    assert "kappa × (1 - beta) is 1.6 for beta 0.9" in found.notes[0]
    with pytest.raises(ValueError, match=r"rule='adam' at 16 times the batch: .* they are 0\.9, 0\.999: below 10 times the batch it works"):
        scale_lr(1e-3, batch=32, to_batch=512, optimizer="adam", rule="adam", strict=True)


def test_strict() -> None:
    with pytest.raises(
        ValueError, match=r"from batch 32 to 4,096 with sgd: outside the rule's domain: at a noise of 100 samples .* strict=False"
    ):
        scale_lr(0.1, batch=32, to_batch=4096, rule="linear", noise_scale=100, strict=True)
    assert scale_lr(0.1, batch=32, to_batch=64, rule="linear", noise_scale=1000, strict=True).valid == "inside"


def test_beside_the_data() -> None:
    few = scale_lr(0.1, batch=32, to_batch=256, noise_scale=10_000, dataset_size=1000)
    assert few.valid == "edge"
    assert few.notes[0].startswith("an epoch of 1,000 samples is 3.9 steps")
    none = scale_lr(0.1, batch=32, to_batch=1001, noise_scale=10_000, dataset_size=1000)
    assert none.valid == "outside"
    assert none.notes[0].startswith("a batch of 1,001 is more than the 1,000 samples there are")
    with pytest.raises(ValueError, match="more than the 1,000 samples there are"):
        scale_lr(0.1, batch=32, to_batch=1001, dataset_size=1000, strict=True)


# --- what goes along


@pytest.mark.parametrize(("given_steps", "to_batch", "steps"), [(100, 128, 25), (100, 96, 34), (1, 640, 1), (7, 16, 14)])
def test_a_warm_up_keeps_its_samples(given_steps: int, to_batch: int, steps: int) -> None:
    assert scale_lr(0.1, batch=32, to_batch=to_batch, warmup_steps=given_steps, dataset_size=10**6).warmup_steps == steps


def test_no_warm_up_is_invented_for_a_smaller_rate() -> None:
    assert scale_lr(0.1, batch=32, to_batch=8, dataset_size=10_000).warmup_steps == 0
    assert scale_lr(0.1, batch=32, to_batch=64, rule="none", dataset_size=10_000).warmup_steps == 0
    assert "give dataset_size=…" in str(scale_lr(0.1, batch=32, to_batch=64))


def test_momentum_and_decay_are_said() -> None:
    plain = scale_lr(0.1, batch=32, to_batch=64, optimizer="sgd(momentum=0.9, weight_decay=0.0001)", rule="linear")
    assert (plain.momentum, plain.weight_decay) == (0.9, 1e-4)
    assert "no momentum correction is needed" in str(plain)
    assert "forgotten" not in str(plain)  # lr × weight_decay grows with the batch: the same time in samples
    rooted = scale_lr(0.1, batch=32, to_batch=128, optimizer="sgd(weight_decay=0.0001)", rule="sqrt")
    assert "forgotten over 2 times as many samples" in str(rooted)
    assert "weight_decay=0.0002 would keep that time" in str(rooted)
    assert "is inside its average" in str(scale_lr(0.1, batch=32, to_batch=64, optimizer="lars"))
    assert "the rule was derived without it" in str(scale_lr(0.1, batch=32, to_batch=64, optimizer="rmsprop(momentum=0.9)"))


def test_the_knobs_fit_a_spec() -> None:
    spec = RunSpec(task="text-gpt", lr=0.01, optimizer="adamw(betas=(0.9, 0.95))")
    found = scale_lr(0.01, batch=32, to_batch=64, optimizer=spec.optimizer or "")
    assert spec.replace(**found.changes()).optimizer == found.optimizer()
    assert scale_lr(0.01, batch=32, to_batch=64).changes() == {"lr": 0.02, "warmup_steps": 0}  # the task's own stays


def test_it_shows_itself() -> None:
    found = scale_lr(0.1, batch=32, to_batch=128, optimizer="adam(betas=(0.9, 0.99))", noise_scale=1e6)
    assert str(found).splitlines()[0] == "adam, batch 32 → 128, rule 'adam': inside the rule's domain"
    assert "betas" in found._repr_html_()
    assert found.to_frame().loc[0, "lr"] == 0.2
    assert repr(found) == "ScaledLr(0.2, adam, inside)"
    assert "alpha" in str(scale_lr(0.1, batch=32, to_batch=64, optimizer="rmsprop"))


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"batch": 0},
            "batch=0: a whole number of at least 1 is allowed: samples per optimizer step, micro_batch × accumulation × world_size",
        ),
        ({"to_batch": 1.5}, r"to_batch=1\.5: .* samples per optimizer step"),
        ({"lr": 0}, r"lr=0: a number above 0 is allowed"),
        ({"lr": float("nan")}, r"lr=nan: a number above 0"),
        ({"warmup_steps": -1}, r"warmup_steps=-1: a whole number of at least 0"),
        ({"dataset_size": 0}, r"dataset_size=0: a whole number of at least 1"),
        ({"rule": "liner"}, r"rule='liner': allowed are 'auto', 'linear', 'sqrt', 'adam', 'damped', 'none'; did you mean \"linear\""),
        (
            {"rule": "adam"},
            r"rule='adam' is for adam, adamw, nadam, radam, rmsprop, and the optimizer is sgd: try linear or damped, or auto",
        ),
        ({"rule": "adam", "optimizer": "adagrad"}, r"the optimizer is adagrad: try sqrt or damped, or auto"),
        ({"rule": "damped"}, r"rule='damped' needs the noise: give noise_scale=… .* or critical_batch=…"),
        ({"optimizer": "adamm"}, r"no rule is known for 'adamm'; did you mean 'adam'\? known are adafactor, adagrad, adam, "),
        ({"optimizer": {"name": "Shampoo"}}, r"no rule is known for 'Shampoo'; .* give the name of the optimizer that it resembles most"),
        ({"optimizer": {"lr": 1}}, r"a mapping needs a \"name\""),
        ({"optimizer": "adam(betas=(0.9, 1.0))"}, r"betas and momentum from 0 to below 1 are allowed"),
        ({"optimizer": "adam(betas=0.9)"}, r"betas and momentum from 0 to below 1 are allowed"),
        ({"optimizer": "sgd(weight_decay=-1)"}, r"eps, weight_decay and lr from 0 on"),
        ({"optimizer": "adamw(beta=(.9,.95))"}, r"adamw has no option 'beta'; did you mean 'betas'\? it has betas, eps, amsgrad, lr, "),
        ({"optimizer": "sgd(momentun=.9)"}, r"sgd has no option 'momentun'; did you mean 'momentum'\?"),
        ({"optimizer": {"name": "sgd", "momentun": 0.9}}, r"sgd has no option 'momentun'; did you mean 'momentum'\?"),
        ({"optimizer": "sgd(**{'momentum': 0.9})"}, r"a name with options is allowed"),
        ({"optimizer": 3}, r'optimizer is 3: a name with options such as .* or a mapping with a "name"; try optimizer="adamw"'),
        ({"optimizer": torch.optim.RMSprop}, r'optimizer is the class RMSprop: .* try optimizer="rmsprop"'),
        ({"optimizer": BUILT}, r'optimizer is a built AdamW: .* try optimizer=\{"name": "adamw", \*\*optimizer\.param_groups\[0\]\}'),
        ({"optimizer": "sgd(0.1)"}, r"a name with options is allowed"),
        ({"optimizer": "sgd(momentum=open)"}, r"a name with options is allowed"),
        ({"noise_scale": -3}, r"noise scale of -3: a number of samples above 0 is allowed, or what measured it"),
        ({"critical_batch": float("inf")}, r"critical batch of inf: a number of samples above 0"),
    ],
)
def test_what_makes_no_sense(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scale_lr(**{"lr": 0.1, "batch": 32, "to_batch": 64, **changes})
