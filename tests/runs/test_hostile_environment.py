"""Hostile environment variables: each is refused with a clear error, or ignored with a reason; nothing is executed or written elsewhere."""

import ast
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.conftest import HandMade
from tests.diagnosis.test_calibration import proof
from tests.hostile import CONTROLS, EVIL, assert_is_text
from workbench.core import run_directory
from workbench.core.cache import cache_folder, ignored_variables
from workbench.core.energy_counters import visible_gpus
from workbench.core.machine_speeds import Machine, MachineSpeeds, Speed
from workbench.core.package import ROOT
from workbench.data.samples import SamplesMissingError, folder
from workbench.diagnosis.analysis.calibration import keep
from workbench.memory.analysis.non_pytorch import fits_file, load_fits
from workbench.programs import alone
from workbench.runs import failure
from workbench.runs.launch import nodes
from workbench.runs.launch.environment import gpu_count
from workbench.runs.launch.machine_report import disk_checks
from workbench.runs.launch.new_run import LaunchError
from workbench.runs.launch.rendezvous import Rendezvous, RendezvousError
from workbench.runs.root_cause import first_failure
from workbench.runs.spec import SpecError
from workbench.timeline import rank_log

CODE = "$(touch executed)`touch executed`;__import__('os').system('touch executed')"
ODD = {
    "code": CODE,
    "relative": "cache",
    "traversal": "../../cache",
    "newline": "/tmp/a\nb",
    "escape": "/tmp/\x1b[2J\x1b]0;title\x07",
    "not unicode": os.fsdecode(b"/tmp/\xff"),
    "long name": "/tmp/" + "x" * 300,
    "long path": "/tmp" + "/x" * 5000,
}
"""Values that name no folder."""
LINES = ("newline", "escape", "not unicode")

PRESENCE = {
    "CI", "CUBLAS_WORKSPACE_CONFIG", "KINETO_LOG_LEVEL", "GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME",
}  # fmt: skip
"""Variables of which only whether they are set matters."""
HANDED_ON = {"PATH", "PYTHONPATH"}
"""Variables with which a user chooses what is executed; ranks get them as they are."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory and a home of the test's own, in which nothing may appear that the test does not expect."""
    home = tmp_path / "home"
    (tmp_path / "work").mkdir()
    home.mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(home))
    for name in ("WORKBENCH_CACHE", "XDG_CACHE_HOME", run_directory.ENV_RUN_DIR, "RANK"):
        monkeypatch.delenv(name, raising=False)
    yield home
    assert not list((tmp_path / "work").iterdir())
    assert not list(tmp_path.rglob("executed"))


def anybody(path: Path) -> Iterator[None]:
    """Act as a user who owns nothing."""
    if os.geteuid() != 0:
        path.chmod(0)
        yield
        path.chmod(0o700)
        return
    os.seteuid(65533)
    try:
        yield
    finally:
        os.seteuid(0)


another_user = contextlib.contextmanager(anybody)


def read_variables() -> set[str]:
    """Names of the environment variables that the library reads, from its source."""
    constants, reads = {}, set()
    texts = [path.read_text() for path in sorted(ROOT.rglob("*.py"))]
    spoken = re.compile(r"environ|getenv|number_or_default|= .*[\"'][A-Z][A-Z0-9_]+[\"']")  # else a file neither reads one nor has its name
    trees = [ast.parse(text) for text in texts if spoken.search(text)]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=False) if several else [(target, value)]  # type: ignore[attr-defined]
            for name, text in pairs:
                if isinstance(name, ast.Name) and isinstance(text, ast.Constant) and isinstance(text.value, str):
                    constants[name.id] = text.value
    for node in (node for tree in trees for node in ast.walk(tree)):
        if (
            isinstance(node, ast.Call)
            and node.args
            and re.search(r"(^|\.)(environ\.(get|pop)|getenv|(number|folder)_in_environment|number_or_default)$", ast.unparse(node.func))
        ):
            reads.add(node.args[0])
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ" and isinstance(node.ctx, ast.Load):
            reads.add(node.slice)
        elif isinstance(node, ast.Compare) and "environ" in ast.unparse(node.comparators[0]).split("."):
            reads.add(node.left)
    words = {name.value if isinstance(name, ast.Constant) else constants.get(ast.unparse(name).rpartition(".")[2]) for name in reads}
    ours = {word for word in constants.values() if re.fullmatch(r"WORKBENCH_[A-Z_]+", word)}
    return {word for word in words if isinstance(word, str) and re.fullmatch(r"[A-Z][A-Z0-9_]+", word)} | ours


