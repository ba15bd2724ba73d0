"""The usage of a machine is what /proc says has grown, per second; what cannot be read is left out."""

from pathlib import Path

import pytest

from workbench.core import run_directory
from workbench.core.machine_usage import MachineUsage, UsageLog


class Counter:
    name = "package"

    def __init__(self) -> None:
        self.value = 100.0

    def joules(self) -> float:
        return self.value


def proc(path: Path, *, busy: int, idle: int, received: int, written: int) -> None:
    (path / "net").mkdir(parents=True, exist_ok=True)
    (path / "stat").write_text(f"cpu {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1\n")
    (path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 400 kB\n")
    head = "Inter-| Receive | Transmit\n face |bytes packets|bytes packets\n"
    (path / "net" / "dev").write_text(f"{head}    lo: 999 {'0 ' * 7}999 {'0 ' * 7}\n  eth0: {received} {'0 ' * 7}70 {'0 ' * 7}\n")
    rows = [("sda", written), ("sda1", written), ("loop0", 5), ("dm-0", written)]
    (path / "diskstats").write_text("".join(f" 8 0 {name} 1 0 4 0 1 0 {sectors} 0 0 0 0\n" for name, sectors in rows))


def test_rates_are_what_has_grown(tmp_path: Path) -> None:
    now, counter = [10.0], Counter()
    for disk in ("sda", "loop0", "dm-0"):
        (tmp_path / "block" / disk).mkdir(parents=True)
    proc(tmp_path / "proc", busy=100, idle=300, received=1000, written=10)
    usage = MachineUsage(proc=tmp_path / "proc", block=tmp_path / "block", clock=lambda: now[0], counters=[counter])
    now[0], counter.value = 14.0, 500.0
    proc(tmp_path / "proc", busy=130, idle=310, received=3000, written=26)
    expected = {"cpu": 0.75, "memory": 600 * 1024, "network_in": 500.0, "network_out": 0.0, "disk_read": 0.0}
    assert usage.read() == expected | {"disk_write": 16 * 512 / 4, "watts": 100.0}
    assert usage.read() == {}  # no time has passed


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    now = [0.0]
    usage = MachineUsage(proc=tmp_path, block=tmp_path, clock=lambda: now[0], counters=[])
    now[0] = 1.0
    assert usage.read() == {}
    (tmp_path / "stat").write_text("cpu nonsense\n")
    now[0] = 2.0
    assert usage.read() == {}


def test_this_machine_is_read_and_written(tmp_path: Path) -> None:
    log = UsageLog(tmp_path / "usage.jsonl", MachineUsage(), 3, every=0.05)
    while not (path := tmp_path / "usage.jsonl").exists() or not path.read_bytes():  # the first row, not only its file
        sum(range(10_000))
    log.step = 4
    log.close()
    rows = run_directory.LineTail(tmp_path / "usage.jsonl").read()
    assert [rows[0]["step"], rows[-1]["step"]] == [3, 4]
    assert all(0 <= row.get("cpu", 0.0) <= 1 for row in rows)  # ticks may not have moved
    assert rows[-1]["memory"] > 1e6
    assert rows == sorted(rows, key=lambda row: row["time"])


@pytest.mark.parametrize("name", ["usage.jsonl"])
def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path, name: str) -> None:
    UsageLog(tmp_path / "gone" / name, MachineUsage(), 0, every=0.01).close()
