"""How a rank of ours starts: what is there before the task is out of the collector's way, and nothing else is."""

import json
import os
import subprocess
import sys
from pathlib import Path

from workbench.core import run_directory
from workbench.runs.entrypoints import entrypoint

PROGRAM = """
import gc, json, sys, weakref
import torch

class Task: ...

def main():
    task = Task()
    task.itself, dead = task, weakref.ref(task)
    frozen = gc.get_freeze_count()
    seen = any(one is task for one in gc.get_objects())
    del task
    swept = len(gc.get_objects())
    gc.collect()
    print(json.dumps([sys.argv, gc.isenabled(), frozen, swept, seen, dead() is None, "torch._dynamo" in sys.modules]))
"""


def test_libraries_are_frozen_and_what_a_task_makes_is_collected(tmp_path: Path) -> None:
    (tmp_path / "program_of_a_rank.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, *entrypoint("program_of_a_rank", tmp_path / "one", tmp_path / "two")],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=True,
    )
    argv, enabled, frozen, swept, seen, dead, loaded = json.loads(done.stdout)
    assert argv == ["program_of_a_rank", f"{tmp_path / 'one'}", f"{tmp_path / 'two'}"]
    assert enabled
    assert frozen > 100 * swept
    assert seen
    assert dead
    assert loaded


def test_an_import_that_fails_is_on_record(tmp_path: Path) -> None:
    (tmp_path / "program_of_a_rank.py").write_text("raise ImportError('no such library')")
    done = subprocess.run(
        [sys.executable, *entrypoint("program_of_a_rank", tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
            run_directory.ENV_RUN_DIR: str(tmp_path),
            "RANK": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    found = run_directory.read_json(tmp_path / run_directory.ERRORS / "rank1.json")
    assert (found["rank"], found["message"]) == (1, "ImportError: no such library")
    assert "program_of_a_rank.py" in found["traceback"]
