"""`workbench doctor`: each problem is named with its fix, on made machines; what torch tells comes from another process."""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.made import machine_slower_by
from workbench.runs.launch import environment, machine_report
from workbench.runs.launch.machine_report import (
    Check,
    MachineReport,
    cores_check,
    disk_checks,
    examine,
    files_check,
    gpu_checks,
    group_checks,
    kind_of,
    links_check,
    memory_check,
    probe_torch,
    shm_check,
    start_check,
)

GIB = 2**30


def test_a_quota_and_a_busy_machine_are_said() -> None:
    quota = cores_check(usable=3.5, there=64, load=1.0)
    assert quota.here == "3.5 of 64 (quota of a container); load 1.0"
    assert "64 threads" in quota.trouble
    assert "OMP_NUM_THREADS=3" in quota.fix
    assert "12.0 processes want to compute" in cores_check(usable=8, there=8, load=12.0).trouble


def test_memory_and_the_limit_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {32 * GIB // 1024} kB\n")
    assert memory_check(tmp_path, iter([])) == Check(name="memory", here="32.0 GiB free of 64.0 GiB")
    limited = memory_check(tmp_path, iter([1 * GIB]))
    assert "a container's limit of 1.00 GiB" in limited.here
    assert "killed for want of memory" in limited.trouble
    assert memory_check(tmp_path / "none", iter([])).here == "unknown"


def test_little_shared_memory_and_few_open_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Small:
        f_bavail, f_frsize = 16_384, 4096

    monkeypatch.setattr(os, "statvfs", lambda _: Small)
    small = shm_check(tmp_path)
    assert (small.here, "Bus error" in small.trouble, "--shm-size=8g" in small.fix) == ("64.0 MiB", True, True)
    assert shm_check(tmp_path / "none").trouble == ""
    assert "Too many open files" in files_check((1024, 1_000_000)).trouble
    assert "ulimit -n 65536" in files_check((1024, 1_000_000)).fix
    assert "administrator" in files_check((1024, 1024)).fix
    assert files_check((65_536, 65_536)).trouble == files_check((-1, -1)).trouble == ""


def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = f"x / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n"
    assert (kind_of(tmp_path, mounts), kind_of(Path("/"), mounts), kind_of(tmp_path, "")) == ("nfs4", "ext4", "")
    runs = next(iter(disk_checks(tmp_path / "runs", {"disk": {str(tmp_path): 1e9}}, mounts)))
    assert "small files are slow there" in runs.trouble
    assert "writes 954 MiB/s" in runs.here
    slow = next(iter(disk_checks(tmp_path, {"disk": {str(tmp_path): 1e6}}, "")))
    assert "each checkpoint stops the training" in slow.trouble
    monkeypatch.setattr(machine_report, "MIN_DISK", 2**60)
    assert "checkpoints may fill it" in next(iter(disk_checks(tmp_path, {}, ""))).trouble


def test_a_home_of_somebody_else_is_said_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, stat = tmp_path / "theirs", os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and home in Path(path).parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    def no_answer(path: Any) -> Any:
        raise OSError(5, "Input/output error", str(path))

    home.mkdir()
    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != home)
    monkeypatch.setenv("WORKBENCH_CACHE", str(home / ".cache" / "workbench"))
    *_, cache = disk_checks(tmp_path, {}, "")
    assert cache.trouble == "this user may not write there"
    assert cache.here.endswith(str(home))
    monkeypatch.setattr(shutil, "disk_usage", no_answer)
    assert "free space unknown" in next(iter(disk_checks(tmp_path, {}, ""))).here


def test_words_of_torch_that_are_no_utf_8_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nprintf 'caf\\351 is missing\\n' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert probe_torch()["error"] == "torch could not be tested: caf\N{REPLACEMENT CHARACTER} is missing"


def test_links_between_gpus() -> None:
    linked = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-63\nGPU1\tNV18\t X \t0-63\n"
    assert links_check(linked) == Check(name="links between GPUs", here="NV18")
    apart = links_check(linked.replace("NV18", "SYS"))
    assert apart.here == "SYS"
    assert "across processor sockets" in apart.trouble


def test_gpus_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "gpu_count", lambda: 2)
    monkeypatch.setattr(environment, "gpu_trouble", lambda _: None)
    checks = {check.name: check for check in gpu_checks({"gpu_error": "no driver"}, ask=lambda _: "")}
    assert checks["NVIDIA GPUs"].trouble == "no driver"
    assert checks["links between GPUs"].here == "unknown"
    facts = {"gpus": [{"name": "NVIDIA H100", "memory": 80 * GIB}]}
    seen = next(iter(gpu_checks(facts, ask=lambda _: "")))
    assert (seen.here, seen.trouble) == ("2 (NVIDIA H100, 80.0 GiB)", "")


def test_workers_and_groups() -> None:
    assert start_check("fork").trouble == ""
    assert "__main__" in start_check("forkserver").fix
    checks = list(group_checks({"gloo": {"here": "works"}, "nccl": {"trouble": "no route"}}))
    assert [check.here for check in checks] == ["works", "fails"]
    assert (checks[0].fix, checks[1].trouble) == ("", "no route")
    assert "NCCL_DEBUG=INFO" in checks[1].fix


def test_the_report_has_three_faces_and_is_read_back(tmp_path: Path) -> None:
    def probe() -> Mapping[str, Any]:
        return {"speeds": machine_slower_by(dispatch=2.0).to_json(), "gloo": {"trouble": "<script>alert(1)</script>"}}

    report = examine(probe, runs_dir=tmp_path)
    assert "✗ <script>alert(1)</script>: check that" in str(report)
    assert "4.00 µs" in str(report)
    page = report.to_page()
    assert "<script>" not in page
    assert "://" not in page
    assert MachineReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_without_torch_the_rest_is_shown(tmp_path: Path) -> None:
    report = examine(lambda: {"error": "torch could not be tested: no such module"}, runs_dir=tmp_path)
    assert report.speeds is None
    assert any(check.trouble.startswith("torch could not be tested") for check in report.checks)


def test_a_process_that_gives_no_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "gave no answer (FileNotFoundError)" in probe_torch()["error"]
