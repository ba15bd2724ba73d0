"""Builds torchrun's command and the environment of the ranks; reads versions, git state, cores and GPUs; never imports torch."""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from workbench.core import run_directory
from workbench.core.package import ROOT
from workbench.core.variables import INHERITED
from workbench.runs import flight_recorder
from workbench.runs.entrypoints import START, TORCHRUN
from workbench.runs.launch.rendezvous import HERE
from workbench.runs.spec import ScriptSpec, Spec
from workbench.runs.task import code_names

SHUTDOWN, SHUTDOWN_WITH_CHECKPOINT = 4, 25
"""Seconds that torchrun gives its ranks between SIGTERM and SIGKILL (torch's own default is 30), in which they may write a checkpoint.

Slurm kills 30 s after SIGTERM unless its KillWait is another.
"""

_KEEP = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(4 * 2**30)}


DETERMINISTIC = {} if "CUBLAS_WORKSPACE_CONFIG" in os.environ else {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables of a run with `deterministic`: cuBLAS reads it before its first product."""


def shutdown_s(spec: Mapping[str, Any]) -> int:
    """Seconds that the ranks of a spec, as it is in run.json, get to end."""
    return SHUTDOWN_WITH_CHECKPOINT if spec.get("checkpoint_every") else SHUTDOWN


def torchrun(
    nproc_per_node: int,
    logs: Path,
    program: list[str],
    run_id: str,
    rendezvous: Sequence[str] = HERE,
    shutdown: int = SHUTDOWN,
    python: str = sys.executable,
) -> list[str]:
    """The command that starts `program` (`["-m", module, …]`) in `nproc_per_node` ranks on this machine.

    What the ranks print goes into the folder `logs`; `rendezvous` are options that say how machines find each other (see
    `rendezvous.Rendezvous`), and `shutdown` are the seconds from SIGTERM to SIGKILL.

    Not the bare `torchrun`: a kernel started by its absolute path has no `bin` on PATH; and `--standalone` listens on all network
    interfaces, and unpickles what it is sent. The port is chosen as it is opened, so any number of launches run at once. Without
    `--log-dir` a folder stays in the temporary directory; a folder in it is named after the id, which may hold a "/" if an earlier version
    wrote it. `--redirects`, not `--tee`: tee writes its prefix into unfinished lines.
    """
    flags = [*rendezvous, "--rdzv-id", run_id.replace("/", "-"), "--nproc-per-node", str(nproc_per_node)]
    flags += ["--max-restarts", "0", "--redirects", "3", "--log-dir", str(logs)]
    if "--shutdown-timeout" in _torch_source("distributed", "run.py"):
        flags += ["--shutdown-timeout", str(shutdown)]
    return [python, "-m", START, TORCHRUN, *flags, *program]


@functools.cache
def _torch_source(*path: str) -> str:
    """The text of a file of torch: importing it would import torch. Empty where torch is not installed."""
    torch = importlib.util.find_spec("torch")
    folders = torch.submodule_search_locations if torch else None
    return Path(folders[0], *path).read_text(encoding="utf-8") if folders else ""


def for_ranks(
    run_dir: Path, run_id: str, threads: int, more: Mapping[str, str] = MappingProxyType({}), environ: Mapping[str, str] = os.environ
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """The environment of the ranks, and how it differs from `environ`: what was set (`more` included), and which names were removed."""
    ours = {
        run_directory.ENV_RUN_DIR: str(run_dir),
        run_directory.ENV_RUN_ID: run_id,
        "OMP_NUM_THREADS": str(threads),  # else torchrun sets 1 and prints a banner
        "PYTHONUNBUFFERED": "1",  # redirected output is block-buffered otherwise: nothing to follow
        "PYTHONFAULTHANDLER": "1",
        "MPLBACKEND": "Agg",
        "NO_COLOR": "1",
        "KINETO_LOG_LEVEL": "6",
        **flight_recorder.switched_on(versions().get("torch", ""), environ),
        **more,
    }
    if "workbench" not in versions():  # imported from a checkout by way of sys.path, which the ranks do not share
        ours["PYTHONPATH"] = os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), str(ROOT.parent.resolve())]))
    removed = sorted(name for name in environ if INHERITED.fullmatch(name))
    kept = {name: value for name, value in environ.items() if name not in removed}
    return kept | ours, ours, removed


def asked_of_launch(spec: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, str]:
    """Variables of the ranks that a run was launched with, for those that start later: after a resume, or on another machine."""
    before = info.get("environment")
    given = before.get("set") if isinstance(before, Mapping) else None
    alarm = given.get(run_directory.ENV_ALARM) if isinstance(given, Mapping) else None
    more = {run_directory.ENV_ALARM: str(alarm)} if alarm in run_directory.ALARMS else {}
    return more | (DETERMINISTIC if spec.get("deterministic") else {})


def source_of(spec: Spec, folder: Path) -> str:
    """The text of a script, or of the files of a task and of its own schedule; without those that only an import would find."""
    if isinstance(spec, ScriptSpec):
        files = [spec.script]
    else:
        where = [name.rpartition(":")[0] for name in code_names(spec).values()]
        files = [name if name.endswith(".py") else f"{name.replace('.', '/')}.py" for name in where]
    texts = []
    for file in dict.fromkeys(files):
        with contextlib.suppress(OSError):
            texts.append((folder / file).read_text(encoding="utf-8", errors="replace"))
    return "\n".join(texts)


def machine_state() -> dict[str, Any]:
    """What of this machine's state changes how fast it is: since when it runs, how many processes want a core, and how many cores there
    are for them, ours or not; what is not known is left out.
    """
    state: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        state["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with contextlib.suppress(OSError, AttributeError):
        state |= {"load": round(os.getloadavg()[0], 2), "cores": os.cpu_count()}
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
        state |= {"MHz": round(sum(clocks) / len(clocks))} if clocks else {}
    return state


def steady_malloc() -> dict[str, str]:
    """Variables that keep glibc's memory from disturbing experiments that measure time; none where the user has set such.

    Left alone, glibc gives what was freed back to the system or keeps it, as other blocks happen to lie: a step with 38 MB of gradients
    had 9,700 page faults or none, and took 84 or 56 ms, in one process and the next. With these it keeps all but blocks above 32 MiB.
    """
    return {} if any(name in os.environ for name in (*_KEEP, "GLIBC_TUNABLES")) else dict(_KEEP)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what a result depends on, by name; what is not installed is left out."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name, package in {"workbench": "training-workbench", "torch": "torch", "numpy": "numpy"}.items():
        try:
            versions[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


UNCOMMITTED = 50
"""Files with changes that are not committed, of which a run records the names at most."""


class GitQuery:
    """Asks git for a folder's commit in the background; a slow answer is no answer."""

    def __init__(self, folder: Path) -> None:
        command = ["git", "-C", str(folder), "--no-optional-locks", "status", "--porcelain=v2", "-z", "--branch", "--untracked-files=no"]
        try:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
            )
        except OSError:  # no git here
            self._process = None

    def answer(self, timeout: float) -> dict[str, Any] | None:
        """{"commit": …, "dirty": …, "uncommitted": [paths]}; None without git, repository or commit, or after `timeout` seconds."""
        if self._process is None:
            return None
        with self._process as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                return None
        lines = output.decode(errors="replace").split("\0")
        commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
        if not commits or commits[0] == "(initial)":
            return None
        branch = next((line.split()[-1] for line in lines if line.startswith("# branch.head ")), "")
        places = {"1": 8, "2": 9, "u": 10}  # spaces before the path, in git's format "porcelain=v2"
        changed, rest = list[str](), iter(lines)
        for line in rest:
            if line[:1] in places:
                changed.append(line.split(" ", places[line[0]])[-1])
                changed += [next(rest)] if line[0] == "2" else []  # a file was renamed: its former name follows
        files = {"uncommitted": changed[:UNCOMMITTED]} if changed else {}
        return {"commit": commits[0], "branch": branch, "dirty": bool(changed), **files}


