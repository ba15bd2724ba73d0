"""Launching: what is refused before anything is written, what run.json says, hostile surroundings, several runs at once, full disks."""

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.conftest import processes_with
from workbench.__main__ import main
from workbench.core import run_directory
from workbench.runs import entrypoints
from workbench.runs.launch import environment, launch
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.spec import SpecError
from workbench.runs.task import TaskError

SCRIPTS = Path(__file__).parents[1] / "scripts"
HELLO, PLAIN = SCRIPTS / "hello.py", SCRIPTS / "plain.py"
SPEC = wb.RunSpec(task=f"{SCRIPTS / 'tiny_task.py'}:build", device="cpu")


def finished(run: wb.Run) -> wb.Run:
    run.wait()
    assert run.ok, (run.error, run.logs(), (run.path / run_directory.LAUNCHER_LOG).read_text())
    end = time.monotonic() + 5  # the outcome is the guard's last deed, but not its last instruction
    while processes_with(run_directory.ENV_RUN_ID, run.id) and time.monotonic() < end:
        time.sleep(0.02)
    assert processes_with(run_directory.ENV_RUN_ID, run.id) == []
    return run


# --- what is refused


@pytest.mark.parametrize(
    ("target", "options", "error", "said"),
    [
        (
            SCRIPTS / "helo.py",
            {},
            LaunchError,
            r"scripts/helo\.py does not exist: did you mean \".*/scripts/hello\.py\"\?$",
        ),
        (SCRIPTS, {}, LaunchError, r"scripts is not a Python script \(\*\.py\)"),
        ("nowhere/train.py", {}, LaunchError, r"nowhere/train\.py does not exist: there is no folder .*nowhere$"),
        (r"C:\Users\me\train.py", {}, LaunchError, r"train\.py does not exist: a path of this machine has / where yours has \\"),
        ("clipart-resnet", {"steps": 0}, SpecError, "steps=0"),
        (
            HELLO,
            {"micro_batch": 64},
            LaunchError,
            r"a script has no knob 'micro_batch': It has args, nproc_per_node, .*, name, on_hang\. Its own .*\"--micro-batch\", \"64\"",
        ),
        (
            HELLO,
            {"gpu": 2, "thread": 1},
            LaunchError,
            r"no knobs 'gpu': here it is called nproc_per_node; 'thread': did you mean 'threads'\?",
        ),
        (3, {}, LaunchError, r"launch\(int\): expected a RunSpec, the name of a task or the path of a script"),
        (HELLO, {"nproc_per_node": 0}, SpecError, r"nproc_per_node=0: a whole number of at least 1"),
        (HELLO, {"threads": 0}, SpecError, r"threads=0: a whole number"),
        (HELLO, {"args": "--epochs 1"}, SpecError, r"expected a list of words, such as \['--epochs', '1'\]"),
        (HELLO, {"timeout": 0}, LaunchError, r"timeout=0: seconds above 0 are allowed, or None"),
        (HELLO, {"timeout": float("nan")}, LaunchError, r"timeout=nan: seconds above 0"),
        (SPEC, {"args": ["--lr", "1"]}, LaunchError, r"args=\['--lr', '1'\] with a RunSpec: only a script takes it"),
        (SPEC, {"watch": True}, LaunchError, r"watch=True with a RunSpec"),
        (SPEC, {"mikro_batch": 64}, SpecError, r"no knob 'mikro_batch': did you mean 'micro_batch'\?"),
        (SPEC, {"task": "no_such.py:build"}, TaskError, r"there is no file .*no_such\.py"),
        (SPEC.replace(task=SPEC.task + "er"), {}, TaskError, r"tiny_task\.py has no function 'builder'"),
    ],
)
def test_refused_before_anything_is_written(
    tmp_path: Path, target: Any, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        wb.launch(target, runs_dir=tmp_path / "runs", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("visible", "devices", "count"),
    [
        (None, ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], 2),
        (None, ["null"], 0),
        (None, ["dxg"], None),
        (None, ["kfd"], None),
        ("", ["nvidia0"], 0),
        ("-1", ["nvidia0"], 0),
        ("1", ["nvidia0", "nvidia1"], 1),
        ("0,1,-1,3", ["nvidia0", "nvidia1", "nvidia2", "nvidia3"], 2),
        ("0,1,2,3", ["nvidia0", "nvidia1"], 2),
        ("GPU-5a4,GPU-77b", ["nvidia0", "nvidia1", "nvidia2"], 2),
        ("MIG-1,MIG-2,MIG-3", ["nvidia0"], 1),
    ],
)
def test_gpus_are_counted_without_torch(tmp_path: Path, visible: str | None, devices: list[str], count: int | None) -> None:
    for name in devices:
        (tmp_path / name).touch()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert environment.gpu_count(environ, tmp_path) == count


