"""What a sample is: a dict of named fields, how each kind of field becomes bytes and is read back, and which keys are allowed.

A sample has its name under "__key__" and further fields, named as WebDataset names the parts of a sample: "jpg", "cls", "txt". A field's
value is bytes, an int, a float, a text or a numpy array: its kind.
"""

import functools
import hashlib
import io
import itertools
import re
import struct
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from workbench.core.checks import shown

Sample = dict[str, Any]
"""Field → value; "__key__" → the name of the sample."""

KEY = "__key__"
KINDS = ("bytes", "int", "float", "str", "array")
"""The kinds of a field's value."""
PICTURES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")
"""Names of fields that hold encoded pictures."""
_KIND_OF = {
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), "int"),
    **dict.fromkeys(("txt", "text", "transcript"), "str"),
    "npy": "array",
}
"""Extension → kind, as WebDataset decodes them; all others are bytes. Source: webdataset/autodecode.py."""
USUAL_KINDS: Mapping[type, str] = {bytes: "bytes", str: "str", int: "int", float: "float"}
"""Type → kind, of values that are stored as they are."""
_LONGEST_KEY = 1000
_USUAL = re.compile(r"[A-Za-z0-9_-]{1,100}(?:/[A-Za-z0-9_-]{1,100}){0,8}")
_USUAL_LINES = re.compile(rf"(?:{_USUAL.pattern}\n)+")
_ILLEGAL = re.compile(r"[\x00-\x1f\x7f\\]")


class CorruptSampleError(ValueError):
    """The bytes of a sample are not those that were written."""


class UnsafeNameError(ValueError):
    """A name leads out of the folder, or cannot be the name of a file."""


class NameCollisionError(ValueError):
    """Two samples, or two fields of a sample, would have the same name."""


def checked_key(key: str, *, dots: bool = True) -> str:
    """The key of a sample without a leading "./", if it can be part of a path below a folder.

    Args:
        key: the key as it was given.
        dots: whether its last part may have a dot. In a tar file it may not: what follows the first dot is the name of a field.

    Raises:
        UnsafeNameError: it is empty or too long, leads upwards or to the root, or has signs that no file system takes.

    >>> checked_key("./cats/0001")
    'cats/0001'
    """
    if _USUAL.fullmatch(key):
        return key
    name = key[2:] if key.startswith("./") else key
    parts = name.split("/")
    why = (
        "is empty, or has an empty part"
        if not all(parts)
        else "leads out of the folder"
        if ".." in parts or "." in parts
        else "has control characters or backslashes"
        if _ILLEGAL.search(name)
        else "is too long"
        if len(name) > _LONGEST_KEY or max(map(len, parts)) > 200
        else "has a dot in its last part, after which the name of the field would begin"
        if not dots and "." in parts[-1]
        else ""
    )
    if why:
        raise UnsafeNameError(f"the key {key!r:.90} {why}: a relative path such as 'cats/0001' is allowed; try keys=\"number\"")
    return name


def are_usual(keys: Sequence[Any]) -> bool:
    """Are these texts that `checked_key` gives back as they are, without a dot?"""
    lines = "\n".join([*keys, ""]) if set(map(type, keys)) == {str} else ""
    return lines.count("\n") == len(keys) and _USUAL_LINES.fullmatch(lines) is not None


def kind_of_field(field: str) -> str:
    """The kind that the name of a field stands for where nothing else says it: "cls" an int, "txt" a text, "npy" an array."""
    return _KIND_OF.get(field.rpartition(".")[2].lower(), "bytes")


def kind_of(value: object, field: str = "") -> str:
    """The kind of a value.

    Raises:
        ValueError: it is none of KINDS.
    """
    if (kind := USUAL_KINDS.get(type(value))) is not None:
        return kind
    for usual, kind in USUAL_KINDS.items():
        if isinstance(value, usual):
            return kind
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return "array"
    raise ValueError(f"field {field!r} is a {type(value).__name__}: bytes, int, float, str or an array of numbers is allowed")


def plain(value: Any, field: str = "") -> Any:
    """A value as one of KINDS: tensors and pictures as arrays, numpy's numbers as Python's, lists of numbers as arrays; None stays.

    Raises:
        ValueError: it is nothing of that.
    """
    if value is None or isinstance(value, bytes | str | float):
        return value
    if isinstance(value, bool | int):
        return int(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, np.generic):
        return plain(value.item(), field)
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):  # an undecoded picture of Hugging Face datasets
        return value["bytes"]
    if isinstance(value, np.ndarray):
        array = value
    elif hasattr(value, "detach"):  # a tensor of torch, which this file does not import
        array = value.detach().cpu().numpy()
        if not array.ndim:
            return plain(array[()], field)
    elif hasattr(value, "__array_interface__") or isinstance(value, list | tuple):  # a picture of Pillow, or numbers
        array = np.asarray(value)
    else:
        kind_of(value, field)
        return value
    kind_of(array, field)
    return np.ascontiguousarray(array)


