"""Source: samples in any storage format behind one interface, by number, many at once, or from the first to the last.

A format is a class in `data/formats/`, and reading it is three methods: `_read`, `_read_many` and `_scan`. What makes a source of a path,
or of a dataset of another library, is in `data/adapters.py`.
"""

import itertools
import operator
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

from workbench.core import units
from workbench.core.checks import choice
from workbench.data.sample import CorruptSampleError, Sample, schema_of

OnError = Literal["raise", "skip", "count"]
POLICIES = ("raise", "skip", "count")
DAMAGE_KEPT = 1000
"""Descriptions of damaged samples that a source keeps at most; it goes on counting."""
Damage = CorruptSampleError | FileNotFoundError
"""What a policy deals with: damaged bytes and files that are gone. Everything else is always raised."""


class Source:
    """Samples in one storage format; a map-style dataset for torch's DataLoader.

    `source[i]` is a dict of fields (bytes, int, float, text or array) with the sample's name under "__key__". `source[[3, 1]]` and
    `__getitems__`, which a DataLoader calls with a whole batch, read several samples at once; iterating reads in storage order, in large
    pieces. A source can be sent to worker processes with any start method, since no open file goes with it.

    Args:
        check: compare what is read with the format's checksums, if it has any.
        on_error: what happens to damaged or missing samples in batches and when iterating: "raise" = an error, "skip" = they are left out
            with one warning, "count" = their bytes are returned as they are (if there are any). `source.damaged` lists them in each case.
            `source[i]` always raises, except with "count".
    """

    format: ClassVar[str] = ""
    """Name of the format."""

    def __init__(self, path: str | os.PathLike[str] = "", *, check: bool = True, on_error: OnError = "raise") -> None:
        choice("on_error", on_error, POLICIES)
        self.path, self.check, self.on_error = os.fspath(path), check, on_error
        self.damaged: list[str] = []
        self.damaged_count = 0
        self._schema: dict[str, str] | None = None

    # --- what a format gives

    def __len__(self) -> int:
        raise NotImplementedError

    def _read(self, index: int) -> Sample:
        """One sample; the index is in range."""
        raise NotImplementedError

    def _read_many(self, indices: list[int]) -> Iterator[Sample | Damage]:
        """Several samples, in this order; what is damaged as the error that `_read` would raise."""
        for index in indices:
            try:
                yield self._read(index)
            except (CorruptSampleError, FileNotFoundError) as error:
                yield error

    def _scan(self, start: int, stop: int) -> Iterator[Sample | Damage]:
        """Those from `start` to before `stop` in the order of storage."""
        for first in range(start, stop, 64):
            yield from self._read_many(list(range(first, min(stop, first + 64))))

    def keys(self) -> Sequence[str]:
        """The names of all samples; numbers if the format stores no names."""
        return [f"{i:08d}" for i in range(len(self))]

    def stored_bytes(self) -> int | None:
        """Bytes of all files; None = not known."""
        return None

    def facts(self) -> dict[str, Any]:
        """Facts about the format's layout, such as the rows of a row group."""
        return {}

    def close(self) -> None:
        """Close what this process has opened."""

    # --- what users call

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.__getitems__(list(range(*index.indices(len(self)))))
        if isinstance(index, list | tuple) or getattr(index, "ndim", 0) == 1:
            return self.__getitems__([operator.index(i) for i in index])
        return self._one(self._number(index))

    def _one(self, index: int) -> Sample:
        if self.on_error == "raise":
            return self._read(index)
        found = next(iter(self._read_many([index])))
        if isinstance(found, dict):
            return found
        self._note(found)
        given = getattr(found, "sample", None)
        if self.on_error == "count" and given is not None:
            return given  # type: ignore[no-any-return]
        raise found

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        length = len(self)
        wanted = [i if type(i) is int and 0 <= i < length else self._number(i) for i in indices]
        found = list(self._read_many(wanted))
        return found if set(map(type, found)) == {dict} else list(self._by_policy(iter(found)))  # type: ignore[return-value]

    def __iter__(self) -> Iterator[Sample]:
        return self.iterate()

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Sample]:
        """Iterate over the samples from `start` to before `stop` (None = the end), in storage order, read in large pieces."""
        start, stop, _ = slice(start, stop).indices(len(self))
        return self._by_policy(self._scan(start, stop))

    def map(self, function: Callable[[Sample], Any]) -> "MappedSource":
        """The same samples, each passed through a function, such as one that decodes and augments. If workers are not forked, the function
        must be defined in a module.
        """
        return MappedSource(self, function)

    @property
    def schema(self) -> dict[str, str]:
        """Field → kind ("bytes", "int", "float", "str", "array"), from the format or the first samples."""
        if self._schema is None:
            self._schema = schema_of(itertools.islice(self._raw(), 16))
        return self._schema

    def __repr__(self) -> str:
        where = f" at {self.path}" if self.path else ""
        size = self.stored_bytes()
        return f"{type(self).__name__}({len(self):,} samples{where}{f', {units.bytes_(size)}' if size else ''})"

    # --- inside

    def _raw(self) -> Iterator[Sample]:
        """The samples that can be read, from the first on, with no note of the others."""
        return (found for found in self._scan(0, len(self)) if isinstance(found, dict))

    def _number(self, index: Any) -> int:
        length = len(self)
        number = operator.index(index)
        if not -length <= number < length:
            raise IndexError(f"sample {number} of {length:,}: from {-length} to {length - 1} is allowed")
        return number + length if number < 0 else number

    def _by_policy(self, found: Iterator[Sample | Damage]) -> Iterator[Sample]:
        for sample in found:
            if isinstance(sample, dict):
                yield sample
                continue
            if self.on_error == "raise":
                raise sample
            self._note(sample)
            if self.on_error == "count" and (given := getattr(sample, "sample", None)) is not None:
                yield given

    def _note(self, error: Damage) -> None:
        self.damaged_count += 1
        if len(self.damaged) < DAMAGE_KEPT:
            self.damaged.append(str(error))
        if self.damaged_count == 1 and self.on_error == "skip":
            warnings.warn(f"{error}. It is left out, as all that are damaged; `source.damaged` lists them", stacklevel=4)


