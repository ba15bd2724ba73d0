"""Predicts the throughput of two hosts at 100 Mbit/s from a run at 1 Gbit/s, then measures it.

    python benchmarks/two_hosts.py [--rounds 3] [--json FILE]

The hosts are network namespaces of this machine, joined by a virtual cable whose rate `tc` limits in both directions (tbf). On each of them
torchrun starts one rank, as on real hosts: `wb.launch(…, nnodes=2)` on the first, `workbench join` on the second; gloo speaks over the
cable. Needs root, ip and tc (Debian: iproute2), and cleans up after itself. The aim is an error of at most 15 %.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from published_times import timed

import workbench as wb
from workbench.cluster.analysis.collective_cost import Link, collective_seconds
from workbench.cluster.analysis.links import Sweep
from workbench.core import units
from workbench.runs.launch import environment

RANK = Path(__file__).with_name("two_hosts_rank.py")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
FAST, SLOW = 1000, 100
"""Mbit/s."""
PAYLOAD = 1448 / 1514
"""Share of a full frame that is data: 14 bytes of Ethernet, 20 of IP, 20 of TCP and 12 of its time stamps are not (MTU 1500)."""
WANTED = 0.15
PATIENCE = 300


class CannotRun(Exception):
    """This machine does not let us make hosts."""


class Hosts:
    """Two network namespaces and the cable between them."""

    def __init__(self) -> None:
        self.names = tuple(f"wb{os.getpid()}{side}" for side in "ab")

    def __enter__(self) -> "Hosts":
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            raise CannotRun("hosts are network namespaces here: that takes root, ip and tc (Debian: apt-get install iproute2)")
        first, second = self.names
        try:
            for name in self.names:
                self._do("ip", "netns", "add", name)
            self._do("ip", "link", "add", first, "netns", first, "type", "veth", "peer", "name", second, "netns", second)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                self._do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", name)
                self._do("ip", "-n", name, "link", "set", name, "up")
                self._do("ip", "-n", name, "link", "set", "lo", "up")
            self.limit(FAST)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:  # the cable goes with them
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def limit(self, rate: int) -> None:
        """Let so many Mbit/s through, each way. The bucket is small against a message, which else would pass at once."""
        for name in self.names:
            tbf = ["root", "tbf", "rate", f"{rate}mbit", "burst", "64kb" if rate >= FAST else "16kb", "latency", "100ms"]
            self._do("tc", "-n", name, "qdisc", "replace", "dev", name, *tbf)

    def start(self, side: int, *command: str, **more: Any) -> "subprocess.Popen[str]":
        """Start a command on one of them."""
        return subprocess.Popen(["ip", "netns", "exec", self.names[side], *command], text=True, **more)

    @staticmethod
    def _do(*command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotRun(f"{' '.join(command)}: {done.stderr.strip()}")


def measured(hosts: Hosts, folder: Path) -> dict[str, Any]:
    """What two ranks measure, at both rates in turns; see two_hosts_rank.py. This process changes the cable's rate for them."""
    out = folder / "found.json"
    head = hosts.start(0, sys.executable, __file__, "--head", str(out), str(folder), stdout=subprocess.PIPE)
    joined = None
    try:
        assert head.stdout
        run_dir = head.stdout.readline().strip()
        joined = hosts.start(1, sys.executable, "-m", "workbench", "join", run_dir, stdout=subprocess.DEVNULL)
        serve(hosts, folder, head)
        if head.returncode:
            raise RuntimeError(head.stdout.read())
        joined.wait(PATIENCE)
    finally:
        for process in filter(None, (head, joined)):
            if process.poll() is None:
                process.terminate()
                process.wait()
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def serve(hosts: Hosts, folder: Path, head: "subprocess.Popen[str]") -> None:
    """Give the cable the rate that the ranks want, until they have ended."""
    want, now, rate = folder / "want", folder / "now", ""
    limit = time.monotonic() + PATIENCE
    while head.poll() is None and time.monotonic() < limit:
        wanted = want.read_text() if want.exists() else ""
        if wanted and wanted != rate:
            rate = wanted
            hosts.limit({"fast": FAST, "slow": SLOW}[rate])
            part = folder / "now.part"
            part.write_text(rate)
            part.replace(now)
        time.sleep(0.01)


