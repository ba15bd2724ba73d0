"""Measures passes over loaders: a `Loop` marks each `next()`, and `OpenLoops` gives marks to the one of several loops that runs."""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice, repeat
from typing import Any, Generic, TypeVar

from workbench.timeline.marks import AWAY, BACK, BATCH, BORDER, DATA_WAIT, END, END_PHASE, NEXT, NOWHERE, MarkRecorder, Marks
from workbench.timeline.steps import Row, StepBuilder, StepRules

T = TypeVar("T")


def samples_in(batch: Any, batch_size: int | None = None) -> int | None:
    """Samples of a batch, by the first dimensions of the tensors (or arrays) near its front; None if there are none, or if in doubt.

    Where they differ, some count tokens, nodes or boxes. In a list inside the batch every tensor may well be one sample
    (`tuple(zip(*samples))`), so such lists say nothing.

    Args:
        batch: of tensors in any containers.
        batch_size: samples of a full batch of its loader; None = not known. Only batches that differ from it are looked at closely.
    """
    first = batch[0] if batch.__class__ in (tuple, list) and batch else batch
    try:
        count = first.shape[0]
    except (AttributeError, IndexError, TypeError, RuntimeError):  # no tensor, one without dimensions, or a nested one
        sizes = _sizes(batch)
    else:
        if first is batch or count == batch_size:
            return count  # type: ignore[no-any-return]
        sizes = _sizes(batch) or [count]
    return _likely(sizes, batch_size or 1) if sizes else None


def _likely(sizes: list[int], full: int) -> int:
    """Which of these counts samples: all agree, or one is a full batch, or most tensors say so and it is less than a full batch.

    Where a full batch is not known, or is one item of the dataset (which may be a batch), it is the first, unless most say less: an
    `EmbeddingBag` takes the tokens of all texts, then where each begins, then come the labels.
    """
    if full in sizes and full > 1:
        return full
    if sizes.count(sizes[0]) == len(sizes):
        return sizes[0]
    times = {size: sizes.count(size) for size in sizes}
    common = [size for size in times if times[size] == max(times.values())]
    if full == 1:
        return common[0] if len(common) == 1 and 1 < common[0] < sizes[0] else sizes[0]
    return max((size for size in common if size < full), default=full)


def _sizes(batch: Any) -> list[int]:
    """First dimensions of the tensors that are as near the front of a batch as the first one; of more than 8, the first 8."""
    if isinstance(batch, (list, tuple)):
        parts = [*batch[:8]]
    elif isinstance(batch, Mapping):
        parts = [*islice(batch.values(), 8)]
    else:
        return []
    if sizes := [int(shape[0]) for part in parts if (shape := _shape(part)) and isinstance(shape, tuple)]:
        return sizes
    inner = [part for part in parts if isinstance(part, Mapping)]
    if not isinstance(batch, Mapping) and len(inner) == len(parts) and all(part.keys() == inner[0].keys() for part in inner):
        return []  # one for each sample
    return next((sizes for part in inner if (sizes := _sizes(part))), [])


def _shape(part: Any) -> Any:
    try:
        return getattr(part, "shape", None)
    except RuntimeError:  # a nested tensor has none
        return None


def batch_size_of(loader: Any) -> int | None:
    """Samples of a full batch of a DataLoader over a map-style dataset; None for any other loader, or where it is not known."""
    data = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(loader, data.DataLoader) or isinstance(loader.dataset, data.IterableDataset):
        return None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def expected_sizes(loader: Any) -> Iterator[int | None] | None:
    """Samples per batch as a DataLoader's options predict them, which costs less than looking at each batch.

    None unless it is over a map-style dataset and collates as torch does: another collate function may leave samples out, or pack them.
    """
    data = sys.modules.get("torch.utils.data")
    if data is None or type(loader) is not data.DataLoader or not loader.batch_size or isinstance(loader.dataset, data.IterableDataset):
        return None
    if loader.collate_fn is not data.default_collate:
        return None
    try:
        batches, last = len(loader), loader.batch_size
        if not loader.drop_last:
            last = len(loader.sampler) - loader.batch_size * (batches - 1)
    except TypeError:  # a sampler without a length
        return None
    return chain(repeat(loader.batch_size, batches - 1), (last,), repeat(None))


