"""Writes and reads one checkpoint file: what `torch.save` writes, a zip file, with its length and checksum in the zip file's comment.

A comment is part of the zip format, so torch and earlier workbenches read such a file as any other, and a checksum cannot be parted from
its file. It is a CRC-32, summed up while the file is written: `benchmarks/checkpoints.py` says what it costs.
Files of earlier workbenches have none. There the CRC-32 of each tensor is compared that is in every zip file; torch does not look at it.
"""

import contextlib
import errno
import io
import itertools
import json
import os
import pickle
import re
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor, nn

from workbench.core.checks import is_number, is_whole
from workbench.runs.errors import is_out_of_memory
from workbench.runs.restarts import checkpoints_of, step_of
from workbench.runs.task import TaskError
from workbench.train.sharded_tensors import is_dtensor

FORMAT = 2
"""Number of the format of checkpoints; a file with a larger one was written by a newer workbench. In 2, ranks have files of their own."""
MARK = b"workbench checkpoint "
"""Begins the comment; `{"format": 1, "bytes": 12345, "crc32": "89abcdef"}` follows."""
_END = b"PK\5\6"
"""Begins the last record of a zip file, of 22 bytes and the comment; the record ends with the comment's length."""
_END_BYTES = 22
_PIECE = 1 << 20
_PARTS = frozenset({"step", "module", "optimizer", "scheduler", "scaler"})
"""What every checkpoint holds."""
_DAMAGE_PATTERN = re.compile(r"PytorchStreamReader|inline_container|hasRecord|not resizable|record size|corrupt|unexpected EOF")
"""Marks RuntimeErrors of torch.load that are about the file, unlike those about memory or a device."""
_OF_TORCH = re.compile(r"PytorchStreamWriter|file write|unexpected pos")
"""Marks RuntimeErrors of torch.save that are about the file."""


_PLAIN: dict[type, Any] = {bool: bool, int: int, float: float, complex: complex, str: str.__str__, bytes: bytes}
"""Type → what makes it of a value of a subclass."""


class UnusableCheckpointError(ValueError):
    """A file cannot be loaded as a checkpoint, however often it is tried.

    Attributes:
        kind: "damaged"; "partial"; "newer": of a newer workbench; "foreign": of something else, or of another model; "not-finite": with
            weights that are NaN or infinite, while an earlier one has finite weights.
        todo: what makes a resume possible if there is no other checkpoint.
    """

    def __init__(self, why: str, kind: str = "damaged", todo: str = "put an undamaged one there") -> None:
        super().__init__(why)
        self.kind, self.todo = kind, todo


def plain(value: Any) -> Any:
    """A number or text as Python's own type, such as float for NumPy's float64, also in lists and tuples; anything else as it is."""
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    value = value.item() if isinstance(value, np.generic) else value
    if type(value) in _PLAIN:
        return value
    return next((made(value) for kind, made in _PLAIN.items() if isinstance(value, kind)), value)


class Copies:
    """Copies a state into host memory, as a checkpoint file can hold it. Tensors that are the same stay the same.

    Numbers and texts get Python's own types (`plain`), since a file with NumPy's scalars cannot be loaded with `weights_only`. A
    state_dict keeps the versions of its modules (`_metadata`).
    """

    def __init__(self, *, tensors: bool = True) -> None:
        """`tensors`: copy them, too; else they stay as they are, for a file that is written at once."""
        self._tensors = tensors
        self._made: dict[Any, tuple[Tensor, Tensor]] = {}

    def __call__(self, value: Any, *names: Any) -> Any:
        """The copy of a value; `names` lead to it from the whole state.

        Raises:
            TaskError: it is, or holds, an object with which the file could not be loaded.
        """
        value = plain(value)
        if value is None or type(value) in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, names)
        if isinstance(value, Mapping):
            kind: Any = type(value) if type(value) in (OrderedDict, Counter) else dict
            copied: Any = kind({self(name, *names): self(each, *names, name) for name, each in value.items()})
            if versions := getattr(value, "_metadata", None):
                copied = OrderedDict(copied)
                copied._metadata = self(versions, *names, "_metadata")
            return copied
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            items = (self(each, *names, number) for number, each in enumerate(value))
            return torch.Size(items) if isinstance(value, torch.Size) else list(items) if isinstance(value, list) else tuple(items)
        return _through_file(value, names)

    def _tensor(self, value: Tensor, names: tuple[Any, ...]) -> Tensor:
        usual = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
        if not usual and not is_dtensor(value):
            _through_file(value, names)
        if not self._tensors:
            return value
        key = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device) if usual else id(value)
        if key not in self._made or not value.numel():
            self._made[key] = value, value.detach().to("cpu", copy=True)
        return self._made[key][1]


