"""Runs Python scripts, alone or as ranks, in processes that have imported torch already: forks, there seconds sooner than new ones.

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
from collections.abc import Iterator, Mapping, Sequence
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
        return self._run(folder, argv, os.environ if env is None else env, [{}])

    def ranks(
        self, count: int, folder: Path, *argv: str | Path, env: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """The same of a script in so many processes with the variables of torchrun; where one fails, the others are killed."""
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's, it outlives the ranks
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        own = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        return self._run(folder, argv, os.environ if env is None else env, own)

    def train(self, ranks: int, folder: Path, *run_dirs: Path) -> "subprocess.CompletedProcess[str]":
        """Train what run directories say in so many ranks; of several their parent is that of the launch."""
        launched = run_dirs[0] if len(run_dirs) == 1 else run_dirs[0].parent
        return self.program("workbench.programs.train", ranks, folder, *run_dirs, launched=launched)

    def program(self, name: str, ranks: int, folder: Path, *words: str | Path, launched: Path) -> "subprocess.CompletedProcess[str]":
        """One of `workbench.programs` in so many ranks, as a launch starts it that has this directory."""
        from workbench.core.run_directory import ENV_RUN_DIR  # here: a process that waits has nothing of the library

        env = {**os.environ, "OMP_NUM_THREADS": "1", ENV_RUN_DIR: str(launched)}
        return self.ranks(ranks, folder, "-c", f"from {name} import main\nmain()", *words, env=env)

    def _run(
        self, folder: Path, argv: Sequence[str | Path], env: Mapping[str, str], own: Sequence[Mapping[str, str]]
    ) -> "subprocess.CompletedProcess[str]":
        """Of a process for each of the `own` variables."""
        assert self._process.stdin
        assert self._process.stdout
        streams = [str(folder / f"forked.{name}") for name in ("stdout", "stderr")]
        for stream in streams:
            Path(stream).write_text("")
        order = {"cwd": os.getcwd(), "argv": list(map(str, argv)), "envs": [{**env, **variables} for variables in own], "streams": streams}
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
        order, there, code = json.loads(line), set[int](), 0
        for env in order["envs"]:
            if not (pid := os.fork()):
                answers.detach()
                yield order | {"env": env}
                return
            there.add(pid)
        while there:
            pid, status = os.wait()
            there.discard(pid)
            if ended := os.waitstatus_to_exitcode(status):
                code = code or ended
                for other in there:
                    os.kill(other, signal.SIGKILL)
        print(code, file=answers, flush=True)


def become(order: dict[str, Any]) -> None:
    """This process is the one that the order is about."""
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    for number, name in ((0, os.devnull), *zip((1, 2), order["streams"], strict=True)):
        opened = os.open(name, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY)
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
