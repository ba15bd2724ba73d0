"""Makes a source of whatever holds samples: a path or URL in any format, or a dataset of another library."""

import contextlib
import functools
import inspect
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from workbench.core.checks import shown
from workbench.core.synonyms import accept_synonyms
from workbench.data.formats import by_name, find_format, format_class
from workbench.data.manifest import INDEX, MANIFEST
from workbench.data.sample import KEY, USUAL_KINDS, Sample, plain
from workbench.data.source import Damage, Source
from workbench.data.storage import Storage


class NoRandomAccessError(TypeError):
    """A sample was asked for by its number, but the dataset can only be iterated."""


class DatasetSource(Source):
    """A dataset of another library with `len` and `[i]`: of torch, Hugging Face datasets, litdata, grain, or a list."""

    format = "dataset"

    def __init__(self, dataset: Any, fields: Sequence[str] | None = None) -> None:
        """
        Args:
            dataset: its samples are dicts, or tuples, or single values.
            fields: names of the parts of tuples; None = "input" and "label" for two, else "0", "1" …
        """
        super().__init__()
        self.dataset, self.fields = dataset, fields

    def __len__(self) -> int:
        return len(self.dataset)

    def _read(self, index: int) -> Sample:
        return as_sample(self.dataset[index], index, self.fields)

    def _read_many(self, indices: list[int]) -> Iterator[Sample | Damage]:
        if type(self.dataset) is list:
            return iter(_as_samples([self.dataset[index] for index in indices], indices, self.fields))
        several = getattr(self.dataset, "__getitems__", None)
        if several is None or not indices:
            return super()._read_many(indices)
        found = several(indices)
        if not isinstance(found, list) or len(found) != len(indices):  # whole batches, ready
            return super()._read_many(indices)
        return iter(_as_samples(found, indices, self.fields))


class IterableSource(Source):
    """A dataset of another library that can only be iterated, such as webdataset.WebDataset."""

    format = "iterable"

    def __init__(self, dataset: Iterable[Any], fields: Sequence[str] | None = None) -> None:
        super().__init__()
        self.dataset, self.fields = dataset, fields
        self._length: int | None = None

    def __len__(self) -> int:
        if self._length is None:
            self._length = sum(1 for _ in self.dataset)
        return self._length

    def _read(self, index: int) -> Sample:
        raise NoRandomAccessError(
            f"{type(self.dataset).__name__} has no numbered samples: iterate over it, or write it once as shards, "
            "wb.data.write_shards(source, folder), and open those"
        )

    def _scan(self, start: int, stop: int) -> Iterator[Sample | Damage]:
        for index, sample in enumerate(itertools.islice(self.dataset, start, stop), start):
            yield as_sample(sample, index, self.fields)

    def iterate(self, start: int = 0, stop: int | None = None) -> Iterator[Sample]:
        """The samples from `start` to before `stop` (None = the end)."""
        return self._by_policy(self._scan(start, stop))  # type: ignore[arg-type]

    def _raw(self) -> Iterator[Sample]:
        return self.iterate()

    def __repr__(self) -> str:
        return f"IterableSource({type(self.dataset).__name__})"


def as_sample(value: Any, index: int, fields: Sequence[str] | None = None) -> Sample:
    """What a dataset gives for a sample, as a dict of plain values with a key.

    Raises:
        ValueError: a field is of no kind that can be stored; names it.
    """
    if type(value) is dict and _is_plain(tuple(value), tuple(map(type, value.values()))):
        sample = value.copy()
        if type(key := value[KEY]) is not str:
            sample[KEY] = str(key)
        return sample
    if isinstance(value, Mapping):
        parts = {str(name): item for name, item in value.items() if not (str(name).startswith("__") and str(name) != KEY)}
    elif isinstance(value, tuple | list):
        names = fields or (("input", "label") if len(value) == 2 else tuple(map(str, range(len(value)))))
        if len(names) != len(value):
            raise ValueError(f"sample {index} has {len(value)} parts, and fields={list(names)!r} has {len(names)} names: one for each part")
        parts = dict(zip(names, value, strict=True))
    else:
        parts = {(fields or ("input",))[0]: value}
    given = parts.pop(KEY, None)
    sample = {KEY: str(given) if given is not None else f"{index:08d}"}
    for name, item in parts.items():
        if (converted := plain(item, name)) is not None:
            sample[name] = converted
    return sample


