"""Samples the stack of the training thread every few milliseconds, and names the user's lines where it spends its time.

Time in operators of torch can be left out of a line, so that what remains is Python and waiting.
"""

import dis
import linecache
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Self

import torch

from workbench.core.package import ROOT, is_installed, is_standard, is_workbench
from workbench.harness.results import Place

_TORCH_FILES = f"{Path(torch.__file__).parent.as_posix()}/"
WAITS = re.compile(r"\.(item|tolist|cpu|numpy|synchronize)\(")
"""Calls of torch that wait for the device. Their time counts as the line's, not as torch's."""
ARITHMETIC = ("BINARY_", "COMPARE_OP", "UNARY_", "STORE_SUBSCR", "CONTAINS_OP")
"""Instructions at which Python itself never releases the interpreter. A sample there means that C code, such as an operator of torch, has
released it."""
FIRST_NAME = re.compile(r"[\s(\[]*([^\W\d]\w*)")

_texts: dict[tuple[int, int], tuple[CodeType, str, bool]] = {}
"""Id of a code object and offset of an instruction → the code, the instruction's source, whether it is arithmetic."""


def in_torch(frame: FrameType) -> bool:
    """Is an operator of torch running, or torch's Python code around it? To be called right after this thread got the interpreter."""
    code = frame.f_code
    if code.co_filename.startswith(_TORCH_FILES) or _serves_torch(frame):
        return True
    text, arithmetic = _instruction(code, frame.f_lasti)
    if not text or WAITS.search(text):
        return False
    root = FIRST_NAME.match(text)
    name = root.group(1) if root else ""
    value = frame.f_locals.get(name, frame.f_globals.get(name))
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return True
    if arithmetic:
        numpy = sys.modules.get("numpy")
        return not (numpy and isinstance(value, numpy.ndarray))
    origin = getattr(value, "__name__", "") if isinstance(value, type(sys)) else getattr(value, "__module__", "")
    return isinstance(origin, str) and origin.partition(".")[0] == "torch"


def _serves_torch(frame: FrameType) -> bool:
    """Is the frame one of the standard library that torch has called?"""
    at: FrameType | None = frame
    while at is not None and is_standard(at.f_code.co_filename):
        at = at.f_back
    return at is not None and at is not frame and at.f_code.co_filename.startswith(_TORCH_FILES)


def _instruction(code: CodeType, at: int) -> tuple[str, bool]:
    """The source text of an instruction, and whether it is arithmetic."""
    key = id(code), at
    if (known := _texts.get(key)) is None:
        known = _texts[key] = (code, *_find(code, at))
    return known[1:]


