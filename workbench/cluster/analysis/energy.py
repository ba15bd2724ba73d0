"""`Energy`: joules, kilowatt-hours, money and carbon of a run or of a plan; arithmetic only, nothing is measured here.

kWh = W × h / 1000 × PUE; money = GPUs × h × price + kWh × electricity; gCO2e = kWh × intensity. Embodied carbon of the hardware is left
out, and so is all that ran before and after the steps. A run's energy is measured if its directory has counters, else estimated from its
step times.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from workbench.cluster.analysis.collective_cost import CostError
from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.device import DEVICES, NOT_READ, Device
from workbench.core.display import table as display

JOULES_PER_KWH = 3.6e6
NODE_WATTS: Mapping[str, tuple[float, str]] = {
    "DGX-A100": (6500, f"NVIDIA DGX A100 user guide: 6.5 kW at most, {NOT_READ}"),
    "DGX-H100": (10200, f"NVIDIA DGX H100 user guide: 10.2 kW at most, {NOT_READ}"),
    "DGX-H200": (10200, f"NVIDIA DGX H200 user guide: 10.2 kW at most, {NOT_READ}"),
    "DGX-B200": (14300, "NVIDIA DGX B200 user guide, docs.nvidia.com/dgx/dgxb200-user-guide: 14.3 kW at most"),
}
"""Cluster → maximal power of a whole node in W, and its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy(display.Shown, JsonDataclass):
    """Energy that a run drew, or a plan would draw.

    >>> used = Energy(joules=7.2e6, seconds=3600, gpus=2, measured=True, source="NVML", price=2.5, intensity=400)
    >>> used.kwh, used.watts, used.money, used.grams
    (2.0, 2000.0, 5.0, 800.0)
    """

    joules: float
    """Joules of all devices together."""
    seconds: float
    """Duration in seconds."""
    gpus: int
    """Number of devices that are paid."""
    measured: bool
    """Measured by the hardware? Otherwise estimated."""
    source: str
    """Source of the joules."""
    low: float | None = None
    """Lower end of the joules; None = as `joules`."""
    high: float | None = None
    """Upper end of the joules; None = as `joules`."""
    price: float | None = None
    """Money per device and hour; None = not given."""
    electricity: float | None = None
    """Money per kWh, if electricity is paid separately; None = it is not."""
    intensity: float | None = None
    """gCO2e per kWh of the grid; None = not given."""
    pue: float = 1.0
    """Power usage effectiveness: power of the building over that of the machines; 1 = the building is left out."""

    def __post_init__(self) -> None:
        for name in ("joules", "seconds", "low", "high", "price", "electricity", "intensity"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf):
                raise CostError(f"{name}={value!r}: expected {_UNITS[name]} of at least 0")
        if not 1 <= self.pue < 10:
            raise CostError(f"pue={self.pue!r}: the building's power over that of the machines is 1 or more, such as 1.2")

    @property
    def kwh(self) -> float:
        """Kilowatt-hours, the building's share included."""
        return self.joules / JOULES_PER_KWH * self.pue

    @property
    def watts(self) -> float:
        """Mean power of the devices."""
        return self.joules / self.seconds if self.seconds else 0.0

    @property
    def gpu_hours(self) -> float:
        """Devices × hours."""
        return self.gpus * self.seconds / 3600

    @property
    def money(self) -> float | None:
        """Rent, and electricity if it is paid separately; None without a price."""
        if self.price is None and self.electricity is None:
            return None
        return self.gpu_hours * (self.price or 0.0) + self.kwh * (self.electricity or 0.0)

    @property
    def grams(self) -> float | None:
        """gCO2e of the electricity; None without an intensity."""
        return None if self.intensity is None else self.kwh * self.intensity

    @property
    def table(self) -> display.Table:
        """Energy, power, and money and carbon if known."""
        scale = self.pue / JOULES_PER_KWH
        rows = [["energy", _kwh(self.kwh)]]
        if self.low is not None and self.high is not None:
            rows.append(["between", f"{_kwh(self.low * scale)} … {_kwh(self.high * scale)}"])
        rows += [["mean power", units.count(self.watts, "W")], ["device hours", f"{self.gpu_hours:,.4g}"]]
        rows += [["money", f"{self.money:,.4g}"]] if self.money is not None else []
        rows += [["carbon", f"{units.count(self.grams, 'g')} CO2e"]] if self.grams is not None else []
        how = "measured" if self.measured else "estimated"
        building = "" if self.pue == 1 else f"; with the building ({self.pue:g})"
        return display.Table(
            columns=("energy", how), rows=rows, note=f"{how}: {self.source}{building}; carbon of making the hardware is left out"
        )

    def to_frame(self) -> Any:
        """A DataFrame with one row."""
        return display.frame([{**asdict(self), "kwh": self.kwh, "watts": self.watts, "money": self.money, "grams": self.grams}])


