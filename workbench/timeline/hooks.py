"""Marks the phases of an unedited loop by hooks on its model and optimizer, and by wrappers around functions of torch."""

import contextlib
import math
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from itertools import islice
from threading import get_ident
from typing import TYPE_CHECKING, Any

from workbench.timeline.analysis.step_table import UNREAD, put, taken_means
from workbench.timeline.loops import OpenLoops
from workbench.timeline.marks import BACKWARD, END_FORWARD, END_PHASE, FORWARD, H2D, OPTIMIZER, OWN_BACKWARD

if TYPE_CHECKING:
    import torch


OPEN_LOOPS = OpenLoops()
"""The loops that are measured by hooks. Marks go to the one that runs, and only from its own thread."""
os.register_at_fork(after_in_child=OPEN_LOOPS.clear)


def on_model(module: "torch.nn.Module", begin: Callable[[], None] | None = None) -> "Patch":
    """Mark the calls of a module, also those that end by an exception; `begin` is called where no loop runs, and may begin one.

    It sits where `module.compile()` puts the compiled call. Forward hooks cost 5 µs more in the midst of a training step, they travel with
    copies and pickles of the module, and would be compiled as well.
    """

    def wrap(compiled: Callable[..., Any] | None) -> Callable[..., Any]:
        call = compiled or module._call_impl

        def marked(*args: Any, **kwargs: Any) -> Any:
            if begin and OPEN_LOOPS.thread is None:
                begin()
            if get_ident() != OPEN_LOOPS.thread:
                return call(*args, **kwargs)
            OPEN_LOOPS.forward = True
            now, marks = OPEN_LOOPS.now, OPEN_LOOPS.marks
            marks.extend((now(), FORWARD))
            try:
                output = call(*args, **kwargs)
            finally:
                marks.extend((now(), END_FORWARD))
            OPEN_LOOPS.losses = losses_in(output)
            return output

        return marked

    return Patch(module, "_compiled_call_impl", wrap)


def losses_in(output: Any) -> tuple[int, ...]:
    """Numbers of the operations of autograd that made the scalars in what a model returned."""
    if getattr(output, "ndim", 0):
        return ()  # the usual case: a tensor of many numbers
    if isinstance(output, Mapping):
        output = output.values()
    elif not isinstance(output, (tuple, list)):
        output = (output,)
    nodes = [value.grad_fn for value in islice(output, 8) if getattr(value, "grad_fn", None) is not None and not value.dim()]
    return tuple(node._sequence_nr() for node in nodes)


_SCALING = frozenset({"DivBackward0", "MulBackward0", "NegBackward0", "ToCopyBackward0"})
"""Operations after which a loss is the same but for a factor, as accumulation and a GradScaler have it."""


def _is_own(loss: Any) -> bool:
    """Did the model return this loss, but for a factor?"""
    node = getattr(loss, "grad_fn", None)
    while node is not None:
        if node._sequence_nr() in OPEN_LOOPS.losses:
            return True
        before = [parent for parent, _ in node.next_functions if parent is not None]
        node = before[0] if len(before) == 1 and node.name() in _SCALING else None
    return False


def optimizer_begins(_optimizer: object, _args: object, _kwargs: object, /) -> None:
    """The hook before an optimizer step."""
    if get_ident() == OPEN_LOOPS.thread:
        now = OPEN_LOOPS.now
        OPEN_LOOPS.marks.extend((now(), OPTIMIZER))


def optimizer_ends(_optimizer: object, _args: object, _kwargs: object, /) -> None:
    """The hook after an optimizer step."""
    if get_ident() == OPEN_LOOPS.thread:
        now = OPEN_LOOPS.now
        OPEN_LOOPS.marks.extend((now(), END_PHASE))


_users: "weakref.WeakKeyDictionary[Callable[..., Any], int]" = weakref.WeakKeyDictionary()
"""The wrappers that are in place, and how many need each."""


