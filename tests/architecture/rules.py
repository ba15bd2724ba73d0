"""Checks the architecture: reads every import of a package tree as syntax and says what breaks a rule.

`make architecture` prints the figures and every breach; `test_architecture.py` asserts that there is none, and that each rule catches a
breach planted in a small tree. Nothing that is checked is imported.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median

NAME = "workbench"
PACKAGES = (
    *("core", "timeline", "runs", "data", "harness", "traces", "train"),
    *("memory", "cluster", "batch", "scaling", "diagnosis", "programs"),
)
FACES = ("plot", "widgets")
POSITION = {name: position for position, name in enumerate(PACKAGES)} | dict.fromkeys(FACES, len(PACKAGES))
POSITION |= {"": len(PACKAGES) + 1, "__main__": len(PACKAGES) + 2}
"""Where each package stands in the total order; `""` is the root's `__init__`, which only the command line imports."""

LAYERS = ("analysis", "measure", "estimate", "api", "plot", "panel")
"""The layers of a package, from the lowest up. Every file that lies beside `api.py` belongs to its layer."""
LOW = ("core", "timeline", "runs", "harness")
"""Packages that analysis may import, except for what is in torch's home; the launching of runs is not analysis's business."""

TORCH = (
    *("*/measure/", "*/estimate/", "harness/", "train/", "data/", "programs/"),
    *(f"timeline/{name}.py" for name in ("hooks", "marks", "watch", "watch_script")),
)
PLOT = ("*/plot/", "*/plot*.py")
PANEL = ("*/panel/", "core/display/")
HOMES = {
    "torch": TORCH,
    "numpy": ("*/analysis/", "*/measure/", "*/estimate/", "harness/", "train/", "data/", *PLOT, "core/display/axes.py"),
    "scipy": ("batch/analysis/", "scaling/analysis/"),
    "msgspec": ("traces/analysis/", "runs/rank_steps.py"),
    "pandas": ("core/display/table.py",),
    "matplotlib": (*PLOT, "core/display/axes.py"),
    "safetensors": ("train/export_weights.py", "train/saved_entries.py", "timeline/watch_script.py"),
    "ipywidgets": PANEL,
    "anywidget": PANEL,
    "traitlets": PANEL,
    "PIL": ("data/",),
    "fsspec": ("data/storage.py",),
    "pyarrow": ("data/formats/",),
    "h5py": ("data/formats/",),
    "lmdb": ("data/formats/",),
    "pynvml": ("core/energy_counters.py", "core/gpu_load.py"),
}
"""Package from outside → the folders (`…/`) and files that may import it; `*` stands for any letters between two slashes."""

LATE = (
    *("core/late.py", "__init__.py", "runs/task.py", "programs/start.py", "train/lazy_dynamo.py", "programs/script.py", "runs/export.py"),
    *("data/__init__.py", "data/formats/__init__.py"),
)
"""The files that import what they know only at the call: the late calls, the public names, a task, a program or script, and a format."""
QUESTIONS = ("importlib.metadata", "importlib.resources", "importlib.util.find_spec")
"""Parts of importlib that tell something about a package and do not import it."""

NAMED = re.compile(rf"(?:^|-m |-m -- |`)(?P<name>{NAME}\.[\w.:]+)(?=$|[ \"'`;,)(])")
"""The name of one of our modules in a string that is nothing else, after `-m`, or in backticks."""

LIMITS = {"packages": len(PACKAGES), "files": 500, "lines": 114_500, "longest file": 500}
MEDIAN = (120, 250)


@dataclass(frozen=True)
class Import:
    """An import of a module, or of a name of a module."""

    source: str
    """The file that imports, relative to the root: `runs/run.py`."""
    target: str
    """The file that is imported, or the dotted name of a module from outside."""
    origin: str
    """The file that defines the imported name: another than the target where that only passes the name on."""
    name: str
    """The imported name; empty for a module."""
    line: int
    ours: bool
    """Whether the target belongs to the tree."""
    deferred: bool
    """Whether loading the source does not load the target: in a function, under `TYPE_CHECKING`, or in a string."""

    def __str__(self) -> str:
        what = f"{self.name} of {self.origin}" if self.name and self.ours else self.origin
        return f"{self.source}:{self.line} imports {what}" + f" through {self.target}" * (self.origin != self.target)


