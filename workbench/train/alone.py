"""Runs `programs.alone` under its former name, which Kubernetes manifests that users keep still have: `-m workbench.train.alone`."""

import runpy

from workbench.runs.entrypoints import ALONE

if __name__ == "__main__":
    runpy.run_module(ALONE, run_name="__main__", alter_sys=True)
