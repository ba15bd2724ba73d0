"""What is installed with the workbench: every licence is one that is allowed, and every version is one that its users ask for.

Read from the metadata of the installed packages, without a network. Whether a version has known vulnerabilities is not checked here: that
needs a database from the network (`make audit`).
"""

import importlib.metadata
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

requirements = pytest.importorskip("packaging.requirements", reason="needs packaging, which pytest brings along")

ROOT = Path(__file__).parents[1]
ALLOWED = re.compile(
    r"MIT(-0|-CMU)?|Apache(-2\.0)?|(0|3-Clause )?BSD(-[23]-Clause|-3)?|0BSD|ISC|PSF(-2\.0|L)?|MPL-2\.0|Zlib|BSL-1\.0|CC0-1\.0|Unlicense"
    r"|CNRI-Python|LLVM-exception|HPND"
)
"""Identifiers of SPDX, and how some packages write them."""
ALLOWED_NAMES = re.compile(
    r"Apache Software License|Apache (License, Version )?2\.0( License)?|Apache License|(3-Clause )?BSD( [23]-Clause)?( License)?"
    r"|MIT License|ISC License.*|ISC license|MIT license|Python Software Foundation License|Mozilla Public License 2\.0.*|The Unlicense.*",
    re.IGNORECASE,
)
"""Classifiers, and whole names of licences."""
EXEMPT = {"nvidia": "CUDA's own libraries, which torch for GPUs depends on: NVIDIA's licence", "cuda": "the same"}
"""The first word of a package's name → why another licence is taken."""


def installed(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def wanted() -> tuple[tuple[str, str], ...]:
    """(who, requirement) for every requirement of the workbench with all of its extras, and of what they require in turn."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    todo, seen = [("the workbench", text) for text in own], dict[tuple[str, str], None]()
    while todo:
        who, text = todo.pop()
        if (who, text) in seen:
            continue
        seen[who, text] = None
        requirement = requirements.Requirement(text)
        for further in found.requires or () if (found := installed(requirement.name)) else ():
            marker = requirements.Requirement(further).marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)):
                todo.append((requirement.name, further))
    return tuple(seen)


def licence(package: importlib.metadata.Distribution) -> list[str]:
    """The licences of a package in its own words: an expression, classifiers, or the first line of a text."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return [word for word in re.split(r"[\s()]+|\bAND\b|\bOR\b|\bWITH\b", expression) if word]
    classifiers = [text.split("::")[-1].strip() for text in metadata.get_all("Classifier") or () if text.startswith("License ::")]
    if named := [name for name in classifiers if name != "OSI Approved"]:
        return named
    lines = (metadata.get("License") or "").strip().splitlines()
    return re.split(r" AND | OR ", lines[0].strip()) if lines else ["none"]


def strange() -> Iterator[str]:
    """Packages with a licence that is not allowed."""
    for name in sorted({requirements.Requirement(text).name for _, text in wanted()}):
        package = installed(name)
        if package and re.split(r"[-_.]", name.lower())[0] not in EXEMPT:
            words = licence(package)
            if not all(ALLOWED.fullmatch(word) or ALLOWED_NAMES.fullmatch(word) for word in words):
                yield f"{name} {package.version}: {', '.join(words)}"


def test_every_licence_is_one_that_is_allowed() -> None:
    assert len(wanted()) > 10
    assert list(strange()) == []


def test_every_version_is_one_that_its_users_ask_for() -> None:
    clashes = [
        f"{who} wants {text}, and {package.version} is installed"
        for who, text in wanted()
        if (package := installed(requirements.Requirement(text).name)) and not who.startswith("the workbench")
        if not requirements.Requirement(text).specifier.contains(package.version, prereleases=True)
    ]
    assert clashes == []


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        ("Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("(MIT OR GPL-3.0-only)", False),  # somebody has to read it
        ("AGPL-3.0-or-later", False),
        ("LicenseRef-Proprietary", False),
    ],
)
def test_an_expression_is_read_word_by_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, allowed: bool) -> None:
    (tmp_path / "METADATA").write_text(f"Metadata-Version: 2.4\nName: x\nVersion: 1\nLicense-Expression: {words}\n")
    package = importlib.metadata.PathDistribution(tmp_path)
    monkeypatch.setitem(globals(), "installed", lambda name: package)
    monkeypatch.setitem(globals(), "wanted", lambda: (("the workbench", "x"),))
    assert (list(strange()) == []) is allowed
