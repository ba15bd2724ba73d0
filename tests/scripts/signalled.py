"""Two ranks that exchange a byte all the time, by a socket or by gloo, until one of them is gone.

Each leaves its process id in the run directory.

signalled.py socket|gloo
"""

import os
import socket
import sys
import time
from pathlib import Path

RUN_DIR, RANK = Path(os.environ.get("WORKBENCH_RUN_DIR", "")), int(os.environ.get("RANK", "0"))  # none where doctests are collected


def ready() -> None:
    part = RUN_DIR / f"pid{RANK}.part"
    part.write_text(str(os.getpid()))
    part.rename(RUN_DIR / f"pid{RANK}")


def by_socket() -> None:
    place = f"\0{os.environ['WORKBENCH_RUN_ID']}"
    if RANK == 0:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(place)
            listening.listen()
            peer, _ = listening.accept()
    else:
        peer = socket.socket(socket.AF_UNIX)
        while peer.connect_ex(place):
            time.sleep(0.01)
    ready()
    with peer:
        while True:
            peer.send(b"x")
            if not peer.recv(1):
                raise ConnectionResetError("Connection reset by peer")
            time.sleep(0.002)


def by_gloo() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    ready()
    while True:
        dist.all_reduce(value)
        time.sleep(0.002)


if __name__ == "__main__":
    by_gloo() if sys.argv[1] == "gloo" else by_socket()