@dataclass
class Tree:
    """A package as syntax."""

    files: dict[str, ast.Module]
    lines: dict[str, int]
    names: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)
    """Per file the names that it binds outside functions → the module and the name they are imported from; empty ones for its own."""

    @classmethod
    def read(cls, root: Path) -> "Tree":
        """Read the package that lies in a folder."""
        texts = {path.relative_to(root).as_posix(): path.read_text() for path in sorted(root.rglob("*.py"))}
        tree = cls({path: ast.parse(text) for path, text in texts.items()}, {path: len(text.splitlines()) for path, text in texts.items()})
        tree.names = {path: dict(_names(path, module)) for path, module in tree.files.items()}
        return tree

    @cached_property
    def nodes(self) -> dict[str, list[tuple[ast.AST, bool]]]:
        """File → every node of it, and whether loading the module passes it by."""
        return {path: list(_nodes(module)) for path, module in self.files.items()}

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of every file, wherever in it."""
        return [found for path in self.files for found in _imports(self, path)]

    @property
    def internal(self) -> list[Import]:
        """The imports of files of the tree."""
        return [link for link in self.imports if link.ours]

    @property
    def packages(self) -> list[str]:
        """The folders in the root."""
        return sorted({path.partition("/")[0] for path in self.files if "/" in path})

    @property
    def graph(self) -> dict[str, set[str]]:
        """File → the files that it imports."""
        graph: dict[str, set[str]] = {path: set() for path in self.files}
        for link in self.internal:
            graph[link.source] |= {link.target, link.origin} - {link.source}
        return graph

    def file(self, module: str) -> str:
        """The file of a dotted name; empty if there is none."""
        stem = "/".join(module.split(".")[1:])
        paths = (f"{stem}/__init__.py".lstrip("/"), f"{stem}.py")
        return next((path for path in paths if path in self.files), "")

    def resolve(self, module: str, name: str) -> tuple[str, str]:
        """The file that `from module import name` reaches, and the name in it; an empty name where it reaches a module."""
        path = self.file(module)
        submodule = self.names.get(path, {}).get(name) in (None, (module, name))  # its own names hide modules, unless they are those
        if name and submodule and self.file(f"{module}.{name}"):
            return self.file(f"{module}.{name}"), ""
        return path, name

    def origin(self, path: str, name: str) -> str:
        """The file that defines a name of a file, however many files pass it on."""
        passed = {path}
        while path and name:
            module, original = self.names[path].get(name, ("", ""))
            if not module.startswith(NAME):
                return path
            path, name = self.resolve(module, original)
            if path in passed:
                return path
            passed.add(path)
        return path


# Reading imports


def _nodes(node: ast.AST, deferred: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below another, and whether loading the module passes it by."""
    for child in ast.iter_child_nodes(node):
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield child, deferred
        yield from _nodes(child, deferred or function or typing)


def _name(function: ast.expr) -> str:
    """The name that a function is called by, without where it comes from."""
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _module(path: str, node: ast.ImportFrom) -> str:
    """The absolute name of the module in `from … import`."""
    if not node.level:
        return node.module or ""
    folders = [NAME, *path.split("/")[:-1]]
    return ".".join([*folders[: len(folders) + 1 - node.level], *filter(None, [node.module])])


def _names(path: str, module: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    statements = list(module.body)
    while statements:
        statement = statements.pop(0)
        if isinstance(statement, ast.ImportFrom):
            yield from ((alias.asname or alias.name, (_module(path, statement), alias.name)) for alias in statement.names)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, ("", "")
        elif isinstance(statement, ast.If | ast.Try | ast.With):
            statements += [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)]
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from ((node.id, ("", "")) for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))


