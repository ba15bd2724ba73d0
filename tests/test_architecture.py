"""The rules of the house, executed: which way imports flow, what a light import loads, which names are public."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import workbench

ROOT = Path(workbench.__file__).parent
FLOORS = (
    ("codec", "units", "display", "vocabulary"),
    ("device", "optimizer_table", "statistics", "task", "timeline", "progress", "profiling", "collector"),
    ("memory", "batch", "laws", "cost", "traces"),
    ("rundir", "spec", "symptoms"),
    ("failure", "job"),
    ("root_cause",),
    ("run",),
    ("comparison",),
    ("diagnosis", "scaling"),
    ("launcher", "measure", "data"),
    ("train", "estimate"),
    ("diagnosing", "growing", "estimating", "measuring", "tracing"),
    ("fitting", "estimators", "calibrating", "communicating"),
    ("batching",),
    ("planning",),
    ("plot",),
    ("widgets",),
    ("__main__",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
LIGHT = {name for rooms in FLOORS[:9] for name in rooms} | {
    "launcher",
    "diagnosing",
    "growing",
    "estimating",
    "measuring",
    "tracing",
    "fitting",
    "estimators",
    "calibrating",
    "communicating",
    "batching",
    "planning",
}
HOMES = {
    "numpy": {"memory", "batch", "laws", "traces", "scaling", "planning", "measure", "data", "train", "estimate", "plot"},
    "scipy": {"batch", "laws", "scaling"},
    "msgspec": {"traces"},
    "pandas": {"display"},
    "matplotlib": {"plot"},
    "ipywidgets": {"widgets"},
    "anywidget": {"widgets"},
    "torch": {"measure", "data", "train", "estimate"},
}
MODULES = sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    """Dotted names of everything a module imports, wherever in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports by full name, not by dots"
            found += [node.module or ""] if node.module != "workbench" else [f"workbench.{alias.name}" for alias in node.names]
    return found


def printed(code: str) -> list[str]:
    """Words that a fresh Python prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_every_room_has_a_floor() -> None:
    assert {room(path) for path in MODULES} - {"__init__"} <= set(FLOOR)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_flow_one_way(path: Path) -> None:
    here = room(path)
    if here == "__init__":
        return
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package == "workbench" and rest:
            there = rest.partition(".")[0]
            if there in workbench._HOMES:  # a public name, such as `from workbench import Task`
                there = workbench._HOMES[there] or there
            assert there == here or FLOOR[there] < FLOOR[here], f"{path.name} ({here}) imports {name}: that is no lower floor"
            assert {here, there} != {"launcher", "train"}, "launcher and train meet in the run directory only"
        elif package in HOMES:
            assert here in HOMES[package], f"{path.name} imports {package}, whose home is {', '.join(HOMES[package])}"
        elif here in LIGHT:
            assert package in sys.stdlib_module_names | {"workbench"}, f"{path.name} imports {package}: this floor is the standard library"


def test_a_first_line_says_what_a_file_is_for() -> None:
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


def test_the_only_late_calls_upward_are_those_of_display() -> None:
    users = {room(path) for path in MODULES if "import_module" in path.read_text()}
    assert users <= {"__init__", "display", "task", "diagnosis", "traces", "train"}  # Diagnosis.prove; traces and train: their own files


def test_import_is_light() -> None:
    code = "import sys, workbench; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = set(printed(code))
    assert not loaded & {"torch", "numpy", "pandas", "matplotlib", "ipywidgets", "psutil", "PIL", "IPython"}


def test_a_training_loads_nothing_that_reads_traces() -> None:
    """A GPU machine may have torch and numpy, and not msgspec."""
    code = "import sys, workbench.train.__main__; print('msgspec' in sys.modules, 'pandas' in sys.modules, 'scipy' in sys.modules)"
    assert printed(code) == ["False"] * 3


def test_launching_loads_no_torch() -> None:
    code = "import sys, workbench; workbench.launch, workbench.sweep, workbench.Run, workbench.RunSpec; print('torch' in sys.modules)"
    assert printed(code) == ["False"]


def test_public_names_are_there() -> None:
    assert sorted(workbench.__all__) == sorted(workbench._HOMES)
    code = "import workbench as wb; [getattr(wb, name) for name in wb.__all__]; print(*map(callable, (wb.launch, wb.compare, wb.watch)))"
    assert printed(code) == ["True"] * 3


def test_a_submodule_does_not_shadow_a_public_name() -> None:
    code = "import workbench.launcher, workbench.comparison, workbench as wb; print(*map(callable, (wb.launch, wb.compare)))"
    assert printed(code) == ["True"] * 2


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'lunch': it offers"):
        workbench.lunch  # noqa: B018
