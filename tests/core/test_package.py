"""Whose code a file is: the workbench's, Python's, an installed package's, or the user's, also where one path begins like another."""

import functools
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from workbench.core import package
from workbench.core.package import ROOT, is_installed, is_standard, is_users, is_workbench

PURELIB, STDLIB = sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (package.__file__, is_workbench),
        (f"{ROOT}\\core\\units.py", is_workbench),
        (f"{PURELIB}/torch/nn/modules/linear.py", is_installed),
        ("/home/me/.local/lib/python3.12/site-packages/timm/models/vit.py", is_installed),
        ("/usr/lib/python3/dist-packages/numpy/__init__.py", is_installed),
        (f"{STDLIB}/json/decoder.py", is_standard),
        (str(Path(functools.__file__).resolve()), is_standard),
        ("<frozen importlib._bootstrap>", is_standard),
        ("/home/me/train.py", is_users),
        ("<stdin>", is_users),
        ("/tmp/ipykernel_12/1234.py", is_users),
        (f"{ROOT}_task.py", is_users),
        (f"{ROOT}-experiments/train.py", is_users),
        (f"{STDLIB}-mine/train.py", is_users),
    ],
)
def test_a_path_is_of_one_kind(path: str, kind: Callable[[str], bool]) -> None:
    assert [one for one in (is_workbench, is_installed, is_standard, is_users) if one(path)] == [kind]


def test_two_files_of_one_name_are_both_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, path in (("one_utils", "a/utils.py"), ("other_utils", "b/utils.py"), ("alone", "d/alone.py")):
        module = ModuleType(name)
        module.__file__ = str(tmp_path / path)
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(path)
        monkeypatch.setitem(sys.modules, name, module)
    found = package.imported_sources()
    assert len({found[name] for name in ("a/utils.py", "b/utils.py", "alone.py")}) == 3
