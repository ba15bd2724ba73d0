"""What all tests share: a limit of time, no process that outlives its test, and run directories made by hand."""

import contextlib
import fcntl
import gc
import json
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest.assertion import rewrite
from _pytest.doctest import DoctestModule

from tests import no_hypothesis
from tests.forked import Forks
from workbench.core import run_directory
from workbench.runs.spec import RunSpec

OPTIONAL = ("hypothesis", "ipywidgets", "nbformat", "playwright", "kubernetes_validate", "transformers", "viztracer", "yaml")
MISSING = [name for name in OPTIONAL if not find_spec(name)]
"""Packages that the core library does without; the tests that need them are skipped, or left out as a whole."""
collect_ignore = ["browser"] if "playwright" in MISSING else []

if "hypothesis" not in MISSING:
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "shared", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )  # no absolute times: others compute here
    settings.load_profile("shared")
else:  # as where only the core library is tested
    no_hypothesis.install()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under `nohup make test &`: then no child could be interrupted either
    signal.signal(signal.SIGINT, signal.default_int_handler)

MARK = "WORKBENCH_TEST_SESSION"
SESSION = uuid.uuid4().hex
MARK_OF_TEST = "WORKBENCH_TEST"
LEFT = "processes left behind by the tests"
PATIENCE = 10.0
"""Seconds that the last processes of a session may take to go."""
LIMIT, SLOW_LIMIT = 180.0, 600.0
"""Seconds that each part of a test may take (its fixtures, its call, their end); of a slow one, and of a cell of a notebook."""
REPEAT = 20.0
"""Seconds after which one that goes on all the same, as a callback from C may, is ended again."""


def processes_with(name: str, value: str) -> list[int]:
    """Processes that carry NAME=value in their environment: exact, whatever their name, parent or session."""
    wanted, found = f"{name}={value}".encode(), []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:  # ended while we looked, or somebody else's
            continue
        if wanted in environment.split(b"\0"):
            found.append(int(entry))
    return [pid for pid in found if pid != os.getpid()]


def kill_all(name: str, value: str) -> None:
    """Kill the processes that carry NAME=value, and those that they start meanwhile."""
    while left := processes_with(name, value):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def within_limit(item: pytest.Item) -> Generator[None, Any, Any]:
    """End a part of a test that takes too long, by an exception: its fixtures then clean up."""
    limit = SLOW_LIMIT if item.get_closest_marker("slow") or item.path.suffix == ".ipynb" else LIMIT

    def expired(*_: object) -> None:
        pytest.fail(f"the test took longer than its limit of {limit:g} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, limit, REPEAT)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)  # None = a handler that is not of Python


pytest_runtest_setup = pytest_runtest_call = pytest.hookimpl(wrapper=True, tryfirst=True)(within_limit)

TEST = pytest.StashKey[str]()
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = report.failed or (report.when != "setup" and item.stash[FAILED])
    return report


@pytest.fixture(autouse=True)
def mark_of_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """What this test starts carries its mark, but not what fixtures of a wider scope have started before."""
    os.environ[MARK_OF_TEST] = request.node.stash[TEST] = uuid.uuid4().hex
    yield
    del os.environ[MARK_OF_TEST]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """A test that failed leaves no process behind, and a file of tests no process group, in which those of the next file would fail."""
    try:
        return (yield from within_limit(item))
    except BaseException:
        item.stash[FAILED] = True
        raise
    finally:
        if item.stash[FAILED] and TEST in item.stash:
            kill_all(MARK_OF_TEST, item.stash[TEST])
        if (nextitem is None or nextitem.path != item.path) and end_process_group():
            pytest.fail(f"{item.path.name} has left a process group behind; this was its last test")


def end_process_group() -> bool:
    """Whether this process had one, which is ended."""
    torch = sys.modules.get("torch.distributed")
    if torch is None or not torch.is_available() or not torch.is_initialized():
        return False
    torch.destroy_process_group()
    return True


def selects_gpu(expression: str, paths: list[str]) -> bool:
    """Whether these options of pytest ask for the tests that need a GPU: `-m gpu`, or nothing but tests/gpu."""
    by_mark = re.search(r"(?<!not )\bgpu\b", expression) is not None
    return by_mark or (not expression and bool(paths) and all("tests/gpu" in path for path in paths))


def pytest_configure(config: pytest.Config) -> None:
    if not selects_gpu(config.option.markexpr, config.args):  # what tests expect without saying so is a CPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config.pluginmanager.register(Doctests())
    if MISSING:  # then `--doctest-modules` cannot import the panels
        config.option.doctest_ignore_import_errors = True
    if not _is_worker(config):  # those of pytest-xdist carry the mark of their session
        os.environ[MARK] = SESSION  # every process started from here on carries it
        if getattr(config.option, "numprocesses", None):
            rewrite_assertions(config)
    os.environ["PET_LOG_DIR"] = tempfile.mkdtemp(prefix="torchrun-tests-")  # else each torchrun that a test starts leaves a folder
    os.environ["WORKBENCH_PROGRESS"] = "off"  # what a slow machine takes longer than half a minute for would write a line
    os.environ["WORKBENCH_CACHE"] = tempfile.mkdtemp(prefix="workbench-tests-")  # what tests prove says nothing about this machine


def rewrite_assertions(config: pytest.Config) -> None:
    """Rewrite the assertions of all test modules now, on all cores, where that is to do: each worker would do it for all of them.

    The same of the library's constants, which hypothesis tries, where all is tested.
    """
    chosen = [Path(str(name).partition("::")[0]) for name in config.args]
    files = sorted({path for name in chosen for path in (name.rglob("test_*.py") if name.is_dir() else [name])})
    tests = Path(__file__).parent
    library = sorted((tests.parent / "workbench").rglob("*.py")) if tests in map(Path.absolute, chosen) else []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    children = []
    for share in range(cores):
        if not (child := os.fork()):
            with contextlib.suppress(BaseException):  # of what is wrong with a file its collection tells
                for path in files[share::cores]:
                    rewritten(path.absolute(), config)
                for path in library[share::cores]:
                    constants_stored(path)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def rewritten(path: Path, config: pytest.Config) -> None:
    """Store a module with its assertions rewritten, as pytest does at its import, unless it is stored."""
    pyc = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(path, pyc) is None:
        pyc.parent.mkdir(exist_ok=True)
        digest, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, pyc)


