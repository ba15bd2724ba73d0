"""Described: an optimizer in plain values, read from text such as "adamw(betas=(0.9, 0.95))" or from what a built one has."""

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.core.checks import did_you_mean, nearest
from workbench.core.optimizer_table import OPTIMIZERS, Family

_MISSPELT = 0.8
"""A key of a mapping so alike to an option is a misspelt one: "momentun" is 0.88, and "initial_lr", which schedulers add, 0.33."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """An optimizer, as far as the rules care.

    >>> Described.of("adamw(betas=(0.9, 0.95))").betas
    (0.9, 0.95)
    >>> Described.of({"name": "sgd", "lr": 0.1, "momentum": 0.9}).text
    'sgd(momentum=0.9)'
    """

    name: str
    """One of OPTIMIZERS."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Those that were given, `lr` not among them."""
    lr: float | None = None
    """That was given with it; None = none was."""

    @classmethod
    def of(cls, given: "str | Mapping[str, Any] | Described") -> "Described":
        """From its name with options, or from a mapping of what a built one has ("name", "lr", "betas", "eps", "momentum", …).

        Raises:
            ValueError: not of this form, an optimizer that is not known here, or options that make no sense.
        """
        if isinstance(given, Described):
            return given
        if not isinstance(given, str | Mapping):
            raise ValueError(_no_text(given))
        name, options = _parsed(given) if isinstance(given, str) else _mapped(given)
        lr = options.pop("lr", None)
        found = cls(name=name, options=options, lr=lr)
        _check(found, given)
        return found

    @property
    def family(self) -> Family:
        """What the rules treat it like."""
        return OPTIMIZERS[self.name].family

    @property
    def default_lr(self) -> float:
        """Its own learning rate: what was given, or torch's default."""
        return float(self.lr if self.lr is not None else OPTIMIZERS[self.name].defaults["lr"])

    def get(self, option: str) -> Any:
        """What an option is, given or by default; None where it has no such option."""
        return self.options.get(option, OPTIMIZERS[self.name].defaults.get(option))

    @property
    def betas(self) -> tuple[float, ...] | None:
        """How much of each moving average stays in a step; RMSProp has one, torch's `alpha`. None = none."""
        found = (self.get("alpha"),) if self.name == "rmsprop" else self.get("betas")
        return None if found is None else tuple(float(beta) for beta in found)

    @property
    def text(self) -> str:
        """As a spec writes it, without its learning rate: `adamw(betas=(0.9, 0.95))`."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name

    def having(self, *, betas: tuple[float, ...] | None, eps: float | None) -> "Described":
        """The same with other betas and another eps, where it has them; its other options stay."""
        changed: dict[str, Any] = {}
        if betas is not None and betas != self.betas:
            changed |= {"alpha": betas[0]} if self.name == "rmsprop" else {"betas": betas}
        if eps is not None and eps != self.get("eps"):
            changed["eps"] = eps
        return Described(name=self.name, options={**self.options, **changed}, lr=self.lr)


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    form = 'a name with options is wanted, such as "adamw(betas=(0.9, 0.95))"'
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
        if not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        if any(keyword.arg is None for keyword in call.keywords):
            raise ValueError
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(f"optimizer={text!r}: {form}") from None
    name = _known(call.func.id.lower(), text)
    for option in options:
        if option not in OPTIMIZERS[name].options:
            raise ValueError(_no_option(text, name, option))
    return name, options


def _mapped(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if "name" not in given:
        raise ValueError(f'optimizer={dict(given)!r}: a mapping needs a "name", such as {{"name": "sgd", "momentum": 0.9}}')
    name = _known(str(given["name"]), given)
    options = {str(key): _plain(value) for key, value in given.items() if key not in ("name", "params") and value is not None}
    known = {option for row in OPTIMIZERS.values() for option in row.options}
    for option in options:
        if option not in known and nearest(option, OPTIMIZERS[name].options, cutoff=_MISSPELT):
            raise ValueError(_no_option(dict(given), name, option))
    if name == "rmsprop" and "betas" in options:
        options["alpha"] = options.pop("betas")[0]
    usual = OPTIMIZERS[name].defaults
    return name, {key: value for key, value in options.items() if key == "lr" or (key in usual and value != usual[key])}


def _plain(value: Any) -> Any:
    """Lists as tuples, and scalars of numpy and torch as Python's own, so that the text can be read again."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value.item() if callable(getattr(value, "item", None)) and getattr(value, "shape", None) == () else value


def _no_option(given: object, name: str, option: str) -> str:
    row = OPTIMIZERS[name]
    return f"optimizer={given!r}: {name} has no option {option!r}; {did_you_mean(option, row.options)}it has {', '.join(row.options)}"


def _no_text(given: object) -> str:
    built = hasattr(given, "param_groups")
    kind = given if isinstance(given, type) else type(given)
    name = kind.__name__.lower() if kind.__name__.lower() in OPTIMIZERS else "adamw"
    shown = f"a built {kind.__name__}" if built else f"the class {kind.__name__}" if isinstance(given, type) else f"{given!r:.80}"
    hint = f'{{"name": "{name}", **optimizer.param_groups[0]}}' if built else f'"{name}"'
    return (
        f'optimizer is {shown}: a name with options such as "adamw(betas=(0.9, 0.95))" is allowed, or a mapping with a "name"; '
        f"try optimizer={hint}"
    )


def _known(name: str, given: object) -> str:
    if name in OPTIMIZERS:
        return name
    hint = did_you_mean(name.lower(), OPTIMIZERS)
    raise ValueError(
        f"optimizer={given!r}: no rule is known for {name!r}; {hint}known are {', '.join(OPTIMIZERS)}; "
        "of another one, give the name of that which it resembles"
    )


def _check(one: Described, given: object) -> None:
    try:
        betas = one.betas or ()
        momentum = float(one.get("momentum") or 0.0)
        sound = all(0 <= beta < 1 for beta in (*betas, momentum)) and (one.name == "rmsprop" or len(betas) in (0, 2))
        rates = [float(one.get(name) or 0.0) for name in ("eps", "weight_decay")] + [one.default_lr]
    except (TypeError, ValueError):
        sound, rates = False, []
    if not sound or not all(0 <= rate < math.inf for rate in rates):
        raise ValueError(f"optimizer={given!r}: betas and momentum from 0 to below 1 are allowed, and eps, weight_decay and lr from 0 on")