def corrupt(message: str, sample: Sample | None = None) -> CorruptSampleError:
    """An error that carries the damaged sample, for the policy "count"."""
    error = CorruptSampleError(message)
    if sample is not None:
        error.sample = sample  # type: ignore[attr-defined]
    return error


class MappedSource(Source):
    """The samples of another source, each passed through a function."""

    format = "mapped"

    def __init__(self, source: Source, function: Callable[[Sample], Any]) -> None:
        super().__init__(source.path)
        self.source, self.function = source, function

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: Any) -> Any:
        found = self.source[index]
        return [self.function(sample) for sample in found] if isinstance(found, list) else self.function(found)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self.function(sample) for sample in self.source.__getitems__(indices)]

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """The samples from `start` to before `stop` (None = the end), passed through the function."""
        return map(self.function, self.source.iterate(start, stop))

    def _read(self, index: int) -> Any:
        return self.function(self.source._read(index))

    def _read_many(self, indices: list[int]) -> Iterator[Any]:
        return (self.function(found) if isinstance(found, dict) else found for found in self.source._read_many(indices))

    def _scan(self, start: int, stop: int) -> Iterator[Any]:
        return (self.function(found) if isinstance(found, dict) else found for found in self.source._scan(start, stop))

    def _raw(self) -> Iterator[Sample]:
        return map(self.function, self.source._raw())

    def keys(self) -> Sequence[str]:
        """The names of all samples."""
        return self.source.keys()

    def close(self) -> None:
        """Close what this process has opened."""
        self.source.close()


def take(source: Source, count: int, *, seed: int = 0) -> "SubsetSource":
    """A random part of a source, the same for the same seed, in rising order; all of it if it has no more."""
    total = len(source)
    return SubsetSource(source, range(total) if total <= count else sorted(random.Random(seed).sample(range(total), count)))


class SubsetSource(Source):
    """Some samples of another source."""

    format = "subset"

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        super().__init__(source.path)
        self.source, self.indices = source, indices

    def __len__(self) -> int:
        return len(self.indices)

    def _read(self, index: int) -> Sample:
        return self.source._read(self.indices[index])

    def _read_many(self, indices: list[int]) -> Iterator[Sample | Damage]:
        return self.source._read_many([self.indices[i] for i in indices])

    def keys(self) -> Sequence[str]:
        """The names of these samples."""
        keys = self.source.keys()
        return [keys[i] for i in self.indices]

    def close(self) -> None:
        """Close what this process has opened."""
        self.source.close()
