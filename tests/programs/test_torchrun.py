"""torchrun's rendezvous of known machines: which store each gets, where it listens, and what is said when somebody does not come."""

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from workbench.programs import torchrun
from workbench.programs.torchrun import KnownMachines


def machine(endpoint: str = "127.0.0.1:0", count: int = 1, **conf: Any) -> KnownMachines:
    return KnownMachines(RendezvousParameters(torchrun.BACKEND, endpoint, "id", count, count, **conf))


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def test_ten_at_once_have_ten_ports_of_this_machine() -> None:
    machines = [machine() for _ in range(10)]
    met = [one.next_rendezvous() for one in machines]
    assert len({info.bootstrap_store_info.master_port for info in met}) == 10
    assert {info.bootstrap_store_info.master_addr for info in met} == {"127.0.0.1"}
    met[0].store.set("word", "ours")
    assert not met[1].store.check(["word"])


def test_a_restart_begins_with_an_empty_store() -> None:
    one = machine()
    one.next_rendezvous().store.set("word", "old")
    assert not one.next_rendezvous().store.check(["word"])


def test_machines_meet(port: int) -> None:
    first, second = machine(f"127.0.0.1:{port}", 2, rank="0", timeout="60"), machine(f"127.0.0.1:{port}", 2, rank="1", timeout="60")
    with ThreadPoolExecutor() as pool:
        infos = [info.result() for info in [pool.submit(first.next_rendezvous), pool.submit(second.next_rendezvous)]]
    assert [(info.rank, info.world_size) for info in infos] == [(0, 2), (1, 2)]
    infos[0].store.set("word", "ours")
    assert infos[1].store.get("word") == b"ours"


def test_who_does_not_come_is_named_as_torchrun_does(port: int) -> None:
    with pytest.raises(RendezvousTimeoutError, match="not all of 2 machines joined"):
        machine(f"127.0.0.1:{port}", 2, rank="0", timeout="1").next_rendezvous()
    with pytest.raises(RendezvousConnectionError, match=f"machine 0 does not answer at 127.0.0.1:{port}"):
        machine(f"127.0.0.1:{port}", 2, rank="1", timeout="1").next_rendezvous()


def test_all_addresses_only_where_it_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are those of IPv6, too, where there is any: the others may have no address of IPv4."""
    asked = list[tuple[str, bool]]()
    create = socket.create_server

    def created(place: tuple[str, int], *, family: int, dualstack_ipv6: bool, **more: Any) -> socket.socket:
        asked.append((place[0], dualstack_ipv6))
        here = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        return create((here, place[1]), family=family, **more)

    monkeypatch.setattr(socket, "create_server", created)
    both = socket.has_dualstack_ipv6()
    machine("[::1]:0" if both else "127.0.0.1:0", listen="*").next_rendezvous().store.set("word", "ours")
    machine().next_rendezvous()
    assert asked == [("", both), ("127.0.0.1", False)]


def test_torchrun_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(torchrun.run, "main", given.append)
    torchrun.main(["train.py"])
    assert given == [["train.py"]]
    handler = rendezvous_handler_registry.create_handler(RendezvousParameters(torchrun.BACKEND, "127.0.0.1:0", "id", 1, 1))
    assert isinstance(handler, KnownMachines)
