"""Plain: frozen values as plain JSON, and back by the types of their fields."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

from workbench.timeline import Timeline


def plain(value: Any) -> Any:
    """As JSON values: numbers that are not finite as None."""
    if isinstance(value, Timeline):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(kind: Any, value: Any) -> Any:
    """A value of a kind, from plain JSON.

    Args:
        kind: a dataclass, or what its fields may be: dataclasses, tuples, mappings, None or a kind, numbers and texts.
        value: what `plain` made of it.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Timeline:
        return Timeline.from_json(value)
    if kind is float:
        return math.nan if value is None else float(value)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: read(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    if origin is tuple:
        parts = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(read(part, item) for part, item in zip(parts, value, strict=True))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return {name: read(inner[1], item) for name, item in value.items()}
    if type(None) in inner:
        return None if value is None else read(next(part for part in inner if part is not type(None)), value)
    return value
