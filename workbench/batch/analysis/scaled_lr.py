"""ScaledLr: a learning rate that was taken from one batch to another, with what else changed, why, and whether the rule holds there.

What `scale_lr` is asked: numbers that make sense, and the noise to damp by.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

from workbench.batch.analysis.optimizer import Described
from workbench.core import units
from workbench.core.checks import choice, is_number, real_number, whole_number
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display

RULES = ("auto", "linear", "sqrt", "adam", "damped", "none")
"""Rules that `scale_lr` knows; "auto" chooses one of the others."""

Valid = Literal["inside", "edge", "outside", "unknown"]
"""Do the rule's assumptions hold at the new batch? "unknown": it depends on a number that was not given, in most cases the noise scale."""

LIGHTS: Mapping[str, str] = {
    "inside": "inside the rule's domain",
    "edge": "at the edge of the rule's domain",
    "outside": "outside the rule's domain",
    "unknown": "not known whether the rule holds here",
}
"""What each light says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledLr(display.Shown, JsonDataclass):
    """A learning rate for another batch."""

    lr: float
    """The new (peak) learning rate."""
    base_lr: float
    """The one it comes from."""
    betas: tuple[float, ...] | None
    """The new betas of Adam and its kin; RMSProp's one, alpha, alone; None = it has none."""
    eps: float | None
    """The new epsilon; None = it has none."""
    momentum: float | None
    """Of SGD and its kin: kept; None = it has none."""
    weight_decay: float | None
    """Kept; `notes` say what becomes of the time over which weights are forgotten."""
    warmup_steps: int
    """Optimizer steps at the new batch."""
    rule: str
    """The one that was used: one of RULES, never "auto"."""
    batch: int
    """Samples per optimizer step over all ranks and micro-batches, before."""
    to_batch: int
    """After."""
    factor: float
    """What the learning rate was multiplied with."""
    valid: Valid
    """The light."""
    why: str
    """Why this rule, in words."""
    notes: tuple[str, ...] = ()
    """What else there is to know, most important first."""
    base: str = "sgd"
    """The optimizer it was made for, as a spec writes it."""
    base_warmup_steps: int = 0
    """Before."""
    noise: float | None = None
    """Samples at which noise and signal are equal, by which a damped rate is damped; None = not known."""

    def __post_init__(self) -> None:
        assert self.valid in get_args(Valid)

    @property
    def ratio(self) -> float:
        """The new batch over the old one: kappa."""
        return self.to_batch / self.batch

    def optimizer(self, base: str | None = None) -> str:
        """An optimizer's text with the scaled options, the learning rate left out: `adamw(betas=(0.6, 0.8), eps=5e-09)`.

        Args:
            base: whose other options to keep; None = the one it was made for.

        Raises:
            ValueError: no such optimizer.
        """
        return Described.of(base or self.base).having(betas=self.betas, eps=self.eps).text

    def changes(self) -> dict[str, Any]:
        """The knobs of a RunSpec that it turns, for `spec.replace(**scaled.changes())`: the batch itself is a `BatchPlan`'s.

        `optimizer` is among them only where betas or epsilon change: a task's own optimizer else stays what it is.
        """
        found: dict[str, Any] = {"lr": self.lr, "warmup_steps": self.warmup_steps}
        if self.optimizer() != self.base:
            found["optimizer"] = self.optimizer()
        return found

    @property
    def table(self) -> display.Table:
        """One row per number, before and after."""
        before = Described.of(self.base)
        rows: list[list[object]] = [
            ["batch", number(self.batch), number(self.to_batch)],
            ["learning rate", number(self.base_lr), number(self.lr)],
        ]
        if self.betas is not None:
            rows.append(["betas" if len(self.betas) > 1 else "alpha", _several(before.betas or ()), _several(self.betas)])
        if self.eps is not None:
            rows.append(["eps", number(before.get("eps")), number(self.eps)])
        for name in ("momentum", "weight_decay"):
            if getattr(self, name):
                rows.append([name, number(before.get(name)), number(getattr(self, name))])
        rows.append(["warm-up steps", number(self.base_warmup_steps), number(self.warmup_steps)])
        return display.Table(
            columns=("", "before", "after"),
            rows=rows,
            title=f"{before.name}, batch {number(self.batch)} → {number(self.to_batch)}, rule {self.rule!r}: {LIGHTS[self.valid]}",
            note="\n".join([self.why, *self.notes]),
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row."""
        return display.frame([{**self.to_json(), "notes": "; ".join(self.notes)}])

    plot = display.plot_method("scaled_lr")

    def __repr__(self) -> str:
        return f"ScaledLr({number(self.lr)}, {self.rule}, {self.valid})"


def number(value: float | None) -> str:
    """A plain number as text, four significant digits: 0.1, 0.02828, 1e-08, 4,096.

    >>> number(0.1), number(0.0282842), number(4096), number(None)
    ('0.1', '0.02828', '4,096', '–')
    """
    if value is None:
        return units.MISSING
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _several(values: tuple[float, ...]) -> str:
    return ", ".join(map(number, values))


def known_noise(noise_scale: Any, critical_batch: Any) -> tuple[float | None, str, tuple[str, ...]]:
    """The noise to damp by, which one it is in words, and doubts about it.

    Args:
        noise_scale: samples, or what has them as `b_simple`.
        critical_batch: samples, or what has them as `b_crit`.

    Raises:
        ValueError: no number above 0.
    """
    known = {
        name: _samples(name, getattr(given, attribute, given))
        for name, attribute, given in (("noise scale", "b_simple", noise_scale), ("critical batch", "b_crit", critical_batch))
        if given is not None
    }
    doubts: tuple[str, ...] = ()
    if getattr(noise_scale, "enough", True) is False:
        doubts = (f"the noise scale was measured over too few steps: {number(known['noise scale'])} is not certain yet",)
    if not known:
        return None, "", doubts
    name = min(known, key=lambda one: known[one])
    text = f"damped by the {name}, {number(known[name])} samples"
    if len(known) > 1:
        text += f": the smaller of the two (noise scale {number(known['noise scale'])}, critical batch {number(known['critical batch'])})"
    return known[name], text, doubts


def plain(value: Any) -> Any:
    """A number as Python's own int or float, so that it can be written as JSON; anything else as it is.

    >>> plain(2), plain(0.5), plain(None)
    (2, 0.5, None)
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _samples(name: str, given: Any) -> float:
    if not is_number(given, above=0, numpy=True):
        raise ValueError(
            f"{name} of {given!r}: a number of samples above 0 is wanted, or what measured it; leave it out if it is not known"
        )
    return float(given)


def check(lr: object, rule: object, **whole: object) -> None:
    """Refuse what makes no sense.

    Args:
        lr: learning rate.
        rule: one of RULES.
        whole: numbers by name; warm-up and dataset may be None.

    Raises:
        ValueError: says what is allowed.
    """
    real_number("lr", lr, above=0, numpy=True)
    for name, value in whole.items():
        least = 0 if name == "warmup_steps" else 1
        if value is None and name in ("warmup_steps", "dataset_size"):
            continue
        also = ": samples per optimizer step, micro_batch × accumulation × world_size" if name in ("batch", "to_batch") else ""
        whole_number(name, value, least=least, also=also, numpy=True)
    choice("rule", rule, RULES)
