"""The rules of the architecture hold, each rule catches a breach, an import stays light, and the public names are there."""

import ast
import importlib.util
import marshal
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import workbench
from tests.architecture import rules
from tests.architecture.rules import LIMITS, RULES, Tree

ROOT = Path(workbench.__file__).parent


@pytest.fixture(scope="module")
def tree() -> Tree:
    """A million objects, which no other test is to have in its process."""
    return Tree.read(ROOT)


JUPYTER = ["ipywidgets", "anywidget", "traitlets", "IPython", "ipykernel", "jupyter_client", "nbformat"]

BREACHES: list[tuple[str, dict[str, str], str]] = [
    # order
    ("order", {"runs/run.py": "from workbench.memory.api import f", "memory/api.py": "f = 1"}, "memory is not to the left of runs"),
    ("order", {"runs/run.py": "def f():\n    import workbench.memory.api", "memory/api.py": ""}, "runs/run.py:2"),
    ("order", {"runs/run.py": "from workbench import Task", "__init__.py": "Task = 1"}, "the root is not to the left of runs"),
    ("order", {"runs/run.py": "from ..memory import api", "memory/api.py": ""}, "memory is not to the left of runs"),
    ("order", {"__main__.py": "import workbench.programs.train", "programs/train.py": ""}, "programs is not to the left of __main__"),
    ("order", {"train/loop.py": "from workbench.runs.launch.launch import launch", "runs/launch/launch.py": "def launch(): ..."}, "meet"),
    ("order", {"measure/loop.py": ""}, "measure has no place"),
    ("order", {"helpers.py": "import workbench.core.units", "core/units.py": ""}, "helpers has no place"),
    ("order", {"plot.py": "import workbench.widgets", "widgets.py": ""}, "widgets is not to the left of plot"),
    # what a package passes on counts where it is defined
    (
        "order",
        {"runs/run.py": "from workbench.core import f", "core/__init__.py": "from workbench.memory.api import f", "memory/api.py": "f = 1"},
        "runs/run.py:1 imports f of memory/api.py through core/__init__.py",
    ),
    # layers
    ("layers", {"memory/analysis/a.py": "import workbench.memory.measure.b", "memory/measure/b.py": ""}, "analysis does not see measure"),
    ("layers", {"memory/measure/a.py": "import workbench.memory.estimate.b", "memory/estimate/b.py": ""}, "measure does not see estimate"),
    ("layers", {"memory/estimate/a.py": "import workbench.memory.ladder", "memory/ladder.py": ""}, "estimate does not see api"),
    ("layers", {"memory/api.py": "import workbench.memory.plot", "memory/plot.py": ""}, "api does not see plot"),
    ("layers", {"memory/plot_time.py": "import workbench.memory.panel.p", "memory/panel/p.py": ""}, "plot does not see panel"),
    ("layers", {"batch/analysis/a.py": "import workbench.memory.measure.b", "memory/measure/b.py": ""}, "analysis does not see measure"),
    ("layers", {"batch/api.py": "import workbench.memory.plot", "memory/plot.py": ""}, "api does not see plot"),
    ("layers", {"runs/run.py": "import workbench.runs.panel.panel", "runs/panel/panel.py": ""}, "api does not see panel"),
    ("layers", {"batch/analysis/a.py": "import workbench.train.loop", "train/loop.py": ""}, "analysis does not see measure"),
    ("layers", {"batch/analysis/a.py": "import workbench.runs.launch.sweep", "runs/launch/sweep.py": ""}, "analysis does not see api"),
    # homes
    ("homes", {"memory/analysis/a.py": "import torch"}, "the home of torch"),
    ("homes", {"memory/api.py": "def f():\n    from torch import nn"}, "memory/api.py:2"),
    ("homes", {"memory/api.py": "import matplotlib.pyplot as plt"}, "the home of matplotlib"),
    ("homes", {"core/display/table.py": "import matplotlib"}, "the home of matplotlib"),
    ("homes", {"runs/run.py": "import pandas"}, "the home of pandas is core/display/table.py"),
    ("homes", {"memory/plot.py": "import ipywidgets"}, "the home of ipywidgets"),
    ("homes", {"core/device.py": "import requests"}, "the home of requests is not chosen"),
    # light
    ("light", {"batch/api.py": "from workbench.train import loop", "train/loop.py": "import torch"}, "batch/api.py:1"),
    (
        "light",
        {
            "diagnosis/analysis/a.py": "import workbench.harness.arm",
            "harness/__init__.py": "import workbench.harness.blocks",
            "harness/arm.py": "",
            "harness/blocks.py": "import torch.nn",
        },
        "which loads torch",
    ),
    # circles
    (
        "circles",
        {"runs/a.py": "import workbench.runs.b", "runs/b.py": "import workbench.runs.a"},
        "a circle of 2 files: runs/a.py, runs/b.py",
    ),
    ("circles", {"runs/a.py": "import workbench.runs.b", "runs/b.py": "def f():\n    from workbench.runs import a"}, "a circle of 2 files"),
    (
        "circles",
        {"runs/a.py": "if TYPE_CHECKING:\n    from workbench.runs.b import B", "runs/b.py": "import workbench.runs.a\nclass B: ..."},
        "a circle of 2 files",
    ),
    ("circles", {"runs/a.py": "import_module('workbench.runs.b')", "runs/b.py": "import workbench.runs.a"}, "a circle of 2 files"),
    (
        "circles",
        {"runs/a.py": "import workbench.runs.b", "runs/b.py": "import workbench.runs.c", "runs/c.py": "import workbench.runs.a"},
        "a circle of 3 files",
    ),
    # late
    ("late", {"runs/run.py": "import importlib\nimportlib.import_module(name)"}, "runs/run.py:2 uses importlib.import_module"),
    ("late", {"runs/run.py": "from importlib import import_module"}, "runs/run.py:1 uses importlib.import_module"),
    ("late", {"runs/run.py": "__import__(name)"}, "runs/run.py:1 uses __import__"),
    ("late", {"runs/run.py": "import importlib.util\nimportlib.util.spec_from_file_location(name, path)"}, "runs/run.py:2"),
    # strings
    (
        "strings",
        {"runs/task.py": "SAMPLE = 'workbench.train.tasks:gone'", "train/tasks.py": "def there(): ..."},
        "workbench.train.tasks:gone",
    ),
    ("strings", {"runs/a.py": "PROGRAM = 'workbench.programs.gone'"}, "workbench.programs.gone"),
    ("strings", {"runs/a.py": "'''Starts `python -m workbench.programs.gone`.'''"}, "workbench.programs.gone"),
    ("strings", {"runs/a.py": "f'{python} -m workbench.programs.gone RUN'"}, "workbench.programs.gone"),
    ("strings", {"runs/a.py": "'''See `workbench.core.gone`.'''", "core/__init__.py": ""}, "workbench.core.gone"),
    ("strings", {"runs/a.py": "'workbench.gone'", "__init__.py": "def __getattr__(name): ..."}, "workbench.gone"),
    ("strings", {"runs/a.py": "'workbench.core.late.gone'", "core/late.py": "def call(): ..."}, "workbench.core.late.gone"),
    # sizes
    ("sizes", {"runs/run.py": "\n" * 501}, "runs/run.py has 501 lines"),
    ("sizes", {f"runs/f{number}.py": "" for number in range(LIMITS["files"] + 1)}, f"files: {LIMITS['files'] + 1}"),
    (
        "sizes",
        {f"runs/f{number}.py": "\n" * 500 for number in range(LIMITS["lines"] // 500 + 1)},
        f"lines: {(LIMITS['lines'] // 500 + 1) * 500:,}",
    ),
    ("sizes", {f"p{number}/a.py": "" for number in range(14)}, "packages: 14"),
    ("sizes", {"runs/a.py": "\n" * 99}, "the median file has 99 lines"),
]
HEALTHY = {
    "__init__.py": "import importlib\nimportlib.import_module(name)",
    "__main__.py": "import workbench\nimport workbench.plot",
    "plot.py": "from workbench.memory.plot import memory",
    "core/__init__.py": "",
    "core/late.py": "from importlib import import_module\nimport_module('workbench.plot')",
    "core/display/axes.py": "def f():\n    import matplotlib.pyplot as plt",
    "core/display/table.py": "def frame():\n    import pandas as pd",
    "timeline/watch.py": "def watch():\n    import torch",
    "runs/run.py": "from importlib import metadata\nimport importlib.util\nimportlib.util.find_spec('torch')\nRun = 1",
    "runs/launch/launch.py": "PROGRAM = 'workbench.programs.start'\nTASK = 'workbench.train.sized:gpt_8'\nfrom workbench.runs import run",
    "harness/blocks.py": "import torch",
    "harness/results.py": "VariantTimes = 1",
    "train/sized.py": "import torch\ndef __getattr__(name): ...",
    "memory/__init__.py": "from workbench.memory.api import measure_memory",
    "memory/analysis/family.py": "import numpy as np\nfrom workbench.runs.run import Run",
    "memory/measure/recorder.py": "import torch\nfrom workbench.memory.analysis import family\nimport workbench.harness.blocks",
    "memory/estimate/dry_run.py": "from workbench.memory.measure.recorder import torch\nimport workbench.train.sized",
    "memory/api.py": "def measure_memory():\n    from workbench.memory.estimate import dry_run\nimport workbench.runs.launch.launch",
    "memory/plot.py": "import matplotlib\nfrom workbench.memory import api\nfrom workbench.core.display import axes\ndef memory(): ...",
    "memory/panel/explorer.py": "import ipywidgets\nimport workbench.memory.plot",
    "diagnosis/analysis/costs.py": "from workbench.harness.results import VariantTimes\nfrom workbench.memory.analysis.family import np",
    "diagnosis/panel/doctor.py": "from workbench.memory.panel import explorer\nfrom workbench.memory import api",
    "programs/start.py": "import importlib\nimportlib.import_module(name)\nimport workbench.memory.api",
}


def planted(folder: Path, files: Mapping[str, str]) -> Tree:
    """A package with these files."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Tree.read(folder)


def printed(code: str) -> list[str]:
    """Words that a fresh Python prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("rule", RULES)
def test_the_library_keeps_every_rule(rule: str, tree: Tree) -> None:
    breaches = list(RULES[rule](tree))
    assert not breaches, "\n".join([str(RULES[rule].__doc__), *breaches])


@pytest.mark.parametrize(("rule", "files", "message"), BREACHES, ids=[f"{rule}-{message}" for rule, _, message in BREACHES])
def test_a_rule_catches_a_breach(tmp_path: Path, rule: str, files: dict[str, str], message: str) -> None:
    assert any(message in breach for breach in RULES[rule](planted(tmp_path, files))), list(RULES[rule](planted(tmp_path, files)))


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"sizes"}))
def test_a_rule_leaves_a_healthy_tree_alone(tmp_path: Path, rule: str) -> None:
    assert list(RULES[rule](planted(tmp_path, HEALTHY))) == []


