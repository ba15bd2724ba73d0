"""Digests of the code whose results a notebook shows, so that a test can say which stored outputs are older than their code.

That code is: the notebook's own cells, the helpers of `notebooks/scripts` that it names, the modules of the public names `wb.…` that it
uses, those of the results that these return, their pictures and panels, and what all of these import from `analysis` in their package. How
a measurement is made does not count, nor do comments, docstrings, annotations and the layout of lines: they change nothing that is shown.
"""

import ast
import functools
import hashlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import workbench
import workbench.data

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "notebooks/scripts"
KEY = "workbench"
"""Of a notebook's metadata: what `code_of` gave when its outputs were stored."""
CELLS = "its cells"
INPUTS = {"RunSpec", "Task", "Failure", "RunError"}
"""Public classes that a notebook gives to a function, or of which nothing is shown as long as nothing fails."""
COMPARED = {"check.py", "__init__.py"}
"""Helpers whose outputs strict nbval compares."""


def code_of(notebook: dict[str, Any]) -> dict[str, str]:
    """File, relative to the root → digest, of all code whose results a notebook shows."""
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    source = "\n".join(line for cell in cells for line in cell.splitlines() if not line.lstrip().startswith("%"))
    tree = ast.parse(source)
    files = sorted(library(tree) | helpers(tree))
    return {CELLS: digest(source)} | {str(path.relative_to(ROOT)): digest(path.read_text()) for path in files}


def older(notebook: dict[str, Any]) -> list[str] | None:
    """What changed since the outputs of a notebook were stored; None = nobody knows what made them."""
    stored = notebook["metadata"].get(KEY)
    if stored is None:
        return None
    now = code_of(notebook)
    return sorted(name for name in stored.keys() | now.keys() if stored.get(name) != now.get(name))


@functools.cache
def digest(source: str) -> str:
    """Of what a program does, the same with every Python: comments, docstrings, annotations and the layout of lines are left out.

    >>> digest("def f(x: int) -> int:\\n    'Adds.'\\n    return x + 1  # more") == digest("def f(x):\\n\\n    return x+1")
    True
    >>> digest("x = 1") == digest("x = 2")
    False
    """
    left_out = list(_left_out(ast.parse(source), source.splitlines()))
    parts = []
    for kind, place, text in _tokens(source):
        if kind in ("COMMENT", "NL") or any(start <= place < end for start, end in left_out):
            continue
        parts.append(re.sub(r"\s", "", text) or kind)
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:8]


Place = tuple[int, int]


def _tokens(source: str) -> Iterator[tuple[str, Place, str]]:
    """Kind, place and text of each token; an f-string is one, as in Python 3.11: later ones take it apart."""
    lines, depth, begun = source.splitlines(keepends=True), 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            begun, depth = (token.start if not depth else begun), depth + 1
        if not depth:
            yield kind, token.start, token.string
        if kind == "FSTRING_END":
            depth -= 1
            if not depth:
                (first, left), (last, right) = begun, token.end
                part = lines[first - 1 : last]
                part[-1] = part[-1][:right]
                part[0] = part[0][left:]
                yield "STRING", begun, "".join(part)


def _left_out(tree: ast.Module, lines: list[str]) -> Iterator[tuple[Place, Place]]:
    """Where docstrings and annotations begin and end, as tokens count: from line 1 and letter 0."""

    def place(line: int, column: int) -> Place:
        return line, len(lines[line - 1].encode()[:column].decode())

    for node in ast.walk(tree):
        body = getattr(node, "body", ())
        for text in filter(_is_text, body if isinstance(body, list) else ()):
            yield place(text.lineno, text.col_offset), (text.end_lineno + 1, 0)
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(part, ast.expr):
                line, column = place(part.lineno, part.col_offset)
                sign = lines[line - 1][:column].rstrip().removesuffix("->").removesuffix(":")
                yield (line, len(sign)), place(part.end_lineno, part.end_col_offset)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def helpers(tree: ast.Module) -> set[Path]:
    """The helpers that a notebook imports, or names in a text such as "scripts/hits.py:build"."""
    named = {module.split(".")[1] for module in imported(tree) if module.startswith("scripts.")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named |= set(re.findall(r"scripts/(\w+)\.py", node.value))
    return {path for name in named if (path := SCRIPTS / f"{name}.py").exists() and path.name not in COMPARED}


def library(tree: ast.Module) -> set[Path]:
    """The modules of the library whose results a notebook shows."""
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = {name for text in used if (name := text.removeprefix("wb.")) != text} - INPUTS
    begun = {path for name in names for path in homes(name)}
    begun |= {path for module in imported(tree) if module.startswith("workbench.") and (path := file_of(module))}
    begun |= {result for path, name in ((path, name) for name in names for path in homes(name)) for result in results(path, name)}
    if any(text.endswith(".plot") for text in used):
        begun |= {plot for path in begun for plot in [_package(path) / "plot.py"] if plot.exists()}
    return begun | {found for path in begun for found in analysis(path)}


def homes(name: str) -> Iterator[Path]:
    """Where a public name is defined: `diagnose`, `plot.loader_curve`, `widgets.ThroughputDoctor`, `data.audit`."""
    head, _, tail = name.partition(".")
    if head in ("plot", "widgets"):
        for module in imported_by(ROOT / f"workbench/{head}.py"):
            if module.endswith(f".{tail}") and (path := file_of(module.removesuffix(f".{tail}"))):
                yield path
    elif head == "data":
        if (home := workbench.data._HOMES.get(tail.partition(".")[0])) and (path := file_of(home)):
            yield path
    elif head in workbench._HOMES and (path := file_of(workbench._HOMES[head])):
        yield path


def results(path: Path, name: str) -> Iterator[Path]:
    """The modules of the classes that a public function returns."""
    tree = ast.parse(path.read_text())
    origins = {module.rpartition(".")[2]: module.rpartition(".")[0] for module in imported(tree)}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name.removeprefix("data.").partition(".")[0] and node.returns is not None:
            for word in re.findall(r"\w+", ast.unparse(node.returns)):
                if word in origins and (found := file_of(origins[word])):
                    yield found
                    yield from nouns(found)


def nouns(path: Path) -> Iterator[Path]:
    """The modules of the public classes that a result holds, such as the Timeline of a Run."""
    for module in imported_by(path):
        home, _, name = module.rpartition(".")
        if name[:1].isupper() and name not in INPUTS and workbench._HOMES.get(name) == home and (found := file_of(home)):
            yield found


def analysis(path: Path) -> set[Path]:
    """What a module imports from `analysis` of its own package, directly or through such a module."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        for module in imported_by(waiting.pop()):
            for name in (module, module.rpartition(".")[0]):
                other = file_of(name)
                if other and other not in found and "analysis" in other.parts and _package(other) == _package(path):
                    found.add(other)
                    waiting.append(other)
    return found


@functools.cache
def imported_by(path: Path) -> set[str]:
    """Dotted names that a file imports."""
    return imported(ast.parse(path.read_text()))


def imported(tree: ast.Module) -> set[str]:
    """Dotted names that a program imports; of `from a import b`: `a.b`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def file_of(module: str) -> Path | None:
    """The file of a module of the library, if there is one."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    return path if module.startswith("workbench.") and path.exists() else None


def _package(path: Path) -> Path:
    return ROOT / Path(*path.relative_to(ROOT).parts[:2])
