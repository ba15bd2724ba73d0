"""Ranks that do all they can to survive: deaf to SIGTERM, with a worker and a deaf orphan in a session of its own.

With the argument "polite" the rank itself ends on SIGTERM. With "torch" it has met the other ranks, and its worker is a DataLoader's: all
else is the same, and up a second sooner.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

ORPHAN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    time.sleep(300)
"""

if __name__ == "__main__":
    if "polite" not in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "torch" in sys.argv:
        import torch.distributed as dist
        from torch.utils.data import DataLoader

        dist.init_process_group("gloo")
        batches = iter(DataLoader(range(100_000), num_workers=1))
        next(batches)
    elif os.fork() == 0:
        time.sleep(300)
    subprocess.run([sys.executable, "-c", ORPHAN], start_new_session=True, check=True)
    print("ready", flush=True)
    while True:
        with contextlib.suppress(RuntimeError):  # "DataLoader worker is killed by signal: Terminated"
            time.sleep(300)