def _through_file(value: Any, names: tuple[Any, ...]) -> Any:
    """A value after it was saved and loaded as a checkpoint is."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=True)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        keys = itertools.chain.from_iterable(name if isinstance(name, tuple) else (name,) for name in names)
        kind, where = type(value), ".".join(str(key) for key in keys if key != "")
        raise TaskError(
            f"a checkpoint with {where} could not be loaded again: it is a {kind.__module__}.{kind.__qualname__}, and only tensors, "
            "numbers and texts, and dicts, lists and tuples of them, are loaded, since other objects can execute code. Make it one of "
            "these, such as torch.as_tensor(array)"
            + (", in get_extra_state(), and convert it back in set_extra_state()" if "_extra_state" in where else "")
            + "; or launch with checkpoint_every=None"
        ) from error


class _Summed:
    """A file for `torch.save` that computes the checksum of what is written, and keeps the error, which torch replaces."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._crc, self._size, self._end = file, 0, 0, b""
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            view = memoryview(data).cast("B")
            written = self._file.write(view)
            self._crc, self._size = zlib.crc32(view, self._crc), self._size + len(view)
            self._end = (self._end + bytes(view[-_END_BYTES:]))[-_END_BYTES:]
        except BaseException as error:  # an interrupt, too: torch replaces it as well
            self.error = self.error or error
            raise
        return written

    def flush(self) -> None:
        self._file.flush()

    @property
    def checksum(self) -> str:
        """Of all that was written."""
        return f"{self._crc:08x}"

    def add_comment(self, number: int) -> None:
        """Write format, length and checksum behind the zip file, which ends without a comment."""
        if self._end.startswith(_END) and self._end.endswith(b"\0\0"):
            comment = MARK + json.dumps({"format": number, "bytes": self._size, "crc32": self.checksum}).encode()
            self._file.seek(self._size - 2)
            self._file.write(len(comment).to_bytes(2, "little") + comment)


def save(state: dict[str, Any], path: Path) -> str:
    """Write a checkpoint, or a rank's part of one; when this returns, it is on the disk. Returns its checksum.

    Raises:
        OSError: that of the disk.
    """
    with open(path, "wb") as file:
        summed = _Summed(file)
        try:
            torch.save(state, cast(IO[bytes], summed))
        except RuntimeError as error:  # "unexpected pos 3136 vs 3030": torch counts what it could not write
            if summed.error:
                raise summed.error from error
            if _OF_TORCH.search(str(error)):
                raise OSError(errno.ENOSPC, str(error)) from error  # nothing else is known to lead to it
            raise
        summed.add_comment(FORMAT if "shards" in state else 1)
        file.flush()
        os.fsync(file.fileno())
    return summed.checksum


def are_finite(weights: Iterable[Any]) -> bool:
    """Is no weight NaN or infinite? Those of a type that cannot be tested, such as one of 8 bits, are taken to be finite."""
    for weight in weights:
        with contextlib.suppress(RuntimeError, TypeError, AttributeError):
            if not torch.isfinite(weight.sum()) and not torch.isfinite(weight).all():  # a sum needs no memory; it may overflow
                return False
    return True


