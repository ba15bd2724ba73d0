"""Memory-mapped npy files and HDF5: a column per field, in which a sample is a row.

A column of numbers or of arrays of one shape is an array (samples, …). Values of uneven length (bytes, texts, arrays of several shapes) lie
one after the other in a column of bytes, `NAME.data`, beside `NAME.ends`. Both formats store columns uncompressed and contiguous, so that a
row is a copy out of the mapped file. Others' HDF5 files may be chunked: there a sample costs the whole chunk.
"""

import io
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workbench.core import units
from workbench.data.formats.library import LibrarySource
from workbench.data.manifest import Rows
from workbench.data.sample import KEY, Sample, UnsafeNameError, decode, encode
from workbench.data.shard_file import Written, noted, written
from workbench.data.storage import Storage, need

DATA, ENDS = ".data", ".ends"
MUCH = 4
"""Samples that a chunk may have before opening a file says that reading at random will be slow."""
Array = np.ndarray[Any, Any]


class _RemoteRows:
    """A column on a server, of which only the rows that are asked for are read."""

    def __init__(self, storage: Storage, name: str, offset: int, dtype: Any, shape: tuple[int, ...]) -> None:
        self.storage, self.name, self.offset, self.dtype, self.shape = storage, name, offset, np.dtype(dtype), shape
        self.row = int(np.prod(shape[1:], dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Array:
        start, stop = (index.start, index.stop) if isinstance(index, slice) else (index, index + 1)
        data = self.storage.read(self.name, self.offset + start * self.row, (stop - start) * self.row)
        found = np.frombuffer(data, self.dtype).reshape(stop - start, *self.shape[1:])
        return found if isinstance(index, slice) else found[0]


class ColumnSource(LibrarySource):
    """What npy and HDF5 have in common."""

    def _columns(self, name: str) -> tuple[dict[str, Any], Any]:
        """The columns of a shard, and what has to be closed."""
        raise NotImplementedError

    def _open(self, name: str) -> Any:
        columns, opened = self._columns(name)
        for column in [name for name in columns if name.endswith(ENDS)]:
            columns[column] = np.asarray(columns[column][0 : len(columns[column])])  # small, and needed for each read
        lengths = {name: len(column) - name.endswith(ENDS) for name, column in columns.items() if not name.endswith(DATA)}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"its columns have different lengths: {lengths}")
        return {"columns": columns, "opened": opened, "count": next(iter(lengths.values()))}

    def _count(self, handle: Any) -> int:
        return int(handle["count"])

    def _get(self, handle: Any, rows: Sequence[int], base: int) -> list[Sample]:
        columns = handle["columns"]
        samples: list[Sample] = [{KEY: f"{base + row:08d}"} for row in rows]
        for name, column in columns.items():
            if name.endswith(DATA):
                continue
            field = name.removesuffix(ENDS)
            kind = self._schema.get(field) if self._schema else None
            for sample, row in zip(samples, rows, strict=True):
                if name.endswith(ENDS):
                    self._uneven(sample, field, kind, columns[field + DATA], column, row)
                else:
                    value = column[row]
                    plain = np.ndim(value) == 0 and kind != "array"
                    sample[field] = np.asarray(value).item() if plain else np.array(value)
        return samples

    @staticmethod
    def _uneven(sample: Sample, field: str, kind: str | None, data: Any, ends: Array, row: int) -> None:
        start, end = int(ends[row]), int(ends[row + 1])
        if end < 0:  # no such field
            return
        start = -start - 1 if start < 0 else start
        value = np.asarray(data[start:end]).tobytes()
        sample[field] = value.decode() if field == KEY else value if kind in (None, "bytes") else decode(kind, value)

    def _shut(self, handle: Any) -> None:
        handle["columns"].clear()
        if handle["opened"] is not None:
            handle["opened"].close()


class NpySource(ColumnSource):
    """Samples in npy files that are mapped into memory: a folder with a file per field, in each shard, or a single file.

    Of others' files, "x.npy" and "y.npy" in one folder are the fields "x" and "y"; a single file is the field "input".
    """

    format = "npy"
    endings = (".npy",)

    def _names(self) -> list[str]:
        folders = {name.rpartition("/")[0] for name in super()._names()}
        return sorted(folders)

    def _columns(self, name: str) -> tuple[dict[str, Any], Any]:
        if name.endswith(".npy"):
            return {"input": self._column(name)}, None
        inside = [found for found, _, _ in self.storage.files() if found.rpartition("/")[0] == name and found.endswith(".npy")]
        return {found.rpartition("/")[2].removesuffix(".npy"): self._column(found) for found in inside}, None

    def _column(self, name: str) -> Any:
        if not self.storage.remote:
            empty = self.storage.size(name) <= 128  # an array without elements cannot be mapped
            return np.load(self.storage.path(name), mmap_mode=None if empty else "r", allow_pickle=False)
        file = io.BytesIO(self.storage.read(name, 0, 4096))
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if fortran:  # its rows are no ranges of bytes
            return np.load(io.BytesIO(self.storage.read(name)), allow_pickle=False)
        return _RemoteRows(self.storage, name, file.tell(), dtype, shape)

    def stored_bytes(self) -> int:
        return sum(size for _, size, _ in self.storage.files())


class Hdf5Source(ColumnSource):
    """Samples in HDF5 files: each dataset in the root of a file is a field.

    Contiguous datasets are mapped into memory past the library. Where others' datasets are chunked or compressed, opening the file warns
    if a sample read at random costs the whole chunk of many. A field that is a link to another file, or whose values lie in other files
    (HDF5 can name any path for both), is refused: `UnsafeNameError`.
    """

    format = "hdf5"
    package = "h5py"
    endings = (".h5", ".hdf5")

    def _columns(self, name: str) -> tuple[dict[str, Any], Any]:
        import h5py

        remote = self.storage.open(name) if self.storage.remote else None
        file = h5py.File(remote if remote is not None else self.storage.path(name), "r")
        try:
            return self._datasets(name, file, remote is not None), file
        except BaseException:
            file.close()  # else h5py keeps what it has read of it, also when the file has been restored
            raise

    def _datasets(self, name: str, file: Any, remote: bool) -> dict[str, Any]:
        """The rows of each field of an open file."""
        import h5py

        columns: dict[str, Any] = {}
        for field in file:
            link = file.get(field, getlink=True)  # before it is followed
            if isinstance(link, h5py.ExternalLink):
                raise self._elsewhere(name, field, f"is a link to the file {link.filename!r:.90}")
            dataset = file.get(field)
            if not isinstance(dataset, h5py.Dataset) or not dataset.ndim:
                continue
            if dataset.file.id != file.id:  # a link inside of the file, to a link out of it
                raise self._elsewhere(name, field, f"is in the file {dataset.file.filename!r:.90}")
            parts = dataset.virtual_sources() if dataset.is_virtual else ()
            others = [path for path, _, _ in dataset.external or ()] + [part.file_name for part in parts if part.file_name != "."]
            if others:
                raise self._elsewhere(name, field, f"has its values in the file {others[0]!r:.90}")
            offset = None if dataset.chunks or dataset.dtype.hasobject else dataset.id.get_offset()
            if offset is None or dataset.size == 0:
                columns[field] = dataset if dataset.size else dataset[()]
                self._warn(name, field, dataset)
            elif not remote:
                columns[field] = np.memmap(self.storage.path(name), dataset.dtype, "r", offset, dataset.shape)
            else:
                columns[field] = _RemoteRows(self.storage, name, offset, dataset.dtype, dataset.shape)
        return columns

    def _elsewhere(self, name: str, field: str, where: str) -> UnsafeNameError:
        return UnsafeNameError(
            f"{self.storage.path(name)}: the field {field!r:.60} {where}, which is not read: a file may name any path there. If it is "
            "yours, copy the values into one file: h5repack, or h5py's create_dataset"
        )

    def _warn(self, name: str, field: str, dataset: Any) -> None:
        rows = dataset.chunks[0] if dataset.chunks else 1
        if rows > MUCH and not getattr(self, "_warned", False):
            self._warned = True
            much = units.bytes_(float(np.prod(dataset.chunks) * dataset.dtype.itemsize))
            packed = f", decompressed by {dataset.compression}" if dataset.compression else ""
            warnings.warn(
                f"{self.storage.path(name)}: a sample of {field!r} that is read at random costs its chunk of {rows} ({much}{packed}). "
                'Read in order, or convert it: wb.data.convert(source, out, format="hdf5") stores it contiguous',
                stacklevel=6,
            )

    def facts(self) -> dict[str, Any]:
        """Samples of a chunk, which one at random reads."""
        columns = self._try(0, lambda handle: handle["columns"]) if self.shards else {}
        chunks = [column.chunks[0] for column in columns.values() if getattr(column, "chunks", None)]
        return {"rows_read_for_one": float(max(chunks, default=1)), "unit": "chunk"}


def to_columns(samples: Iterable[tuple[str, Sample]], schema: Mapping[str, str]) -> dict[str, Array]:
    """The columns of some samples, which have to fit into memory."""
    values: dict[str, list[Any]] = {name: [] for name in schema}
    keys = []
    for key, sample in samples:
        keys.append(key)
        for name in schema:
            values[name].append(sample.get(name))
    columns: dict[str, Array] = {}
    for name, kind in {KEY: "str", **schema}.items():
        column: list[Any] = keys if name == KEY else values[name]
        even = column and all(value is not None for value in column)
        if even and kind == "int" and all(-(1 << 63) <= value < 1 << 63 for value in column):
            columns[name] = np.array(column, np.int64)
        elif even and kind == "float":
            columns[name] = np.array(column, np.float64)
        elif even and kind == "array" and len({(value.shape, value.dtype) for value in column}) == 1 and column[0].size:
            columns[name] = np.stack(column)
        else:
            parts = [None if value is None else encode(value) for value in column]
            columns[name + DATA] = np.frombuffer(b"".join(part for part in parts if part is not None), np.uint8)
            ends = np.cumsum([0, *(len(part or b"") for part in parts)], dtype=np.int64)
            gone = np.array([False, *(part is None for part in parts)])
            columns[name + ENDS] = np.where(gone, -ends - 1, ends)
    return columns


def _write_npy(path: str, samples: Iterable[tuple[str, Sample]], schema: Mapping[str, str]) -> Written:
    """A folder with an npy file per column."""
    rows = Rows(schema)
    columns = to_columns(noted(samples, rows), schema)
    os.mkdir(path)
    for name, column in columns.items():
        with open(Path(path) / f"{name}.npy", "xb") as file:
            np.lib.format.write_array(file, column, version=(1, 0), allow_pickle=False)
    return written(path, rows)


def _write_hdf5(path: str, samples: Iterable[tuple[str, Sample]], schema: Mapping[str, str]) -> Written:
    """An HDF5 file with a contiguous dataset per column, without times, so that equal data make equal files."""
    need("h5py", "the format hdf5")
    import h5py

    rows = Rows(schema)
    columns = to_columns(noted(samples, rows), schema)
    with h5py.File(path, "x") as file:
        for name, column in columns.items():
            file.create_dataset(name, data=column, track_times=False)
    return written(path, rows)


def writers() -> dict[str, Any]:
    """Format → what writes it."""
    return {"npy": _write_npy, "hdf5": _write_hdf5}
