"""Starts torchrun with a rendezvous of ours, which unpickles nothing, and listens on one address instead of on all.

python -m workbench.programs.torchrun --rdzv-backend workbench --rdzv-endpoint HOST:PORT …    and all other options of torchrun

Torchrun's `c10d` rendezvous, which `--standalone` takes too, unpickles what it reads from its TCPStore, and every TCPStore server of
torch listens on all network interfaces: whoever reaches the port can run code. Here the machines know their numbers beforehand, so they
exchange nothing but JSON, and the server gets a socket that is bound already. Ranks that call `init_process_group()` use this store, too.
"""

import datetime
import socket
from typing import Any

import torch
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore, run  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

BACKEND = "workbench"
"""As in `runs/launch/rendezvous.py`; a test compares them."""
_BACKLOG = 1024
_LIBUV_TAKES_SOCKETS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)
"""Before, only the older server of a TCPStore accepts a socket that is bound already."""


class KnownMachines(RendezvousHandler):
    """Machines that know their numbers: the first one serves a TCPStore, the others connect to it.

    Options of `--rdzv-conf`: `rank`, the number of this machine; `listen`, the address where the first one listens (default: the
    endpoint's; "*" = all); `timeout`, seconds in which all have to come.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._id, self._count = params.run_id, params.max_nodes
        self._rank = int(params.get("rank", 0))
        self._host, self._port = parse_rendezvous_endpoint(params.endpoint, 0)
        self._listen = str(params.get("listen", self._host))
        self._timeout = datetime.timedelta(seconds=float(params.get("timeout", 600)))
        self._store: TCPStore | None = None
        self._meetings = 0

    use_agent_store = True

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        try:
            address = self._host, self._port, self._count, False, self._timeout
            self._store = self._store or (TCPStore(*address) if self._rank else self._serving())
        except DistStoreError as error:
            raise RendezvousTimeoutError(f"not all of {self._count} machines joined: {error}") from error
        except DistNetworkError as error:
            raise RendezvousConnectionError(f"machine 0 does not answer at {self._host}:{self._port}: {error}") from error
        self._meetings += 1
        store = PrefixStore(f"{self._id}/{self._meetings}", self._store)
        return RendezvousInfo(store, self._rank, self._count, RendezvousStoreInfo(self._host, self._port))

    def _serving(self) -> TCPStore:
        """A store with a server on a socket of ours; port 0 becomes a free one, which nobody else can take meanwhile."""
        host = "" if self._listen == "*" else self._listen
        both = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.getaddrinfo(host or "0.0.0.0", self._port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, self._port), family=family, backlog=_BACKLOG, dualstack_ipv6=both) as listening:
            self._port = listening.getsockname()[1]
            return TCPStore(
                self._host,
                self._port,
                self._count,
                True,
                self._timeout,
                master_listen_fd=listening.detach(),
                use_libuv=_LIBUV_TAKES_SOCKETS,
            )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._id

    def shutdown(self) -> bool:
        return True


def main(args: Any = None) -> None:
    """torchrun, with one more choice for `--rdzv-backend`."""
    rendezvous_handler_registry.register(BACKEND, KnownMachines)
    run.main(args)


if __name__ == "__main__":
    main()
