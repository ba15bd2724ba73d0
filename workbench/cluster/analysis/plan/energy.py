"""Power: what energy, money and carbon of a plan are reckoned with, and the one way in which they are."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.cluster.analysis.energy import Energy, estimated
from workbench.cluster.analysis.plan.ranges import ENDS, PlanError
from workbench.core.checks import nearest
from workbench.core.statistics import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Prices, and what the hardware draws. None = not said."""

    price: float | None = None
    """Money per GPU and hour."""
    electricity: float | None = None
    """Money per kWh, where it is paid beside."""
    intensity: float | None = None
    """gCO2e per kWh of the grid."""
    pue: float = 1.0
    """What the building draws over what the machines do."""
    watts: float | None = None
    """Of a GPU under load; None = by its datasheet."""

    def __post_init__(self) -> None:
        checked({one.name: getattr(self, one.name) for one in dataclasses.fields(self)})

    @property
    def asked(self) -> bool:
        """Is money or carbon wanted?"""
        return any(value is not None for value in (self.price, self.electricity, self.intensity))

    def drawn(
        self, *, gpus: int, steps: int, seconds: Interval, computing: Interval, device: str, node: str, per_node: int, **changes: Any
    ) -> Energy:
        """Energy of some steps: the middle by the middle step; at least what the fastest step draws while it computes, at most what whole
        nodes draw all through the slowest.

        Args:
            gpus: that work.
            steps: of them.
            seconds: of a step.
            computing: those of them in which GPUs compute.
            device: name of each.
            node: name of the cluster.
            per_node: GPUs of a node.
            changes: other inputs than these.

        Raises:
            PlanError: inputs that are none.
            CostError: a device of unknown power, or numbers out of bounds.
        """
        power = dataclasses.replace(self, **checked(changes))
        inputs = dataclasses.asdict(power) | {"node": node, "per_node": per_node}
        low, mid, high = (
            estimated(each * steps, gpus, device, utilization=min(1.0, busy / each), **inputs)
            for each, busy in ((getattr(seconds, end), getattr(computing, end)) for end in ENDS)
        )
        least, most = (found.joules if end is None else end for found, end in ((low, low.low), (high, high.high)))
        return dataclasses.replace(mid, low=min(least, mid.joules), high=max(most, mid.joules))


def at_ends(used: Energy, name: str, seconds: Interval) -> Interval | None:
    """A figure of energy such as "money": with the least joules in the least time, and with the most in the most; None = it has none."""
    if getattr(used, name) is None:
        return None
    joules = (used.joules if used.low is None else used.low, used.joules, used.joules if used.high is None else used.high)
    bare = dataclasses.replace(used, low=None, high=None)
    pairs = zip(joules, (getattr(seconds, end) for end in ENDS), strict=True)
    low, mid, high = (getattr(dataclasses.replace(bare, joules=drawn, seconds=taken), name) for drawn, taken in pairs)
    return Interval(low=low, mid=mid, high=high)


INPUTS = tuple(one.name for one in dataclasses.fields(Power))


def checked(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of energy by their names, each a number or None.

    Raises:
        PlanError: another name, or no number.
    """
    for name, value in inputs.items():
        if name not in INPUTS:
            near = nearest(name, INPUTS)
            raise PlanError(f"{name}={value!r:.60}: allowed are {', '.join(INPUTS)}" + (f"; did you mean {near}?" if near else ""))
        if value is None and name != "pue":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PlanError(f"{name}={value!r:.60}: a number is wanted, such as {name}={_SUCH[name]}")
    return dict(inputs)


_SUCH = {"price": 2.5, "electricity": 0.2, "intensity": 400, "pue": 1.2, "watts": 700}
