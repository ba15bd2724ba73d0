"""Looks at this machine: what a training needs of it, the problems, and how to fix them. `workbench doctor` shows the MachineReport.

What needs torch is found out by `programs/machine.py`, in a process of its own.
"""

import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core import units
from workbench.core.cache import cache_folder, ignored_variables
from workbench.core.codec import JsonDataclass
from workbench.core.display import table as display
from workbench.core.gpu_load import ask_nvidia_smi
from workbench.core.machine_speeds import MachineSpeeds
from workbench.core.system_load import PROC, control_groups, text_of, usable_cores
from workbench.runs.entrypoints import MACHINE, START
from workbench.runs.launch import environment

PATIENCE = 180.0
"""Seconds that the process with torch may take; loading torch from a cold network disk alone can take a minute."""
PACKAGES = ("training-workbench", "torch", "numpy", "jupyterlab", "ipykernel", "ipywidgets", "anywidget")
MIN_SHM, MIN_MEMORY, MIN_DISK = 512 * 2**20, 2 * 2**30, 5 * 2**30
"""Bytes of shared memory, of memory and of disk below which trainings fail now and then. Docker gives 64 MiB of shared memory."""
MIN_FILES = 4096
"""Files that a process may have open: with workers, torch keeps one open for each tensor of a batch that lies ready."""
MIN_WRITE = 50e6
"""Bytes per second of a disk: a checkpoint of 1 GB takes 20 s there."""
NETWORK = ("nfs", "cifs", "smb", "lustre", "fuse", "9p", "gpfs", "beegfs", "ceph", "afs")
"""How the kinds of file systems begin that lie behind a network or a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(JsonDataclass):
    """One thing that was looked at."""

    name: str
    here: str
    """What this machine has."""
    trouble: str = ""
    """The problem, and how to fix it; "" = none."""
    fix: str = ""
    """What to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport(display.Shown, JsonDataclass):
    """The machine on one page."""

    checks: tuple[Check, ...]
    speeds: MachineSpeeds | None = None
    """What basic operations cost here; None = torch could not be loaded."""

    @property
    def table(self) -> display.Table:
        """One row per check."""
        rows = [[check.name, check.here, f"✗ {check.trouble}: {check.fix}" if check.trouble else ""] for check in self.checks]
        troubles = sum(bool(check.trouble) for check in self.checks)
        note = f"{units.several(troubles, 'problem')}, marked ✗" if troubles else "no problems found"
        return display.Table(columns=("what", "here", "problem, and how to fix it"), rows=rows, title="workbench doctor", note=note)

    @property
    def _tables(self) -> list[display.Table]:
        return [self.table, *([self.speeds.table] if self.speeds else [])]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self._tables))

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self._tables)

    def to_page(self, *others: display.Shown) -> str:
        """A page of HTML that loads nothing, with others below."""
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
            f"<title>workbench doctor: {display.escape(platform.node())}</title>"
            "<style>body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em}"
            "table{border-collapse:collapse}th,td{padding:.3em .8em;border-bottom:1px solid #8888;vertical-align:top}</style>"
            f"<body>{''.join(each._repr_html_() for each in (self, *others))}</body></html>\n"
        )


def examine(probe: Callable[[], Mapping[str, Any]] | None = None, *, runs_dir: Path | None = None) -> MachineReport:
    """Look at everything.

    Args:
        probe: finds out what needs torch; None = `probe_torch`.
        runs_dir: where runs will be written; None = `runs` in the current folder.
    """
    facts = (probe or probe_torch)()
    speeds = MachineSpeeds.from_json(facts["speeds"]) if facts.get("speeds") else None
    return MachineReport(checks=tuple(_checks(facts, runs_dir or Path.cwd())), speeds=speeds)


def probe_torch(*options: str, timeout: float = PATIENCE) -> dict[str, Any]:
    """What `programs/machine.py` finds out in a process of its own; {"error": why} if it could not.

    Args:
        options: "fresh" measures all speeds anew; "links" also those between two GPUs.
        timeout: seconds after which the process is given up.
    """
    command = [sys.executable, "-m", START, MACHINE, *options]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=timeout, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"the process that loads torch gave no answer ({type(error).__name__})"}
    try:
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = " ".join(done.stderr.splitlines()[-1:]) or f"it ended with {done.returncode}"
        return {"error": f"torch could not be tested: {last:.200}"}
    return facts


def _checks(facts: Mapping[str, Any], folder: Path) -> Iterator[Check]:
    yield Check(name="Python", here=sys.version.split()[0])
    yield from map(_package, PACKAGES)
    yield from gpu_checks(facts)
    yield cores_check()
    yield memory_check()
    yield shm_check()
    yield files_check()
    yield from disk_checks(folder, facts)
    yield start_check(multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0])
    yield from group_checks(facts)


