"""Results of scripts are compared entry by entry, and nothing in them is executed."""

import argparse
import datetime
import inspect
import sys
import zipfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from workbench.train.saved_entries import differences, entries_of


def test_entries_that_differ_are_named(tmp_path: Path) -> None:
    nan = float("nan")
    before = {"model": {"a": torch.tensor([1.0, nan]), "b": torch.zeros(2), "c": torch.zeros(2)}, "steps": [3, 4], "gone": None, "bytes": 1}
    after = {
        "model": {"a": torch.tensor([1.0, nan]), "b": torch.tensor([0.0, 0.5]), "c": torch.zeros(3)},
        "steps": [3, 5],
        "new": 1,
        "bytes": 1.0,
    }
    for name, value in (("a.pt", before), ("b.pt", after)):
        torch.save(value, tmp_path / name)
    assert list(differences(entries_of(tmp_path / "a.pt"), entries_of(tmp_path / "b.pt"))) == [
        ("model.b", "by 0.5 at most, of 0"),
        ("model.c", "torch.float32 (2,) and torch.float32 (3,)"),
        ("steps.1", "4 and 5"),
        ("gone", "missing"),
        ("bytes", "1 and 1.0"),
        ("new", "not in the undisturbed result"),
    ]


def test_tensors_of_safetensors_are_compared_by_name(tmp_path: Path) -> None:
    save = pytest.importorskip("safetensors.torch").save_file
    save({"wte": torch.ones(3), "wpe": torch.zeros(2)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    save({"wte": torch.tensor([1, 1, 1.25]), "wpe": torch.zeros(2)}, tmp_path / "b.safetensors", metadata={"format": "np"})
    one, other = (entries_of(tmp_path / name) for name in ("a.safetensors", "b.safetensors"))
    assert sorted(one) == ["metadata.format", "wpe", "wte"]
    assert sorted(differences(one, other)) == [("metadata.format", "'pt' and 'np'"), ("wte", "by 0.25 at most, of 1")]
    (tmp_path / "c.safetensors").write_bytes(b"cut off")
    assert entries_of(tmp_path / "c.safetensors") == {"c.safetensors": b"cut off"}


def test_nothing_of_a_result_is_executed(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "touched",)  # type: ignore[return-value]

    torch.save({"x": Hostile()}, tmp_path / "a.pt")
    (tmp_path / "b.bin").write_bytes(b"other")
    assert entries_of(tmp_path / "a.pt")["x.1"] == str(tmp_path / "touched")
    torch.save({"x": 1}, tmp_path / "c.pt")
    with zipfile.ZipFile(tmp_path / "c.pt", "a") as file:  # as torch.jit.save writes it
        file.writestr("c/constants.pkl", b"")
    assert list(entries_of(tmp_path / "c.pt")) == ["c.pt"]  # as bytes: torch.load would load its code
    assert entries_of(tmp_path / "b.bin") == {"b.bin": b"other"}
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("named", ["ccollections\nCounter\n", "ctorch._utils\n_rebuild_tensor_v2\n"])
def test_a_result_changes_no_class_or_function_of_this_process(tmp_path: Path, named: str) -> None:
    content = named.encode() + b"}S'hacked'\nS'yes'\nsb."
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        file.writestr("a/data.pkl", b"\x80\x02" + content)
        file.writestr("a/version", b"3\n")
    assert list(entries_of(tmp_path / "a.pt")) == ["a.pt"]  # as bytes
    assert not hasattr(Counter, "hacked")
    assert not hasattr(torch._utils._rebuild_tensor_v2, "hacked")  # type: ignore[attr-defined]


class Pair(list[Any]):
    """A list with an attribute."""

    name = ""


class Slots:
    __slots__ = ("size",)


def test_objects_of_all_classes_are_compared_entry_by_entry(tmp_path: Path) -> None:
    """Their files may differ where their values do not: pickle writes a text once or twice, by its identity."""

    def saved(name: str, text: str, lr: float = 0.1, noise: int = 0) -> dict[str, Any]:
        pair, slots = Pair([1, {"b", text}]), Slots()
        pair.name, slots.size = text, 3
        pair.append(pair)
        generator = np.random.Generator(np.random.PCG64(noise))
        state: dict[str, Any] = {"args": argparse.Namespace(lr=lr, out=tmp_path / text), "rng": np.random.RandomState(noise).get_state()}
        state |= {"pair": pair, "slots": slots, "counts": defaultdict(list, {"a": [np.float32(0.5)]}), "generator": generator}
        state |= {"names": np.array([text]), "when": datetime.datetime(2026, 1, 1), "kind": inspect.Parameter.KEYWORD_ONLY}
        torch.save(state | {"module": nn.Linear(2, 2).requires_grad_(False), "text": text}, tmp_path / name)
        return entries_of(tmp_path / name)

    torch.manual_seed(0)
    one = saved("a.pt", "".join(["x", "y"]))
    torch.manual_seed(0)
    same = saved("b.pt", sys.intern("xy"))
    assert {
        "args.lr": 0.1,
        "args.out": str(tmp_path / "xy"),
        "slots.state.1.size": 3,
        "names.0": "xy",
        "counts.a.0": 0.5,
    }.items() <= one.items()
    assert not list(differences(one, same))
    torch.manual_seed(1)
    changed = dict(differences(one, saved("c.pt", "xy", lr=0.2, noise=1)))
    assert changed["args.lr"] == "0.1 and 0.2"
    assert changed["rng.1"].startswith("by ")
    assert changed["module._parameters.weight"].startswith("by ")
    assert {name.partition(".")[0] for name in changed} == {"args", "rng", "generator", "module"}


def test_what_is_equal_only_almost_differs() -> None:
    nan, inf = float("nan"), float("inf")
    pairs = [
        (torch.tensor([nan, 1.0]), torch.tensor([0.0, 1.0])),
        (torch.tensor([inf]), torch.tensor([torch.finfo(torch.float32).max])),
        (torch.tensor([-0.0]), torch.tensor([0.0])),
        (torch.tensor([1.0]).to_sparse(), torch.tensor([2.0]).to_sparse()),
        (torch.tensor([1.0]).to_sparse(), torch.tensor([1.0])),
        (torch.tensor([1j]), torch.tensor([2j])),
    ]
    for one, other in pairs:
        assert [name for name, _ in differences({"a": one}, {"a": other})] == ["a"]
        assert not list(differences({"a": one}, {"a": one.clone()}))
    assert not list(differences({"a": torch.ones(2).to(torch.float8_e4m3fn)}, {"a": torch.ones(2).to(torch.float8_e4m3fn)}))


def test_each_entry_has_a_name_of_its_own(tmp_path: Path) -> None:
    torch.save({"a.b": 1, "a": {"b": 2}, 1: 3, "1": 4, "state": {}}, tmp_path / "a.pt")
    assert entries_of(tmp_path / "a.pt") == {"a.b": 1, "a.b'": 2, "1": 3, "1'": 4, "state": {}}