def _find(code: CodeType, at: int) -> tuple[str, bool]:
    if at < 0:
        return "", False
    number, last, begin, end = next(islice(code.co_positions(), at // 2, None), (None,) * 4)
    name = dis.opname[code.co_code[at]]
    if number is None or begin is None or not (name.startswith(ARITHMETIC) or "CALL" in name):
        return "", False
    line = linecache.getline(code.co_filename, number).encode()
    text = line[begin : end if last == number else None].decode(errors="replace")
    return text, name.startswith(ARITHMETIC)


INTERVAL = 5e-3
"""Seconds between two samples."""
SWITCH = 5e-5
"""Switch interval of the interpreter for a fine sampler, in seconds. Within Python's default of 5 ms, the training thread reaches an
operator and releases the interpreter there, so that Python code between operators would not be sampled."""
MIN_LOOKS = 20
"""Samples from which on shares of lines are told. Chosen: then a share of a tenth is known to ± 0.07. With half, a line
that was sampled once is named; with twice, less is said of steps longer than a tenth of a second."""
MAX_COST = 0.01
"""Largest fraction of the time that sampling may take. Deep stacks are sampled less often to stay below it. Chosen: below the noise of a
block. With twice as much, lines are known sooner, and steps measured 1 % longer."""
USER, PACKAGE, LIBRARY, OURS = range(4)
"""Whose code a file is: the user's; an installed package's; torch's, Python's or the workbench's; the workbench's where it calls the user's
code."""
SAMPLE_CODE = ("train/tasks.py", "train/models.py", "data/samples.py")
"""Files of the workbench that count as the user's."""
ENGINES = ("harness/", "timeline/", "diagnos", "programs/")
"""Beginnings of paths of files that call the user's code. So do all files in folders named `measure`."""
TYPED = ("<stdin>", "<string>", "<console>", "<ipython")
"""Beginnings of file names of code that a user has typed."""
KINDS = ("checkpoint", "evaluation", "drawing", "logging", "optimizer")
"""Kinds of work that are recognised in a stack, the most specific first."""
FILES = {
    "checkpoint": re.compile(r"torch/distributed/checkpoint/|safetensors/|torch/serialization\.py$"),
    "drawing": re.compile(r"/(matplotlib|seaborn|plotly)/"),
    "logging": re.compile(r"/logging/__init__\.py$|torch/utils/tensorboard/|/(wandb|mlflow|tensorboardX|tqdm|loguru|rich)/"),
    "optimizer": re.compile(r"torch/optim/(?!lr_scheduler|swa_utils)"),
}
NAMES = {
    "checkpoint": re.compile(
        r"(^|_)(checkpoint|checkpoints|ckpt|snapshot)(_|$)|(^|_)(save|saving)_(.*_)?(model|net|network|weight|parameter|param|state|optimizer)s?(_|$)",
        re.IGNORECASE,
    ),
    "evaluation": re.compile(r"(^|_)(eval|evaluate|evaluation|valid|validate|validation)(_|$)", re.IGNORECASE),
    "logging": re.compile(r"(^|_)(log|logs|logging|report|print)(_|$)", re.IGNORECASE),
}
"""Words in the names of functions. What a function saves without a word for it, such as a picture, is no checkpoint."""
WRITERS = re.compile(r"(^|_)save(_|$)")
"""In the names of those functions of torch.serialization that write a file."""
SOURCE = {
    "checkpoint": re.compile(r"\btorch\.save\(|\bfsync\(|\bpickle\.dump\(|\bnp\.save"),
    "logging": re.compile(r"\bprint\(|\bjson\.dump|\.write\(|\.writerow\(|\.flush\(|\bwandb\.|\.add_scalar"),
}
"""Calls of C functions, which have no frame and are recognised by the line that calls them."""


TRAINING = re.compile(r"/torch/(optim/|nn/parallel/|nn/utils/|autograd/(__init__|graph)\.py$|_dynamo/|distributed/)")
"""Files of torch whose frames in a stack show that the model, backward or the optimizer is at work."""
LOSSES = re.compile(r"loss|entropy|kl_div|ctc")
"""In the names of those functions of torch.nn.functional that compute a loss."""


class StackSampler:
    """Looks at the stack of a thread every few milliseconds: `with StackSampler() as sampler: …; sampler.lines()`.

    A sample has the weight of the time since the sample before it, so code that blocks the interpreter counts in full.
    """

    def __init__(
        self, *, every: float = INTERVAL, fine: bool = False, operators: bool = True, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Prepare the sampler. It starts with the `with` block.

        Args:
            every: seconds between two samples.
            fine: also sample short calls. All threads then wait less for the interpreter, which may change what is measured.
            operators: does a line's time include operators of torch? If not, it is Python code, waiting, and other C code only.
            clock: gives the time in seconds.
        """
        self._every, self._fine, self._operators, self._clock = every, fine, operators, clock
        self._switch = 0.0
        self.call: int | None = 0
        """The number of the call of step() that samples belong to; None = no call. The caller of step() sets it."""
        self._seen: dict[int, Counter[Place | None]] = {}
        self._own: Counter[tuple[str, bool] | None] = Counter()
        self._lock = threading.Lock()
        self._over = threading.Lock()
        """Held while sampling goes on."""
        self._thread: threading.Thread | None = None
        self._watched = 0
        self._last = 0.0
        self.looks = 0
        """Number of samples."""
        self.spent = 0.0
        """CPU seconds that the samples took."""

    def __enter__(self) -> Self:
        """Begin to sample the calling thread."""
        self._watched, self._last = threading.get_ident(), self._clock()
        self._switch = sys.getswitchinterval()
        self._over.acquire()
        try:
            self._thread = threading.Thread(target=self._run, name="workbench-sampler", daemon=True)
            self._thread.start()
            if self._fine:
                sys.setswitchinterval(SWITCH)
        except BaseException:  # Ctrl-C as well: nobody else restores the interval then
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop sampling."""
        if self._fine:
            sys.setswitchinterval(self._switch)
        self._over.release()
        if self._thread and self._thread.is_alive():
            self._thread.join()
        self._thread = None

    def _run(self) -> None:
        pause, cost, before = self._every, 0.0, 0.0
        while not self._over.acquire(timeout=pause):  # and look at once: whatever else is done first lets the other thread go on
            frame = sys._current_frames().get(self._watched)
            begun = time.thread_time()
            self._note(frame)
            del frame  # it keeps alive what its function works on
            took = time.thread_time() - begun
            self.spent += took
            cost, before = cost + (min(took, before) - cost) / 8, took  # one look may cost far more, as where garbage is collected
            pause = max(self._every, cost / MAX_COST)
        self._over.release()

    def _note(self, frame: FrameType | None) -> None:
        now, call = self._clock(), self.call
        since, self._last = now - self._last, now
        self.looks += 1
        if frame is not None and call is not None:
            try:
                place = place_of(frame) if self._operators or not in_torch(frame) else None
                own = None if self._operators else own_line_of(frame)
            except AttributeError:  # torch.compile's frames are seen half made on Python 3.11: f_code is a cell then
                return
            with self._lock:
                self._seen.setdefault(call, Counter())[place] += since  # type: ignore[assignment]
                self._own[own] += since  # type: ignore[assignment]

    def places(self, call: int) -> Mapping[Place, float]:
        """Place → seconds that the thread spent there during a call of step()."""
        with self._lock:
            return {place: seconds for place, seconds in self._seen.get(call, {}).items() if place}

    def lines(self, calls: Collection[int] | None = None, *, most: int = 8, least: float = 0.01) -> tuple[tuple[str, float], ...]:
        """The user's lines with their share of the sampled time, largest first.

        Args:
            calls: calls of step() to include; None = all.
            most: largest number of lines.
            least: lines with a smaller share are left out.
        """
        with self._lock:
            some = [dict(seen) for call, seen in self._seen.items() if calls is None or call in calls]
        total = sum(sum(seen.values()) for seen in some)
        lines = dict[str, float]()
        for seen in some:
            for place, seconds in seen.items():
                if place:
                    lines[place.line] = lines.get(place.line, 0.0) + seconds / total
        return tuple(sorted(((line, share) for line, share in lines.items() if share >= least), key=lambda item: -item[1])[:most])

    def own_lines(self, *, helpers: bool = False, looks: int = MIN_LOOKS) -> tuple[tuple[str, float], ...]:
        """The user's lines outside of modules, losses, backward and optimizers (see `own_line_of`), operators of torch included, with their
        share of the sampled time, largest first. Only of a sampler whose `lines` leave operators out.

        Args:
            helpers: instead, those of functions that a module's `forward` calls.
            looks: of fewer samples nothing is said.
        """
        with self._lock:
            own = self._own.copy()
        total = sum(own.values())
        if self.looks < looks or not total:
            return ()
        return tuple((seen[0], seconds / total) for seen, seconds in own.most_common() if seen and seen[1] == helpers)


def own_line_of(frame: FrameType | None) -> tuple[str, bool] | None:
    """The innermost line of the user's code in a stack, and whether it is of a function that a module's `forward` calls; None if a module,
    a loss, backward or an optimizer is at work there.
    """
    best: str | None = None
    found: FrameType | None = None
    last: FrameType | None = None
    """The user's frame that was met last."""
    while frame is not None:
        code = frame.f_code
        whose, kind, is_module = _facts(code)
        if whose == OURS:
            break
        if is_module and best and found is not last:
            return best, True  # called by a forward, and none itself
        if is_module or kind == "optimizer" or TRAINING.search(code.co_filename):
            return None
        if LOSSES.search(code.co_name) and code.co_filename.endswith("/torch/nn/functional.py"):
            return None
        if whose == USER and best is None:
            best = _label(code, frame.f_lineno or code.co_firstlineno)
            found = frame
            while found.f_code.co_name.startswith("<") and found.f_back:  # a comprehension belongs to its function
                found = found.f_back
        last = frame if whose == USER else last
        frame = frame.f_back
    return None if best is None else (best, False)


def place_of(frame: FrameType | None) -> Place | None:
    """The innermost line of the user's code in a stack, with the kind of work there. None if no code in the stack is the user's.

    Frames outside the workbench's call of the user's code are not looked at. A line of an installed package is taken if none is the user's.
    """
    best: tuple[int, CodeType, int] | None = None
    kinds, module = set[str | None](), None
    while frame is not None:
        code = frame.f_code
        whose, kind, is_module = _facts(code)
        if whose == OURS:
            break
        if whose < (best[0] if best else LIBRARY):
            best = whose, code, frame.f_lineno or code.co_firstlineno  # some instructions have no line
        if kind:
            kinds.add(kind)
        if is_module:
            module = frame
        frame = frame.f_back
    if best is None:
        return None
    _, code, number = best
    kinds.add(_kind_of_line(code.co_filename, number))
    if module is not None and getattr(module.f_locals.get("self"), "training", True) is False:
        kinds.add("evaluation")
    return _place(_label(code, number), next((kind for kind in KINDS if kind in kinds), None))


@lru_cache(maxsize=4096)
def _place(line: str, kind: str | None) -> Place:
    return Place(line, kind)


def _label(code: CodeType, number: int) -> str:
    name = Path(code.co_filename).name
    if "ipykernel_" in code.co_filename or code.co_filename.startswith("<ipython"):
        name = "cell"
    return f"{name}:{number} {code.co_name}"


_known: dict[int, tuple[CodeType, tuple[int, str | None, bool]]] = {}
"""Id of a code object → the code and its facts. By id, since hashing a code object takes as long as reading the whole stack."""


def _facts(code: CodeType) -> tuple[int, str | None, bool]:
    """Whose code a function is, the kind of work by its name or file, and whether it is `Module._call_impl`."""
    if (known := _known.get(id(code))) is None:
        known = _known[id(code)] = code, _find_facts(code)
    return known[1]


def _find_facts(code: CodeType) -> tuple[int, str | None, bool]:
    path, name = code.co_filename.replace("\\", "/"), code.co_name
    whose = _whose(path)
    kind = next((kind for kind, pattern in FILES.items() if pattern.search(path)), None)
    if kind == "checkpoint" and path.endswith("serialization.py") and not WRITERS.search(name):
        kind = None  # reading one
    if kind is None and whose in (USER, PACKAGE):
        kind = next((kind for kind, pattern in NAMES.items() if pattern.search(_words(name))), None)
    return whose, kind, path.endswith("torch/nn/modules/module.py") and name == "_call_impl"


def _words(name: str) -> str:
    """saveCheckpoint → save_Checkpoint."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)


@lru_cache(maxsize=8192)
def _kind_of_line(path: str, number: int) -> str | None:
    line = linecache.getline(path, number)
    return next((kind for kind, pattern in SOURCE.items() if pattern.search(line)), None)


@lru_cache(maxsize=4096)
def _whose(path: str) -> int:
    if is_workbench(path):
        inner = path.removeprefix(f"{ROOT.as_posix()}/")
        if "measure" in inner.split("/") or inner.startswith(ENGINES):
            return OURS
        return USER if inner in SAMPLE_CODE else LIBRARY
    if path.startswith("<"):
        return USER if path.startswith(TYPED) else LIBRARY
    if path.startswith(_TORCH_FILES) or "/torchinductor_" in path:
        return LIBRARY
    if is_installed(path):
        return PACKAGE
    return LIBRARY if is_standard(path) else USER
