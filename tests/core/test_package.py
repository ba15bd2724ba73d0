"""Whose code a file is: the workbench's, Python's, an installed package's, or the user's, also where one path begins like another."""

import functools
import sysconfig
from collections.abc import Callable
from pathlib import Path

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
