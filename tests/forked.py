"""Runs Python scripts, alone or as ranks, in processes that have imported torch already: forks, there seconds sooner than new ones.

What runs there starts as `python script.py …` does, and ends as that does: threads are joined, exit handlers called, streams flushed. Only
what Python and torch have in memory is not taken apart, which takes a fork a second of computing. What has to see that, or torch being
imported, needs a new process. Launches may have their ranks from here, too: then this file is started in the place of torchrun.

    process that waits ──fork──▶ parent of an order, who serves the store of its ranks ──fork──▶ one process, or the ranks
"""

import atexit
import contextlib
import ctypes
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOM = {"FORKS_ROOM": "x" * 2**15}
"""In the environment of the process that waits: where the kernel looks for the environment of a fork, there is room for its own."""
IMPORTS = "import torch, torch._dynamo, torch.distributed"
"""The optimizer's first step imports torch._dynamo."""


class Forks:
    """The process that waits; it ends with the one that started it."""

    def __init__(self, more: Mapping[str, str] = MappingProxyType({})) -> None:
        """With more in its environment, such as what the allocator reads when a process starts."""
        root = Path(__file__).parents[1]
        environ = {**ROOM, **os.environ, **more, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}
        self.orders = Path(tempfile.mkdtemp(prefix="forks-")) / "orders"
        os.mkfifo(self.orders)
        command = [sys.executable, "-m", "tests.forked", str(self.orders)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environ, start_new_session=True)
        self._held = open(self.orders, "w")  # noqa: SIM115  # until it is closed, orders may come

    def run(self, folder: Path, *argv: str | Path, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        """What a script (a path, or "-c" and code) leaves, as `subprocess.run` says it; its streams are files in the folder."""
        return self._run(folder, argv, [dict(os.environ if env is None else env)])

    def ranks(
        self, count: int, folder: Path, *argv: str | Path, env: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """The same of a script in so many processes with the variables of torchrun; where one fails, the others are killed."""
        return self._run(folder, argv, of_ranks(count, os.environ if env is None else env), meet=True)

    def train(self, ranks: int, folder: Path, *run_dirs: Path) -> "subprocess.CompletedProcess[str]":
        """Train what run directories say in so many ranks; of several their parent is that of the launch."""
        launched = run_dirs[0] if len(run_dirs) == 1 else run_dirs[0].parent
        return self.program("workbench.programs.train", ranks, folder, *run_dirs, launched=launched)

    def program(self, name: str, ranks: int, folder: Path, *words: str | Path, launched: Path) -> "subprocess.CompletedProcess[str]":
        """One of `workbench.programs` in so many ranks, as a launch starts it that has this directory."""
        from workbench.core.run_directory import ENV_RUN_DIR  # here: a process that waits has nothing of the library

        env = {**os.environ, "OMP_NUM_THREADS": "1", ENV_RUN_DIR: str(launched)}
        return self.ranks(ranks, folder, "-c", f"from {name} import main\nmain()", *words, env=env)

    def torchrun(self, *about: Any, **options: Any) -> list[str]:
        """In the place of `workbench.runs.launch.environment.torchrun`: the command of a launch whose ranks are forks, on one machine."""
        return torchrun(self.orders, *about, **options)

    def _run(
        self, folder: Path, argv: Sequence[str | Path], envs: Sequence[Mapping[str, str]], meet: bool = False
    ) -> "subprocess.CompletedProcess[str]":
        """Of a process for each environment. Threads may ask at the same time, each with a folder of its own."""
        streams = [str(folder / f"forked.{name}") for name in ("stdout", "stderr")]
        code = follow(self.orders, folder, argv, envs, [streams] * len(envs), meet)
        return subprocess.CompletedProcess(list(map(str, argv)), code, *(Path(stream).read_text() for stream in streams))

    def close(self) -> None:
        """No more of them."""
        self._held.close()
        self._process.wait()
        shutil.rmtree(self.orders.parent, ignore_errors=True)


def torchrun(
    orders: str | Path, nproc_per_node: int, logs: Path, program: Sequence[str], run_id: str, *_: object, **__: object
) -> list[str]:
    """The command that starts the ranks of a launch as forks of the process that takes these orders."""
    return [sys.executable, __file__, str(orders), str(nproc_per_node), str(logs / f"{run_id}_forks"), *program]


def of_ranks(count: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each rank; where they meet is added by the parent of the order."""
    shared = {**environ, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def follow(
    orders: Path,
    folder: Path,
    argv: Sequence[str | Path],
    envs: Sequence[Mapping[str, str]],
    streams: Sequence[Sequence[str]],
    meet: bool,
    started: Callable[[int], object] = int,
) -> int:
    """Give an order, and wait for the exit code of what it starts; who goes away before that ends it. `started` is told its group."""
    for name in {name for both in streams for name in both}:
        Path(name).write_text("")
    order, ended = folder / "forked.json", folder / "forked.ended"
    ended.unlink(missing_ok=True)
    os.mkfifo(ended)
    more = {"envs": list(map(dict, envs)), "streams": list(map(list, streams)), "meet": meet, "ended": str(ended)}
    order.write_text(json.dumps({"cwd": os.getcwd(), "argv": list(map(str, argv)), **more}))
    with open(os.open(ended, os.O_RDONLY | os.O_NONBLOCK)) as answers:
        with open(os.open(orders, os.O_WRONLY | os.O_NONBLOCK), "w") as line:
            line.write(f"{order}\n")
        select.select([answers], [], [])
        os.set_blocking(answers.fileno(), True)
        started(int(answers.readline()))
        code = int(answers.readline())
    for path in (order, ended):
        path.unlink()
    return code


def received(orders: str) -> Iterator[dict[str, Any]]:
    """What is to be run, in a fork each; the process that waits gets nothing."""
    with open(orders) as lines:
        exec(IMPORTS, {})
        for line in lines:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # those of earlier orders
                    pass
            if not os.fork():
                os.setpgid(0, 0)
                yield from processes(json.loads(Path(line.strip()).read_text()))
                return


def processes(order: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The order in each of its processes; their parent says when all have ended, and gets nothing."""
    there, code, store = set[int](), 0, None
    answers = open(os.open(order["ended"], os.O_WRONLY | os.O_NONBLOCK), "w")  # noqa: SIM115  # fails where nobody waits any more
    meeting = socket.create_server(("127.0.0.1", 0), backlog=64) if order["meet"] else None
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting.getsockname()[1])} if meeting else {}
    for env, streams in zip(order["envs"], order["streams"], strict=True):
        if not (pid := os.fork()):
            answers.close()
            if meeting:
                meeting.close()
            yield order | {"env": env | place, "streams": streams}
            return
        there.add(pid)
    stops = list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))  # as torchrun, it gives them time to end
    print(os.getpid(), file=answers, flush=True)
    threading.Thread(target=end_with_listener, args=(answers.fileno(),), daemon=True).start()
    if meeting:
        store = serve(meeting, len(order["envs"]))  # as torchrun's, it outlives the ranks
    while there:
        pid, status = os.wait()
        there.discard(pid)
        if ended := os.waitstatus_to_exitcode(status):
            code = code or ended
            for other in there if not stops else ():
                os.kill(other, signal.SIGKILL)
    print(code, file=answers, flush=True)
    del store
    os._exit(0)


