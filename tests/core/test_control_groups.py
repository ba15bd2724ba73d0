"""Control groups are read from a process's own up to that of all, in both versions, and inside a container."""

from pathlib import Path

from workbench.core.system_load import control_groups


def test_every_group_that_has_all_the_files(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("12:cpu,cpuacct:/x\n5:memory:/job/step\n0::/user/session\n")
    (root / "user" / "session").mkdir(parents=True)
    (root / "memory" / "job" / "step").mkdir(parents=True)
    for folder, text in (("user/session", "700"), ("user", "max"), ("memory/job/step", "50"), ("memory", "900")):
        old = folder.startswith("memory")
        (root / folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(text)
        (root / folder / "memory.stat").write_text(f"file {text}\n")
    (root / "memory.stat").write_text("file 1\n")  # of all: without a limit
    names = (["memory.max", "memory.stat"], ["memory.limit_in_bytes", "memory.stat"])
    found = control_groups("memory", *names, root=root, proc=proc)
    assert found == [(text, f"file {text}\n") for text in ("50", "900", "700", "max")]
    assert control_groups("cpu", ["cpu.max"], ["cpu.cfs_quota_us"], root=root, proc=proc) == []
    assert control_groups("memory", *names, root=root, proc=tmp_path / "nowhere") == []


def test_the_path_of_the_host_inside_a_container(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    for folder in (proc / "self", root):
        folder.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/../docker/abc\n")
    (root / "memory.max").write_text("5000\n")
    assert control_groups("memory", ["memory.max"], [], root=root, proc=proc) == [("5000\n",)]
