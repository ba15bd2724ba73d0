"""The energy of a run: of what its directory holds, measured; else of the time that its steps took, estimated."""

from collections.abc import Mapping
from typing import Any

from workbench.cost.collectives import CostError
from workbench.cost.energy import Energy, estimated
from workbench.device import Device


def measured(found: Mapping[str, Any], *, ranks: int, machines: int = 1, **inputs: Any) -> Energy:
    """Of what the counters said.

    Args:
        found: `seconds`, `joules` by counter, `gpus` and `lives`, as the run wrote them on its first machine.
        ranks: that are paid for.
        machines: of the run; what the first one drew counts for each.
        inputs: `price`, `electricity`, `intensity` and `pue` of `Energy`.

    Raises:
        CostError: the file holds something else.
    """
    try:
        joules, seconds = {str(name): float(value) for name, value in found["joules"].items()}, float(found["seconds"])
        gpus, lives = int(found["gpus"]), int(found.get("lives", 1))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CostError(f"these are no figures of energy: {found!r:.80}") from error
    words = [f"counted by {', '.join(joules)}"]
    if gpus and not any(name.startswith("NVML") for name in joules):
        words.append("the GPUs did not tell (package nvidia-ml-py), and are left out")
    if any(name.startswith("RAPL") for name in joules):
        words.append("CPU packages are counted whole, whoever used them")
    if lives > 1:
        words.append(f"over the {lives} lives of the run, what was computed twice included")
    if machines > 1:
        words.append(f"of the first machine, taken {machines} times")
    return Energy(joules=sum(joules.values()) * machines, seconds=seconds, gpus=ranks, measured=True, source="; ".join(words), **inputs)


def by_time(*, seconds: float, ranks: int, device: str, utilization: float, watts: float | None = None, **inputs: Any) -> Energy:
    """By the design power of the devices, since nothing was counted.

    Args:
        seconds: of the steps.
        ranks: a device each.
        device: as the run's files name it; "cpu" = no GPU.
        utilization: share of the time in which they compute.
        watts: of one device under load.
        inputs: as of `measured`.

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
