"""Arguments of loaders, optimizers and DDP that a launch replaces, and those of a script that nobody asked to change."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from workbench.core.run_directory import ENV_ARGUMENTS
from workbench.timeline.script_arguments import ScriptArguments, described

ASKED = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True, "pin_memory": True, "bucket_cap_mb": 3}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_arguments_are_replaced_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_ARGUMENTS, json.dumps(ASKED))
    arguments = ScriptArguments(DataLoader, DistributedDataParallel)
    monkeypatch.setenv(ENV_ARGUMENTS, "null")
    loader, model = DataLoader(range(4), 2, num_workers=1), DistributedDataParallel(nn.Linear(2, 2))  # type: ignore[arg-type, var-annotated]
    assert (loader.batch_size, loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 2, 4, True)
    assert loader.pin_memory
    assert model.bucket_bytes_cap == 3 * 2**20
    assert arguments.replaced == {*ASKED}
    assert "test_script_arguments.py" in arguments.places["ddp"]
    arguments.close()
    assert DataLoader(range(4)).num_workers == 0  # type: ignore[arg-type]
    assert DistributedDataParallel(nn.Linear(2, 2)).bucket_bytes_cap == 25 * 2**20


def test_a_loader_without_workers_drops_what_only_workers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_ARGUMENTS, '{"num_workers": 0}')
    arguments = ScriptArguments(DataLoader, DistributedDataParallel)
    options: dict[str, Any] = {
        "num_workers": 2,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "timeout": 9,
        "multiprocessing_context": "fork",
    }
    loader = DataLoader(range(4), **options)  # type: ignore[arg-type, var-annotated]
    arguments.close()
    assert list(loader) == [torch.tensor([value]) for value in range(4)]
    assert loader.num_workers == 0


def test_what_only_workers_take_does_not_count_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"prefetch_factor": 4, "persistent_workers": True}
    monkeypatch.setenv(ENV_ARGUMENTS, json.dumps(asked))
    arguments = ScriptArguments(DataLoader, DistributedDataParallel)
    loader = DataLoader(range(4), 2)  # type: ignore[arg-type, var-annotated]
    assert (loader.prefetch_factor, loader.persistent_workers) == (None, False)
    assert (arguments.replaced, arguments.without_workers) == (set(), {*asked})
    DataLoader(range(4), 2, num_workers=1)  # type: ignore[arg-type]
    assert arguments.replaced == {*asked}
    arguments.close()
    none = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    monkeypatch.setenv(ENV_ARGUMENTS, json.dumps(none))
    arguments = ScriptArguments(DataLoader, DistributedDataParallel)
    DataLoader(range(4), 2, num_workers=1, prefetch_factor=3)  # type: ignore[arg-type]
    arguments.close()
    assert (arguments.replaced, arguments.without_workers) == ({*none}, set())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_an_optimizer_has_the_implementation_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    def trained(asked: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
        monkeypatch.setenv(ENV_ARGUMENTS, asked)
        arguments = ScriptArguments(DataLoader, DistributedDataParallel, (kind, torch.optim.LBFGS))
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1, foreach=True)
        torch.optim.LBFGS(model.parameters())  # has one implementation
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        said = arguments.say_of(optimizer)
        arguments.close()
        return said, list(model.parameters())

    fused, weights = trained('{"optimizer": "fused"}')
    assert (fused["optimizer"], fused["replaced"]) == (f"{kind.__name__}(fused)", ["optimizer"])
    plain, same = trained("null")
    assert (plain["optimizer"], plain["replaced"]) == (f"{kind.__name__}(foreach)", [])
    for one, other in zip(weights, same, strict=True):
        torch.testing.assert_close(one, other)
    assert trained('{"optimizer": "magic"}')[0] == plain


def test_an_implementation_that_a_checkpoint_undoes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = nn.Linear(3, 2).parameters
    kept = torch.optim.SGD(weights(), 0.1, fused=False).state_dict()
    monkeypatch.setenv(ENV_ARGUMENTS, '{"optimizer": "fused"}')
    arguments = ScriptArguments(DataLoader, DistributedDataParallel, (torch.optim.SGD,))
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.1)
    optimizer.load_state_dict(kept)
    arguments.close()
    assert arguments.say_of(optimizer) == {"replaced": [], "without_workers": [], "optimizer": "SGD"}


def test_an_optimizer_with_a_step_of_its_own_takes_no_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    class Plain(torch.optim.SGD):
        pass

    monkeypatch.setenv(ENV_ARGUMENTS, '{"optimizer": "foreach"}')
    arguments = ScriptArguments(DataLoader, DistributedDataParallel, (torch.optim.SGD,))
    said = []
    for kind in (Own, Plain):
        optimizer = kind(nn.Linear(3, 2).parameters(), lr=0.1)
        optimizer.step()
        said.append(arguments.say_of(optimizer)["replaced"])
        arguments.replaced.clear()
    arguments.close()
    assert said == [[], ["optimizer"]]


def test_options_of_a_loader_in_numpy_are_plain() -> None:
    loader = DataLoader([1, 2], num_workers=np.int64(0), pin_memory=np.bool_(False))  # type: ignore[arg-type]
    assert json.loads(json.dumps(described(loader)))["num_workers"] == 0


def test_a_loader_is_described() -> None:
    class Numbers(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(9))

    loader = DataLoader(range(10), 4, num_workers=1, prefetch_factor=3)  # type: ignore[arg-type, var-annotated]
    options = {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": False, "pin_memory": False, "batch_size": 4}
    assert described(loader) == {**options, "stream": "", "epoch": 3}
    stream = described(DataLoader(Numbers()))
    assert (stream["stream"], stream["epoch"]) == ("unknown", None)


@pytest.mark.parametrize("text", ["", "null", "[1]", "{", '{"batch_size": 9}', '"__import__"', "9" * 10**4])
def test_what_is_not_asked_for_changes_nothing(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(ENV_ARGUMENTS, text)
    arguments = ScriptArguments(DataLoader, DistributedDataParallel)
    loader = DataLoader(range(4), batch_size=2)  # type: ignore[arg-type, var-annotated]
    arguments.close()
    assert (loader.batch_size, loader.num_workers, arguments.replaced) == (2, 0, set())
