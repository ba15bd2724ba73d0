"""Runs `programs.alone` under its former name, `-m workbench.train.alone`, which existing Kubernetes manifests have."""

import runpy

from workbench.runs.entrypoints import ALONE

if __name__ == "__main__":
    runpy.run_module(ALONE, run_name="__main__", alter_sys=True)
