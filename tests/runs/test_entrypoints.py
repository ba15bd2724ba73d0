"""Every program that starts in another process is named once, exists and has a `main`; names in files that users keep go on working."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import workbench
from workbench.runs import entrypoints
from workbench.runs.spec import RunSpec, ScriptSpec

ROOT = Path(workbench.__file__).parent
NAMES = {name: value for name, value in vars(entrypoints).items() if name.isupper() and isinstance(value, str)}
"""The names of programs; tuples are groups of them."""


@pytest.mark.parametrize("module", NAMES.values())
def test_each_program_exists_and_has_a_main(module: str) -> None:
    assert callable(importlib.import_module(module).main)


def test_every_program_has_a_name() -> None:
    files = {f"workbench.programs.{path.stem}" for path in (ROOT / "programs").glob("*.py")} - {"workbench.programs.__init__"}
    assert files == set(NAMES.values()) - {entrypoints.NODE}


def test_no_other_file_writes_a_program_name_down() -> None:
    """Docstrings aside, which say how a program is called."""
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        if not any(name.rpartition(".")[0] in text for name in NAMES.values()):
            continue
        tree = ast.parse(text)
        docs = {
            ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docs and path.name != "entrypoints.py":
                assert not any(f"{name} " in f"{node.value} " for name in NAMES.values()), f"{path}:{node.lineno} names {node.value!r}"


def test_out_in_the_arguments_of_a_script_is_a_folder_of_each_launch(tmp_path: Path) -> None:
    spec = ScriptSpec(script="train.py", args=("--ckpt={out}/last", "{out}", "--n"))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        out = tmp_path / name / "out"
        for _ in range(2):  # also where a run is started again
            assert entrypoints.spec_entrypoint(spec, tmp_path / name)[-3:] == [f"--ckpt={out}/last", str(out), "--n"]
        assert out.is_dir()


def test_entrypoints() -> None:
    spec = ScriptSpec(script="train.py", args=("--n", "1"), watch=True, profile=3)
    *words, profile, script, option, value = entrypoints.spec_entrypoint(spec, Path("run"))
    assert words == ["-m", "--", entrypoints.SCRIPT, "--watch", "--profile"]
    assert profile.startswith('{"steps": 3')
    assert [script, option, value] == ["train.py", "--n", "1"]
    assert entrypoints.spec_entrypoint(RunSpec(task="text-gpt"), Path("a"), Path("b")) == [
        "-m",
        entrypoints.START,
        entrypoints.TRAIN,
        "a",
        "b",
    ]


def test_a_manifest_of_an_older_workbench_still_starts_its_program(tmp_path: Path) -> None:
    """`-m workbench.train.alone` is in files that users keep; here it refuses a knob, as the program itself does."""
    for module in ("workbench.train.alone", entrypoints.ALONE):
        words = [sys.executable, "-m", module, "text-gpt", str(tmp_path), "micro_batch=0"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].endswith('SpecError: micro_batch=0: a whole number of at least 1 is allowed, or "auto"')