def git_state(folder: Path, timeout: float = 30.0) -> dict[str, Any] | None:
    """As GitQuery says, with a digest of all changes to the commit, where there are any."""
    state = GitQuery(folder).answer(timeout)
    if state and state["dirty"]:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["git", "-C", str(folder), "--no-optional-locks", "diff", "--no-ext-diff", "HEAD"]
            changes = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=True).stdout
            state["changes"] = hashlib.blake2b(changes, digest_size=8).hexdigest()
    return state


def core_count() -> int | None:
    """CPU cores that a process started on this machine may use; None = not known."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def gpu_count(environ: Mapping[str, str] = os.environ, dev: Path = Path("/dev")) -> int | None:
    """NVIDIA GPUs that a rank would see, counted by their device files; None where those do not tell (ROCm, WSL, not Linux).

    >>> gpu_count({"CUDA_VISIBLE_DEVICES": "-1"})
    0
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    listed = None
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        listed = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))  # CUDA stops at the first invalid one
        if listed == 0:
            return 0
    there = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in dev.iterdir()) if dev.is_dir() else 0
    if not there:
        return None if sys.platform != "linux" or (dev / "dxg").exists() or (dev / "kfd").exists() else 0
    if listed is None:
        return there
    return 1 if str(visible).lstrip().startswith("MIG-") else min(listed, there)  # a process sees one slice, however many are listed


MIN_DRIVERS = {11: 450, 12: 525, 13: 580}
"""CUDA's major version → the oldest driver branch that runs it. Source: NVIDIA, "CUDA Compatibility", minor version compatibility."""
_DRIVER = Path("/proc/driver/nvidia/version")


def torch_cuda() -> str | None:
    """The version of CUDA (or ROCm) that the installed torch is built for; None = it computes on CPUs only."""
    built = re.search(r"^(cuda|hip)\b[^=\n]*= *['\"]([\d.]+)", _torch_source("version.py"), re.MULTILINE)
    return built[2] if built else None


def gpu_trouble(gpus: int | None, dev: Path = Path("/dev"), driver: Path = _DRIVER) -> str | None:
    """Why torch most likely cannot use the NVIDIA GPUs that are here; None where nothing speaks against it."""
    torch, cuda = versions().get("torch"), torch_cuda()
    if not gpus or torch is None:
        return None
    if cuda is None:
        return f"torch {torch} is built without CUDA; pytorch.org/get-started has the command that installs a build with it"
    control = dev / "nvidiactl"
    if control.exists() and not os.access(control, os.R_OK | os.W_OK):
        return f"this user may not open {control}"
    text = driver.read_text(encoding="utf-8", errors="replace") if driver.is_file() else ""
    version = re.search(r"Kernel Module\b.*?\s(\d+)((?:\.\d+)+)", text)
    least = MIN_DRIVERS.get(int(cuda.partition(".")[0]))
    if version and least and int(version[1]) < least:
        return (
            f"NVIDIA's driver {version[1]}{version[2]} is older than {least}, the least for CUDA {cuda}, for which torch {torch} is built; "
            "install a newer driver, or a torch for an older CUDA"
        )
    return None