def test_every_variable_that_is_read_is_tried() -> None:
    read = read_variables()
    assert {"RANK", "WORKBENCH_CACHE", "WORKBENCH_RUN_DIR", "CUDA_VISIBLE_DEVICES", "SLURM_PROCID"} <= read
    page = (ROOT.parent / "SECURITY.md").read_text()
    named = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", page.partition("| environment variable |")[2].partition("\n\n")[0]))
    assert read - PRESENCE - HANDED_ON - named == set()
    assert {name for name in named if name.startswith("WORKBENCH_")} <= read


# --- WORKBENCH_CACHE, XDG_CACHE_HOME


@pytest.mark.parametrize("name", ["WORKBENCH_CACHE", "XDG_CACHE_HOME"])
@pytest.mark.parametrize("odd", ODD)
def test_a_cache_that_is_no_absolute_path_is_ignored_with_a_reason(
    here: Path, monkeypatch: pytest.MonkeyPatch, name: str, odd: str
) -> None:
    monkeypatch.setenv(name, ODD[odd])
    assert cache_folder() == here / ".cache" / "workbench"
    (reason,) = ignored_variables()
    assert reason.startswith(f"the environment variable {name} is {ODD[odd]!r:.80}: an absolute path is allowed")
    assert reason.endswith(f"Try: unset {name}. Until then it is ignored")
    assert reason.isprintable()
    assert len(reason) < 300
    *_, cache = disk_checks(here, {}, "")
    assert f"the environment variable {name}" in cache.trouble
    assert cache.fix.startswith(f"unset {name}")


def refused(trouble: str | None, why: str) -> None:
    assert trouble
    assert "cannot be written" in trouble
    assert why in trouble


