"""Runs Python scripts, each in a process of its own that has imported torch already: a fork, which is there seconds sooner than a new one.

What runs there starts as `python script.py …` does, and ends as that does: threads are joined, exit handlers called. What has to see torch
being imported needs a new process.
"""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

IMPORTS = "import torch, torch._dynamo, torch.distributed"
"""The optimizer's first step imports torch._dynamo."""


class Forks:
    """The process that waits; it ends with the one that started it."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        root = Path(__file__).parents[1]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}
        command = [sys.executable, "-m", "tests.forked"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True
        )

    def run(self, folder: Path, *argv: str | Path, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        """What a script (a path, or "-c" and code) leaves, as `subprocess.run` says it; its streams are files in the folder."""
        assert self._process.stdin
        assert self._process.stdout
        streams = [str(folder / f"forked.{name}") for name in ("stdout", "stderr")]
        order = {"argv": list(map(str, argv)), "env": dict(os.environ if env is None else env), "streams": streams}
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            code = int(self._process.stdout.readline())
        except BaseException:  # such as the limit of time
            os.killpg(self._process.pid, signal.SIGKILL)
            self.close()
            self._start()
            raise
        return subprocess.CompletedProcess(order["argv"], code, *(Path(stream).read_text() for stream in streams))

    def close(self) -> None:
        """No more of them."""
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def orders() -> Iterator[dict[str, Any]]:
    """What is to be run, in a fork each; the process that waits gets none and says how each ended."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        if not (pid := os.fork()):
            answers.detach()
            yield json.loads(line)
            return
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def become(order: dict[str, Any]) -> None:
    """This process is the one that the order is about."""
    os.environ.clear()
    os.environ.update(order["env"])
    for number, name in ((0, os.devnull), *zip((1, 2), order["streams"], strict=True)):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    first, *rest = order["argv"]
    sys.argv = [first, *(rest[1:] if first == "-c" else rest)]
    sys.path[0] = "" if first == "-c" else str(Path(first).parent)


if __name__ == "__main__":
    exec(IMPORTS, {})
    for order in orders():
        become(order)
        if order["argv"][0] == "-c":
            exec(compile(order["argv"][1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(order["argv"][0], run_name="__main__")
