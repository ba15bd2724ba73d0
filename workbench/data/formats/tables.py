"""Parquet and Arrow (Feather): tables of pyarrow, with a column per field.

Parquet is read by whole row groups: a sample at random costs all that are in its group. As pyarrow writes it by default a group has a
million rows; "parquet" is tuned (groups of 128 KiB, checksums per page, no dictionary or compression of what is compressed already), and
"parquet-untuned" is the default, for comparison. Arrow files are memory-mapped, so that a sample is a copy of its bytes.
"""

import bisect
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from workbench.data.formats.library import LibrarySource
from workbench.data.manifest import Rows
from workbench.data.sample import KEY, PICTURES, Sample, decode, encode, plain, stored_schema
from workbench.data.shard_file import Written, noted, written
from workbench.data.storage import need

GROUP, BATCH = 128 << 10, 1 << 20
"""Bytes of samples in a row group of Parquet, and in a record batch of Arrow."""
KEPT = 4
"""Row groups that stay in memory per shard."""
META = b"workbench"


class TableSource(LibrarySource):
    """What Parquet and Arrow have in common: groups of rows, found by the number of a row."""

    package = "pyarrow"

    def _group(self, handle: Any, group: int) -> Any:
        raise NotImplementedError

    def _count(self, handle: Any) -> int:
        return int(handle["edges"][-1])

    def _get(self, handle: Any, rows: Sequence[int], base: int) -> list[Sample]:
        groups = (handle["edges"].searchsorted(rows, "right") - 1).tolist()
        found: dict[int, Sample] = {}
        for group in dict.fromkeys(groups):
            table = self._group(handle, group)
            first = int(handle["edges"][group])
            places = [place for place, other in enumerate(groups) if other == group]
            inside = [rows[place] - first for place in places]
            columns = {name: self._values(table.column(name), inside, handle["kinds"].get(name)) for name in table.column_names}
            for number, place in enumerate(places):
                sample = {KEY: f"{base + rows[place]:08d}"}
                sample.update((name, values[number]) for name, values in columns.items() if values[number] is not None)
                found[place] = sample
        return [found[place] for place in range(len(rows))]

    @staticmethod
    def _values(column: Any, rows: Sequence[int], kind: str | None) -> list[Any]:
        if len(rows) > 8 and rows[-1] - rows[0] == len(rows) - 1 and list(rows) == list(range(rows[0], rows[-1] + 1)):
            values = column.slice(rows[0], len(rows)).to_pylist()
        else:
            values = [column[row].as_py() for row in rows]
        if kind in ("array", "int", "float"):
            return [decode(kind, value) if isinstance(value, bytes) else value for value in values]
        return values if kind is not None else [plain(value) for value in values]

    @staticmethod
    def _kinds(schema: Any) -> dict[str, str]:
        """Field → kind, as our writer noted it; empty for others' files."""
        about = (schema.metadata or {}).get(META)
        return {KEY: "str", **stored_schema(json.loads(about))} if about else {}


class ParquetSource(TableSource):
    """Samples in Parquet files. Checksums of pages are checked where the file has them."""

    format = "parquet"
    endings = (".parquet",)

    def _open(self, name: str) -> Any:
        import pyarrow.parquet as pq

        file = self.storage.open(name) if self.storage.remote else None
        parquet = pq.ParquetFile(file or self.storage.path(name), page_checksum_verification=self.check)
        groups = [parquet.metadata.row_group(group) for group in range(parquet.num_row_groups)]
        return {
            "file": file,
            "parquet": parquet,
            "edges": np.cumsum([0, *(group.num_rows for group in groups)], dtype=np.int64),
            "kinds": self._kinds(parquet.schema_arrow),
            "kept": {},
        }

    def _group(self, handle: Any, group: int) -> Any:
        kept = handle["kept"]
        if group not in kept:
            while len(kept) >= KEPT:
                del kept[next(iter(kept))]
            kept[group] = handle["parquet"].read_row_group(group, use_threads=False)
        return kept[group]

    def _shut(self, handle: Any) -> None:
        handle["parquet"].close()
        if handle["file"] is not None:
            handle["file"].close()

    def facts(self) -> dict[str, Any]:
        """Rows of a row group, which a sample at random reads."""
        counts = np.concatenate([np.diff(self._try(shard, lambda handle: handle["edges"])) for shard in range(len(self.shards))])
        return {"rows_read_for_one": float(np.average(counts, weights=counts)) if len(self) else 0.0, "unit": "row group"}


