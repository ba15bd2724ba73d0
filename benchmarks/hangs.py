"""Plants hangs in launched trainings of two and four ranks, and checks which rank and line are named, and how soon.

python benchmarks/hangs.py [CASE…]    about 30 s per case

Exit code: 0 all were named right within 15 s, 1 some were not.
"""

import argparse
import os
import platform
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

import workbench as wb
from workbench.core.display.table import Table
from workbench.runs.hang import Hang
from workbench.runs.run import Run

LIMIT = 15.0
"""Seconds from the moment at which a rank hangs, within which it is to be named."""
READY = 120.0
"""Seconds that a run may take until it gets there."""
BEFORE = "import ctypes, os, queue, signal, subprocess, sys, threading, time\nimport torch, torch.distributed as dist\n"
SCRIPT = (
    BEFORE
    + """
case, culprit, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rank = int(os.environ["RANK"])
forgotten, never, empty = threading.Lock(), threading.Event(), queue.Queue()


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        if rank == culprit and index == 100 and case in ("loader", "worker"):
            print("HANG", time.time(), flush=True)
            time.sleep(1000)  # loader, worker
        time.sleep(0.01)
        return torch.ones(4)


def validate():
    time.sleep(1000)  # evaluation


def hang():
    print("HANG", time.time(), flush=True)
    if case == "sleep":
        time.sleep(1000)  # sleep
    elif case == "evaluation":
        validate()
    elif case == "lock":
        with forgotten:
            forgotten.acquire()  # lock
    elif case == "event":
        never.wait()  # event
    elif case == "queue":
        empty.get()  # queue
    elif case == "program":
        subprocess.run(["sleep", "1000"])  # program
    elif case == "loop":
        tries = 0
        while not never.is_set():  # loop
            tries += 1
    elif case == "polling":
        while not os.path.exists("/nowhere/flag"):
            time.sleep(0.05)  # polling
    elif case == "barrier":
        dist.barrier()  # barrier
    elif case == "recv":
        dist.recv(torch.ones(3), src=0)  # recv
    elif case == "native":
        ctypes.CDLL(None).pause()  # native
    elif case == "gil":
        mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
        lock(mutex), lock(mutex)  # gil
    elif case == "signal":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case == "end":
        threading.Thread(target=never.wait).start()
        sys.exit()
    elif case == "skipped":
        pass  # rank 0 joins a reduction of ranks 0 and 1, and rank 1 goes on


if rank == culprit and last < 0:
    hang()
dist.init_process_group("gloo")
pair = dist.new_group([0, 1])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
if rank == culprit and last == 0:
    hang()
step = 0
while step < 2000:
    for batch in torch.utils.data.DataLoader(Samples(), batch_size=2, num_workers=case == "worker"):
        model(batch).sum().backward()
        if case == "skipped" and rank == 0 and step == 40:
            dist.all_reduce(torch.ones(3), group=pair)  # skipped
        if case == "subgroup" and rank == culprit and step == 40:
            print("HANG", time.time(), flush=True)
            time.sleep(1000)  # subgroup
        if case == "subgroup" and rank < 2:
            dist.all_reduce(torch.ones(3), group=pair)
        step += 1
        if rank == culprit and step == last and case not in ("loader", "worker", "subgroup"):
            hang()
"""
)
TASK = (
    BEFORE
    + """
import workbench as wb

case, culprit, last = CASE, CULPRIT, LAST


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(4), index % 2


steps = 0


def loss(model, batch):
    global steps
    steps += 1
    if steps == last and dist.get_rank() == culprit:
        print("HANG", time.time(), flush=True)
        if case == "loss":
            time.sleep(1000)  # loss
        dist.barrier()  # collective
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def build():
    return wb.Task(model=lambda: torch.nn.Linear(4, 2), dataset=Samples, loss=loss)
"""
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A hang to be planted, and what is to be said of it."""

    ranks: int = 2
    culprit: int = 1
    words: str
    """A pattern of what is said about the culprit."""
    line: str = ""
    """The comment on the line that is to be named; empty = there is none."""
    step: int = 40
    """After how many steps it hangs; -1 = before the ranks have met."""
    spec: bool = False
    """Is it a RunSpec, not a script?"""


CASES = {
    "sleep": Case(words=r"sleeps in hang\(\)", line="# sleep"),
    "evaluation": Case(ranks=4, culprit=2, words=r"sleeps in validate\(\)", line="# evaluation"),
    "lock": Case(words="waits for a lock", line="# lock"),
    "event": Case(ranks=4, culprit=0, words="waits for a lock or another thread", line="# event"),
    "queue": Case(words="waits for a queue", line="# queue"),
    "program": Case(words="waits for a process that it started", line="# program"),
    "loader": Case(words="waits for its loader", line="# loader"),
    "worker": Case(words=r"waits for its loader, whose worker is at train.py:\d+ in __getitem__", line="for batch in torch.utils"),
    "loop": Case(ranks=4, culprit=3, words="repeats a loop", line=""),
    "polling": Case(words="sleeps", line="# polling"),
    "barrier": Case(words=r"waits in barrier number \d+", line="# barrier"),
    "barrier of four": Case(ranks=4, culprit=2, words=r"waits in barrier number \d+", line="# barrier"),
    "recv": Case(words="waits in recv", line="# recv"),
    "subgroup": Case(ranks=4, words="sleeps", line="# subgroup"),
    "skipped": Case(
        ranks=4, culprit=0, words=r"waits in all_reduce number \d+ of group \d+.*which rank 1 has not called", line="# skipped"
    ),
    "native": Case(words="is stuck in hang", line="# native"),
    "gil": Case(words="holds Python's lock", line="# gil"),
    "signal": Case(ranks=4, words="is stopped", line=""),
    "end": Case(words="has left its script", line=""),
    "before the ranks meet, sleep": Case(step=-1, words=r"sleeps in hang\(\)", line="# sleep"),
    "before step 1, sleep": Case(step=0, words=r"sleeps in hang\(\)", line="# sleep"),
    "before step 1, lock": Case(ranks=4, culprit=2, step=0, words="waits for a lock", line="# lock"),
    "before step 1, queue": Case(step=0, words="waits for a queue", line="# queue"),
    "before step 1, program": Case(step=0, words="waits for a process that it started", line="# program"),
    "task, loss": Case(words=r"sleeps in loss\(\)", line="# loss", spec=True),
    "task, first step, loss": Case(step=1, words=r"sleeps in loss\(\)", line="# loss", spec=True),
    "task, collective": Case(ranks=4, culprit=3, words=r"waits in barrier number \d+ in loss\(\)", line="# collective", spec=True),
}


@dataclass(frozen=True, kw_only=True)
class Named:
    """What was said of a hang."""

    hang: Hang | None
    seconds: float
    """From the moment at which the rank hung."""
    wrong: str
    """What was wrong with it; "" = nothing."""


def start(name: str, folder: Path, **options: str) -> Run:
    """Launch a training that will hang."""
    case, kind = CASES[name], name.rpartition(", ")[2].partition(" ")[0]
    file = folder / "train.py"
    if not case.spec:
        file.write_text(SCRIPT)
        arguments = [kind, str(case.culprit), str(case.step)]
        return wb.launch(file, args=arguments, nproc_per_node=case.ranks, runs_dir=folder / "runs", **options)  # type: ignore[arg-type]
    file.write_text(TASK.replace("CASE", repr(kind)).replace("CULPRIT", str(case.culprit)).replace("LAST", str(case.step)))
    spec = wb.RunSpec(task=f"{file}:build", nproc_per_node=case.ranks, micro_batch=2, steps=1000, device="cpu")
    return wb.launch(spec, runs_dir=folder / "runs", **options)  # type: ignore[arg-type]


def follow(name: str, run: Run, folder: Path) -> Named:
    """Wait until the hang is named."""
    case, limit, began = CASES[name], time.monotonic() + READY, None
    while began is None and time.monotonic() < limit and run.state == "running":
        time.sleep(0.1)
        began = re.search(r"HANG ([\d.]+)", run.logs())
    since = float(began[1]) if began else time.time()
    while (hang := run.hang) is None and time.time() < since + 2 * LIMIT and run.state == "running":
        time.sleep(0.1)
    seconds = time.time() - since
    source = (folder / "train.py").read_text().splitlines()
    lines = [f"train.py:{number}" for number, text in enumerate(source, 1) if case.line and case.line in text]
    if hang is None:
        wrong = f"nothing was said; the run is {run.state}: {run.error or ''}"
    elif hang.rank != case.culprit or not re.search(case.words, hang.message):
        wrong = f"rank {case.culprit} is to blame ({case.words})"
    elif lines and hang.line.partition(" ")[0] not in lines:
        wrong = f"the line is {', '.join(lines)}"
    else:
        wrong = "" if seconds <= LIMIT else f"it took {seconds:.1f} s"
    return Named(hang=hang, seconds=seconds, wrong=wrong)


def main() -> int:
    """Plant, print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[*CASES])
    rows, seconds, right = [], [], 0
    for name in parser.parse_args().cases:
        with tempfile.TemporaryDirectory() as folder:
            run = start(name, Path(folder))
            try:
                named = follow(name, run, Path(folder))
            finally:
                run.stop()
        right += not named.wrong
        seconds.append(named.seconds)
        rows.append([name, CASES[name].ranks, named.wrong or "yes", f"{named.seconds:.1f} s", named.hang.message if named.hang else ""])
        print(*rows[-1], sep=" | ", flush=True)
    note = f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}; "
    note += f"{right} of {len(rows)} named right within {LIMIT:g} s, in the median after {sorted(seconds)[len(seconds) // 2]:.1f} s"
    print(Table(columns=("hang", "ranks", "named right", "after", "what was said"), rows=rows, title="Planted hangs", note=note))
    return int(right < len(rows))


if __name__ == "__main__":
    sys.exit(main())