class Patch:
    """Wraps a function of torch, or the call of a module, once for all who need it, until nobody needs it. Keeps no module alive."""

    def __init__(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        ours = getattr(owner, name)
        if ours not in _users:
            before, ours = ours, wrap(ours)
            ours.__wrapped__, ours.inherited = before, name not in vars(owner)
            _setter(owner)(owner, name, ours)
        _users[ours] = _users.get(ours, 0) + 1
        self._owner, self._name, self._ours = weakref.ref(owner), name, weakref.ref(ours)

    def remove(self) -> None:
        """Need it no longer. If someone has wrapped ours meanwhile, ours stays below, and marks nothing without a loop that runs."""
        owner, ours = self._owner(), self._ours()
        if owner is None or ours is None:
            return
        _users[ours] -= 1
        if _users[ours] or getattr(owner, self._name) is not ours:
            return
        del _users[ours]
        if ours.inherited:
            (object.__delattr__ if _setter(owner) is object.__setattr__ else delattr)(owner, self._name)
        else:
            _setter(owner)(owner, self._name, ours.__wrapped__)


def _setter(owner: Any) -> Callable[[Any, str, Any], None]:
    """Sets an attribute. A module may pass its attributes on to one that it wraps, as Fabric's does, which would then call itself."""
    return setattr if isinstance(owner, type) else object.__setattr__


def wrap_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark `torch.autograd.backward`, which `Tensor.backward` and so GradScaler and Accelerate call."""

    @wraps(backward)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if get_ident() != OPEN_LOOPS.thread:
            return backward(*args, **kwargs)
        now, marks = OPEN_LOOPS.now, OPEN_LOOPS.marks
        begin = args[0] if args else kwargs.get("tensors")
        own = OPEN_LOOPS.losses and _is_own(begin)
        OPEN_LOOPS.losses = ()
        if (top := OPEN_LOOPS.top) and top.loss:
            top.loss(begin)
        marks.extend((now(), OWN_BACKWARD if own else BACKWARD))
        try:
            return backward(*args, **kwargs)
        finally:
            marks.extend((now(), END_PHASE))

    return marked


def wrap_copy(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Mark `Tensor.to` and `Tensor.cuda` where they copy from the host's memory to the device's."""
    always = copy.__name__ == "cuda"

    @wraps(copy)
    def marked(tensor: "torch.Tensor", *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type != "cpu" or not (always or to_cuda(args, kwargs)) or get_ident() != OPEN_LOOPS.thread:
            return copy(tensor, *args, **kwargs)
        OPEN_LOOPS.mark(H2D)
        try:
            return copy(tensor, *args, **kwargs)
        finally:
            OPEN_LOOPS.mark(END_PHASE)

    return marked


def to_cuda(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Do these arguments of `Tensor.to` name a CUDA device?"""
    where = kwargs.get("device", args[0] if args else kwargs.get("other"))
    where = getattr(where, "device", where)  # like another tensor
    return str(where).startswith("cuda") or (isinstance(where, int) and not isinstance(where, bool))


@contextlib.contextmanager
def marked_functions() -> Iterator[None]:
    """Inside, backward and the copies to the device are marked."""
    import torch

    patches = [Patch(torch.autograd, "backward", wrap_backward)]
    if torch.version.cuda or torch.version.hip:  # whether there is a device must not be asked: the script may yet choose, or fork
        patches += [Patch(torch.Tensor, name, wrap_copy) for name in ("to", "cuda")]
    try:
        yield
    finally:
        for patch in patches:
            patch.remove()


KEPT = 16384
"""Places of the ring. Of the losses since the last look, the latest half of so many are looked at."""
FORGOTTEN = 1 << 20
"""So many losses of a CPU that wait mean that nobody looks at them any more."""
FIRST, SOMETIMES = 64, 61
"""Of a CPU's losses, so many are asked at first whether a scaler has multiplied them, and later one in so many: to ask takes as long as to
read them. (Another prime number than the losses of a step, so that each of these has its turn.) Where one was scaled, all are asked."""


class Losses:
    """The losses of a training, taken where they are made and looked at later by another thread, without a wait for the device.

    A loss on a device is copied into the host's memory by the device itself, when it comes to it: `item()` would wait for all work before
    it. A look that comes earlier sees UNREAD. On a CPU there is nothing to wait for, and `item()` takes a tenth of a copy's time. Between
    two losses a training drives all of this out of the caches, so that each call here counts more than it seems.
    """

    def __init__(self) -> None:
        self._taken = self._read = self._steps = 0
        self._unscaled = 0.0  # losses of a CPU that no scaler had multiplied; -inf as soon as one was
        self._unasked = 0  # of the next losses, how many need not be asked
        self._tensor: Any = None  # their type
        self._alike: Any = None  # the same, as long as all of that type have been single numbers of a CPU
        self._on_cpu: deque[float] = deque()
        """Losses of a CPU that are not among the others yet."""
        self._append = self._on_cpu.append
        self._values: Any = None
        self._seen: Any = None  # the same memory, for numpy
        self._pinned = self._ended = self._on_device = self._mixed = False
        self._turn, self._in_turn, self._turns = 0, 1, 0

    def add(self, loss: Any) -> None:
        """The tensor from which a backward begins; what is no single number of torch's own is passed over."""
        turn = self._turn
        self._turn = turn + 1 if turn + 1 < self._turns else 0
        if turn >= self._in_turn:
            if type(loss) is self._alike:
                self._append(math.nan)  # without a question to torch, whose code is outside the caches by now
            else:
                self._skip(loss)
        elif self._unasked and type(loss) is self._tensor and loss.is_cpu:
            self._unasked -= 1
            try:
                self._append(loss.item())
            except Exception as error:
                self._failed(loss, error)
        else:
            self._add_asked(loss)

    def _skip(self, loss: Any) -> None:
        """A loss that is not read, in the place that it would have."""
        if not self._ended and type(loss).__name__ == "Tensor" and loss.numel() == 1:
            if self._on_device:
                self._seen[self._taken % KEPT] = UNREAD
                self._taken += 1
            else:
                self._append(math.nan)

    def _add_asked(self, loss: Any) -> None:
        """A loss that is asked what it is."""
        if self._ended or type(loss).__name__ != "Tensor":
            return
        try:
            if loss.is_cpu and type(loss.grad_fn).__name__ != "MulBackward0":
                self._append(loss.item())
                self._unscaled += 1
                if self._unscaled >= FIRST:
                    self._unasked, self._tensor = SOMETIMES - 1, type(loss)
                    self._alike = None if self._mixed else self._tensor
            elif loss.numel() == 1:
                self._unscaled, self._alike = -math.inf, None
                value, place = _unscaled(loss), self._taken % KEPT
                if value is None:
                    self._skip(loss)
                elif value.is_cpu:
                    self._append(value.item())
                else:
                    self._ring(pinned=value.is_cuda)[place : place + 1].copy_(value.reshape(1), non_blocking=True)
                    self._taken += 1
                    self._on_device = True
            if len(self._on_cpu) >= FORGOTTEN:
                self._end()
        except Exception as error:
            self._failed(loss, error)

    def _failed(self, loss: Any, error: Exception) -> None:
        """A loss cannot be taken, such as in the capture of a CUDA graph; an alarm never ends a training."""
        self._mixed, self._alike = True, None
        if loss.numel() == 1:
            self._end()
            print(f"workbench: losses are not followed any more: {error!r}", file=sys.stderr, flush=True)

    def _end(self) -> None:
        self._ended, self._unasked, self._alike = True, 0, None

    def _ring(self, *, pinned: bool = False) -> Any:
        if self._values is None or pinned > self._pinned:  # only into pinned memory can a device copy without a wait
            import torch

            before, self._pinned = self._values, pinned
            self._values = torch.full((KEPT,), math.nan, pin_memory=pinned)
            self._seen = self._values.numpy()
            self._seen[:] = UNREAD if before is None else before.numpy()
        return self._values

    def take(self, steps: int, every: int = 1) -> list[float]:
        """The mean loss of each of the next steps; nan = not known, inf = NaN or infinite. Steps have as many losses as they had so far.

        Args:
            steps: of which losses are asked for.
            every: from now on, of so many steps, those of one are read. (Where a step has several, so many that one is whole.)
        """
        if count := len(self._on_cpu):
            waiting = [self._on_cpu.popleft().real for _ in range(count)]
            self._ring()
            put(self._seen, self._taken, waiting)
            self._taken += count
        taken = self._taken  # another thread goes on
        self._steps += steps
        each = max(1, round(taken / max(1, self._steps)))
        if every > 1:
            self._in_turn, self._turns = 2 * each - 1, every * each
        count = min(steps * each, taken - self._read)
        lost = min(steps, max(0, -((self._read + KEPT // 2 - taken) // each)))  # of so many steps, losses may be overwritten by later ones
        first, self._read = self._read + lost * each, self._read + count
        means = [math.nan] * lost + (taken_means(self._seen, first, self._read - first, each) if self._read > first else [])
        return means + [math.nan] * (steps - len(means))


def _unscaled(loss: Any) -> Any:
    """A loss without what a GradScaler has multiplied it by; on a device, or divided by that, also without its graph. None = by 0."""
    node = loss.grad_fn
    scale = getattr(node, "_saved_other", None) if node is not None and node.name() == "MulBackward0" else None
    if scale is None or scale.requires_grad or scale.numel() != 1:
        return loss if loss.is_cpu else loss.detach()
    scale = scale.detach().reshape(loss.shape)
    if scale.is_cpu:
        return loss.detach() / scale if scale.item() else None
    return loss.detach() / (scale + 1e-30)  # whether it is 0 must not be waited for; any other scale stays as it is


def threads_per_operator() -> int:
    """Threads of this process that share an operator on a CPU."""
    import torch

    return torch.get_num_threads()
