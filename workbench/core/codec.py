"""Converts dataclasses to plain JSON values and back, by the type hints of their fields.

Give a dataclass `to_json` and `from_json` by inheriting `JsonDataclass`. Where its JSON differs from its fields, override the methods and
build them on `fields_to_json` and `fields_from_json`; the override is used wherever the value is nested in another one:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Point(JsonDataclass):
        rate: float
        ratio: float | None = None
        high: OrInf = math.inf

        def to_json(self) -> dict[str, Any]:
            return {"version": 1, **fields_to_json(self)}

(Not `super().to_json()`: in a dataclass with slots, Python 3.11's `super()` without arguments fails.)

Numbers that are not finite are written as null, since JSON has none. Null in a field of type `float` is read as nan, in an `OrInf` as
infinity, in an `OrMinusInf` as minus infinity; in a `float | None` it is None.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints, overload

T = TypeVar("T")

OrInf = Annotated[float, math.inf]
"""A number whose null is read as infinity."""

OrMinusInf = Annotated[float, -math.inf]
"""A number whose null is read as minus infinity."""


NOT_STORED: Mapping[str, Any] = {"json": False}
"""Metadata of a field that has no place in JSON: `subject: Any = field(default=None, metadata=NOT_STORED)`."""


class JsonDataclass:
    """A dataclass with `to_json` and `from_json` by the type hints of its fields."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, one per field."""
        return fields_to_json(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Inverse of `to_json`.

        Raises:
            ValueError: a field is missing, unknown, or not of its type.
        """
        return fields_from_json(cls, value)


def to_json(value: Any) -> Any:
    """As plain JSON values: numbers, texts, lists and dicts with text as keys; numbers that are not finite as None.

    Args:
        value: a dataclass, an object with `to_json`, a mapping, list, tuple, path, numpy array or number, text, bool or None.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "to_json"):
        return value.to_json()
    if dataclasses.is_dataclass(value):
        return fields_to_json(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):  # numpy
        return to_json(value.tolist())
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def fields_to_json(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as plain JSON values, less those that are NOT_STORED or not arguments of it (`init=False`)."""
    return {name: to_json(getattr(value, name)) for name in _fields(type(value))}  # type: ignore[arg-type]


@overload
def from_json(kind: type[T], value: Any) -> T: ...
@overload
def from_json(kind: Any, value: Any) -> Any: ...
def from_json(kind: Any, value: Any) -> Any:
    """A value of a type, from the plain JSON values that `to_json` made of it.

    Args:
        kind: a dataclass, a class with `from_json`, or a type hint: `tuple[float, ...]`, `Mapping[int, Point]`, `str | None`. Of a union
            the first type that fits is taken.
        value: plain JSON values.

    Raises:
        ValueError: the value does not fit; the message names class and field.
    """
    return _read(kind, value, getattr(kind, "__name__", str(kind)))


def fields_from_json(cls: type[T], value: Mapping[str, Any]) -> T:
    """A dataclass from its fields as plain JSON values; fields that are missing take their default.

    Raises:
        ValueError: a field is missing, unknown, or not of its type.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{cls.__name__}: expected an object with its fields, got {_short(value)}")
    fields, hints = _fields(cls), _hints(cls)  # type: ignore[arg-type]
    if unknown := [name for name in value if name not in fields]:
        raise ValueError(f"{cls.__name__}: unknown field {unknown[0]!r}; its fields are {', '.join(fields)}")
    if missing := [name for name, required in fields.items() if required and name not in value]:
        raise ValueError(f"{cls.__name__}: field {missing[0]!r} is missing")
    return cls(**{name: _read(hints[name], item, f"{cls.__name__}.{name}") for name, item in value.items()})


@functools.cache
def _fields(cls: type) -> dict[str, bool]:
    """The stored fields of a dataclass, by name: is a value required?"""
    none = dataclasses.MISSING
    stored = [field for field in dataclasses.fields(cls) if field.init and field.metadata.get("json", True)]
    return {field.name: field.default is none and field.default_factory is none for field in stored}


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value of a type; `where` names the field in errors."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return inner[1] if value is None and isinstance(inner[1], float) else _read(inner[0], value, where)
    if origin in (Union, UnionType):
        return _read_union(inner, value, where)
    if origin is Literal:
        return _checked(value, value in inner, where, " or ".join(map(repr, inner)))
    if kind in _SCALARS:
        return _read_scalar(kind, value, where)
    kind = origin or kind
    if kind in (Any, object) or not isinstance(kind, type):  # not a type: a type variable
        return value
    if hasattr(kind, "from_json"):
        return kind.from_json(value)
    if dataclasses.is_dataclass(kind):
        return fields_from_json(kind, value)
    if issubclass(kind, PurePath):
        return kind(_read_scalar(str, value, where))
    if issubclass(kind, Mapping):
        return _read_mapping(inner or (str, Any), value, where)
    if issubclass(kind, tuple | list) or kind in (Sequence, Collection, Iterable):
        return _read_list(kind, inner, value, where)
    raise TypeError(f"{where}: {kind.__name__} cannot be read from JSON")


_SCALARS = {NoneType: "null", bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def _read_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is float:
        fits = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        return math.nan if _checked(value, fits, where, _SCALARS[kind]) is None else value
    return _checked(value, isinstance(value, kind) and (kind is not int or not isinstance(value, bool)), where, _SCALARS[kind])


def _read_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    if len(kinds) == 1:
        return _read(kinds[0], value, where)
    errors = []
    for kind in kinds:
        try:
            return _read(kind, value, where)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError("; or ".join(errors))


def _read_mapping(kinds: tuple[Any, ...], value: Any, where: str) -> dict[Any, Any]:
    _checked(value, isinstance(value, Mapping), where, "an object")
    return {_read_key(kinds[0], key, where): _read(kinds[1], item, f"{where}[{key!r}]") for key, item in value.items()}


def _read_key(kind: Any, key: Any, where: str) -> Any:
    """A key of a mapping, which JSON writes as text."""
    if kind not in (int, float) or not isinstance(key, str):
        return key
    try:
        return kind(key)
    except ValueError:
        raise ValueError(f"{where}: expected {_SCALARS[kind]} as key, got {key!r}") from None


def _read_list(kind: Any, inner: tuple[Any, ...], value: Any, where: str) -> Any:
    _checked(value, isinstance(value, list | tuple), where, "a list")
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        _checked(value, len(value) == len(inner), where, f"a list of {len(inner)}")
        kinds = inner
    else:
        if inner and inner[0] in _SCALARS and all(type(item) is inner[0] for item in value):  # long lists of numbers, at once
            return list(value) if kind is list else tuple(value)
        kinds = (inner or (Any,))[:1] * len(value)
    items = [_read(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(value)]
    return items if kind is list else tuple(items)


def _checked(value: T, fits: bool, where: str, expected: str) -> T:
    if not fits:
        raise ValueError(f"{where}: expected {expected}, got {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