def load(path: Path, device: torch.device) -> dict[str, Any]:
    """The content of a checkpoint, on a device, after its checksum was compared.

    Raises:
        UnusableCheckpointError: it is damaged, or no checkpoint that this workbench reads.
        OSError, MemoryError, RuntimeError: it could not be read now: the error of the disk, of memory or of the device.
    """
    with open(path, "rb") as file:  # torch's own reader would turn the disk's OSError into a RuntimeError
        verify(file)
        file.seek(0)
        state = _loaded(file, map_location=device)
    if not isinstance(state, dict) or not state.keys() >= _PARTS:
        what = f"it has no {', '.join(sorted(_PARTS - state.keys()))}" if isinstance(state, dict) else f"it holds a {type(state).__name__}"
        raise UnusableCheckpointError(f"it is not a checkpoint of the workbench: {what}", "foreign")
    for name, of in (("random", dict), ("rows", str)):  # by rank
        values = state.get(name) or {}
        if not isinstance(values, dict) or not all(isinstance(value, of | None) for value in values.values()):
            raise UnusableCheckpointError(f"it is not a checkpoint of the workbench: its {name} is not a table by rank", "foreign")
    if not is_whole(state.get("finite at", 0), least=0, most=2**53):
        raise UnusableCheckpointError("it is not a checkpoint of the workbench: its last finite weights are of no step", "foreign")
    best = state.get("best")
    if best and not (
        isinstance(best, tuple | list) and len(best) == 2 and is_number(best[0], finite=False) and is_whole(best[1], least=0, most=2**53)
    ):
        raise UnusableCheckpointError(
            f"it is not a checkpoint of the workbench: its best is {best!r:.40}, not a loss and a step", "foreign"
        )
    return state


def load_part(path: Path) -> dict[str, Any]:
    """What a rank wrote of a checkpoint, mapped into memory: only the tensors that are used are read. `verify` comes before it.

    Raises:
        UnusableCheckpointError: it holds something else.
        OSError, MemoryError, RuntimeError: it could not be read now.
    """
    state = _loaded(str(path), map_location="cpu", mmap=True)
    if not isinstance(state, dict) or not all(isinstance(state.get(name), dict) for name in ("parts", "other")):
        raise UnusableCheckpointError(f"{path.name} is not part of a checkpoint of the workbench", "foreign")
    return state


def _loaded(file: Any, **options: Any) -> Any:
    try:
        return torch.load(file, weights_only=True, **options)
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError):
            name = re.search(r"GLOBAL ([\w.]+)", str(error))
            what = f" ({name[1]})" if name else ""
            raise UnusableCheckpointError(f"it holds objects other than tensors, numbers and strings{what}", "foreign") from error
        if _is_damage(error):
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
            raise UnusableCheckpointError(f"torch cannot read it: {why}") from error
        raise


