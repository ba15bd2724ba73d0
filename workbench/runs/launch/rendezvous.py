"""Rendezvous: where the machines of a run meet, torchrun's options for it, and the network interfaces on which the ranks listen."""

import contextlib
import fcntl
import os
import platform
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core import run_directory

TIMEOUT = 600.0
"""Default seconds in which all machines have to come; torchrun's own."""
SILENCE = 60.0
"""Seconds without a heartbeat from a machine after which it counts as lost: a shared file system may be slow."""
BACKEND = "workbench"
"""The rendezvous of `workbench.programs.torchrun`."""
HERE = ("--nnodes", "1", "--rdzv-backend", BACKEND, "--rdzv-endpoint", "127.0.0.1:0")
"""torchrun's options for a run on this machine alone: its store listens on a free port that no other machine reaches."""
_ANYWHERE = "192.0.2.1"
"""An address that nobody has (RFC 5737): the route to it is the route out of this machine."""
_SIOCGIFADDR = 0x8915  # linux/sockios.h


_ENDPOINT = re.compile(r"(?P<host>[\w.][\w.-]{0,252}|\[?[0-9A-Fa-f:]+[0-9A-Fa-f:.]*(%[\w.-]+)?\]?):(?P<port>[0-9]{1,5})")
"""A name or an address with a port: nothing that is an option, or ends the option that it is part of."""


class RendezvousError(ValueError):
    """An endpoint that is not host:port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where and how long."""

    nnodes: int
    """Machines that have to come."""
    endpoint: str
    """host:port of machine 0, as the others reach it."""
    timeout: float = TIMEOUT
    """Seconds until who has come gives up."""
    silence: float = SILENCE
    """Seconds without a heartbeat after which a machine counts as lost."""

    def __post_init__(self) -> None:
        match = _ENDPOINT.fullmatch(self.endpoint)
        if not match or not 0 < int(match["port"]) < 65536:
            raise RendezvousError(
                f"rdzv_endpoint={self.endpoint!r:.80}: expected host:port of this machine as the others reach it, such as "
                f'"{platform.node()}:29400"'
            )

    @property
    def host(self) -> str:
        """Of the endpoint, without the brackets of an IPv6 address."""
        return self.endpoint.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Of the endpoint."""
        return int(self.endpoint.rpartition(":")[2])

    def flags(self, rank: int) -> list[str]:
        """torchrun's options on machine `rank`. Machine 0 listens on its address in the endpoint's network; on all, if that is unclear."""
        if self.nnodes == 1:
            return list(HERE)
        listen = {} if rank else {"listen": self._listen()}
        conf = {"rank": rank, "timeout": max(1, round(self.timeout)), **listen}
        words = ["--nnodes", str(self.nnodes), "--rdzv-backend", BACKEND, "--rdzv-endpoint", self.endpoint]
        return [*words, "--rdzv-conf", ",".join(f"{name}={value}" for name, value in conf.items())]

    def _listen(self) -> str:
        """The address where machine 0 listens; "*" where its own name does not say by which network the others come."""
        address = _own_address(self.host, self.port)
        local = address is not None and address.startswith("127.") and not self.host.startswith(("127.", "localhost"))
        return "*" if address is None or local else address

    def address(self) -> str | None:
        """This machine's own address on the way to the endpoint; None = the endpoint's name is not known here (yet).

        Many machines call themselves 127.0.1.1, which means another machine elsewhere: then this is the address of the outgoing route.
        """
        address = _own_address(self.host, self.port)
        if address and address.startswith("127.") and not self.host.startswith(("127.", "localhost")):
            return _own_address(_ANYWHERE, 9) or address
        return address

    def offered(self) -> str:
        """host:port where this machine could take the place of machine 0: its address on the way there, the port if it is free."""
        host = self.address() or ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for port in (self.port, 0) if host else ():
            with contextlib.suppress(OSError), socket.create_server((host, port), family=family) as listening:
                return f"{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        return free_endpoint()

    def environ(self) -> dict[str, str]:
        """Names gloo's network interface: by default it takes the one of the host's own name, often one that no other machine reaches."""
        if self.nnodes == 1:
            return loopback_environ()
        interface = _interface(self.address())
        return {"GLOO_SOCKET_IFNAME": interface} if interface and "GLOO_SOCKET_IFNAME" not in os.environ else {}

    def node(self, run_dir: Path, rank: int, name: str | None = None) -> dict[str, Any]:
        """What the guard of machine `rank` needs to know of the others; makes its folder."""
        (run_dir / run_directory.NODES / str(rank)).mkdir(parents=True, exist_ok=True)
        node = {"rank": rank, "members": list(range(self.nnodes)), "attempt": 0, "lost": {}}
        return node | {"name": name or platform.node(), "silence": self.silence}


def loopback_environ() -> dict[str, str]:
    """Keeps the ranks of one machine from listening on a network: interfaces of gloo, NCCL and RPC, where the user has set none."""
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    wanted = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}", "TP_SOCKET_IFNAME": name} if name else {}
    return {variable: str(value) for variable, value in wanted.items() if variable not in os.environ}


def free_endpoint(host: str | None = None) -> str:
    """host:port with a port that nobody listens at just now; where no host is given this machine's name, or its address if it has none."""
    if host is None:
        host = platform.node() if _own_address(platform.node(), 9) else _own_address(_ANYWHERE, 9) or "127.0.0.1"
    with socket.create_server(("", 0)) as listening:
        return f"{host}:{listening.getsockname()[1]}"


def _own_address(host: str, port: int) -> str | None:
    """This machine's address on the route to another; None = there is no route."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(place)  # of a datagram socket: nothing is sent
            return str(route.getsockname()[0])
    except OSError:
        return None


def _interface(address: str | None) -> str | None:
    """The network interface that has an IPv4 address; None = no interface has it, or it cannot be found out."""
    if address is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