_UNITS = {
    "joules": "joules",
    "seconds": "seconds",
    "low": "joules",
    "high": "joules",
    "price": "money per device and hour",
    "electricity": "money per kWh",
    "intensity": "grams of CO2e per kWh",
}


def _kwh(value: float) -> str:
    return units.count(value * 1000, "Wh")


def watts_of(device: str, watts: float | None = None) -> tuple[float, str]:
    """Power of a device under load, by the table or as given, and the source of the figure.

    Raises:
        CostError: the device is not in the table and no watts were given.
    """
    if watts is not None:
        if not 0 < watts < math.inf:
            raise CostError(f"watts={watts!r}: expected watts of one device under load, above 0")
        return float(watts), "power as given"
    known = Device.known(device)
    if known is None or known.watts is None:
        names = ", ".join(gpu.name for gpu in DEVICES if gpu.watts is not None)
        raise CostError(f"the power of {device!r} is not known: give watts=…; known are {names}")
    return known.watts, known.watts_source


def estimated(
    seconds: float,
    gpus: int,
    device: str,
    *,
    utilization: float = 1.0,
    watts: float | None = None,
    node: str | None = None,
    per_node: int = 8,
    **inputs: Any,
) -> Energy:
    """Energy by a device's design power.

    The middle: every device at its design power all the time. The low end: in the busy share of the time only, without idle power. The high
    end: the maximal power of whole nodes, if known.

    Args:
        seconds: seconds that the work takes.
        gpus: number of devices that do it.
        device: name of the devices, such as "H100".
        utilization: share of the time in which they compute.
        watts: of one under load; None = by its datasheet.
        node: name of the cluster, for the power of a whole node.
        per_node: devices of a node.
        inputs: `price`, `electricity`, `intensity` and `pue` of `Energy`.

    Raises:
        CostError: a device of unknown power, or a wrong number.
    """
    if not 0 <= utilization <= 1:
        raise CostError(f"utilization={utilization!r}: expected a share from 0 to 1")
    each, source = watts_of(device, watts)
    most, where = NODE_WATTS.get(node or "", (each * per_node, ""))
    joules = seconds * gpus * each
    return Energy(
        joules=joules,
        low=joules * utilization,
        high=max(joules, seconds * gpus * most / per_node),
        seconds=seconds,
        gpus=gpus,
        measured=False,
        source="; ".join(filter(None, [source, where])),
        **inputs,
    )


def measured(counters: Mapping[str, Any], *, ranks: int, machines: int = 1, **inputs: Any) -> Energy:
    """Energy by the hardware's counters.

    Args:
        counters: `seconds`, `joules` by counter, `gpus` and `lives`, as the run wrote them on its first machine.
        ranks: devices that are paid.
        machines: of the run; the first one's energy counts for each.
        inputs: `price`, `electricity`, `intensity` and `pue` of `Energy`.

    Raises:
        CostError: these are no such figures.
    """
    try:
        joules, seconds = {str(name): float(value) for name, value in counters["joules"].items()}, float(counters["seconds"])
        gpus, lives = int(counters["gpus"]), int(counters.get("lives", 1))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CostError(f"these are not figures of energy: {counters!r:.80}") from error
    sources = [f"counted by {', '.join(joules)}"]
    if gpus and not any(name.startswith("NVML") for name in joules):
        sources.append("the GPUs did not tell (package nvidia-ml-py), and are left out")
    if any(name.startswith("RAPL") for name in joules):
        sources.append("CPU packages are counted whole, other processes included")
    if lives > 1:
        sources.append(f"over the {lives} lives of the run, what was computed twice included")
    if machines > 1:
        sources.append(f"of the first machine, taken {machines} times")
    return Energy(joules=sum(joules.values()) * machines, seconds=seconds, gpus=ranks, measured=True, source="; ".join(sources), **inputs)


def by_time(*, seconds: float, ranks: int, device: str, utilization: float, watts: float | None = None, **inputs: Any) -> Energy:
    """Energy by the devices' design power, for runs without counters.

    Args:
        seconds: seconds of all steps together.
        ranks: number of ranks, with one device each.
        device: as the run's files name it; "cpu" = no GPU.
        utilization: share of the time in which they compute.
        watts: of one device under load.
        inputs: prices and factors, as `measured` takes them.

    Raises:
        CostError: a CPU, or a device of unknown power, and no watts.
    """
    if watts is None and device == "cpu":
        raise CostError(
            "this run was on CPUs whose counters could not be read (/sys/class/powercap is mostly root's): give watts=… of one rank's "
            "share of the machine under load, such as run.energy(watts=65)"
        )
    try:
        name = Device.named(device).name
    except ValueError:
        name = device
    return estimated(seconds, ranks, name, utilization=utilization, watts=watts, **inputs)