def check_loader(loader: object, caller: str) -> None:
    """Raise unless this is an iterable of batches, before anything is measured.

    Raises:
        ValueError: it is not an iterable, or is measured already.
    """
    if isinstance(loader, MeasuredBatches):
        raise ValueError(f"{caller} was given {loader!r}, which is measured already: give it the loader itself")
    if isinstance(loader, (str, bytes)) or not (isinstance(loader, Iterable) or hasattr(type(loader), "__getitem__")):
        raise ValueError(
            f"{caller} was given {loader!r}: it takes a DataLoader or any other iterable of batches, e.g. {caller}(train_loader)"
            + _INSTEAD.get(type(loader).__name__, "")
        )


_INSTEAD = {
    "Run": "; a run is watched already: run shows it live in a notebook, run.wait() waits for it, and run.timelines are its steps",
    "RunSpec": "; a spec is launched: wb.launch(spec)",
    "str": '; a script is launched: wb.launch("train.py", watch=True)',
}
"""Type of what is no loader → what to do with it."""


class MeasuredBatches(Generic[T]):
    """The batches of a loader, measured: every `for` over it is one pass."""

    def __init__(self, loader: Iterable[T]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[T]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a loader without a length says so itself


class Loop:
    """One pass over a loader, with a recorder of its own."""

    def __init__(self, recorder: MarkRecorder, rules: StepRules) -> None:
        self.recorder = recorder
        self.asked_again = True
        """Has it called `next()` since a loop below it did?"""
        self.updated = False
        """Has an optimizer stepped since it asked for a batch? So it is set from outside."""
        self.evaluates = False
        """Is it an evaluation inside a training loop? Some are not closed."""
        self.thread: int | None = None
        """The thread that runs it."""
        self.between: Callable[[], object] | None = None
        """Called by the thread that trains, between two batches."""
        self.loss: Callable[[Any], object] | None = None
        """Called by it with what a backward begins from."""
        self.side_by_side = False
        """Does the loop on top also wait for this one's batch?"""
        self._sizes: deque[int | None] = deque()  # samples per batch, each put here before its mark
        self._next_size: Callable[[], int | None] = self._sizes.popleft
        self._builder = StepBuilder(rules)

    def run(
        self,
        open_loops: "OpenLoops",
        loader: Iterable[T],
        watching: AbstractContextManager[object] | None = None,
        *,
        sized_by: object = None,
    ) -> Iterator[T]:
        """Yield the batches of a loader. Worker start-up counts as waiting for the first one; leaving the loop early ends it at once.

        Args:
            open_loops: the loops that are open; this one is among them while it runs.
            loader: gives the batches.
            watching: a context that is active as long as the loop is open.
            sized_by: the DataLoader that tells how many samples are in them, where `loader` is only its iterator.
        """
        now, marks = self.recorder.now, self.recorder.marks
        sized_by = loader if sized_by is None else sized_by
        full = batch_size_of(sized_by)
        if expected := expected_sizes(sized_by):
            self._next_size = expected.__next__
        read = self.recorder.read if self.recorder.clock == "device" else None
        with watching or nullcontext():
            open_loops.begin(self)
            marks.extend((now(), NEXT))
            try:
                for batch in loader:
                    if open_loops.top is self:
                        if not expected:
                            self._sizes.append(samples_in(batch, full))
                        marks.extend((now(), BATCH))
                    else:
                        open_loops.waited(self)
                    yield batch
                    if open_loops.top is self:
                        self.asked_again, self.updated = True, False
                        marks.extend((now(), NEXT))
                        if open_loops.unread:
                            open_loops.read_ended()
                        if read:
                            read()
                        if self.between:
                            self.between()
                    else:
                        open_loops.wait(self)
            finally:
                open_loops.end(self)

    def mark(self, code: int) -> None:
        """Note the time under a code."""
        self.recorder.marks.extend((self.recorder.now(), code))

    def border(self) -> None:
        """In a loop without a loader: a step ends here, and the next one begins."""
        self._sizes.append(None)
        self.updated = False
        self.mark(NEXT)
        self.recorder.read()
        if self.between:
            self.between()
        self.mark(BORDER)

    def harvest(self) -> list[Row]:
        """The steps finished since the last harvest."""
        return self._builder.feed(*self.recorder.take(), self._next_size)

    def unfinished(self) -> Row | None:
        """The step that is under way, as far as it was harvested; None where no optimizer step is done."""
        return self._builder.unfinished()

    @property
    def ended(self) -> bool:
        """Has its END been harvested?"""
        return self._builder.ended


class OpenLoops:
    """The loops that are open, such as a validation inside a training loop, or two loaders side by side.

    `now`, `marks` and `thread` are those of the loop that runs. Code that another thread may call has to compare `thread`.
    """

    __slots__ = ("_open", "forward", "losses", "marks", "now", "thread", "top", "unread")

    def __init__(self) -> None:
        self._open: list[Loop] = []
        self.forward = False
        """Has a model been called since somebody set this to False?"""
        self.losses: tuple[int, ...] = ()
        """Numbers of the operations that made the numbers, perhaps losses, which the last call of a model returned."""
        self.unread: list[Loop] = []
        """Loops that are over, and whose last steps the device had not finished then."""
        self._update()

    def mark(self, code: int) -> None:
        """Note the time under a code, in the loop that runs, if any."""
        self.marks.extend((self.now(), code))

    def begin(self, loop: Loop) -> None:
        """A loop begins: until it ends, its time is `other` of the one around it."""
        if self.top:
            self.mark(AWAY)
        loop.thread = threading.get_ident()
        self._open.append(loop)
        self._update()

    def end(self, loop: Loop) -> None:
        """A loop is over; the one around it goes on."""
        self.waited(loop)
        loop.mark(END)
        if loop in self._open:
            self._open.remove(loop)
            if self.top is loop and self._update():
                self.mark(BACK)
        self.unread.append(loop)
        if loop.thread == threading.get_ident():  # else an iterator was left, and another thread collects it
            self.read_ended()

    def read_ended(self) -> None:
        """Read what the device has finished of the loops that are over."""
        loops, self.unread = self.unread, []
        for loop in loops:
            loop.recorder.read(at_once=True)
        self.unread += [loop for loop in loops if loop.recorder.unread]

    def wait(self, loop: Loop) -> None:
        """A loop that is not on top asks for a batch.

        If the top one did so, too, since the last time, they run side by side (`zip`, or two iterators): the top one keeps the marks, and
        waits. Otherwise the top one was left without being closed, and `loop` takes over.
        """
        assert self.top is not None
        if self.top.asked_again and loop in self._open and not self.top.evaluates:
            self.top.asked_again = False
            loop.side_by_side = True
            self.mark(DATA_WAIT)
        else:
            self.mark(AWAY)
            if loop in self._open:
                self._open.remove(loop)
            self._open.append(loop)
            self._update()
            self.mark(BACK)
            self.mark(NEXT)

    def waited(self, loop: Loop) -> None:
        """The loop beside the top one has its batch, or is over."""
        if loop.side_by_side:
            loop.side_by_side = False
            self.mark(END_PHASE)

    def clear(self) -> None:
        """Forget all loops, without a mark: this is another process now."""
        self._open.clear()
        self.unread.clear()
        self._update()

    def _update(self) -> bool:
        self.top: Loop | None = self._open[-1] if self._open else None
        self.now: Callable[[], Any] = self.top.recorder.now if self.top else int
        self.marks: Marks = self.top.recorder.marks if self.top else NOWHERE
        self.thread = self.top.thread if self.top else None
        return self.top is not None
