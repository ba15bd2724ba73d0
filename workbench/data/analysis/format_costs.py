"""FormatComparison: what reading a sample costs in each format, which is recommended, and what changing to it would gain."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from workbench.core import units
from workbench.core.codec import JsonDataclass
from workbench.core.display.table import Shown, Table, frame_method, plot_method

AS_IT_IS = "as it is"
"""Name of the source that was given, among the formats."""
PREPARED = "decoded"
"""Name of the format in which pictures are stored decoded, and resized where that was asked for."""
ALIKE = 1.15
"""Formats within this factor of the fastest count as equally fast; then fewer bytes and fewer packages decide. Chosen: about what two
measurements of the same format differ by on a shared machine."""
PLAIN = ("tar", "folder", "npy", "tfrecord")
"""Formats that need no package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(JsonDataclass):
    """What a sample costs in one format, read in one way."""

    format: str
    place: str
    """"local" or "remote"."""
    order: str
    """"random" or "sequential"."""
    cache: str
    """"cold" (read from the disk or the server) or "warm" (from memory)."""
    seconds: float
    """Per sample, wall time."""
    cpu: float
    """Per sample, of this process with all its threads."""
    disk_bytes: float | None = None
    """Per sample, read from the disk; None = the system does not say, or it was read from a server."""

    @property
    def blocked(self) -> float:
        """Seconds per sample of waiting, for the disk, a server or a core."""
        return max(0.0, self.seconds - self.cpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat(JsonDataclass):
    """A format as the samples were stored in it."""

    format: str
    stored_bytes: float
    """Per sample."""
    write_seconds: float
    """Per sample; 0 = it was there."""
    rows_read_for_one: float = 1.0
    """Samples that the format reads for one at random: those of its row group or chunk."""
    needs: str = ""
    """Package, if it needs one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatComparison(Shown, JsonDataclass):
    """What reading the same samples costs in several formats, measured on this machine."""

    samples: int
    payload_bytes: float
    """Per sample: what a user gets."""
    readings: tuple[Reading, ...] = field(repr=False)
    formats: tuple[StoredFormat, ...] = field(repr=False)
    order: str = "random"
    """How the samples will be read: what the recommendation is for."""
    batch_size: int = 32
    """Samples that were read at once at random."""
    decode_cpu: float = 0.0
    """Seconds of CPU per sample for decoding its picture, which only the format "decoded" saves; 0 = there are no pictures."""
    transform_cpu: float | None = None
    """Seconds of CPU per sample for what the dataset does with a sample once it has read it, in any format; None = not known."""
    notes: tuple[str, ...] = field(default=())
    to_frame = frame_method("readings", Reading, "blocked")
    plot = plot_method("formats")

    def reading(self, format: str, order: str = "", place: str = "", cache: str = "") -> Reading | None:
        """The measurement of a format; without `place` or `cache`, of the farthest place and the slowest cache. None = not measured."""
        found = [r for r in self.readings if r.format == format and r.order == (order or self.order)]
        found = [r for r in found if (not place or r.place == place) and (not cache or r.cache == cache)]
        return min(found, key=lambda r: (r.place != "remote", r.cache != "cold"), default=None)

    def stored(self, format: str) -> StoredFormat:
        """How a format stores the samples."""
        return next(stored for stored in self.formats if stored.format == format)

    @property
    def ranked(self) -> tuple[Reading, ...]:
        """One reading per format, the way it will be read, fastest first; the source and decoded pictures are not among them."""
        found = [self.reading(stored.format) for stored in self.formats if stored.format not in (AS_IT_IS, PREPARED)]
        return tuple(sorted((reading for reading in found if reading is not None), key=lambda reading: reading.seconds))

    @property
    def best(self) -> str:
        """The recommended format: the fastest; of those about as fast, one that needs no package and has the fewest bytes."""
        ranked = self.ranked
        alike = [reading.format for reading in ranked if reading.seconds <= ALIKE * ranked[0].seconds]
        return min(alike, key=lambda name: (bool(self.stored(name).needs), self.stored(name).stored_bytes))

    @property
    def speedup(self) -> float | None:
        """Speedup of reading a sample by changing from the source to the recommended format; None = the source was not read this way."""
        now, then = self.reading(AS_IT_IS), self.reading(self.best)
        return now.seconds / then.seconds if now is not None and then is not None else None

    @property
    def recommendation(self) -> str:
        """The recommended format, and why."""
        ranked, best = self.ranked, self.best
        reading = self.reading(best)
        assert reading is not None
        if best == ranked[0].format:
            others = f", the next ({ranked[1].format}) {units.seconds(ranked[1].seconds)}" if len(ranked) > 1 else ""
            reason = f"it is the fastest read at {self._way(reading)}: {units.seconds(reading.seconds)} per sample{others}"
        else:
            fastest = ranked[0]
            reason = (
                f"read at {self._way(reading)} it takes {units.seconds(reading.seconds)} per sample, about as long as the fastest "
                f"({fastest.format}, {units.seconds(fastest.seconds)}), and needs "
                + ("no package" if self.stored(fastest.format).needs else "fewer bytes")
            )
        gain = f"; {units.times(self.speedup)} as fast as it is" if self.speedup is not None else ""
        return f"{best}: {reason}{gain}"

    def _way(self, reading: Reading) -> str:
        order = "random" if reading.order == "random" else "its order"
        return f"{order}, {reading.cache}, {reading.place}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of formats that read much more from the disk than the sample itself."""
        return tuple(
            f"{stored.format}: a sample read at random costs its whole group of {stored.rows_read_for_one:,.0f} samples "
            f"(read amplification {stored.rows_read_for_one:,.0f}×)"
            for stored in self.formats
            if stored.rows_read_for_one >= 2
        )

    def left_of_waiting(self) -> float | None:
        """The fraction of the waiting for storage that is left with the best format, on the local disk; None = not measured.

        Where the source hardly waits, there is nothing to gain, and the fraction is 1.
        """
        now, copy = self.reading(AS_IT_IS), self._local_copy()
        if now is None or copy is None:
            return None
        return min(1.0, copy.blocked / now.blocked) if now.blocked > 0 else 1.0

    def left_of_reading(self) -> float | None:
        """The fraction of the CPU of reading, such as that of the requests to a server, that is left with the best format on the local
        disk; more than 1 where it takes more; None = not measured.
        """
        now, copy = self.reading(AS_IT_IS), self._local_copy()
        return copy.cpu / now.cpu if now is not None and copy is not None and now.cpu > 0 else None

    def reading_cpu(self, fetch_cpu: float, batch_size: int | None) -> tuple[float, float]:
        """CPU seconds of a batch that reading takes, as (least, most).

        If it is known what else the dataset does (`transform_cpu`), both are `fetch_cpu` times the share of reading in the two, which were
        timed together: a loader beside which a model trains may take more or less for the same work. Otherwise, reading takes at least what
        it took here, and at most all.

        Args:
            fetch_cpu: seconds of CPU that the dataset takes for a batch, in a loader.
            batch_size: samples of the batch; None = not known.
        """
        now = self.reading(AS_IT_IS)
        cpu = now.cpu if now is not None else 0.0
        if self.transform_cpu is not None and cpu > 0:
            share = fetch_cpu * cpu / (cpu + self.transform_cpu)
            return share, share
        return min(fetch_cpu, cpu * (batch_size or 0)), fetch_cpu

    def _local_copy(self) -> Reading | None:
        return self.reading(self.best, place="local") if self.ranked else None

    def left_of_cpu(self) -> float | None:
        """The fraction of the CPU of reading and decoding that is left where pictures are stored decoded; None = not measured."""
        now, then = self.reading(AS_IT_IS), self.reading(PREPARED)
        if now is None or then is None or not self.decode_cpu:
            return None
        return min(1.0, then.cpu / (now.cpu + self.decode_cpu))

    @property
    def table(self) -> Table:
        """A row per format: time and CPU of a sample in each way of reading, bytes on the disk."""
        ways = list(dict.fromkeys((r.place, r.order, r.cache) for r in self.readings))
        rows = []
        for stored in self.formats:
            cells: list[str] = [stored.format]
            for place, order, cache in ways:
                reading = self.reading(stored.format, order, place, cache)
                cells.append(units.seconds(reading.seconds) if reading else units.MISSING)
            main = self.reading(stored.format)
            amplification = main.disk_bytes / self.payload_bytes if main and main.disk_bytes and self.payload_bytes else None
            cells += [
                units.seconds(main.cpu if main else None),
                units.bytes_(stored.stored_bytes),
                units.times(amplification),
                units.seconds(stored.write_seconds) if stored.write_seconds else units.MISSING,
            ]
            rows.append(cells)
        columns = ("format", *(f"{place} {order} {cache}" for place, order, cache in ways), "CPU", "stored", "disk / payload", "writing")
        notes = [f"recommended: {self.recommendation}", *self.warnings, *self.notes]
        title = f"{self.samples:,} samples of {units.bytes_(self.payload_bytes)}; per sample, measured"
        return Table(columns=columns, rows=rows, title=title, note="\n".join(notes))


def fastest(readings: Sequence[Reading]) -> Reading:
    """The reading of several rounds that was disturbed least."""
    return min(readings, key=lambda reading: reading.seconds)