def head(out: str, folder: str) -> int:
    """On the first host: launch, and see it to its end."""
    run = wb.launch(RANK, args=[out], nnodes=2, rdzv_endpoint=f"{ADDRESSES[0]}:29400", rdzv_timeout=120, runs_dir=folder, timeout=PATIENCE)
    print(run.path, flush=True)
    run.wait()
    if not run.ok:
        print(run, flush=True)
    return 0 if run.ok else 1


def link_of(found: dict[str, Any]) -> Link:
    """Latency and bandwidth that explain a measured sweep."""
    return Sweep(points=[(size, seconds) for size, seconds in found["sweep"]], ranks=2).link


def slowed(link: Link, fast: float, slow: float) -> Link:
    """The link with a slower wire. A byte's time is that of the wire, which is known, and that of the hosts, which stays."""
    more = (1 / slow - 1 / fast) / (1e6 / 8 * PAYLOAD)
    return dataclasses.replace(link, bandwidth=1 / (1 / link.bandwidth + more))


def step(found: dict[str, Any], link: Link) -> float:
    """Seconds of a step over a link, by the formula: the parts of one without reduction, and what DDP's buckets take beyond the backward.

    Left out: copies into buckets, and gloo's threads, which want the core that the backward is on.
    """
    reduced = timed(found["gradients"], found["backward"], lambda size: collective_seconds("all_reduce", size, 2, link), found["cap"])
    return float(found["forward"] + found["backward"] + reduced.exposed + found["optimizer"])


@contextlib.contextmanager
def place() -> Iterator[tuple[Hosts, Path]]:
    """Hosts and a folder, both gone afterwards."""
    with tempfile.TemporaryDirectory() as folder, Hosts() as hosts:
        yield hosts, Path(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="launches")
    parser.add_argument("--json", type=Path, help="also write what was found to this file")
    parser.add_argument("--head", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.head:
        return head(*given.head)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts go away then, too
    rows = []
    try:
        for _ in range(given.rounds):
            with place() as (hosts, folder):
                rows.append(row_of(measured(hosts, folder)))
            print(describe(rows[-1]), flush=True)
    except CannotRun as why:
        print(f"two_hosts: left out: {why}")
        return 0
    print(
        ", ".join(f"{name} {version}" for name, version in environment.versions().items() if name != "platform")
        + f", {os.cpu_count()} cores"
    )
    errors = [abs(error(row)) for row in rows]
    middle = statistics.median(errors)
    print(f"error of the prediction: median {middle:.1%} of {len(rows)}, worst {max(errors):.1%}; aim: at most {WANTED:.0%}")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if middle <= WANTED else 1


def row_of(found: dict[str, Any]) -> dict[str, float]:
    """Seconds of steps, by the formula ("there" at the measured rate, "predicted" at the slow one) and measured."""
    link = link_of(found)
    row = {
        "there": step(found, link),
        "predicted": step(found, slowed(link, FAST, SLOW)),
        "bandwidth": link.bandwidth,
        "latency": link.latency,
    }
    return {name: found[name] for name in ("alone", "fast", "slow", "batch")} | row


def error(row: dict[str, float]) -> float:
    """Predicted over measured throughput, less one."""
    return row["slow"] / row["predicted"] - 1


def describe(row: dict[str, float]) -> str:
    rate = {name: units.rate(row["batch"] / row[name]) for name in ("alone", "there", "fast", "predicted", "slow")}
    link = f"{8e-6 * row['bandwidth']:.0f} Mbit/s, {units.seconds(row['latency'])}"
    return (
        f"without reduction {rate['alone']}; at {FAST} Mbit/s by the formula {rate['there']}, measured {rate['fast']} (link: {link}); "
        f"at {SLOW} Mbit/s predicted {rate['predicted']}, measured {rate['slow']} ({error(row):+.1%})"
    )


if __name__ == "__main__":
    sys.exit(main())