def _as_samples(values: list[Any], indices: list[int], fields: Sequence[str] | None) -> list[Sample]:
    """`as_sample` of each value: at once where all are dicts with the same names, of values that stay as they are."""
    if set(map(type, values)) == {dict} and len(named := set(map(tuple, values))) == 1:
        (names,) = named
        kinds = {name: set(map(type, map(operator.itemgetter(name), values))) for name in names}
        if _is_plain(names, tuple(set().union(*kinds.values()))) and kinds[KEY] == {str}:
            return list(map(dict.copy, values))
    return [as_sample(value, index, fields) for value, index in zip(values, indices, strict=True)]


@functools.lru_cache(maxsize=256)
def _is_plain(names: tuple[Any, ...], kinds: tuple[type, ...]) -> bool:
    """Are these the names and types of fields that stay as they are?"""
    usual = all(type(name) is str and (name == KEY or not name.startswith("__")) for name in names)
    return KEY in names and usual and USUAL_KINDS.keys() >= set(kinds)


@accept_synonyms
def as_source(data: Any, *, fields: Sequence[str] | None = None, **options: Any) -> Source:
    """Make a Source of anything that holds samples: a path or URL, a dataset of torch, webdataset, litdata or Hugging Face, or a list.

    Args:
        data: a source (returned as it is); a path or URL, or several of tar files (see `open_source`); a map-style dataset, with `len` and
            `[i]`; or an iterable dataset. Tensors and Pillow's pictures become arrays.
        fields: names of the parts of samples that are tuples; None = "input" and "label" for two parts, otherwise "0", "1" …
        options: for `open_source`.

    Raises:
        ValueError: none of these was given.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, str | os.PathLike) or (
        isinstance(data, list | tuple) and data and all(isinstance(p, str | os.PathLike) for p in data)
    ):
        return open_source(data, **options)
    if options:
        raise ValueError(f"{', '.join(options)}: allowed for paths only, and {type(data).__name__} is a dataset")
    kind = type(data)
    gone_through = "IterableDataset" in {base.__name__ for base in kind.__mro__}
    # without torch's own, whose IterableDataset inherits a `__getitem__` that raises
    own = {name for base in kind.__mro__ if not base.__module__.startswith("torch.") for name in vars(base)}
    if hasattr(kind, "__getitem__") and hasattr(kind, "__len__") and (not gone_through or "__getitem__" in own):
        return DatasetSource(data, fields)
    if hasattr(kind, "__iter__"):
        if isinstance(data, Iterator) and not gone_through:
            raise ValueError(
                f"a {kind.__name__} can be iterated over only once: give an object whose __iter__ begins anew, or list(…) of it"
            )
        return IterableSource(data, fields)
    raise ValueError(
        f"{shown(data):.90} is a {kind.__name__}: a path or URL, a dataset with len() and [i], or an iterable of samples is allowed"
    )


@accept_synonyms
def open_source(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, format: str | None = None, **options: Any) -> Source:
    """Open the samples at a path or URL, in any supported format.

    Args:
        path: a folder or a file. Its format follows from a manifest in it or from the extensions of its files ("tar", "tfrecord",
            "parquet", "arrow", "h5", "npy", "mdb"); otherwise it is a folder of files. Several paths, or one with `*` or `{000000..000012}`
            in its last part, are tar files. A URL such as "s3://bucket/folder" goes through fsspec.
        format: name of the format, if it should not be detected.
        options: `check` and `on_error` as in `Source`; `storage_options` for fsspec; other options of the format.

    Raises:
        ValueError: an unknown format, or an option that the format does not have.
        FileNotFoundError: there is nothing at this path.
        MissingPackageError: the format needs a package that is not installed; the message has the command that installs it.
    """
    asked: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if format is None and isinstance(path, str | os.PathLike) and not by_name(os.fspath(path)):
        asked = Storage(path, options.get("storage_options")).fetched(MANIFEST, INDEX)
    with asked:
        chosen = format_class(format) if format is not None else find_format(path, options.get("storage_options"))
        allowed = inspect.signature(chosen).parameters
        if unknown := [name for name in options if name not in allowed]:
            raise ValueError(f"{unknown[0]}=: {chosen.__name__} takes {', '.join(name for name in allowed if name != 'path')}")
        made: Callable[..., Source] = chosen
        return made(path, **options)