def test_every_rule_has_a_planted_breach() -> None:
    assert {rule for rule, _, _ in BREACHES} == set(RULES)


def test_the_figures_of_a_tree(tmp_path: Path) -> None:
    files = {
        "core/units.py": "\n" * 4,
        "runs/run.py": "import os\nimport workbench.core.units",
        "runs/spec.py": "import workbench.runs.run",
    }
    measured = rules.figures(planted(tmp_path, files))
    assert (measured["packages"], measured["files"], measured["lines"], measured["median file"]) == (2, 3, 7, 2)
    assert (measured["imports"], measured["imports between packages"], measured["levels of packages"]) == (2, 1, 2)


def test_the_command_prints_figures_and_breaches(tmp_path: Path) -> None:
    planted(tmp_path, {"runs/run.py": "import workbench.memory.api", "memory/api.py": ""})
    command = [sys.executable, str(Path(rules.__file__)), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "order: runs/run.py:1 imports memory/api.py" in result.stdout
    assert "upward imports                   1" in result.stdout


def test_all_packages_are_there(tree: Tree) -> None:
    assert tree.packages == sorted(rules.PACKAGES)


def test_every_folder_is_a_package(tree: Tree) -> None:
    """Else it is not installed."""
    folders = {path.rpartition("/")[0] for path in tree.files if "/" in path}
    assert {f"{folder}/__init__.py" for folder in folders} <= set(tree.files)


def test_a_first_line_says_what_a_file_is_for(tree: Tree) -> None:
    for path, module in tree.files.items():
        assert ast.get_docstring(module), f"{path} has no docstring"


def test_imports_are_by_full_name(tree: Tree) -> None:
    relative = [path for path, nodes in tree.nodes.items() for node, _ in nodes if isinstance(node, ast.ImportFrom) and node.level]
    assert relative == []


def test_no_package_has_the_name_of_a_public_function() -> None:
    """Importing the package would hide the function. `wb.data` is the package itself."""
    assert set(rules.PACKAGES) & set(workbench.__all__) == {"data"}
    assert workbench._HOMES["data"] == "workbench.data"


def test_import_is_light() -> None:
    loaded = set(printed("import sys, workbench; print(*sorted({m.partition('.')[0] for m in sys.modules}))"))
    assert not loaded & {"torch", "numpy", "pandas", "matplotlib", "ipywidgets", "psutil", "PIL", "IPython", "msgspec", "scipy"}


def modules(paths: Iterable[str]) -> list[str]:
    """The dotted names of files."""
    return ["workbench." + path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in paths]


def test_what_is_outside_the_home_of_torch_loads_no_torch_and_panels_alone_need_jupyter(tree: Tree) -> None:
    light = [path for path in tree.files if not rules.within(path, rules.TORCH) and path not in ("__main__.py", "__init__.py")]
    panels = {path for path in light if rules.within(path, ("*/panel/", "core/display/html.py", "widgets.py"))}
    code = f"""
import sys, importlib
sys.modules.update(dict.fromkeys({JUPYTER}))  # None = cannot be imported
for name in {modules(sorted(set(light) - panels))}: importlib.import_module(name)
print('torch' in sys.modules)
import workbench as wb
print(*(name for name in wb.__all__ if name != 'widgets' and not getattr(wb, name)))
"""
    assert printed(code) == ["False"]
    pytest.importorskip("ipywidgets", reason="panels need Jupyter's packages (pip install '.[notebooks]')")
    code = f"import sys, importlib\nfor name in {modules(light)}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    assert printed(code) == ["False"]


def test_a_training_loads_nothing_that_reads_traces() -> None:
    """A GPU machine may have torch and numpy, and not msgspec."""
    code = "import sys, workbench.programs.train; print('msgspec' in sys.modules, 'pandas' in sys.modules, 'scipy' in sys.modules)"
    assert printed(code) == ["False"] * 3


def test_launching_loads_no_torch() -> None:
    code = "import sys, workbench; workbench.launch, workbench.sweep, workbench.Run, workbench.RunSpec; print('torch' in sys.modules)"
    assert printed(code) == ["False"]


def test_public_names_are_there() -> None:
    pytest.importorskip("ipywidgets", reason="wb.widgets needs Jupyter's packages (pip install '.[notebooks]')")
    assert sorted(workbench.__all__) == sorted(workbench._HOMES)
    code = "import workbench as wb; [getattr(wb, name) for name in wb.__all__]; print(*map(callable, (wb.launch, wb.compare, wb.watch)))"
    assert printed(code) == ["True"] * 3


def test_type_checkers_see_the_same_public_names(tree: Tree) -> None:
    """What stands under `TYPE_CHECKING` is what `__getattr__` gives."""
    declared = {name: origin for name, origin in tree.names["__init__.py"].items() if origin[0].partition(".")[0] == "workbench"}
    homes = {name: tree.file(module) for name, module in workbench._HOMES.items()}
    assert {name: tree.resolve(*origin)[0] for name, origin in declared.items()} == homes
    declared = {name: origin for name, origin in tree.names["data/__init__.py"].items() if origin[0].startswith("workbench.")}
    homes = {name: tree.file(module) for name, module in workbench.data._HOMES.items()}
    assert {name: tree.resolve(*origin)[0] for name, origin in declared.items()} == homes


def test_an_installation_without_sources_is_imported_also_where_text_is_ascii(tmp_path: Path) -> None:
    """As it may be zipped, or compiled and stripped of its sources."""
    package = Path(workbench.__file__).parent
    with zipfile.ZipFile(tmp_path / "workbench.zip", "w") as packed:
        for name in ("__init__", "data/__init__"):
            compiled = compile((package / f"{name}.py").read_bytes(), name, "exec")
            packed.writestr(f"workbench/{name}.pyc", importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(compiled))
    environment = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONPATH": str(tmp_path / "workbench.zip"),
    }
    code = "import workbench as wb; print(wb.__file__.endswith('.pyc'), 'Device' in wb.__all__, 'Source' in dir(wb.data))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True"] * 3, done.stderr


def test_a_module_does_not_hide_a_public_name(tree: Tree) -> None:
    """`workbench.cluster.plan` is a file and a function: whichever is imported first, `wb.plan` is the function."""
    pytest.importorskip("ipywidgets", reason="wb.widgets needs Jupyter's packages (pip install '.[notebooks]')")
    paths = [path.removesuffix(".py") for path in tree.files if path.split("/")[-1].removesuffix(".py") in workbench.__all__]
    modules = ["workbench." + path.replace("/", ".") for path in paths if path not in rules.FACES]
    code = f"import importlib, types, workbench as wb\nfor name in {modules}: importlib.import_module(name)\n"
    code += "print([name for name in wb.__all__ if isinstance(getattr(wb, name), types.ModuleType)])"
    assert " ".join(printed(code)) == "['data', 'plot', 'widgets']"


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'lunch': did you mean 'launch'\?$"):
        workbench.lunch  # noqa: B018