def end_with_listener(answers: int) -> None:
    """Kill this order's processes when nobody waits for its answer any more, such as at the limit of time."""
    poll = select.poll()
    poll.register(answers, 0)  # an error is told always
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def serve(meeting: socket.socket, ranks: int) -> Any:
    """A store behind a socket that listens already."""
    import torch
    from torch.distributed import TCPStore

    host, port = meeting.getsockname()
    takes_sockets = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
    options: dict[str, Any] = {"master_listen_fd": meeting.detach(), "use_libuv": takes_sockets}
    return TCPStore(host, port, ranks, is_master=True, wait_for_workers=False, **options)


def end(codes: list[int]) -> None:
    """End this process at once if it has an exit code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if codes:
        os._exit(codes[0] & 0xFF)


@contextlib.contextmanager
def exit_code(codes: list[int]) -> Iterator[None]:
    """Note with which code Python will exit; none where a signal is to end it."""
    try:
        yield
        codes.append(0)
    except SystemExit as error:
        codes.append(error.code if isinstance(error.code, int) else int(error.code is not None))
        raise
    except Exception:
        codes.append(1)
        raise


def become(order: dict[str, Any]) -> None:
    """This process is the one that the order is about."""
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    show_environment()
    for number, name in ((0, os.devnull), *zip((1, 2), order["streams"], strict=True)):
        opened = os.open(name, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    first, *rest = order["argv"]
    sys.argv = [first, *(rest[1:] if first in ("-c", "-m") else rest)]
    sys.path[0] = {"-c": "", "-m": os.getcwd()}.get(first, str(Path(first).parent))
    if first == "-c":
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")


def show_environment(stat: str = "/proc/self/stat") -> None:
    """Let /proc show this process's environment (Linux), by which runs find their ranks: a fork shows that of its parent otherwise.

    All variables must have been set anew, so that nothing refers to those with which the program was started.
    """
    if not os.path.exists(stat):
        return
    start, end = map(int, Path(stat).read_text().rpartition(")")[2].split()[47:49])
    shown = b"".join(name + b"=" + value + b"\0" for name, value in os.environb.items())
    if len(shown) <= end - start:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, shown, len(shown))


def as_torchrun(orders: str, count: str, logs: str, *program: str) -> int:
    """Start the ranks of a launch; 1 where one failed."""
    folder = Path(logs)
    streams = [[str(folder / f"attempt_0/{rank}/{name}.log") for name in ("stdout", "stderr")] for rank in range(int(count))]
    for both in streams:
        Path(both[0]).parent.mkdir(parents=True)
    environ = {**os.environ, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": folder.name, "TORCHELASTIC_RESTART_COUNT": "0"}
    argv = [program[0], *program[2:]] if program[1] == "--" else program

    def passes_on(group: int) -> None:
        def pass_on(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):  # the ranks have just ended
                os.killpg(group, number)

        signal.signal(signal.SIGTERM, pass_on)

    return int(follow(Path(orders), folder, argv, of_ranks(int(count), environ), streams, meet=True, started=passes_on) != 0)


if __name__ == "__main__":
    if sys.argv[2:]:
        sys.exit(as_torchrun(*sys.argv[1:]))
    exit_codes = list[int]()
    atexit.register(end, exit_codes)  # the first handler is called last
    for order in received(sys.argv[1]):
        with exit_code(exit_codes):
            become(order)