def _package(name: str) -> Check:
    try:
        return Check(name=name, here=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        needed = name == "torch"
        trouble, fix = ("nothing can be trained or estimated", "pip install torch") if needed else ("", "")
        return Check(name=name, here="not installed", trouble=trouble, fix=fix)


def gpu_checks(facts: Mapping[str, Any], ask: Callable[[Any], str] = ask_nvidia_smi) -> Iterator[Check]:
    """GPUs, whether torch can use them, and what links them."""
    gpus = environment.gpu_count()
    trouble = environment.gpu_trouble(gpus) or ""
    seen = facts.get("gpus", [])
    names = "; ".join(f"{gpu['name']}, {units.bytes_(gpu['memory'])}" for gpu in seen)
    if gpus and not seen and not trouble and "error" not in facts:
        trouble = facts.get("gpu_error") or "torch sees none of them"
    here = "unknown" if gpus is None else f"{gpus}{f' ({names})' * bool(names)}{'; not used' * bool(trouble)}"
    fix = "see pytorch.org/get-started, and nvidia-smi for the driver" if trouble else ""
    yield Check(name="NVIDIA GPUs", here=here, trouble=trouble, fix=fix)
    if driver := re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)", text_of(PROC / "driver" / "nvidia" / "version")):
        yield Check(name="NVIDIA driver", here=driver[1])
    cuda = environment.torch_cuda()
    yield Check(
        name="torch computes on",
        here=f"CPU and GPU ({cuda})" if cuda else "CPU only",
        trouble=facts.get("error", ""),
        fix="try: python -c 'import torch'" if "error" in facts else "",
    )
    if gpus and gpus > 1:
        try:
            yield links_check(ask(["topo", "-m"]))
        except (OSError, subprocess.SubprocessError):
            yield Check(name="links between GPUs", here="unknown: nvidia-smi does not answer")


def links_check(matrix: str) -> Check:
    """What links the GPUs, by the matrix of `nvidia-smi topo -m`."""
    rows = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", matrix).splitlines() if re.match(r"\s*GPU\d+\s", line)]
    rows = [row for row in rows if "X" in row]
    kinds = {kind for row in rows for kind in row[1 : len(rows) + 1] if kind != "X"}
    slow = sorted(kinds & {"SYS", "NODE"})
    return Check(
        name="links between GPUs",
        here=", ".join(sorted(kinds)) or "unknown",
        trouble="some pairs of GPUs are connected only across processor sockets, which is slow" if slow else "",
        fix="choose GPUs of one socket by CUDA_VISIBLE_DEVICES (nvidia-smi topo -m), or reduce gradients less often" if slow else "",
    )


