"""Estimates memory for another process: answers each JSON line on its input with one on its output, until the input or its parent ends.

`python -m workbench.programs.estimate_worker PARENT`, with the number of the parent process; `memory.estimator_process` starts it.
"""

import json
import os
import queue
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

from workbench.core.package import ROOT
from workbench.memory.estimator_process import Answer, Question

TICK = 1.0
"""Seconds between two checks that the parent is alive."""
SAMPLES = 16
"""Samples that a batch's shape is taken from."""


_SEEN: set[str] = set()
"""Specs estimated so far, by their text; those that shard take longer at the first time."""


def main() -> None:
    """Answer every line that comes in with one line that goes out. What tasks print goes to the standard error instead."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    questions: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(questions,), daemon=True).start()
    threading.Thread(target=_watch, args=(int(sys.argv[1]),), daemon=True).start()
    files = Files()
    while True:
        question = json.loads(questions.get())
        answers.write(json.dumps({"edited": files.edited} if files.edited else answer_or_error(question)) + "\n")
        answers.flush()
        files.note()


def _read(questions: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        questions.put(line)
    os._exit(0)  # no more questions can come


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(TICK)
    os._exit(0)  # its children may hold our standard input open


def answer_or_error(question: dict[str, Any]) -> dict[str, Any]:
    """The answer to a question, or {"error": message}."""
    try:
        os.chdir(question.pop("folder"))  # where relative paths of tasks begin
        return answer(Question.from_json(question)).to_json()
    except ValueError as error:
        return {"error": str(error)}
    except Exception as error:  # of ours or of a task: the message is all that the other process can get
        return {"error": f"{type(error).__name__}: {error}"}


def answer(question: Question) -> Answer:
    """Record a dry run on fake tensors.

    Raises:
        ValueError: it cannot be estimated; the message says why.
    """
    from workbench.memory.api import record
    from workbench.memory.estimate.examples import sample_batch
    from workbench.memory.estimate.plan import plan_of
    from workbench.runs import task as tasks

    spec = question.spec
    example = sample_batch(tasks.resolve(spec.task), min(spec.micro_batch, SAMPLES))
    plan = plan_of(spec, example, device=question.device, micro_batch=spec.micro_batch, sequence=question.sequence, image=question.image)
    log, rank = record(plan)
    kind = repr(spec.replace(micro_batch=1))
    first = not spec.whole_models and kind not in _SEEN
    _SEEN.add(kind)
    sizes = sizes_of(plan.example)
    return Answer(log=log, device=plan.device, rank=rank, world_size=plan.world_size, **sizes, first=first)


def sizes_of(batch: Any) -> dict[str, Any]:
    """How long the sequences and how large the images of a batch are: what `resized` can change."""
    from workbench.harness.batches import tensors_of

    tensors = tensors_of(batch)
    long = [t for t in tensors if t.dim() == 2 and not t.dtype.is_floating_point] + [t for t in tensors if t.dim() == 3]
    sides = [t.shape[-1] for t in tensors if t.dim() == 4 and t.shape[-1] == t.shape[-2]]
    return {"sequence": long[0].shape[1] if long else None, "image": sides[0] if sides else None}


class Files:
    """The user's own modules that were imported here, and whether one of them was edited since."""

    def __init__(self) -> None:
        paths = sysconfig.get_paths()
        self._others = tuple({str(Path(paths[name]).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
        self._others += (str(ROOT.resolve()),)
        self._seen: dict[str, int] = {}

    def note(self) -> None:
        """Remember what is imported by now."""
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if path and path not in self._seen and not str(Path(path).resolve()).startswith(self._others):
                self._seen[path] = _changed(path)

    @property
    def edited(self) -> list[str]:
        """Paths that are no longer what was imported."""
        return [path for path, when in self._seen.items() if _changed(path) != when]


def _changed(path: str) -> int:
    """When a file was last written; 0 if it is gone."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


if __name__ == "__main__":
    main()
