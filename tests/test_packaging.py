"""Files that must agree: pyproject.toml, environment.yml, constraints.txt, the Makefile and the notebooks' table."""

import importlib.metadata
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_environment_yml_holds_the_same_packages() -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML (pip install PyYAML)")
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    wanted = [
        *PROJECT["dependencies"],
        *(name for extra, names in PROJECT["optional-dependencies"].items() if extra not in ("bench", "gpu") for name in names),
    ]
    python, _, rest = environment["dependencies"]
    assert python == f"python{PROJECT['requires-python']}"
    assert rest["pip"] == [*wanted, "-e ."]


def installed(package: str) -> bool:
    return any(importlib.metadata.distributions(name=package))


def test_constraints_pin_what_the_ranges_allow() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#"))
    assert "torch" in pins
    for name, version in pins.items():
        if not os.environ.get("CI") and not installed(name):
            continue  # as where only the core library is tested
        assert importlib.metadata.version(name).partition("+")[0] == version, f"{name}: run make setup"


def test_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", text, re.M)
    assert targets
    shown = subprocess.run(["make", "-s", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"make (\S+)", shown) == targets[1].split()


def test_make_setup_says_what_to_do_next() -> None:
    for goals, said in ((["setup"], True), (["lint"], False)):
        rule = subprocess.run(["make", "-s", "-n", "-C", str(ROOT), *goals], capture_output=True, text=True, check=True).stdout
        assert (".venv/bin/workbench --help or make lab" in rule) == said


def test_version_is_said_once() -> None:
    import workbench

    assert workbench.__version__ == PROJECT["version"]


def test_links_lead_somewhere() -> None:
    named = (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md", "data_samples/README.md"))
    for page in (*named, *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"


def test_tutorials_list_every_notebook() -> None:
    tutorials = (ROOT / "docs/pages/tutorials.md").read_text()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        row = next((line for line in tutorials.splitlines() if f"notebooks/{path.name})" in line), "")
        assert row, f"docs/pages/tutorials.md does not list {path.name}"
        head = "".join(json.loads(path.read_text())["cells"][0]["source"])
        said = re.search(r"\*\*Difficulty\*\* (\S+) · \*\*Learning\*\* (\d+ min)", head)
        assert said, path.name
        assert row.endswith(f"| {said[1]} {said[2]} |"), f"docs/pages/tutorials.md: {path.name} is {said[1]} and takes {said[2]}"


def test_the_start_page_links_to_every_notebook_and_its_map_has_them_all() -> None:
    start = (ROOT / "notebooks/00_start_here.ipynb").read_text()
    drawn = (ROOT / "notebooks/scripts/course_map.py").read_text()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))[1:]:
        assert f"]({path.name})" in start, f"notebooks/00_start_here.ipynb does not link to {path.name}"
        assert f'"{path.name[:2]}"' in drawn
    for link in re.findall(r"\]\((\w+\.ipynb)\)", start):
        assert (ROOT / "notebooks" / link).exists(), f"notebooks/00_start_here.ipynb: {link}"


def _status(url: str) -> int:
    """Of the answer; a server says where it is a moment before it listens."""
    limit = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(url) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except urllib.error.URLError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.1)


def test_make_lab_prints_a_url_that_opens_the_first_notebook() -> None:
    pytest.importorskip("jupyterlab", reason="needs JupyterLab (pip install '.[notebooks]')")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rule = subprocess.run(
        ["make", "--no-print-directory", "-n", "lab", f"ARGS=--no-browser --port={port}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    words = shlex.split(rule.stdout.replace("\\\n", " ").splitlines()[-1])
    with subprocess.Popen([sys.executable, *words[1:]], cwd=ROOT, stderr=subprocess.PIPE, text=True) as lab:
        assert lab.stderr is not None
        try:
            url = next(found[0] for line in lab.stderr if (found := re.search(r"http://127\S+", line)))
            notebook = url.replace("/lab/tree/", "/api/contents/") + "&content=0"
            assert "00_start_here.ipynb" in url
            assert [_status(address) for address in (url, notebook)] == [200, 200]
        finally:
            lab.terminate()
            lab.stderr.read()
