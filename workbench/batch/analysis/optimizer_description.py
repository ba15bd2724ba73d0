"""Describes an optimizer by its name and options, given as text such as "adamw(betas=(0.9, 0.95))" or as a mapping of its settings."""

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.core.checks import did_you_mean, nearest
from workbench.core.optimizer_table import OPTIMIZERS, Family

MISSPELT = 0.8
"""Similarity from which a key of a mapping is a misspelt option: "momentun" has 0.88, and "initial_lr", which schedulers add, 0.33."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerDescription:
    """An optimizer's name, options and learning rate.

    >>> OptimizerDescription.of("adamw(betas=(0.9, 0.95))").betas
    (0.9, 0.95)
    >>> OptimizerDescription.of({"name": "sgd", "lr": 0.1, "momentum": 0.9}).text
    'sgd(momentum=0.9)'
    """

    name: str
    """One of OPTIMIZERS."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options that were given, without `lr`."""
    lr: float | None = None
    """The learning rate among the options; None = it was not given."""

    @classmethod
    def of(cls, given: "str | Mapping[str, Any] | OptimizerDescription") -> "OptimizerDescription":
        """From a name with options, or from a mapping of settings ("name", "lr", "betas", "eps", "momentum", …).

        Raises:
            ValueError: another form, an unknown optimizer, or options out of range.
        """
        if isinstance(given, OptimizerDescription):
            return given
        if not isinstance(given, str | Mapping):
            raise ValueError(_refusal(given))
        name, options = _parse(given) if isinstance(given, str) else _read_settings(given)
        lr = options.pop("lr", None)
        optimizer = cls(name=name, options=options, lr=lr)
        _check(optimizer, given)
        return optimizer

    @property
    def family(self) -> Family:
        """Optimizers that the scaling rules treat alike."""
        return OPTIMIZERS[self.name].family

    @property
    def default_lr(self) -> float:
        """The learning rate that was given, or torch's default."""
        return float(self.lr if self.lr is not None else OPTIMIZERS[self.name].defaults["lr"])

    def get(self, option: str) -> Any:
        """The value of an option, given or by default; None = the optimizer has no such option."""
        return self.options.get(option, OPTIMIZERS[self.name].defaults.get(option))

    @property
    def betas(self) -> tuple[float, ...] | None:
        """Decay rates of the moving averages; of RMSProp its `alpha` alone; None = it has none."""
        betas = (self.get("alpha"),) if self.name == "rmsprop" else self.get("betas")
        return None if betas is None else tuple(map(float, betas))

    @property
    def text(self) -> str:
        """The text of a RunSpec, without the learning rate: `adamw(betas=(0.9, 0.95))`."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.name}({options})" if options else self.name

    def replace(self, *, betas: tuple[float, ...] | None, eps: float | None) -> "OptimizerDescription":
        """The same optimizer with other betas and another eps; the other options stay."""
        changed: dict[str, Any] = {}
        if betas is not None and betas != self.betas:
            changed |= {"alpha": betas[0]} if self.name == "rmsprop" else {"betas": betas}
        if eps is not None and eps != self.get("eps"):
            changed["eps"] = eps
        return OptimizerDescription(name=self.name, options={**self.options, **changed}, lr=self.lr)


def _parse(text: str) -> tuple[str, dict[str, Any]]:
    form = 'a name with options is allowed, such as "adamw(betas=(0.9, 0.95))"'
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
    name = _known_name(call.func.id.lower(), text)
    for option in options:
        if option not in OPTIMIZERS[name].options:
            raise ValueError(_unknown_option(text, name, option))
    return name, options


def _read_settings(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if "name" not in given:
        raise ValueError(f'optimizer={dict(given)!r}: a mapping needs a "name", such as {{"name": "sgd", "momentum": 0.9}}')
    name = _known_name(str(given["name"]), given)
    options = {str(key): _python_value(value) for key, value in given.items() if key not in ("name", "params") and value is not None}
    known = {option for row in OPTIMIZERS.values() for option in row.options}
    for option in options:
        if option not in known and nearest(option, OPTIMIZERS[name].options, cutoff=MISSPELT):
            raise ValueError(_unknown_option(dict(given), name, option))
    if name == "rmsprop" and "betas" in options:
        options["alpha"] = options.pop("betas")[0]
    defaults = OPTIMIZERS[name].defaults
    return name, {key: value for key, value in options.items() if key == "lr" or (key in defaults and value != defaults[key])}


def _python_value(value: Any) -> Any:
    """Lists become tuples, and scalars of numpy and torch Python's own, so that the text can be read again."""
    if isinstance(value, list | tuple):
        return tuple(map(_python_value, value))
    return value.item() if callable(getattr(value, "item", None)) and getattr(value, "shape", None) == () else value


def _unknown_option(given: object, name: str, option: str) -> str:
    row = OPTIMIZERS[name]
    return f"optimizer={given!r}: {name} has no option {option!r}; {did_you_mean(option, row.options)}it has {', '.join(row.options)}"


def _refusal(given: object) -> str:
    built = hasattr(given, "param_groups")
    kind = given if isinstance(given, type) else type(given)
    name = kind.__name__.lower() if kind.__name__.lower() in OPTIMIZERS else "adamw"
    shown = f"a built {kind.__name__}" if built else f"the class {kind.__name__}" if isinstance(given, type) else f"{given!r:.80}"
    hint = f'{{"name": "{name}", **optimizer.param_groups[0]}}' if built else f'"{name}"'
    return (
        f'optimizer is {shown}: a name with options such as "adamw(betas=(0.9, 0.95))" is allowed, or a mapping with a "name"; '
        f"try optimizer={hint}"
    )


def _known_name(name: str, given: object) -> str:
    if name in OPTIMIZERS:
        return name
    hint = did_you_mean(name.lower(), OPTIMIZERS)
    raise ValueError(
        f"optimizer={given!r}: no rule is known for {name!r}; {hint}known are {', '.join(OPTIMIZERS)}; "
        "for another one, give the name of the optimizer that it resembles most"
    )


def _check(optimizer: OptimizerDescription, given: object) -> None:
    try:
        betas = optimizer.betas or ()
        momentum = float(optimizer.get("momentum") or 0.0)
        sound = all(0 <= beta < 1 for beta in (*betas, momentum)) and (optimizer.name == "rmsprop" or len(betas) in (0, 2))
        rates = [float(optimizer.get(name) or 0.0) for name in ("eps", "weight_decay")] + [optimizer.default_lr]
    except (TypeError, ValueError):
        sound, rates = False, []
    if not sound or not all(0 <= rate < math.inf for rate in rates):
        raise ValueError(f"optimizer={given!r}: betas and momentum from 0 to below 1 are allowed, and eps, weight_decay and lr from 0 on")
