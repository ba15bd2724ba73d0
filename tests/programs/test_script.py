"""The runner of unedited scripts: a script sees what plain Python shows it, and its error is on record before anything is torn down."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from workbench.core import run_directory

RUNNER = [sys.executable, "-m", "workbench.programs.script"]

LOOK = """
import json, sys
import neighbour
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__, "doc": __doc__, "spec": __spec__, "package": __package__,
    "cached": __cached__, "loader": type(__loader__).__name__, "main": main.__dict__ is globals(), "function": (lambda: 0).__module__,
    "builtins": type(__builtins__).__name__, "neighbour": neighbour.VALUE, "torch": "torch" in sys.modules,
}))
"""
SPAWN = """
import multiprocessing
import neighbour
def double(x):
    return 2 * x + neighbour.VALUE
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""
LOADERS = """
import torch
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return i * i
if __name__ == "__main__":
    for context, count in (("fork", 2), ("spawn", 1)):
        print([batch.tolist() for batch in DataLoader(Squares(), batch_size=2, num_workers=count, multiprocessing_context=context)])
"""
PICKLE = """
import pickle
class Thing:
    pass
print(pickle.loads(pickle.dumps(Thing())).__class__ is Thing, Thing.__module__)
"""
NO_ERROR = """
import sys
import atexit
atexit.register(print, "bye")
sys.exit()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "my scripts"
    folder.mkdir()
    (folder / "neighbour.py").write_text("VALUE = 7")
    return folder / "train.py"


def run(command: list[Any], cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORKBENCH_RUN"))}
    return subprocess.run([*map(str, command)], cwd=cwd, env={**environ, **more}, capture_output=True, text=True, check=False, timeout=120)


def errors(run_dir: Path) -> list[dict[str, Any]]:
    return [run_directory.read_json(path) for path in sorted((run_dir / run_directory.ERRORS).glob("*"))]


@pytest.mark.parametrize("code", [LOOK, SPAWN, PICKLE, NO_ERROR], ids=["look", "spawn", "pickle", "sys.exit()"])
def test_as_under_plain_python(script: Path, tmp_path: Path, code: str) -> None:
    script.write_text(code)
    plain = run([sys.executable, script, "--epochs", "1"], tmp_path)
    ours = run([*RUNNER, script, "--epochs", "1"], tmp_path, WORKBENCH_RUN_DIR=str(tmp_path))
    assert plain.returncode == 0, plain.stderr
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, plain.stdout, plain.stderr)
    assert errors(tmp_path) == []


def test_loaders_have_their_workers(script: Path, tmp_path: Path) -> None:
    script.write_text(LOADERS)
    ours = run([*RUNNER, script], tmp_path, WORKBENCH_RUN_DIR=str(tmp_path))
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, 2 * "[[0, 1], [4, 9]]\n", "")
    assert errors(tmp_path) == []


FAILURES = {
    "ValueError: boom": "def deep():\n    raise ValueError('boom')\ndeep()",
    "ModuleNotFoundError: No module named 'nowhere'": "import nowhere",
    "SyntaxError: invalid syntax (train.py, line 1)": "def = 3",
    "SystemExit: 3": "import sys\nsys.exit(3)",
    "SystemExit: no data": "import sys\nsys.exit('no data')",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "ValueError: boom (then sys.exit(1))": "import sys\ntry:\n    raise ValueError('boom')\nexcept ValueError:\n    sys.exit(1)",
}


@pytest.mark.parametrize("message", FAILURES)
def test_an_error_is_recorded_and_goes_on_as_it_came(script: Path, tmp_path: Path, message: str) -> None:
    script.write_text(FAILURES[message])
    plain = run([sys.executable, script], tmp_path)
    ours = run([*RUNNER, script], tmp_path, WORKBENCH_RUN_DIR=str(tmp_path), RANK="2")
    assert (ours.returncode, ours.stderr) == (plain.returncode, plain.stderr)
    (record,) = errors(tmp_path)
    assert (record["rank"], record["message"], record["consequence"]) == (2, message, False)
    assert "workbench" not in record["traceback"]
    if plain.stderr.startswith("Traceback"):
        assert record["traceback"].split("\n")[:-2] == plain.stderr.split("\n")[:-2]


TEARDOWN = """
import time
import torch.distributed as dist
from torch.distributed import destroy_process_group
dist.init_process_group("gloo", init_method="file://{path}", rank=0, world_size=1)
try:
    try:
        raise ValueError("boom")
    finally:
        print(time.monotonic_ns(), flush=True)
        {destroy}()
        print(time.monotonic_ns(), flush=True)
except ValueError:
    {then}
"""


@pytest.mark.parametrize("destroy", ["dist.destroy_process_group", "destroy_process_group"])
def test_the_record_is_written_before_the_teardown(script: Path, tmp_path: Path, destroy: str) -> None:
    script.write_text(TEARDOWN.format(path=tmp_path / "store", destroy=destroy, then="raise"))
    ended = run([*RUNNER, script], tmp_path, WORKBENCH_RUN_DIR=str(tmp_path))
    before, after = map(int, ended.stdout.split())
    (record,) = errors(tmp_path)
    assert record["message"] == "ValueError: boom"
    assert before < record["time_ns"] < after < time.monotonic_ns()


def test_a_handled_error_is_taken_back(script: Path, tmp_path: Path) -> None:
    script.write_text(TEARDOWN.format(path=tmp_path / "store", destroy="destroy_process_group", then="raise SystemExit from None"))
    ended = run([*RUNNER, script], tmp_path, WORKBENCH_RUN_DIR=str(tmp_path))
    assert (ended.returncode, errors(tmp_path)) == (0, [])


def test_a_forked_child_does_not_speak_for_its_rank(script: Path, tmp_path: Path) -> None:
    script.write_text("import os\nif os.fork() == 0:\n    raise ValueError('a child of the script')\nos.wait()")
    ended = run([*RUNNER, script], tmp_path, WORKBENCH_RUN_DIR=str(tmp_path))
    assert "a child of the script" in ended.stderr
    assert (ended.returncode, errors(tmp_path)) == (0, [])


def test_without_a_run_directory_nothing_is_written(script: Path, tmp_path: Path) -> None:
    script.write_text("raise ValueError('boom')")
    before = sorted(tmp_path.rglob("*"))
    assert run([*RUNNER, script], tmp_path).returncode == 1
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)] == before


def test_path_is_left_alone_in_safe_mode(script: Path, tmp_path: Path) -> None:
    script.write_text("import sys\nprint(sys.path)")
    plain = run([sys.executable, "-P", script], tmp_path)
    ours = run([sys.executable, "-P", *RUNNER[1:], script], tmp_path)
    assert json.loads(ours.stdout.replace("'", '"')) == json.loads(plain.stdout.replace("'", '"'))
