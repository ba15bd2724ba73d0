"""A script that knows nothing of us, in the shape that tutorials teach; rank 1 ends as its argument says."""

import atexit
import ctypes
import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def fail(how: str) -> None:
    match how:
        case "teardown":
            raise ValueError("boom")
        case "slow exit":
            atexit.register(time.sleep, 0.5)
            raise ValueError("boom")
        case "sys.exit(3)":
            sys.exit(3)
        case "os._exit(3)":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        for step in range(6):
            dist.all_reduce(torch.ones(4))
            if step == 3 and dist.get_rank() == 1:
                fail(sys.argv[1])
    finally:
        dist.destroy_process_group()
