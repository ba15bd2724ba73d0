"""What cannot be estimated is refused in words: what it was, in which module, and what to try."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore

import workbench as wb

X = torch.randn(4, 8)
LIBRARY = torch.library.Library("workbench_test", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: x * 2, "CPU")


class Part(nn.Module):
    def __init__(self, does: Any) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(8, 8), does

    def forward(self, x: Tensor) -> Any:
        return self.does(self.layer(x))


def whole(does: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(Part(does)))


def refused(does: Any) -> str:
    with pytest.raises(ValueError, match=r"the module '1\.0' \(Part\)") as caught:
        wb.estimate_memory(lambda: whole(does), X)
    return str(caught.value)


@pytest.mark.parametrize(
    ("does", "operator"),
    [
        (lambda x: x[x > 0], "aten::nonzero"),
        (torch.nonzero, "aten::nonzero"),
        (lambda x: torch.masked_select(x, x > 0), "aten::masked_select"),
        (torch.unique, "aten::_unique2"),
    ],
)
def test_shapes_that_depend_on_values(does: Any, operator: str) -> None:
    text = refused(does)
    assert operator in text
    assert "size of its result depends on values" in text
    assert "torch.where" in text


def test_a_forward_that_reads_memory() -> None:
    text = refused(lambda x: torch.from_numpy(np.sort(x.detach().numpy())))
    assert "needs real values" in text
    assert "wb.measure_memory" in text


def test_an_operator_that_does_not_say_what_comes_out() -> None:
    text = refused(torch.ops.workbench_test.twice)
    assert "workbench_test::twice" in text
    assert 'torch.library.register_fake("workbench_test::twice")' in text


def test_a_custom_operator_without_a_fake() -> None:
    @torch.library.custom_op("workbench_test::thrice", mutates_args=())
    def thrice(x: Tensor) -> Tensor:
        return x * 3

    assert 'torch.library.register_fake("workbench_test::thrice")' in refused(thrice)
    thrice.register_fake(torch.empty_like)
    wb.estimate_memory(lambda: whole(lambda x: x + thrice(x.detach())), X)


def test_a_model_that_does_not_accept_the_batch() -> None:
    with pytest.raises(ValueError, match=r"the module '0' \(Linear\) does not accept the batch \(float32 4 × 5\): RuntimeError"):
        wb.estimate_memory(lambda: whole(torch.relu), torch.randn(4, 5))
    with pytest.raises(
        ValueError, match=r"the model \(Linear\) does not accept the batch \(float32 4 × 8\): TypeError: .*unexpected keyword.*give loss="
    ):
        wb.estimate_memory(lambda: nn.Linear(8, 8), {"pixels": X})
    with pytest.raises(ValueError, match=r"the loss function .*KeyError: 'labels'"):
        wb.estimate_memory(lambda: nn.Linear(8, 8), {"input": X}, loss=lambda m, b: m(b["input"]).sum() + b["labels"])


def test_what_a_model_does_not_take_of_a_mapping_is_its_target() -> None:
    classes = torch.zeros(4, dtype=torch.long)
    found = wb.estimate_memory(lambda: nn.Linear(8, 8), {"input": X, "label": classes})
    assert any("the cross-entropy of the output and the batch's last part" in note for note in found.notes)


def test_what_is_no_model() -> None:
    with pytest.raises(ValueError, match=r"expected a RunSpec, a Task, a function that builds a model, or a torch.nn.Module, not a int"):
        wb.estimate_memory(3, X)
    with pytest.raises(ValueError, match="a model needs a batch"):
        wb.estimate_memory(nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"model\(\) returned a list; expected a torch.nn.Module"):
        wb.estimate_memory(list, X)
    with pytest.raises(ValueError, match=r"loss\(model, batch\) returned a tensor of shape \(4, 8\)"):
        wb.estimate_memory(lambda: nn.Linear(8, 8), X, loss=lambda m, b: m(b))


def test_devices() -> None:
    with pytest.raises(ValueError, match="unknown device 'H21': did you mean"):
        wb.estimate_memory(lambda: nn.Linear(8, 8), X, device="H21")
    with pytest.raises(ValueError, match='device=7: "cuda"'):
        wb.estimate_memory(lambda: nn.Linear(8, 8), X, device=7)  # type: ignore[arg-type]
    own = wb.Device(name="Own-1", memory=10**9, bandwidth=1e9, flops_per_sec={"fp32": 1e12}, source="a test")
    breakdown = wb.estimate_memory(lambda: nn.Linear(8, 8), X, device=own)
    assert breakdown.device == "Own-1"
    assert any("was not measured for this GPU" in note for note in breakdown.notes)


def test_knobs() -> None:
    with pytest.raises(ValueError, match="no knob 'precison': did you mean 'precision'"):
        wb.estimate_memory(lambda: nn.Linear(8, 8), X, precison="fp32")
    with pytest.raises(ValueError, match="no optimizer 'adan'"):
        wb.estimate_memory(lambda: nn.Linear(8, 8), X, optimizer="adan")
    with pytest.raises(ValueError, match="world_size=20000: 1 to 8192 ranks are allowed"):
        wb.estimate_memory(lambda: nn.Linear(8, 8), X, world_size=20000)
    with pytest.raises(ValueError, match="rank=2: 0 to 1 is allowed with world_size=2"):
        wb.estimate_memory(lambda: nn.Linear(8, 8), X, world_size=2, rank=2)
    with pytest.raises(ValueError, match="steps=0: a whole number of at least 1"):
        wb.estimate_memory(lambda: nn.Linear(8, 8), X, steps=0)


def test_a_process_with_a_group_of_its_own() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"this process has a process group .* in a process of its own"):
            wb.estimate_memory(lambda: nn.Linear(8, 8), X)
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def test_a_model_that_cannot_be_copied() -> None:
    model = nn.Linear(8, 8)
    model.open = (number for number in range(3))  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"a Linear, cannot be copied .* give a function that builds it"):
        wb.estimate_memory(model, X)


def test_a_dataset_without_samples() -> None:
    task = wb.Task(model=lambda: nn.Linear(8, 8), dataset=list, loss=lambda m, b: m(b).sum())
    with pytest.raises(ValueError, match="has no sample"):
        wb.estimate_memory(task)
