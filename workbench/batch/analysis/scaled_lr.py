"""ScaledLr: the learning rate for another batch with all that changes beside it, why, and whether the rule is valid there.

Also the checks of `scale_lr`'s arguments, and `number`, which writes plain numbers as text.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

from workbench.batch.analysis.optimizer_description import OptimizerDescription
from workbench.core import units
from workbench.core.checks import choice, is_number, real_number, whole_number
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display

RULES = ("auto", "linear", "sqrt", "adam", "damped", "none")
"""Rules that `scale_lr` knows; "auto" chooses one of the others."""

Validity = Literal["inside", "edge", "outside", "unknown"]
"""Do the rule's assumptions hold at the new batch? "unknown": it depends on a number that was not given, in most cases the noise scale."""

VALIDITY_TEXT: Mapping[str, str] = {
    "inside": "inside the rule's domain",
    "edge": "at the edge of the rule's domain",
    "outside": "outside the rule's domain",
    "unknown": "not known whether the rule holds here",
}
"""Validity → text."""
KEEPS_BETAS = 'rule="sqrt" gives the same learning rate and keeps the betas'
"""The alternative where Malladi's rule leaves little of an average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledLr(display.Shown, JsonDataclass):
    """A learning rate for another batch."""

    lr: float
    """The new (peak) learning rate."""
    base_lr: float
    """The learning rate before."""
    betas: tuple[float, ...] | None
    """The new betas of the Adam family; of RMSProp its alpha alone; None = the optimizer has none."""
    eps: float | None
    """The new epsilon; None = the optimizer has none."""
    momentum: float | None
    """Kept; None = the optimizer has none."""
    weight_decay: float | None
    """Kept; `notes` say what becomes of the time over which weights are forgotten."""
    warmup_steps: int
    """Optimizer steps at the new batch."""
    rule: str
    """The rule that was used, one of RULES, never "auto"."""
    batch: int
    """Samples per optimizer step over all ranks and micro-batches, before."""
    to_batch: int
    """After."""
    factor: float
    """What the learning rate was multiplied with."""
    valid: Validity
    """Do the rule's assumptions hold at the new batch?"""
    why: str
    """Why this rule."""
    notes: tuple[str, ...] = ()
    """Limits of the rule and what becomes of other settings, most important first."""
    base: str = "sgd"
    """The optimizer before, as in a RunSpec."""
    base_warmup_steps: int = 0
    """Warm-up steps before."""
    noise: float | None = None
    """Samples at which noise and signal are equal, which damp a damped rate; None = not known."""

    def __post_init__(self) -> None:
        assert self.valid in get_args(Validity)

    @property
    def ratio(self) -> float:
        """The new batch over the old one: kappa."""
        return self.to_batch / self.batch

    def optimizer(self, base: str | None = None) -> str:
        """The optimizer with the scaled options, without its learning rate: `adamw(betas=(0.6, 0.8), eps=5e-09)`.

        Args:
            base: the optimizer whose other options are kept; None = the one before.

        Raises:
            ValueError: no such optimizer.
        """
        return OptimizerDescription.of(base or self.base).replace(betas=self.betas, eps=self.eps).text

    def changes(self) -> dict[str, Any]:
        """The changed knobs of a RunSpec, for `spec.replace(**scaled.changes())`; a `BatchPlan` has those of the batch.

        `optimizer` is among them only where betas or epsilon change, so that a task's own optimizer stays.
        """
        changes: dict[str, Any] = {"lr": self.lr, "warmup_steps": self.warmup_steps}
        return changes if self.optimizer() == self.base else {**changes, "optimizer": self.optimizer()}

    @property
    def table(self) -> display.Table:
        """A row per setting, before and after."""
        before = OptimizerDescription.of(self.base)
        rows: list[list[object]] = [
            ["batch", number(self.batch), number(self.to_batch)],
            ["learning rate", number(self.base_lr), number(self.lr)],
        ]
        if self.betas is not None:
            rows.append(["betas" if len(self.betas) > 1 else "alpha", numbers(before.betas or ()), numbers(self.betas)])
        if self.eps is not None:
            rows.append(["eps", number(before.get("eps")), number(self.eps)])
        for name in ("momentum", "weight_decay"):
            if getattr(self, name):
                rows.append([name, number(before.get(name)), number(getattr(self, name))])
        rows.append(["warm-up steps", number(self.base_warmup_steps), number(self.warmup_steps)])
        instead = f"; {KEEPS_BETAS}" if any(KEEPS_BETAS in note for note in self.notes) else ""
        said = f"{before.name}, batch {number(self.batch)} → {number(self.to_batch)}, rule {self.rule!r}: {VALIDITY_TEXT[self.valid]}"
        return display.Table(columns=("", "before", "after"), rows=rows, title=f"{said}{instead}", note="\n".join([self.why, *self.notes]))

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


def numbers(values: Iterable[float]) -> str:
    """Several numbers as text, separated by commas."""
    return ", ".join(map(number, values))


def noise_to_damp_by(noise_scale: Any, critical_batch: Any) -> tuple[float | None, str, tuple[str, ...]]:
    """The noise for the damped rule, its origin, and a note if it is uncertain.

    Args:
        noise_scale: samples, or an object with `b_simple`.
        critical_batch: samples, or an object with `b_crit`.

    Raises:
        ValueError: not a number above 0.
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
    name = min(known, key=known.__getitem__)
    text = f"damped by the {name}, {number(known[name])} samples"
    if len(known) > 1:
        text += f": the smaller of the two (noise scale {number(known['noise scale'])}, critical batch {number(known['critical batch'])})"
    return known[name], text, doubts


def python_number(value: Any) -> Any:
    """A number as Python's own int or float, so that it can be written as JSON; anything else as it is.

    >>> python_number(2), python_number(0.5), python_number(None)
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
            f"{name} of {given!r}: a number of samples above 0 is allowed, or what measured it; leave it out if it is not known"
        )
    return float(given)


def check_arguments(lr: object, rule: object, **whole: object) -> None:
    """Refuse numbers out of range and unknown rules.

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