@pytest.mark.parametrize("kind", ["file", "below a file", "link to a file", "link to nothing", "of another user"])
def test_a_cache_that_cannot_be_written_is_said_and_nothing_is_written(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    there = tmp_path / "there"
    if kind == "of another user":
        there.mkdir(mode=0o700)
    elif kind.startswith("link"):
        there.symlink_to(tmp_path / ("file" if kind == "link to a file" else "nothing"))
    if "file" in kind:
        (there if kind != "link to a file" else tmp_path / "file").write_text("mine")
    monkeypatch.setenv("WORKBENCH_CACHE", str(there / "below" if kind == "below a file" else there))
    before = sorted(tmp_path.rglob("*"))
    machine = Machine(host="h")
    with another_user(there) if kind == "of another user" else contextlib.nullcontext():
        saved = MachineSpeeds(machine=machine, speeds={"dispatch": Speed(median=1e-6)}).save()
        kept = keep(proof(1.5))
        assert load_fits() == []
        assert not MachineSpeeds.load(machine).speeds
    if kind == "link to nothing":  # mkdir refuses a link that leads nowhere
        assert not (tmp_path / "nothing").exists()
    for trouble in (saved, kept):
        refused(trouble, str(there))
    assert sorted(tmp_path.rglob("*")) == before
    if kind in ("file", "link to a file"):
        *_, cache = disk_checks(tmp_path, {}, "")
        assert cache.trouble == f"{there} is not a folder"


def test_a_link_in_the_cache_is_followed_only_if_it_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A team may share the folder, and anybody of it may put a link there."""
    profile, link = tmp_path / "profile", tmp_path / "cache" / "calibration.jsonl"
    profile.write_text("mine\n")
    link.parent.mkdir()
    link.symlink_to(profile)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)  # then the link is somebody else's
    refused(keep(proof(1.5), path=link), str(link))
    assert profile.read_text() == "mine\n"
    monkeypatch.undo()
    assert keep(proof(1.5), path=link) is None
    assert len(profile.read_text().splitlines()) == 2


def test_fits_and_speeds_replace_a_link_and_not_what_it_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    machine, victim = Machine(host="h"), tmp_path / "victim"
    victim.write_text("mine")
    machine.file.parent.mkdir()
    machine.file.symlink_to(victim)
    assert MachineSpeeds(machine=machine, speeds={"dispatch": Speed(median=1e-6)}).save() == ""
    assert victim.read_text() == "mine"
    assert not machine.file.is_symlink()
    assert fits_file().parent == tmp_path / "cache"


# --- WORKBENCH_DATA_SAMPLES


@pytest.mark.parametrize("odd", [*ODD, "file", "of another user"])
def test_sample_data_elsewhere_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    there = tmp_path / "there"
    if odd == "file":
        there.write_text("mine")
    elif odd == "of another user":
        (there / "austen").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("WORKBENCH_DATA_SAMPLES", ODD.get(odd, str(there)))
    message = r"the sample data are not in .*set WORKBENCH_DATA_SAMPLES to a checkout"
    who = another_user(there) if odd == "of another user" else contextlib.nullcontext()
    with who, pytest.raises(SamplesMissingError, match=message) as error:
        folder("austen")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 800


# --- WORKBENCH_RUN_DIR


def watched() -> wb.Timeline:
    """What a loop says that is only watched; it is never ended."""
    with contextlib.closing(wb.watch([1, 2])) as loop:
        assert list(loop) == [1, 2]
    return loop.timeline


@pytest.mark.parametrize("odd", [*ODD, "file", "nothing", "of another user"])
def test_a_run_directory_that_is_none_ends_no_loop_and_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    there = tmp_path / "there"
    if odd == "file":
        there.write_text("mine")
    elif odd == "of another user":
        there.mkdir(mode=0o700)
        (there / "errors").mkdir()
    monkeypatch.setenv(run_directory.ENV_RUN_DIR, ODD.get(odd, str(there)))
    before = sorted(tmp_path.rglob("*"))
    with another_user(there) if odd == "of another user" else contextlib.nullcontext():
        notes = watched().notes
        failure.record(ValueError("boom"))
        failure.conclude(None)
    (said,) = [note for note in notes if "the steps are not written" in note]
    assert said.isprintable()
    assert len(said) < 400
    if odd != "of another user":
        assert said.startswith(f"the environment variable {run_directory.ENV_RUN_DIR} is ")
        assert rank_log.default_path() is None
    assert sorted(tmp_path.rglob("*")) == before


def test_links_in_a_run_directory_are_not_followed_by_what_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, out = tmp_path / "run", tmp_path / "out"
    there.mkdir()
    out.mkdir()
    (out / "steps").write_text("mine")
    (there / run_directory.rank_file(0)).symlink_to(out / "steps")
    (there / run_directory.ERRORS).symlink_to(out)
    monkeypatch.setenv(run_directory.ENV_RUN_DIR, str(there))
    assert any("the steps are not written" in note for note in watched().notes)
    failure.record(ValueError("boom"))
    failure.conclude(None)
    assert {path.name: path.read_text() for path in out.iterdir()} == {"steps": "mine"}


def test_a_full_disk_costs_no_file_of_a_folder_that_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / run_directory.RESERVE
    mine.write_text("mine")
    monkeypatch.setenv(run_directory.ENV_RUN_DIR, str(tmp_path))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_directory, "write_json", full)
    failure.record(ValueError("boom"))
    assert mine.exists()
    (tmp_path / run_directory.RUN_JSON).write_text("{}")
    failure.record(ValueError("boom"))
    assert not mine.exists()


@pytest.mark.parametrize("rank", ["../../0", "-1", CODE, "1\n", "9" * 5000, "²"])
def test_a_rank_that_is_no_number_names_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv(run_directory.ENV_RUN_DIR, str(tmp_path / "run"))
    monkeypatch.setenv("RANK", rank)
    failure.record(ValueError("boom"))
    watched()
    names = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert names <= {f"run/{name}" for number in (0, 1) for name in (f"errors/rank{number}.json", f"rank{number}.jsonl")}


# --- what the cluster says


@pytest.fixture
def job(by_hand: Callable[..., HandMade], monkeypatch: pytest.MonkeyPatch) -> HandMade:
    """A job of Slurm on two machines, seen from the second."""
    made = by_hand(batch={"system": "slurm", "rdzv_timeout": 60.0}, timeout=None)
    info = run_directory.read_json(made.path / run_directory.RUN_JSON)
    run_directory.write_json(made.path / run_directory.RUN_JSON, info | {"spec": {**info["spec"], "nnodes": 2}})
    monkeypatch.setenv(nodes.ENV_ENDPOINT, "127.0.0.1:29400")
    monkeypatch.setenv("SLURM_PROCID", "1")
    return made


def never(*_: object) -> None:
    raise AssertionError("something was started")


ENDPOINTS = (
    "", "host", "host:0", "host:65536", "host:²", "host:" + "9" * 5000, "-x:1", "a,rank=0:1", "a b:1", "a\n:1", f"{CODE}:1",
    "x" * 300 + ":1",
)  # fmt: skip


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_endpoint_that_is_none_starts_nothing(job: HandMade, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(os, "execve", never)
    monkeypatch.setenv(nodes.ENV_ENDPOINT, endpoint)
    before = sorted(job.path.rglob("*"))
    with pytest.raises((RendezvousError, LaunchError)) as error:
        nodes.step(job.path)
    assert "expected host:port" in str(error.value) if endpoint else f"{nodes.ENV_ENDPOINT} is not set" in str(error.value)
    assert str(error.value).isprintable()
    assert sorted(job.path.rglob("*")) == before


@pytest.mark.parametrize("endpoint", ["node-1:29400", "node_1.cluster:1", "10.0.0.1:65535", "[fe80::1%eth0]:80", "::1:80", "knöten:80"])
def test_endpoints_of_clusters_are_taken(endpoint: str) -> None:
    assert Rendezvous(nnodes=2, endpoint=endpoint).endpoint == endpoint


@pytest.mark.parametrize("number", ["", "-1", "../1", "2", CODE, "²", "9" * 5000])
def test_a_machine_without_a_number_starts_nothing(job: HandMade, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setattr(os, "execve", never)
    monkeypatch.setenv("SLURM_PROCID", number)
    before = sorted(job.path.rglob("*"))
    with pytest.raises(ValueError, match="the environment variable SLURM_PROCID is ") as error:
        nodes.step(job.path)
    assert len(str(error.value)) < 300
    assert sorted(job.path.rglob("*")) == before


def test_a_name_of_a_machine_is_text(job: HandMade, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setenv("SLURMD_NODENAME", EVIL + CONTROLS.replace("\0", ""))
    monkeypatch.setattr(os, "execve", lambda *words: started.append(words))
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    nodes.step(job.path)
    ((program, command, _),) = started
    assert program == sys.executable
    assert json.loads(command[-1])["node"]["name"].startswith(EVIL)
    outcome = {"state": "failed", "nodes": {"1": {"name": EVIL + CONTROLS, "state": "silent"}}}
    error = first_failure(job.path, outcome)
    assert error
    pytest.importorskip("anywidget")
    from workbench.runs.panel import html

    assert_is_text(html.failure(error))


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a pod's rank puts its runs; nothing is trained."""
    monkeypatch.setattr(alone.program, "main", lambda given: None)
    monkeypatch.setenv(run_directory.ENV_RUN_DIR, "")  # put back after the test
    return tmp_path / "runs"


@pytest.mark.parametrize("run_id", ["../../x", CODE])
def test_a_run_id_of_torchrun_stays_in_its_folder(pod: Path, monkeypatch: pytest.MonkeyPatch, run_id: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    alone.main(["clipart-resnet", str(pod)])
    (made,) = pod.iterdir()
    assert wb.Run.load(made).state == "finished"


@pytest.mark.parametrize("run_id", ["a\nb", "\x1b[2J", "x" * 5000])
def test_a_run_id_of_torchrun_that_is_no_name_is_refused(pod: Path, monkeypatch: pytest.MonkeyPatch, run_id: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    with pytest.raises(SpecError, match="Try another --rdzv-id") as error:
        alone.main(["clipart-resnet", str(pod)])
    assert str(error.value).isprintable()
    assert not pod.exists()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_ranks_of_a_pod_that_are_no_numbers_are_refused(pod: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "../0")
    with pytest.raises(ValueError, match=f"the environment variable {name} is "):
        alone.main(["clipart-resnet", str(pod)])
    assert not pod.exists()


@pytest.mark.parametrize("value", ["²", "$(touch executed)", "\n", ",,,", "0,../x", "9" * 5000, "-5", "GPU-\x1b[2J"])
def test_visible_gpus_are_numbers_or_names(value: str) -> None:
    assert len(visible_gpus(8, {"CUDA_VISIBLE_DEVICES": value})) <= 8
    count = gpu_count({"CUDA_VISIBLE_DEVICES": value})
    assert count is None or 0 <= count <= 8