def constants_stored(path: Path) -> None:
    """Let hypothesis store the constants of a module, unless they are stored."""
    from hypothesis.internal.constants_ast import constants_from_module

    module = ModuleType(path.stem)
    module.__file__ = str(path)
    constants_from_module(module)


def pytest_report_header() -> list[str]:
    return [f"not installed, so what needs them is skipped: {', '.join(MISSING)}"] if MISSING else []


LONGEST = (
    # in `make test-slow`
    "diagnosis/test_emulated_device.py",
    "test_docs.py",
    "runs/test_slurm.py",
    "runs/test_random_kills.py",
    "runs/test_signals.py",
    "programs/test_watchdog.py",
    "test_frameworks.py",
    "diagnosis/test_regression.py",
    "diagnosis/test_why_not_linear.py",
    "runs/test_prove_resume.py",
    "runs/test_prove_script_resume.py",
    "train/test_named_state.py",
    "runs/test_failure.py",
    "programs/test_train.py",
    "cluster/test_collectives.py",
    "diagnosis/test_experiment.py",
    # in `make test`
    "train/test_sharding.py",
    "traces/test_capture.py",
    "memory/test_api.py",
    "memory/test_transformers_models.py",
    "timeline/test_watch_script.py",
    "test_left_behind.py",
    "runs/test_nothing_outlives_a_run.py",
    "programs/test_script.py",
    "memory/test_predicted_and_measured.py",
    "memory/test_leaks.py",
    "memory/test_would_fit.py",
    "memory/test_fake_process_group.py",
    "runs/test_launch.py",
    "runs/test_sweep.py",
    "runs/test_resume.py",
    "runs/test_out_of_memory.py",
    "train/test_large_batch_optimizers.py",
    "test_readme.py",
    "test_packaging.py",
    "diagnosis/test_api.py",
    "diagnosis/test_inside.py",
    "scaling/test_api.py",
    "memory/test_memory.py",
    "train/test_auto_micro_batch.py",
    "memory/test_max_micro_batch.py",
    "memory/test_explorer.py",
    "architecture/test_architecture.py",
    "batch/test_find_lr.py",
    "batch/test_steps_to_target.py",
    "core/test_visual_language.py",
    "cluster/test_plans.py",
    "diagnosis/test_loading.py",
    "core/test_interrupts.py",
    "memory/test_building.py",
    "runs/test_nodes.py",
    "runs/test_entrypoints.py",
)
"""Files that take longest; they come first, so that none of them is left over at the end, with idle cores beside it."""
APART = (
    "diagnosis/test_emulated_device.py",
    "runs/test_signals.py",
    "runs/test_failure.py",
    "programs/test_train.py",
    "test_docs.py",
    "test_frameworks.py",
    "runs/test_prove_script_resume.py",
    "runs/test_prove_resume.py",
    "diagnosis/test_experiment.py",
)
"""Files whose long tests share nothing: workers take their tests one by one."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, a file is a worker's as a whole, unless its tests go apart."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name: str = super()._split_scope(nodeid)
            return nodeid if name.removeprefix("tests/") in APART else name

    return ByFile(config, log)


class Doctests:
    """Doctests are looked for in files that have some, of whatever folder: to look through all else takes each worker seconds."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path: Path) -> Generator[None, list[Any], list[Any]]:
        found = yield
        return [each for each in found if not isinstance(each, DoctestModule) or b">>>" in file_path.read_bytes()]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    rank = {tests / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection() -> None:
    """What is imported now stays, and walking over it meanwhile takes half of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What is there before the first test stays to the end: leave it out of the full collections that measurements of memory ask for."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def what_earlier_files_have_left() -> None:
    """Is left out, too."""
    gc.collect()
    gc.freeze()


UNFROZEN = [False]
"""Whether something has unfrozen all since it was frozen last: to count what is frozen would take as long as a collection."""


def unfreeze(usual: Callable[[], None] = gc.unfreeze) -> None:
    """`gc.unfreeze`, noted."""
    UNFROZEN[0] = True
    usual()


gc.unfreeze = unfreeze


@pytest.fixture(autouse=True)
def what_an_earlier_test_has_unfrozen(what_earlier_files_have_left: None) -> None:
    """Is left out again: a search for leaks, or for what is held where memory ran out, unfreezes all, and later collections look at it."""
    if UNFROZEN[0]:
        UNFROZEN[0] = False
        gc.collect(1)
        gc.freeze()


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.hookimpl(trylast=True)  # pytest-xdist ends its workers first
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail the whole session if a process of ours is left."""
    for folder in ("WORKBENCH_CACHE", "PET_LOG_DIR"):
        shutil.rmtree(os.environ[folder], ignore_errors=True)
    if _is_worker(session.config):
        return  # what it says now nobody hears
    limit = time.monotonic() + PATIENCE
    while (left := processes_with(MARK, SESSION)) and time.monotonic() < limit:
        time.sleep(0.1)
    if left:
        commands = [
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:150] for pid in left if Path(f"/proc/{pid}").exists()
        ]
        print(f"\n{LEFT}:", *commands, sep="\n  ")
        kill_all(MARK, SESSION)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def no_process_group_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """But those of fixtures of a wider scope: every later test of this process that needs one would fail."""
    torch = sys.modules.get("torch.distributed")
    before = torch is not None and torch.is_available() and torch.is_initialized()
    yield
    if not before and end_process_group() and not request.node.stash[FAILED]:  # of one that failed it is no wonder
        pytest.fail("this test has left a process group behind")


