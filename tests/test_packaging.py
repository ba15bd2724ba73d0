"""Files that must agree: pyproject.toml, environment.yml, constraints.txt, the Makefile and the notebooks' table."""

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_environment_yml_holds_the_same_packages() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    wanted = [
        *PROJECT["dependencies"],
        *(name for extra, names in PROJECT["optional-dependencies"].items() if extra != "bench" for name in names),
    ]
    python, _, rest = environment["dependencies"]
    assert python == f"python{PROJECT['requires-python']}"
    assert rest["pip"] == [*wanted, "-e ."]


def test_constraints_pin_what_the_ranges_allow() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#"))
    assert "torch" in pins
    for name, version in pins.items():
        assert importlib.metadata.version(name).partition("+")[0] == version, f"{name}: run make setup"


def test_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", text, re.M)
    assert targets
    shown = subprocess.run(["make", "-s", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"make (\S+)", shown) == targets[1].split()


def test_version_is_said_once() -> None:
    import workbench

    assert workbench.__version__ == PROJECT["version"]


def test_links_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md", "data_samples/README.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text()):
            assert link.startswith("https://") or ((ROOT / name).parent / link).exists(), f"{name}: {link}"


def test_readme_lists_every_notebook() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"notebooks/{path.name}" in readme