def see_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """So many GPUs seem to be here, and torch to be able to use them."""
    monkeypatch.setattr(environment, "gpu_count", lambda: count)
    monkeypatch.setattr(environment, "gpu_trouble", lambda gpus: None)


@pytest.mark.parametrize(
    ("gpus", "options", "said"),
    [
        (0, {"device": "cuda"}, r'device="cuda", and no NVIDIA GPU is visible here .* try device="cpu"'),
        (
            2,
            {"device": "cuda", "nproc_per_node": 4},
            r'nproc_per_node=4 with device="cuda": at most 2 here.* Try nproc_per_node=2, or device="auto"',
        ),
        (2, {"device": "auto", "backend": "nccl", "nproc_per_node": 4}, r'nproc_per_node=4 with backend="nccl": at most 2 here'),
        (0, {"device": "auto", "backend": "nccl"}, r'backend="nccl", and no NVIDIA GPU is visible here .* try backend="auto"'),
    ],
)
def test_more_ranks_than_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, options: dict[str, Any], said: str) -> None:
    see_gpus(monkeypatch, gpus)
    with pytest.raises(LaunchError, match=said):
        wb.launch(SPEC, runs_dir=tmp_path / "runs", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"device": "auto", "backend": "gloo"}, {"device": "cuda", "backend": "gloo"}, {"device": "cpu"}])
def test_more_ranks_than_gpus_where_they_need_none_each(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    see_gpus(monkeypatch, 1)
    launch.check(SPEC.replace(nproc_per_node=2, **options))


def test_ranks_that_go_to_the_cpu_for_want_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    see_gpus(monkeypatch, 1)
    with pytest.warns(UserWarning, match=r"on the CPU: nproc_per_node=2 is more than the visible GPUs \(1\).*nproc_per_node=1; .*\"cpu\""):
        launch.check(SPEC.replace(nproc_per_node=2, device="auto"))


BUILDS = {
    "": None,
    "cuda: Optional[str] = None": None,
    "cuda: str | None = '12.8'": "12.8",
    "cuda = '11.8'": "11.8",
    "hip = '6.2.4'": "6.2.4",
}


def test_what_torch_is_built_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, built in BUILDS.items():
        source = f"__version__ = '2.13.0+cpu'\n{text}\ngit_version = '12.8'\n"
        monkeypatch.setattr(environment, "_torch_source", lambda *_, source=source: source)
        assert environment.torch_cuda() == built


@pytest.mark.parametrize(
    ("cuda", "driver", "said"),
    [
        (None, "535.104.05", "is built without CUDA"),
        ("12.8", "470.57.02", "driver 470.57.02 is older than 525, the least for CUDA 12.8"),
        ("13.0", "535.104.05", "driver 535.104.05 is older than 580, the least for CUDA 13.0"),
        ("12.8", "535.104.05", None),
        ("12.8", None, None),
        ("99.0", "535.104.05", None),
    ],
)
def test_gpus_that_torch_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, driver: str | None, said: str | None
) -> None:
    file = tmp_path / "version"
    if driver:
        file.write_text(
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build  (dvs-builder)\nGCC version: 12.2\n"
        )
    monkeypatch.setattr(environment, "torch_cuda", lambda: cuda)
    monkeypatch.setattr(environment, "_DRIVER", file)
    trouble = environment.gpu_trouble(2, dev=tmp_path, driver=file)
    assert said in trouble if said and trouble else said is trouble
    assert environment.gpu_trouble(0, dev=tmp_path, driver=file) is None
    assert environment.gpu_trouble(None, dev=tmp_path, driver=file) is None


def test_a_launch_says_that_gpus_are_not_used(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 2)
    monkeypatch.setattr(environment, "gpu_trouble", lambda gpus: "torch 2.13 is built without CUDA")
    monkeypatch.setattr(environment, "torch_cuda", lambda: None)
    with pytest.warns(UserWarning, match=r"computes on the CPU, although 2 NVIDIA GPUs can be seen: torch 2\.13 is built without CUDA"):
        launch.check(SPEC.replace(device="auto"))
    with pytest.raises(LaunchError, match=r'device="cuda", and torch 2\.13 is built without CUDA\. To use the CPU: device="cpu"'):
        launch.check(SPEC.replace(device="cuda"))
    monkeypatch.setattr(environment, "torch_cuda", lambda: "12.8")
    with pytest.warns(UserWarning, match="though 2 NVIDIA GPUs"):  # it may be mistaken about a driver
        launch.check(SPEC.replace(device="cuda"))
    launch.check(SPEC.replace(device="cpu"))
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "2; not used" in shown
    assert "torch 2.13 is built without CUDA" in shown