@pytest.fixture(autouse=True)
def no_picture_stays_open() -> Iterator[None]:
    """matplotlib warns of more than 20 open ones, whichever test opened them."""
    yield
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """`forks.run(tmp_path, "script.py", …)`: a script in a process of its own that has imported torch already."""
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def forked_ranks(forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches have forks for ranks, in the place of torchrun and new processes: seconds sooner. Their guard and all else is as always.

    Not for tests of how processes start and end.
    """
    monkeypatch.setattr("workbench.runs.launch.environment.torchrun", forks.torchrun)


STEP = {"data_wait": 0.03, "h2d": 0.0, "forward": 0.01, "backward": 0.02, "optimizer": 0.004, "other": 0.001, "samples": 8}


class HandMade:
    """A run directory written by hand, as a launch would, in whatever state a test wants."""

    def __init__(self, path: Path, **info: Any) -> None:
        self.path = path
        path.mkdir(parents=True)
        self.lock = os.open(path / run_directory.LOCK, os.O_RDWR | os.O_CREAT)
        base = {
            "format": run_directory.FORMAT,
            "id": uuid.uuid4().hex,
            "name": "by-hand",
            "created": time.time(),
            "host": platform.node(),
            "launch_dir": ".",
        }
        spec = RunSpec(task="clipart-resnet", nproc_per_node=2, steps=20).to_json()
        run_directory.write_json(path / run_directory.RUN_JSON, {**base, "spec": spec, "outcome": None, **info})

    def alive(self) -> "HandMade":
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        return self

    def steps(self, count: int, rank: int = 0, **changes: Any) -> "HandMade":
        writer = run_directory.LineWriter(self.path / run_directory.rank_file(rank))
        writer.write([{"rank": rank, "world_size": 2, "clock": "host", "pid": 1, "device": "cpu"}])
        writer.write({"step": i, **STEP, **changes} for i in range(count))
        writer.close()
        return self

    def losses(self, count: int) -> "HandMade":
        writer = run_directory.LineWriter(self.path / run_directory.METRICS)
        writer.write(
            {"step": i + 1, "steps": 20, "loss": 2.0 / (i + 1), "lr": 0.1, "samples": 16 * (i + 1), "seconds": 0.065 * i}
            for i in range(count)
        )
        writer.close()
        return self

    def log(self, rank: int, text: str, stream: str = "stdout") -> "HandMade":
        folder = self.path / "logs" / "none" / "attempt_0" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{stream}.log").write_text(text)
        return self

    def ended(self, state: str, **more: Any) -> "HandMade":
        info = json.loads((self.path / run_directory.RUN_JSON).read_text())
        run_directory.write_json(
            self.path / run_directory.RUN_JSON, {**info, "outcome": {"state": state, "returncode": 0, "seconds": 2.5, **more}}
        )
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        return self


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[Callable[..., HandMade]]:
    """Make run directories by hand: `by_hand(name="…").steps(20).ended("finished")`."""
    made: list[HandMade] = []

    def make(**info: Any) -> HandMade:
        made.append(HandMade(tmp_path / "runs" / f"{len(made):03d}", **info))
        return made[-1]

    yield make
    for directory in made:
        os.close(directory.lock)