def _imports(tree: Tree, path: str) -> Iterator[Import]:
    def imported(module: str, name: str, line: int, deferred: bool) -> Import:
        if module.partition(".")[0] != NAME:
            return Import(path, module, module, name, line, False, deferred)
        target, name = tree.resolve(module, name)
        return Import(path, target or module, tree.origin(target, name) or module, name, line, True, deferred)

    for node, deferred in tree.nodes[path]:
        if isinstance(node, ast.Import):
            yield from (imported(alias.name, "", node.lineno, deferred) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (imported(_module(path, node), alias.name, node.lineno, deferred) for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__") and path not in LATE:
            names = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from (imported(str(name), "", node.lineno, True) for name in names)


# The rules: each takes a tree and gives its breaches


def order(tree: Tree) -> Iterator[str]:
    """Packages import only packages to their left; nothing imports `programs`; `train` never imports `runs.launch`."""
    yield from (f"{name} has no place in the order of packages" for name in sorted({package(path) for path in tree.files} - set(POSITION)))
    for link in tree.internal:
        here = package(link.source)
        for there in sorted({package(link.target), package(link.origin)} - {here}):
            if there == "programs" or POSITION.get(there, 99) >= POSITION.get(here, 99):
                yield f"{link}: {there or 'the root'} is not to the left of {here or 'the root'}"
        if here == "train" and link.origin.startswith("runs/launch"):
            yield f"{link}: train and runs.launch meet only in the run directory"


def layers(tree: Tree) -> Iterator[str]:
    """analysis ← measure ← estimate ← api ← plot ← panel: a file sees its own layer and those below, in whichever package."""
    for link in tree.internal:
        if package(link.source) in PACKAGES:
            here, there = layer(link.source), seen_as(link.origin)
            if LAYERS.index(there) > LAYERS.index(here):
                yield f"{link}: {here} does not see {there}"


def homes(tree: Tree) -> Iterator[str]:
    """A package from outside is imported only in its home."""
    for link in tree.imports:
        top = link.target.partition(".")[0]
        if not link.ours and top not in sys.stdlib_module_names and not within(link.source, HOMES.get(top, ())):
            yield f"{link}: the home of {top} is {', '.join(HOMES.get(top, ['not chosen']))}"


def light(tree: Tree) -> Iterator[str]:
    """No file outside torch's home loads torch, not even through others."""
    loads: dict[str, set[str]] = defaultdict(set)
    for link in tree.imports:
        if not link.deferred:
            loads[link.source] |= {link.target, *_folders(link.target)} if link.ours else {link.target.partition(".")[0]}
    for link in tree.internal:
        if not link.deferred and not within(link.source, TORCH) and within(link.target, TORCH) and _reaches(loads, link.target, "torch"):
            yield f"{link}, which loads torch"


def circles(tree: Tree) -> Iterator[str]:
    """No files import each other in a circle, counting imports in functions and under `TYPE_CHECKING` too."""
    for files in components(tree.graph):
        if len(files) > 1:
            yield f"a circle of {len(files)} files: {', '.join(sorted(files))}"


def late(tree: Tree) -> Iterator[str]:
    """Only the files in `LATE` import what a string names."""
    for path, nodes in tree.nodes.items():
        for node, _ in nodes if path not in LATE else ():
            if not isinstance(node, ast.Attribute | ast.Name | ast.ImportFrom):
                continue
            for use in _uses(node):
                asks = any(f"{use}.".startswith(f"{question}.") or question.startswith(f"{use}.") for question in QUESTIONS)
                if use == "__import__" or (use.startswith("importlib.") and dotted(use) and not asks):
                    yield f"{path}:{node.lineno} uses {use}: that is for {', '.join(LATE)}"


def strings(tree: Tree) -> Iterator[str]:
    """What a string names as `workbench.x.y` or `workbench.x.y:z` exists, and so does what it hands to `python -m`."""
    for path, module in tree.files.items():
        for text, line in named(module):
            where, _, name = text.partition(":")
            while "." in where and not tree.file(where):
                where, _, name = where.rpartition(".")
            names = tree.names.get(tree.file(where), {})
            if name and name not in names and ("__getattr__" not in names or where == NAME):
                yield f'{path}:{line} names "{text}", which does not exist'


def sizes(tree: Tree) -> Iterator[str]:
    """The numbers in `LIMITS` and `MEDIAN`."""
    measured = figures(tree)
    for name, limit in LIMITS.items():
        if measured[name] > limit:
            yield f"{name}: {measured[name]:,}, and the limit is {limit:,}"
    yield from (f"{path} has {lines} lines" for path, lines in tree.lines.items() if lines > LIMITS["longest file"])
    if not MEDIAN[0] <= measured["median file"] <= MEDIAN[1]:
        yield f"the median file has {measured['median file']} lines, not {MEDIAN[0]} to {MEDIAN[1]}"


RULES: dict[str, Callable[[Tree], Iterator[str]]] = {
    rule.__name__: rule for rule in (order, layers, homes, light, circles, late, strings, sizes)
}


# What the rules are made of


def package(path: str) -> str:
    """The package of a file. A file in the root is a package by itself, and the root's `__init__` is `""`."""
    return path.partition("/")[0] if "/" in path else path.removesuffix(".py").replace("__init__", "")


def layer(path: str) -> str:
    """The layer of a file; `api` where no folder or name says another."""
    _, _, rest = path.partition("/")
    if within(path, PLOT):
        return "plot"
    folder, slash, _ = rest.partition("/")
    return folder if slash and folder in LAYERS else "api"


def seen_as(path: str) -> str:
    """The layer as which importers see a file: `layer`, and lower for packages that have no layers."""
    if layer(path) != "api" or package(path) not in (*LOW, "data", "train"):
        return layer(path)
    if path.startswith("runs/launch/"):
        return "api"
    return "analysis" if package(path) in LOW else "measure"


def within(path: str, home: tuple[str, ...]) -> bool:
    """Whether a file lies in one of some folders, or is one of some files."""

    def fits(place: str) -> bool:
        parts, wanted = path.split("/"), place.rstrip("/").split("/")
        deep_enough = len(parts) > len(wanted) if place.endswith("/") else len(parts) == len(wanted)
        return deep_enough and all(Path(part).match(pattern) for part, pattern in zip(parts, wanted, strict=False))

    return any(fits(place) for place in home)


def named(module: ast.Module) -> Iterator[tuple[str, int]]:
    """The names of our modules in strings, with their lines: a string that is nothing else, a word after `-m`, and words in backticks."""
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for match in NAMED.finditer(node.value):
                text = match["name"].rstrip(".:")
                if dotted(text.replace(":", ".", 1)):
                    yield text, node.lineno


def _uses(node: ast.Attribute | ast.Name | ast.ImportFrom) -> list[str]:
    """The dotted names that a node uses."""
    return [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else [ast.unparse(node)]


def dotted(text: str) -> bool:
    """Whether a text consists of identifiers with dots between them."""
    return all(part.isidentifier() for part in text.split("."))


def components(graph: dict[str, set[str]]) -> list[set[str]]:
    """The strongly connected components of a graph (Tarjan's algorithm, with a stack of its own)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    components: list[set[str]] = []
    for root in graph:
        work = [(root, iter(sorted(graph[root])))] if root not in number else []
        while work:
            node, others = work[-1]
            if node not in number:
                number[node] = lowest[node] = len(number)
                path.append(node)
            for other in others:
                if other not in number:
                    work.append((other, iter(sorted(graph.get(other, ())))))
                    break
                if other in path:
                    lowest[node] = min(lowest[node], lowest[other])
            else:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[node])
                if lowest[node] == number[node]:
                    components.append(set(path[path.index(node) :]))
                    del path[path.index(node) :]
    return components


def _folders(path: str) -> set[str]:
    """The `__init__` files that loading a file loads before it."""
    parts = path.split("/")
    return {"/".join([*parts[:depth], "__init__.py"]) for depth in range(1, len(parts))}


def _reaches(loads: dict[str, set[str]], start: str, end: str) -> bool:
    seen = {start, *_folders(start)}
    waiting = list(seen)
    while waiting:
        new = loads[waiting.pop()] - seen
        seen |= new
        waiting += new
    return end in seen


# Figures


def figures(tree: Tree) -> dict[str, float]:
    """The numbers that `make architecture` prints."""
    between = [link for link in tree.internal if package(link.source) != package(link.origin)]
    return {
        "packages": len(tree.packages),
        "files": len(tree.files),
        "lines": sum(tree.lines.values()),
        "median file": median(tree.lines.values()),
        "longest file": max(tree.lines.values()),
        "files over 500 lines": sum(lines > LIMITS["longest file"] for lines in tree.lines.values()),
        "imports": len(tree.internal),
        "imports between packages": len(between),
        "upward imports": len(list(order(tree))),
        "circles of files": len(list(circles(tree))),
        "levels of packages": levels(tree),
    }


def levels(tree: Tree) -> int:
    """The length of the longest chain of packages each of which imports the next."""
    depth: dict[str, int] = {}
    for name in sorted(POSITION, key=POSITION.__getitem__):
        below = {package(link.origin) for link in tree.internal if package(link.source) == name} - {name}
        depth[name] = 1 + max((depth.get(other, 0) for other in below), default=0)
    return max(depth.values())


def main() -> int:
    """Print figures, packages and breaches; 1 if there is a breach."""
    tree = Tree.read(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / NAME)
    for name, figure in figures(tree).items():
        print(f"{name:26}{figure:8,.0f}")
    print(f"\n{'package':12}{'files':>6}{'lines':>8}")
    for name in sorted(tree.packages, key=lambda name: POSITION.get(name, 99)):
        lines = [count for path, count in tree.lines.items() if package(path) == name]
        print(f"{name:12}{len(lines):6}{sum(lines):8,}")
    breaches = [f"{name}: {breach}" for name, rule in RULES.items() for breach in rule(tree)]
    print("", *breaches or ["no rule is broken"], sep="\n")
    return bool(breaches)


if __name__ == "__main__":
    sys.exit(main())