class UntunedParquetSource(ParquetSource):
    """Parquet as pyarrow writes it by default."""

    format = "parquet-untuned"


class ArrowSource(TableSource):
    """Samples in Arrow files (Feather, IPC), or in streams as Hugging Face datasets store them."""

    format = "arrow"
    endings = (".arrow", ".feather")

    def _open(self, name: str) -> Any:
        import pyarrow as pa

        source = pa.BufferReader(self.storage.read(name)) if self.storage.remote else pa.memory_map(self.storage.path(name), "rb")
        try:
            reader = pa.ipc.open_file(source)
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        except pa.ArrowInvalid:
            source.seek(0)
            reader = pa.ipc.open_stream(source)
            batches = list(reader)
        return {
            "file": source,
            "batches": batches,
            "edges": np.cumsum([0, *(batch.num_rows for batch in batches)], dtype=np.int64),
            "firsts": list(itertools.accumulate((batch.num_rows for batch in batches), initial=0)),
            "kinds": self._kinds(reader.schema),
            "columns": {},
            "sound": set(),
        }

    def _group(self, handle: Any, group: int) -> Any:
        batch = handle["batches"][group]
        if group not in handle["sound"]:
            batch.validate(full=True)  # pyarrow itself follows any offset, beyond the end of the file and of the process's memory
            handle["sound"].add(group)
        return batch

    def _get(self, handle: Any, rows: Sequence[int], base: int) -> list[Sample]:
        if len(rows) > 8:
            return super()._get(handle, rows, base)
        found = []
        for row in rows:
            group = bisect.bisect_right(handle["firsts"], row) - 1
            if (columns := handle["columns"].get(group)) is None:
                columns = handle["columns"][group] = self._columns(handle, group)
            inside = row - handle["firsts"][group]
            sample: Sample = {KEY: f"{base + row:08d}"}
            for name, read in columns:
                if (value := read(inside)) is not None:
                    sample[name] = value
            found.append(sample)
        return found

    def _columns(self, handle: Any, group: int) -> list[tuple[str, Callable[[int], Any]]]:
        """Name of each column of a record batch, and what gives its value in a row."""
        batch = self._group(handle, group)
        return [(name, _rows_of(batch.column(name), handle["kinds"].get(name))) for name in batch.schema.names]

    def _shut(self, handle: Any) -> None:
        handle["columns"].clear()
        handle["batches"].clear()


def _rows_of(column: Any, kind: str | None) -> Callable[[int], Any]:
    """What gives the value of a column in a row. Usual columns are read from their buffers: pyarrow makes an object for each value."""
    import pyarrow as pa

    kept = column.type
    codes: dict[Any, Literal["i", "q"]] = {pa.binary(): "i", pa.string(): "i", pa.large_binary(): "q", pa.large_string(): "q"}
    if not column.null_count and not column.offset and kept in codes and kind in (None, "bytes", "str", "array"):
        _, ends, values = column.buffers()
        places = memoryview(ends).cast("B").cast(codes[kept])
        data = memoryview(values if values is not None else b"")
        if kind == "array":
            return lambda row: decode("array", bytes(data[places[row] : places[row + 1]]))
        if kept in (pa.string(), pa.large_string()):
            return lambda row: str(data[places[row] : places[row + 1]], "utf-8")
        return lambda row: bytes(data[places[row] : places[row + 1]])
    if not column.null_count and not column.offset and kept in (pa.int64(), pa.float64()) and kind in (None, "int", "float"):
        numbers = memoryview(column.buffers()[1]).cast("B").cast("q" if kept == pa.int64() else "d")
        return lambda row: numbers[row]
    return lambda row: TableSource._values(column, [row], kind)[0]


