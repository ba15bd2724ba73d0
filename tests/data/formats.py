"""A few samples with a field of each kind, and the same in every format; and a server of S3 with latency.

python -m tests.data.formats SECONDS    starts such a server, which waits so long before each answer, and prints its port
"""

import contextlib
import functools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from workbench.data.formats import extension, writer

COUNT = 16
SCHEMA = {"jpg": "bytes", "cls": "int", "npy": "array"}


@functools.cache
def samples() -> list[tuple[str, dict[str, Any]]]:
    """(key, sample) pairs: bytes of several lengths, a label, an array."""
    rng = np.random.default_rng(0)
    keys = [f"folder{i % 3}/{i:04d}" for i in range(COUNT)]
    return [
        (key, {"__key__": key, "jpg": rng.bytes(100 + 300 * i), "cls": i % 5, "npy": rng.integers(0, 9, (2, 3), dtype=np.int16)})
        for i, key in enumerate(keys)
    ]


def write(format: str, folder: Path, name: str = "", some: list[tuple[str, dict[str, Any]]] | None = None) -> Path:
    """One shard of a format, in a folder of its own; the path to open."""
    if not name:
        folder = folder / f"{format}-set"
        folder.mkdir()
    writer(format)(str(folder / (name or f"shard-0{extension(format)}")), samples() if some is None else iter(some), SCHEMA)
    return folder if format != "folder" else folder / (name or "shard-0")


def first(folder: Path) -> Path:
    """The first file of a folder."""
    return sorted(folder.iterdir())[0]


class Latency:
    """Waits before each request that a server answers, as an object store does; counts them, and the rounds of those that wait together."""

    def __init__(self, application: Any, seconds: float) -> None:
        self.application, self.seconds, self.requests, self.rounds = application, seconds, 0, 0
        self._waiting, self._lock = 0, threading.Lock()

    def __call__(self, environ: Any, respond: Any) -> Any:
        with self._lock:
            self.requests += 1
            self.rounds += not self._waiting
            self._waiting += 1
        time.sleep(self.seconds)
        with self._lock:
            self._waiting -= 1
        return self.application(environ, respond)


def s3_server(seconds: float) -> tuple[Any, Latency]:
    """A server of S3 that is not started yet, on a free port, and its latency."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    latency = Latency(DomainDispatcherApplication(create_backend_app), seconds)
    return make_server("127.0.0.1", 0, latency, threaded=True), latency


def s3_options(port: int) -> dict[str, Any]:
    """For fsspec."""
    return {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s"}


@contextlib.contextmanager
def s3_beside(seconds: float) -> Iterator[dict[str, Any]]:
    """Options for fsspec of a server in a process of its own, whose CPU does not count as ours."""
    program = [sys.executable, "-m", "tests.data.formats", str(seconds)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=Path(__file__).parents[2]) as server:
        try:
            assert server.stdout is not None
            yield s3_options(int(server.stdout.readline()))
        finally:
            server.kill()


if __name__ == "__main__":
    served, _ = s3_server(float(sys.argv[1]))
    print(served.server_port, flush=True)
    served.serve_forever()