def verify(file: BinaryIO) -> str:
    """Compare the content of a checkpoint file with its checksum, and return it; of one without, that of each tensor ("" is returned).

    Raises:
        UnusableCheckpointError: the checksum differs, the file is incomplete or not from `torch.save`, or a newer workbench wrote it.
        OSError: the file could not be read now.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(4)
    file.seek(max(0, size - _END_BYTES - 0xFFFF))
    tail = file.read()
    at = tail.rfind(_END)
    if not size:
        raise UnusableCheckpointError("it is empty")
    if head != b"PK\3\4":
        what = "zeros" if not any(head) else repr(head)
        raise UnusableCheckpointError(f"it is not a zip file, as torch.save writes: it begins with {what}")
    if at < 0 or len(tail) - at < _END_BYTES:
        raise UnusableCheckpointError("its end is missing")
    comment = tail[at + _END_BYTES :]
    if comment.startswith(MARK):
        return _compare(file, size - len(comment), comment)
    _compare_parts(file)
    return ""


def _compare(file: BinaryIO, size: int, comment: bytes) -> str:
    """Compare the first `size` bytes, but for the length of the comment in the last two, with what the comment says; their checksum."""
    try:
        stated = json.loads(comment[len(MARK) :])
        written, checksum, length = stated["format"], stated["crc32"], stated["bytes"]
    except (ValueError, LookupError, TypeError):
        raise UnusableCheckpointError("its checksum is damaged") from None
    if isinstance(written, int) and written > FORMAT:
        text = f"it is of format {written}, of a newer workbench; this one reads formats up to {FORMAT}"
        raise UnusableCheckpointError(text, "newer")
    if length != size:
        raise UnusableCheckpointError(f"it has {size:,} bytes, and was written with {length!r:.30}")
    file.seek(0)
    crc, left = 0, size - 2
    while left:
        piece = file.read(min(left, _PIECE))
        if not piece:
            raise UnusableCheckpointError("its end is missing")
        crc, left = zlib.crc32(piece, crc), left - len(piece)
    if f"{zlib.crc32(bytes(2), crc):08x}" != checksum:
        raise UnusableCheckpointError("its content has changed since it was written: its checksum (CRC-32) differs")
    return str(checksum)


def _compare_parts(file: BinaryIO) -> None:
    """Check the parts of a zip file that has no checksum of its own by the checksum of each part."""
    try:
        with contextlib.closing(zipfile.ZipFile(file)) as archive:
            bad = archive.testzip()
    except Exception as error:  # of a damaged file zipfile raises whatever its numbers lead to, such as places before its beginning
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise
        raise UnusableCheckpointError(f"its zip file is damaged: {error}") from error
    if bad is not None:
        raise UnusableCheckpointError(f"its content has changed since it was written: the checksum (CRC-32) of {bad} differs")


def _is_damage(error: Exception) -> bool:
    """Does an error of torch.load mean that the file is damaged, rather than that it could not be read now?"""
    if isinstance(error, RuntimeError):
        return _DAMAGE_PATTERN.search(str(error)) is not None and not is_out_of_memory(error)
    return isinstance(error, EOFError | ValueError | LookupError | TypeError | AttributeError)


def set_aside(path: Path, kind: str) -> None:
    """Give a checkpoint and the parts of its ranks a suffix, so that it is neither read nor deleted nor overwritten.

    Without the suffix they are a checkpoint again. What was set aside before, under the same name, stays.
    """
    parts = [file for file in path.parent.iterdir() if file.name.startswith(f"{path.stem}.") and file.suffix == ".pt" and file != path]
    names = (f"{kind}{number or ''}" for number in itertools.count())
    files = [*parts, path]  # the checkpoint last: until then, the parts belong to one that is there
    suffix = next(name for name in names if not any(file.with_name(f"{file.name}.{name}").exists() for file in files))
    for file in files:
        file.rename(file.with_name(f"{file.name}.{suffix}"))


def delete_old(folder: Path, step: int, keep: int, kept: Container[int | None]) -> None:
    """Delete the checkpoints up to a step but the last `keep` and those of the steps `kept`, and parts of some that never were complete.

    Raises:
        OSError: some could not be deleted; the others were.
    """
    errors = list[OSError]()

    def delete(path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            errors.append(error)

    for old in [path for path in checkpoints_of(folder.parent) if step_of(path) <= step][:-keep]:
        if step_of(old) not in kept:
            delete(old)
    there = {path.stem for path in checkpoints_of(folder.parent)}
    for path in folder.iterdir():
        if (match := re.fullmatch(r"(step(\d+))(\.rank\d+)?\.(pt|part)", path.name)) and match[1] not in there and int(match[2]) < step:
            delete(path)
    if errors:
        raise errors[0]


def said(error: OSError) -> str:
    """An error of writing, and what to do where the folder may not be written."""
    if error.filename is None or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
        return str(error)
    return f"{error}; make {Path(error.filename).parent} writable"
