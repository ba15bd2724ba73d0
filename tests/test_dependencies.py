"""What is installed with the workbench: allowed licences, the versions and checksums of requirements.lock, no known vulnerability.

Licences and versions are read from the metadata of the installed packages, without a network. Advisories need one: `make audit` looks them
up, and what it makes of the answers is tested here.
"""

import importlib.metadata
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import audit, lock

requirements = pytest.importorskip("packaging.requirements", reason="needs packaging, which pytest brings along")

ROOT = Path(__file__).parents[1]
ALLOWED = re.compile(
    r"MIT(-0|-CMU)?|Apache(-2\.0)?|(0|3-Clause )?BSD(-[23]-Clause|-3)?|0BSD|ISC|PSF(-2\.0|L)?|MPL-2\.0|Zlib|BSL-1\.0|CC0-1\.0|Unlicense"
    r"|CNRI-Python|LLVM-exception|HPND|OLDAP-2\.8"
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


# --- the lock

BLOCK = re.compile(
    r"^(?P<name>[a-z0-9-]+)==(?P<version>[^\s;]+)(?: ; (?P<marker>[^\\]+))? \\\n(?P<hashes>(?: {4}--hash=.*\n)+)", re.MULTILINE
)
LOCKED = audit.LOCK.read_text(encoding="utf-8")


def test_the_lock_has_a_checksum_of_every_file_and_no_address() -> None:
    rest = BLOCK.sub("", LOCKED)
    assert all(not line or line.startswith("#") for line in rest.splitlines()), rest[:300]
    hashes = [line for block in BLOCK.finditer(LOCKED) for line in block["hashes"].splitlines()]
    assert all(re.fullmatch(r" {4}--hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes)
    assert "://" not in LOCKED


def test_the_lock_is_that_of_the_constraints_and_of_what_setup_installs() -> None:
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", audit.CONSTRAINTS.read_text(), re.MULTILINE))
    locked = {block["name"]: block["version"] for block in BLOCK.finditer(LOCKED)}
    assert pins.pop("torch")
    assert {name: locked.get(name) for name in pins} == pins, "make lock"
    assert f"'.[{','.join(lock.EXTRAS)}]'" in (ROOT / "Makefile").read_text()


def test_what_is_installed_is_what_is_locked() -> None:
    blocks = [
        block
        for block in BLOCK.finditer(LOCKED)
        if not block["marker"] or requirements.Requirement(f"x ; {block['marker']}").marker.evaluate()
    ]
    locked = {block["name"]: block["version"] for block in blocks}
    if not os.environ.get("CI") and any((package := installed(name)) and package.version != locked[name] for name in locked):
        pytest.skip("this environment is not made from requirements.lock")
    for name, version in locked.items():
        package = installed(name)
        assert package is not None, f"{name}: run make setup"
        assert package.version == version, f"{name}: run make setup"
    others = {requirements.Requirement(text).name for who, text in wanted() if who != "the workbench"}
    unknown = {name for name in others if installed(name) and re.sub(r"[-_.]+", "-", name).lower() not in locked}
    assert {name for name in unknown if not lock.LEFT_OUT.match(f"{name}==")} <= {"pip"}, "make lock"


def test_torch_is_left_out_with_all_that_it_needs_for_gpus() -> None:
    kept = "tomli==1 \\\n    --hash=sha256:0\n"
    text = f"{kept}torch==2 \\\n    --hash=sha256:1\nnvidia-nccl-cu13==3 ; x \\\n    --hash=sha256:2\ntorch-tb-profiler==4\n"
    assert lock.without_torch(text) == f"{kept}torch-tb-profiler==4\n"


# --- advisories

ADVISORY = {"id": "PYSEC-1", "fix_versions": ["2.13.1"], "aliases": ["CVE-7"]}


def answering(tmp_path: Path, **of_service: Any) -> list[str]:
    """A program in the place of pip-audit, which says this for each service; a text goes to stderr, as of one that fails."""
    path = tmp_path / "pip_audit.py"
    path.write_text(
        "import json, sys\n"
        f"said = json.loads({json.dumps(json.dumps(of_service))})[sys.argv[sys.argv.index('-s') + 1]]\n"
        "names = [line.split('==') for line in open(sys.argv[sys.argv.index('-r') + 1])]\n"
        "if isinstance(said, str):\n    sys.exit(said)\n"
        "packages = [{'name': name, 'version': version.strip(), 'vulns': said.get(name, [])} if name in said or said.get('*') else\n"
        "            {'name': name, 'skip_reason': f'Dependency not found on PyPI: {name}'} for name, version in names]\n"
        "print(json.dumps({'dependencies': packages}))\n"
        "sys.exit(any(package.get('vulns') for package in packages))\n"
    )
    return [sys.executable, str(path)]


def test_a_known_vulnerability_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program = answering(tmp_path, pypi={"*": True, "torch": [ADVISORY]})
    assert audit.main([], program) == 1
    said = capsys.readouterr().out
    assert re.search(r"^VULNERABLE: torch \S+: PYSEC-1, fixed in 2\.13\.1$", said, re.MULTILINE)
    assert "NOT AUDITED" not in said
    monkeypatch.setattr(audit, "ACCEPTED", {"CVE-7": "nobody calls it"})
    assert audit.main(["--strict"], program) == 0


def test_where_nobody_can_be_asked_it_says_so_and_fails_only_if_it_is_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = answering(tmp_path, pypi={}, osv="ConnectionError: Failed to resolve")  # as with a mirror that has packages only
    assert audit.main([], program) == 0
    said = capsys.readouterr().out
    assert f"NOT AUDITED: of {len(audit.pins())} pinned packages NONE could be looked up" in said
    assert "osv: ConnectionError: Failed to resolve" in said
    assert audit.main(["--strict"], program) == 2
    assert audit.main([], [str(tmp_path / "missing")]) == 0
    assert "No such file" in capsys.readouterr().out


def test_the_second_service_is_asked_for_what_the_first_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = answering(tmp_path, pypi={"torch": []}, osv={"numpy": [ADVISORY]})
    assert audit.main([], program) == 1
    said = capsys.readouterr().out
    assert f"2 of {len(audit.pins())} pinned packages were looked up; 1 vulnerabilities are known" in said
    assert "NOT AUDITED" in said
