"""What a run listens on: nothing of a run on one machine can be reached from another, whatever the ranks do."""

import os
import re
import time
from pathlib import Path

import pytest

import workbench as wb
from tests.conftest import processes_with
from workbench.core import run_directory
from workbench.programs import torchrun
from workbench.runs.launch import environment, rendezvous
from workbench.runs.launch.rendezvous import HERE, Rendezvous, loopback_environ

TALKING = """
import os, time
import torch, torch.distributed as dist
from torch.distributed import rpc
dist.init_process_group("gloo")  # from the environment, as every script for torchrun does
total = torch.ones(1)
dist.all_reduce(total, group=dist.new_group([0, 1]))
names = [None, None]
dist.all_gather_object(names, os.environ["TORCHELASTIC_RUN_ID"])
rpc.init_rpc(f"worker{dist.get_rank()}", rank=dist.get_rank(), world_size=2)
dist.barrier()
print("ready", int(total), names[1], flush=True)
time.sleep(600)
"""


def listening(pids: list[int]) -> dict[str, int]:
    """Sockets of TCP and UDP on which processes wait for others: address in hexadecimal and port → pid."""
    sockets = {}
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd)):
                sockets[match[1]] = pid
    places = {}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state in ("0A", "07") and rest[5] in sockets:
                places[local] = sockets[rest[5]]
    return places


def loopback(place: str) -> bool:
    """Is it 127.…, ::1 or ::ffff:127.…? The kernel writes words of four bytes, the lowest first."""
    address = place.split(":")[0]
    return (address.endswith("7F") and len(address) == 8) or address in (f"{'0' * 24}01000000", f"{'0' * 16}FFFF00000100007F")


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the sockets of processes are read from /proc")
def test_nothing_of_a_run_can_be_reached_from_another_machine(tmp_path: Path) -> None:
    script = tmp_path / "talking.py"
    script.write_text(TALKING)
    run = wb.launch(script, nproc_per_node=2, runs_dir=tmp_path / "runs")
    limit = time.monotonic() + 120
    while run.logs().count("ready") < 2 and run.state == "running" and time.monotonic() < limit:
        time.sleep(0.1)
    assert run.logs(0).splitlines()[-1] == f"ready 2 {run.id}", run.logs()
    places = listening(processes_with(run_directory.ENV_RUN_ID, run.id))
    run.stop()
    assert len(places) >= 3  # the store, and gloo in each rank
    assert [place for place in places if not loopback(place)] == []


def test_the_users_own_interfaces_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert "GLOO_SOCKET_IFNAME" not in loopback_environ()
    assert loopback_environ()["NCCL_SOCKET_IFNAME"] == "=lo"
    assert Rendezvous(nnodes=1, endpoint="elsewhere:1").environ() == loopback_environ()  # a job of Slurm on one machine


def test_no_rendezvous_is_one_that_unpickles(tmp_path: Path) -> None:
    assert torchrun.BACKEND == rendezvous.BACKEND
    for options in (HERE, Rendezvous(nnodes=2, endpoint="127.0.0.1:1").flags(0), Rendezvous(nnodes=1, endpoint="x:1").flags(0)):
        words = environment.torchrun(2, tmp_path, ["train.py"], "id", options)
        assert words[words.index("--rdzv-backend") + 1] == torchrun.BACKEND
        assert "--standalone" not in words


def test_machine_0_listens_in_the_network_of_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    def listens(endpoint: str, route: str | None) -> str:
        monkeypatch.setattr(rendezvous, "_own_address", lambda host, port: route)
        words = Rendezvous(nnodes=2, endpoint=endpoint).flags(0)
        return words[-1].rpartition("listen=")[2]

    assert listens("10.1.2.3:29400", "10.1.2.3") == "10.1.2.3"
    assert listens("localhost:29400", "127.0.0.1") == "127.0.0.1"
    assert listens("node7:29400", "127.0.1.1") == "*"  # as many machines call themselves: others know them by another address
    assert listens("unknown:29400", None) == "*"
