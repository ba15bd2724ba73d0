"""Ranks that do all they can to survive: deaf to SIGTERM, with a loader's worker and a deaf orphan in a session of its own.

With the argument "polite" the rank itself ends on SIGTERM.
"""

import contextlib
import signal
import subprocess
import sys
import time

import torch.distributed as dist
from torch.utils.data import DataLoader

ORPHAN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    time.sleep(300)
"""

if __name__ == "__main__":
    if sys.argv[1:] != ["polite"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    batches = iter(DataLoader(range(100_000), num_workers=1))
    next(batches)
    subprocess.run([sys.executable, "-c", ORPHAN], start_new_session=True, check=True)
    print("ready", flush=True)
    while True:
        with contextlib.suppress(RuntimeError):  # "DataLoader worker is killed by signal: Terminated"
            time.sleep(300)