# --- what is started


def test_arguments_that_look_like_torchruns_own(tmp_path: Path) -> None:
    run = wb.launch(PLAIN, args=["--n", "5", "--log", "x", "--", "-m"], runs_dir=tmp_path)
    finished(run)
    assert run.logs(0) == "rank 0 of 1: --n 5 --log x -- -m"


def test_a_script_runs_with_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SCRIPTS)
    run = wb.launch("hello.py", args=["--epochs", 1], nproc_per_node=2, runs_dir=tmp_path, name="two words/x")
    finished(run)
    assert [run.logs(rank) for rank in (0, 1)] == ["rank 0 of 2: --epochs 1", "rank 1 of 2: --epochs 1"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d-two-words-x", run.path.name)
    info = run_directory.read_json(run.path / run_directory.RUN_JSON)
    assert (info["format"], info["name"], info["launch_dir"], info["timeout"]) == (run_directory.FORMAT, "two words/x", ".", None)
    assert info["spec"] == {
        "kind": "script", "script": str(HELLO), "args": ["--epochs", "1"], "nproc_per_node": 2, "nnodes": 1, "watch": False, "threads": 1,
        "profile": None,
    }  # fmt: skip
    assert info["command"][:4] == [sys.executable, "-m", entrypoints.START, entrypoints.TORCHRUN]
    assert info["command"][-6:] == ["-m", "--", "workbench.programs.script", str(HELLO), "--epochs", "1"]
    assert info["environment"]["set"]["OMP_NUM_THREADS"] == "1"
    assert {"python", "platform", "torch", *(["workbench"] if "workbench" in environment.versions() else [])} <= set(info["versions"])
    assert info["outcome"]["state"] == "finished"
    assert info["outcome"]["returncode"] == 0
    assert set(info["outcome"]["exits"]) <= {"0", "1"}
    written = {path.name for path in run.path.iterdir()} - {"hang"}  # of ranks that took seconds to meet, as on a busy machine
    assert written == {"errors", "guard.lock", "launcher.log", "logs", "reserve", "run.json"}


def test_an_unedited_script_is_watched(tmp_path: Path) -> None:
    run = finished(wb.launch(SCRIPTS / "loop.py", nproc_per_node=2, watch=True, runs_dir=tmp_path))
    assert [(timeline.rank, len(timeline.steps)) for timeline in run.timelines] == [(0, 16), (1, 16)]
    assert all(timeline.median(phase) > 0 for timeline in run.timelines for phase in ("forward", "backward"))


def test_knobs_change_the_spec(tmp_path: Path) -> None:
    run = wb.launch(SPEC, steps=3, nproc_per_node=2, micro_batch=8, runs_dir=tmp_path)
    assert run.spec == SPEC.replace(steps=3, nproc_per_node=2, micro_batch=8)
    assert run.name == "tiny_task-build"
    run.stop()


def test_nothing_heavy_is_imported_here(tmp_path: Path) -> None:
    code = f"""
import sys
import workbench as wb
wb.launch({str(PLAIN)!r}, runs_dir={str(tmp_path)!r}).stop()
print({{"torch", "numpy", "pandas", "matplotlib", "ipywidgets", "psutil"}} & set(sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.slow
def test_several_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    runs = [wb.launch(HELLO, args=[i], nproc_per_node=2, runs_dir=tmp_path) for i in range(2)]
    assert len({run.path for run in runs}) == 2
    for i, run in enumerate(runs):
        assert finished(run).logs(0) == f"rank 0 of 2: {i}"


def test_hostile_surroundings_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = {
        "PET_NNODES": "2", "PET_RDZV_ENDPOINT": "nowhere:1", "RANK": "5", "LOCAL_RANK": "5", "WORLD_SIZE": "9", "MASTER_ADDR": "nowhere",
        "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "MPLBACKEND": "module://nowhere", "SLURM_PROCID": "3", "FORCE_COLOR": "1",
        "WORKBENCH_RUN_DIR": "/nowhere", "WORKBENCH_RUN_ID": "outer", "OMP_NUM_THREADS": "64",
    }  # fmt: skip
    for name, value in {**hostile, "LOCAL_DATA": "kept", "PATH": "/nowhere"}.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "look.py"
    script.write_text("import os\nprint(dict(os.environ))\n" + HELLO.read_text())
    run = finished(wb.launch(script, nproc_per_node=2, runs_dir=tmp_path / "runs"))
    environ = eval(run.logs(1).splitlines()[0])
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["OMP_NUM_THREADS"], environ["MPLBACKEND"]) == ("1", "2", "1", "Agg")
    assert environ["LOCAL_DATA"] == "kept"
    assert environ["WORKBENCH_RUN_DIR"] == str(run.path)
    assert not {"PET_NNODES", "SLURM_PROCID", "FORCE_COLOR"} & set(environ)
    removed = run_directory.read_json(run.path / run_directory.RUN_JSON)["environment"]["removed"]
    assert set(removed) - {"PET_LOG_DIR"} == set(hostile) - {"OMP_NUM_THREADS"}  # the tests themselves set that one


def test_an_older_torchrun_gets_no_option_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--rdzv-backend" in environment._torch_source("distributed", "run.py")  # the real one is found
    monkeypatch.setattr(environment, "_torch_source", lambda *_: "")
    assert "--shutdown-timeout" not in environment.torchrun(2, tmp_path, ["train.py"], "id")


def test_a_checkout_that_is_not_installed_reaches_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setattr(environment, "versions", lambda: {"workbench": wb.__version__})
    assert environment.for_ranks(tmp_path, "id", 1)[0]["PYTHONPATH"] == "/mine"
    monkeypatch.setattr(environment, "versions", dict)
    root = Path(wb.__file__).parents[1]
    assert environment.for_ranks(tmp_path, "id", 1)[0]["PYTHONPATH"] == f"/mine{os.pathsep}{root}"


FAULTS = """
import resource, torch
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step = [torch.empty(size).fill_(1) for size in (4_000_000, 4_000_000, 2_000_000)]
    del step
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(sum([faults() for _ in range(40)][-10:]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")
def test_experiments_with_time_keep_the_memory_that_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", FAULTS], env={**os.environ, **environment.steady_malloc()}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1000  # of 98,000, if they were mapped anew each time
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert environment.steady_malloc() == {}


def test_the_commit_is_noted(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        return subprocess.run(["git", "-C", tmp_path, *identity, *words], capture_output=True, text=True, check=True).stdout.strip()

    def answer() -> dict[str, Any] | None:
        return environment.GitQuery(tmp_path).answer(timeout=30)

    assert answer() is None
    git("init", "--initial-branch", "trunk")
    assert answer() is None
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert answer() == {"commit": commit, "dirty": False, "branch": "trunk"}
    (tmp_path / "new").write_text("untracked files are no change")
    assert answer() == {"commit": commit, "dirty": False, "branch": "trunk"}
    (tmp_path / "a").write_text("2")
    assert answer() == {"commit": commit, "dirty": True, "branch": "trunk", "uncommitted": ["a"]}
    git("mv", "-f", "a", "ü b")
    (tmp_path / "ü b").write_text("1")
    assert answer() == {"commit": commit, "dirty": True, "branch": "trunk", "uncommitted": ["ü b", "a"]}
    assert environment.GitQuery(tmp_path).answer(timeout=0) is None


# --- disks


def test_no_place_to_write(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(LaunchError, match=r"no run directory can be made in .*/runs: File exists\. Try runs_dir="):
        wb.launch(HELLO, runs_dir=tmp_path / "runs")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Make a file system of so many KiB."""
    where = tmp_path / "disk"
    where.mkdir()

    def make(kib: int) -> Path:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", where], capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount a file system")
        return where

    yield make
    subprocess.run(["umount", "--lazy", where], capture_output=True, check=False)


def test_a_full_disk_leaves_no_half_made_run(small_disk: Callable[[int], Path]) -> None:
    runs = small_disk(48)
    with pytest.raises(LaunchError, match=r"could not be started: .*/disk is full\. Make room, or try runs_dir="):
        wb.launch(HELLO, runs_dir=runs)
    assert list(runs.iterdir()) == []


def test_a_disk_that_fills_up_during_the_run(small_disk: Callable[[int], Path], tmp_path: Path) -> None:
    runs, script = small_disk(512), tmp_path / "fill.py"
    script.write_text(f"with open({str(runs / 'fill')!r}, 'wb', buffering=0) as file:\n    while True:\n        file.write(bytes(512))")
    run = wb.launch(script, runs_dir=runs).wait()
    assert run.state == "failed"
    assert run.error is not None
    assert (run.error.rank, run.error.kind) == (0, "disk-full")
    assert run.error.message == "OSError: [Errno 28] No space left on device"
    assert list(run.path.rglob("*.part")) == []