def cores_check(usable: float | None = None, there: int | None = None, load: float | None = None) -> Check:
    """Cores, the quota of a container, and who else computes; what is given is for tests."""
    may = usable_cores() if usable is None else usable
    count = there or environment.core_count() or 1
    busy = os.getloadavg()[0] if load is None and hasattr(os, "getloadavg") else load or 0.0
    here = f"{count}" if may >= count else f"{may:g} of {count} (quota of a container)"
    governor = text_of(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")).strip()
    trouble = fix = ""
    if may < count:
        trouble = f"torch and many data sets start {count} threads, more than the quota allows, so they are paused again and again"
        fix = f"export OMP_NUM_THREADS={max(1, int(may))}, or raise the quota"
    elif busy > (there or os.cpu_count() or count):  # of the whole machine, as the load is
        trouble, fix = f"{busy:.1f} processes want to compute: timings will vary", "measure when the machine is idle"
    elif governor == "powersave" and "intel_pstate" not in text_of(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver")):
        trouble, fix = "the cores' clocks are kept low (governor powersave)", "cpupower frequency-set -g performance"
    return Check(name="CPU cores", here=f"{here}; load {busy:.1f}", trouble=trouble, fix=fix)


def memory_check(proc: Path = PROC, limits: Iterator[int] | None = None) -> Check:
    """Memory that is left, and the limit of a container."""
    sizes = {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB", text_of(proc / "meminfo"), re.MULTILINE)}
    whole, left = sizes.get("MemTotal"), sizes.get("MemAvailable")
    if whole is None or left is None:
        return Check(name="memory", here="unknown")
    limit = min(limits or _memory_limits(), default=whole)
    here = f"{units.bytes_(left)} free of {units.bytes_(whole)}"
    if limit < whole:
        here += f"; a container's limit of {units.bytes_(limit)}"
    short = min(left, limit) < MIN_MEMORY
    return Check(
        name="memory",
        here=here,
        trouble="a training and its workers may be killed for want of memory" if short else "",
        fix="end other processes, or give the container more; fewer workers and a smaller batch need less" if short else "",
    )


def _memory_limits() -> Iterator[int]:
    for (text,) in control_groups("memory", ["memory.max"], ["memory.limit_in_bytes"]):
        if text.strip().isdigit():
            yield int(text)


def shm_check(folder: Path = Path("/dev/shm")) -> Check:
    """Shared memory, in which workers hand over batches."""
    name = "shared memory for loaders"
    if not folder.is_dir():
        return Check(name=name, here=units.MISSING)
    status = os.statvfs(folder)
    left = status.f_bavail * status.f_frsize
    return Check(
        name=name,
        here=units.bytes_(left),
        trouble='workers of a DataLoader end with "Bus error" where their batches do not fit' if left < MIN_SHM else "",
        fix="docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm" if left < MIN_SHM else "",
    )


def files_check(limits: tuple[int, int] | None = None) -> Check:
    """Files that a process may have open."""
    try:
        import resource  # there is none on Windows
    except ImportError:
        return Check(name="open files", here=units.MISSING)
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < MIN_FILES
    more = "more" if not 0 <= hard < MIN_FILES else "the administrator to raise the limit, then more"
    return Check(
        name="open files",
        here=f"at most {soft:,}" if soft >= 0 else "without limit",
        trouble='loaders with many workers end with "Too many open files"' if few else "",
        fix=f"ask for {more}: ulimit -n 65536" if few else "",
    )


def disk_checks(folder: Path, facts: Mapping[str, Any], mounts: str | None = None) -> Iterator[Check]:
    """Where runs, temporary files and the cache lie."""
    speeds = facts.get("disk", {})
    for name, path in {"disk of runs": folder, "temporary files": Path(tempfile.gettempdir()), "cache": cache_folder()}.items():
        # os.path, since Path.is_dir raises where a folder above may not be entered, such as another user's home
        there = next((parent for parent in (path, *path.parents) if os.path.isdir(parent)), Path("/"))
        left, kind, write = _free_bytes(there), kind_of(there, mounts), speeds.get(str(there))
        free = "free space unknown" if left is None else f"{units.bytes_(left)} free"
        here = ", ".join(filter(None, [free, kind, f"writes {units.bytes_(write)}/s" if write else "", str(there)]))
        trouble = fix = ""
        if not os.access(there, os.W_OK):
            trouble, fix = "this user may not write there", "choose another folder: runs_dir=, TMPDIR or WORKBENCH_CACHE"
        elif os.path.lexists(path) and not os.path.isdir(path):
            trouble, fix = f"{path} is not a folder", "choose another: runs_dir=, TMPDIR or WORKBENCH_CACHE"
        elif name == "cache" and (ignored := ignored_variables()):
            trouble, _, fix = ignored[0].rpartition(" Try: ")
        elif left is not None and left < MIN_DISK and name != "cache":
            trouble, fix = "checkpoints may fill it", "delete what is not needed, or choose another folder: runs_dir= or TMPDIR"
        elif name == "disk of runs" and kind.startswith(NETWORK):
            trouble, fix = "data sets of many small files are slow there", "copy them to a local disk, or pack them into shards"
        elif name == "disk of runs" and write and write < MIN_WRITE:
            trouble, fix = "each checkpoint stops the training for a long time", "write them to a faster disk, or less often"
        yield Check(name=name, here=here, trouble=trouble, fix=fix)


def _free_bytes(folder: Path) -> int | None:
    """What is free on the disk of a folder; None = it does not say."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def kind_of(path: Path, mounts: str | None = None) -> str:
    """The kind of the file system that a folder lies in, such as "ext4"; "" where that is not known."""
    text = text_of(PROC / "mounts") if mounts is None else mounts
    rows = [line.split() for line in text.splitlines()]
    places = [(len(row[1]), row[2]) for row in rows if len(row) > 2 and (path.resolve() / "x").is_relative_to(row[1])]
    return max(places)[1] if places else ""


def start_check(method: str) -> Check:
    """How DataLoader's workers start."""
    anew = method != "fork"
    return Check(
        name="start method of workers",
        here=method,
        trouble="each worker imports the script anew, and unpickles the data set" if anew else "",
        fix='protect the script by if __name__ == "__main__":, and keep workers (persistent_workers=True)' if anew else "",
    )


def group_checks(facts: Mapping[str, Any]) -> Iterator[Check]:
    """Do ranks of this machine reach each other?"""
    fixes = {
        "gloo": "check that the host name resolves (getent hosts $(hostname)); GLOO_SOCKET_IFNAME=lo uses the loopback interface",
        "nccl": "NCCL_DEBUG=INFO says more; check the driver, /dev/shm, and that the container sees all GPUs",
    }
    for name, fix in fixes.items():
        if name in facts:
            answer = facts[name]
            trouble = answer.get("trouble", "")
            yield Check(name=f"{name} smoke test", here=answer.get("here", "fails"), trouble=trouble, fix=fix if trouble else "")