def _arrow_schema(schema: Mapping[str, str]) -> Any:
    import pyarrow as pa

    types = {"bytes": pa.binary(), "int": pa.int64(), "float": pa.float64(), "str": pa.string(), "array": pa.binary()}
    fields = [pa.field(KEY, pa.string()), *(pa.field(name, types[kind]) for name, kind in schema.items())]
    return pa.schema(fields, metadata={META: json.dumps(dict(schema)).encode()})


def _batches(samples: Iterable[tuple[str, Sample]], schema: Mapping[str, str], size: int) -> Iterable[Any]:
    """Record batches of about so many bytes."""
    import pyarrow as pa

    arrow = _arrow_schema(schema)
    columns: dict[str, list[Any]] = {name: [] for name in arrow.names}
    total = 0
    for key, sample in samples:
        columns[KEY].append(key)
        for name, kind in schema.items():
            value = sample.get(name)
            if kind == "array" and value is not None:
                value = encode(value)
            columns[name].append(value)
            total += len(value) if isinstance(value, bytes | str) else 8
        if total >= size:
            yield pa.record_batch([pa.array(columns[field.name], field.type) for field in arrow], schema=arrow)
            columns, total = {name: [] for name in arrow.names}, 0
    if columns[KEY]:
        yield pa.record_batch([pa.array(columns[field.name], field.type) for field in arrow], schema=arrow)


def _write_parquet(path: str, samples: Iterable[tuple[str, Sample]], schema: Mapping[str, str]) -> Written:
    """Parquet, tuned: row groups of 128 KiB, checksums of pages, texts and numbers compressed, pictures and arrays as they are."""
    need("pyarrow", "the format parquet")
    import pyarrow.parquet as pq

    rows = Rows(schema)
    opaque = [name for name, kind in schema.items() if kind in ("bytes", "array")]
    options = {
        "compression": {name: "NONE" if name in opaque else "ZSTD" for name in (KEY, *schema)},
        "use_dictionary": [name for name, kind in schema.items() if kind in ("int", "str") and name not in PICTURES],
        "write_page_checksum": True,
        "write_statistics": False,
    }
    with pq.ParquetWriter(path, _arrow_schema(schema), **options) as writer:
        for batch in _batches(noted(samples, rows), schema, GROUP):
            writer.write_batch(batch, row_group_size=batch.num_rows)
    return written(path, rows)


def _write_untuned(path: str, samples: Iterable[tuple[str, Sample]], schema: Mapping[str, str]) -> Written:
    """Parquet as `pyarrow.parquet.write_table` writes it."""
    need("pyarrow", "the format parquet-untuned")
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = Rows(schema)
    pq.write_table(pa.Table.from_batches(_batches(noted(samples, rows), schema, 1 << 62), _arrow_schema(schema)), path)
    return written(path, rows)


def _write_arrow(path: str, samples: Iterable[tuple[str, Sample]], schema: Mapping[str, str]) -> Written:
    """An Arrow file with record batches of a megabyte."""
    need("pyarrow", "the format arrow")
    import pyarrow as pa

    rows = Rows(schema)
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, _arrow_schema(schema)) as writer:
        for batch in _batches(noted(samples, rows), schema, BATCH):
            writer.write_batch(batch)
    return written(path, rows)


def writers() -> dict[str, Callable[..., Written]]:
    """Format → what writes it."""
    return {"parquet": _write_parquet, "parquet-untuned": _write_untuned, "arrow": _write_arrow}
