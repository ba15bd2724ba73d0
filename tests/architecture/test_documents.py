"""What the documents say of the architecture is true: packages in their order, files that exist, names that stand in them."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.architecture import rules
from tests.architecture.rules import FACES, NAME, PACKAGES

ROOT = Path(__file__).parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
MAPPED = re.compile(r"(?<![\w/.\"<>-])(?P<path>(?:[\w.-]+/)+(?:[\w.-]+\.\w+)?|__\w+__\.py|plot\.py|widgets\.py)(?::(?P<name>\w+))?")
"""A path with a folder in it, or a file of the root; after a colon a name of the file."""


def paths(text: str) -> list[tuple[str, str]]:
    """The paths that a document names, each with the name after its colon; no addresses of pages."""
    return [(match["path"], match["name"] or "") for match in MAPPED.finditer(re.sub(r"https?://\S+", "", text))]


@cache
def names(path: str) -> set[str]:
    """The names that a file of the library binds."""
    file = ROOT / NAME / path
    return {name for name, _ in rules._names(path, ast.parse(file.read_text()))} if file.is_file() else set()


def missing(text: str) -> list[str]:
    """What a document names and is not there."""
    gone = []
    for path, name in paths(text):
        if not (ROOT / path).exists() and not (ROOT / NAME / path).exists():
            gone.append(path)
        elif name and name not in names(path):
            gone.append(f"{path}:{name}")
    return gone


@pytest.mark.parametrize("document", [ARCHITECTURE, CONTRIBUTING], ids=lambda path: path.name)
def test_every_file_that_a_document_names_exists(document: Path) -> None:
    assert paths(document.read_text())
    assert missing(document.read_text()) == []


def test_every_package_stands_on_the_page_of_the_architecture_in_order() -> None:
    assert tuple(re.findall(r"^\| `(\w+)/` \| \w.*\.", ARCHITECTURE.read_text(), re.MULTILINE)) == PACKAGES
    for face in FACES:
        assert f"`{face}.py`" in ARCHITECTURE.read_text()


def test_the_architecture_follows_four_objects() -> None:
    ways = re.findall(r"^## The path of (.*?):", ARCHITECTURE.read_text(), re.MULTILINE)
    assert ways == ["a RunSpec", "a batch", "an estimate", "a trace file"]


def test_contributing_says_where_thirteen_everyday_changes_begin() -> None:
    table = CONTRIBUTING.read_text().partition("## Where do I change …?")[2].partition("\n## ")[0]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 13
    assert all(paths(row) for row in rows)


def test_contributing_gives_the_order_of_packages() -> None:
    order = CONTRIBUTING.read_text().partition("leftwards: ")[2]
    assert tuple(re.findall(r"`(\w+)/`", order))[: len(PACKAGES)] == PACKAGES


def test_a_wrong_path_and_a_wrong_name_are_seen() -> None:
    text = "See `core/gone.py`, `core/`, `tests/architecture/rules.py`, gone/ and `__init__.py:gone`, not https://example.org/gone/."
    assert missing(text) == ["core/gone.py", "gone/", "__init__.py:gone"] or not (ROOT / NAME / "core").exists()
