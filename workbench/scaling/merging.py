"""Merging: points from rows, mappings or frames, those of one number of processes as one with its repeats."""

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from workbench.scaling.point import CurveError, ScalingPoint


def merged(points: Iterable[Any]) -> tuple[ScalingPoint, ...]:
    """Points by ascending number of processes or value (texts in their order), those of one made repeats of each other.

    Args:
        points: (world_size, samples_per_sec), (world_size, samples_per_sec, exposed), mappings with these names, or ScalingPoints.

    Raises:
        CurveError: something else, or repeats that contradict each other.
    """
    found: dict[Any, list[ScalingPoint]] = {}
    for place, given in enumerate(points):
        point = given if isinstance(given, ScalingPoint) else _of_row(given, place)
        found.setdefault(point.at, []).append(point)
    numbers = sorted(at for at in found if not isinstance(at, str))
    return tuple(_one(found[at]) for at in [*numbers, *(at for at in found if isinstance(at, str))])


def _of_row(row: Any, place: int) -> ScalingPoint:
    """A point from (world_size, samples_per_sec[, exposed]) or a mapping with these names, such as a row of a curve's frame."""
    if isinstance(row, Mapping):
        return _of_mapping(row, place)
    if callable(getattr(row, "tolist", None)):  # a row of an array
        row = row.tolist()
    values = tuple(row) if isinstance(row, list | tuple) else ()
    if len(values) not in (2, 3):
        raise CurveError(_no_row(row, place))
    _check_one(values[0], values[1], place)
    return ScalingPoint(world_size=_whole(values[0]), rates=(values[1],), exposed=values[2] if len(values) == 3 else None)


def _of_mapping(row: Mapping[str, Any], place: int) -> ScalingPoint:
    if "world_size" not in row or "samples_per_sec" not in row:
        raise CurveError(_no_row(dict(row), place))
    rate, exposed, failed = row["samples_per_sec"], row.get("exposed"), row.get("failed")
    failed = failed if isinstance(failed, str) else ""
    _check_one(row["world_size"], rate, place)
    return ScalingPoint(
        world_size=_whole(row["world_size"]),
        rates=() if failed and _missing(rate) else (rate,),
        exposed=None if _missing(exposed) else exposed,
        oversubscribed=bool(row.get("oversubscribed", False)),
        failed=failed,
        value=None if _missing(row.get("value")) else row["value"],
        straggling=None if _missing(row.get("straggling")) else row["straggling"],
        cpu_per_sample=None if _missing(row.get("cpu_per_sample")) else row["cpu_per_sample"],
    )


def _check_one(size: Any, rate: Any, place: int) -> None:
    """Refuse several throughputs in one row."""
    rate = rate.tolist() if callable(getattr(rate, "tolist", None)) else rate
    if isinstance(rate, list | tuple):
        rows = ", ".join(f"({size!r}, {one!r})" for one in rate[:2])
        raise CurveError(
            f"point {place}, ({size!r}, {rate!r:.60}): one throughput a row is wanted; repeats are several rows: {rows or '(1, 100.0)'}, …"
        )


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, Real) and math.isnan(value))


def _whole(value: Any) -> Any:
    """A size that is whole as an int, as a column of an array or a frame may hold it as 4.0."""
    whole = isinstance(value, Real) and not isinstance(value, Integral) and float(value).is_integer()
    return int(value) if whole else value


def _no_row(row: Any, place: int) -> str:
    return (
        f"point {place}, {row!r:.80}: (world_size, samples_per_sec) is wanted, or these and the "
        "exposed share of the step, a mapping with these names, or a ScalingPoint; repeats are several rows"
    )


def _one(same: list[ScalingPoint]) -> ScalingPoint:
    """Points of one size as one, with all their repeats (sorted: the order in which they were given says nothing)."""

    def middle(name: str) -> float | None:
        known = sorted(getattr(point, name) for point in same if getattr(point, name) is not None)
        return known[len(known) // 2] if known else None

    return ScalingPoint(
        world_size=same[0].world_size,
        rates=tuple(sorted(rate for point in same for rate in point.rates)),
        exposed=middle("exposed"),
        oversubscribed=any(point.oversubscribed for point in same),
        failed="; ".join(dict.fromkeys(point.failed for point in same if point.failed)),
        value=same[0].value,
        straggling=middle("straggling"),
        cpu_per_sample=middle("cpu_per_sample"),
        of_one_spec=all(point.of_one_spec for point in same),
    )