def encode(value: Any) -> bytes:
    """A value of any kind as bytes, the same for equal values: what a tar shard stores."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, np.ndarray):
        if value.flags.c_contiguous:
            return _npy_head(value.dtype, value.shape) + value.tobytes()
        file = io.BytesIO()
        np.lib.format.write_array(file, value, version=(1, 0), allow_pickle=False)
        return file.getvalue()
    if isinstance(value, str):
        return value.encode()
    return repr(value).encode()


def encoded_columns(samples: Sequence[Sample], fields: Iterable[str]) -> tuple[list[list[bytes]], list[list[int]]]:
    """Some samples field by field: what `encode` makes of each value, and its bytes; b"" and -1 where a sample has no such field."""
    columns, lengths = [], []
    for field in fields:
        values: list[Any] = [sample.get(field) for sample in samples]
        kinds = set(map(type, values))
        if kinds <= {int}:
            values = list(map(b"%d".__mod__, values))
        elif not kinds <= {bytes}:
            values = [None if value is None else encode(value) for value in values]
        gaps = type(None) in kinds
        lengths.append([-1 if value is None else len(value) for value in values] if gaps else list(map(len, values)))
        columns.append([value or b"" for value in values] if gaps else values)
    return columns, lengths


def of_each(function: Callable[[int], Any], numbers: list[int]) -> list[Any]:
    """A function of each number, called once where all are the same."""
    return [function(numbers[0])] * len(numbers) if len(set(numbers)) == 1 else list(map(function, numbers))


@functools.lru_cache(maxsize=512)
def _npy_head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """What an .npy file of an array in C order begins with."""
    file = io.BytesIO()
    like = np.broadcast_to(np.zeros((), dtype), shape)  # of any size, in no memory
    np.lib.format.write_array_header_1_0(file, {**np.lib.format.header_data_from_array_1_0(like), "fortran_order": False})
    return file.getvalue()


def decode(kind: str, data: bytes) -> Any:
    """Inverse of `encode`.

    Raises:
        CorruptSampleError: the bytes are not of that kind.
    """
    try:
        if kind == "bytes":
            return data
        if kind == "int":
            return int(data)
        if kind == "str":
            return data.decode()
        if kind == "float":
            return float(data)
        return _array(data)
    except (ValueError, struct.error) as error:
        raise CorruptSampleError(f"{data[:40]!r} is not of kind {kind!r}: {error}") from None


def _array(data: bytes) -> np.ndarray[Any, Any]:
    """An array out of the bytes of an .npy file; headers that were seen before are not parsed again."""
    size = 10 + int.from_bytes(data[8:10], "little") if data[6:7] == b"\x01" else 12 + int.from_bytes(data[8:12], "little")
    dtype, shape, fortran = _npy_header(data[:size])
    count = int(np.prod(shape))
    if count * dtype.itemsize != len(data) - size:
        raise ValueError(f"an array of {count * dtype.itemsize:,} bytes is declared, {len(data) - size:,} are there")
    return np.frombuffer(data, dtype, count, size).reshape(shape, order="F" if fortran else "C")


@functools.lru_cache(maxsize=512)
def _npy_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    file = io.BytesIO(header)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        shape, fortran, dtype = read(file)
    except (SyntaxError, TypeError, tokenize.TokenError) as error:  # numpy parses it as Python
        raise ValueError(f"its header is not that of an array: {error}") from None
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not read")
    return dtype, shape, fortran


def digest(sample: Mapping[str, Any]) -> bytes:
    """SHA-256 of the fields of a sample, whatever their order and however it is stored. The key does not count."""
    total = hashlib.sha256()
    for field in sorted(sample):
        if field != KEY:
            data = encode(sample[field])
            total.update(b"%d:%b%d:" % (len(field), field.encode(), len(data)))
            total.update(data)
    return total.digest()


def schema_of(samples: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Field → kind over some samples, in the order in which fields appear.

    Raises:
        ValueError: a field has two kinds.
    """
    schema: dict[str, str] = {}
    for sample in samples:
        for field, value in sample.items():
            if field == KEY or value is None:
                continue
            kind = kind_of(value, field)
            if {schema.setdefault(field, kind), kind} == {"int", "float"}:
                schema[field] = "float"
            elif schema[field] != kind:
                raise ValueError(f"field {field!r} is {schema[field]} in one sample and {kind} in another: one kind per field is allowed")
    return schema


def stored_schema(value: object) -> dict[str, str]:
    """Field → kind, as a file says it.

    Raises:
        ValueError: it says something else.
    """
    if not isinstance(value, dict) or not all(kind in KINDS for kind in value.values()):
        raise ValueError(f"its schema is {shown(value):.90}: expected the kind of each field")
    return value


class Strings(Sequence[str]):
    """Many texts in two arrays: small, and not copied into each forked worker when they are looked at, as a list of texts would be."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        self._data = np.frombuffer(b"".join(encoded), np.uint8)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)

    @classmethod
    def of(cls, data: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> "Strings":
        """From the two arrays."""
        self = cls()
        self._data, self._ends = data, ends
        return self

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.some(*index.indices(len(self))[:2])
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._data[self._ends[index] : self._ends[index + 1]].tobytes().decode("utf-8", "surrogateescape")

    def some(self, start: int, stop: int) -> list[str]:
        """Those from `start` to before `stop`, at once."""
        ends = self._ends[start : stop + 1].tolist()
        data, first = self._data[ends[0] : ends[-1]].tobytes() if len(ends) > 1 else b"", ends[0] if ends else 0
        return [data[a - first : b - first].decode("utf-8", "surrogateescape") for a, b in itertools.pairwise(ends)]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 10_000):
            yield from self.some(start, min(len(self), start + 10_000))
