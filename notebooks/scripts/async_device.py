"""A device that works behind the host's back, as a GPU does, made of a thread: so anyone can see what stopwatches get wrong."""

import queue
import statistics
import threading
import time

from workbench.core import units
from workbench.core.display.table import Table


class AsyncDevice:
    """Runs what is launched, one after the other. `launch` returns at once; only `synchronize` waits."""

    def __init__(self) -> None:
        self._queue: queue.Queue[float] = queue.Queue(1000)  # a CUDA launch queue is about that deep
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self._queue.get())
            self._queue.task_done()

    def launch(self, seconds: float) -> None:
        self._queue.put(seconds)

    def synchronize(self) -> None:
        self._queue.join()


ROUNDS = 3
"""How often the loop is timed with and without its loader."""
LOOPS = {
    "around next(), around the launches": "nowhere",
    ".to(device) inside the data timer": "in the data timer",
    "the tutorial: .to(device) between the timers": "between the timers",
    "synchronize() at the end of each step": "at the end",
}


def stopwatch(blocks: str, steps: int = 25, loader: float = 0.004, compute: float = 0.02) -> tuple[float, float, float]:
    """Time a loop as tutorials do. Returns (data, compute, whole) in seconds; `blocks` says where the host waits for the device."""
    device, data, work = AsyncDevice(), 0.0, 0.0
    begin = time.perf_counter()
    for _ in range(steps):
        start = time.perf_counter()
        time.sleep(loader)  # next(loader)
        if blocks == "in the data timer":
            device.synchronize()
        data += time.perf_counter() - start
        if blocks == "between the timers":
            device.synchronize()  # .to(device) of ordinary memory waits until the device has come that far
        start = time.perf_counter()
        device.launch(compute)
        if blocks == "at the end":
            device.synchronize()
        work += time.perf_counter() - start
    device.synchronize()
    return data, work, time.perf_counter() - begin


def four_stopwatches() -> tuple[dict[str, float], float, Table]:
    """The share of data that four ways to time one loop report; the true one, found by taking the loader away; and both as a table."""
    reported = {}
    for name, blocks in LOOPS.items():
        data, work, _ = stopwatch(blocks)
        reported[name] = data / (data + work)
    saved = [1 - stopwatch("nowhere", loader=0.0)[2] / stopwatch("nowhere")[2] for _ in range(ROUNDS)]
    truth = statistics.median(saved)
    rows = [[name, units.percent(share)] for name, share in reported.items()]
    table = Table(
        columns=("where the stopwatches stand", "“time spent on data”"),
        rows=[*rows, ["taking the loader away saves", units.percent(truth) if min(saved) > 0 else "nothing"]],
        note="measured on an emulated device: 4 ms to load a batch, 20 ms to compute on it, behind the host's back",
    )
    return reported, truth, table
