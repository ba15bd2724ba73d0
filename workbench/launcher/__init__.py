"""Launch: a spec or a script becomes a running Run. Nothing here imports torch, and nothing that is started outlives this process.

`launch` starts one run and returns at once, on this machine, on several, or as a job of `Slurm`; `kubernetes` writes a manifest; `sweep`
runs many, several in one launch where they can share it.

    this process -> guard (`guard.py`) -> torchrun -> ranks (`workbench.train.start`, or an unedited script)
"""

from workbench.launcher.launching import launch
from workbench.launcher.manifests import Manifest, kubernetes
from workbench.launcher.slurm import Slurm
from workbench.launcher.start import LaunchError
from workbench.launcher.sweeping import sweep

__all__ = ["LaunchError", "Manifest", "Slurm", "kubernetes", "launch", "sweep"]
