"""Plants faults into trainings that no test has, and asks `wb.sanity` for them: which cause it names, and what it says of sound ones.

python benchmarks/planted_sanity.py
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import workbench as wb
from workbench.data.samples import FashionMnist


class Clothes(Dataset[Any]):
    """Pictures of clothes, changed by a function of all pictures and labels."""

    def __init__(self, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, y: (x, y), regress: bool = False) -> None:
        data = FashionMnist()
        pairs = [data[index] for index in range(1024)]
        images = torch.stack([image for image, _ in pairs])
        self.x, self.y = change((images - images.mean()) / images.std(), torch.tensor([int(label) for _, label in pairs]))
        if regress:
            self.y = self.x.mean((1, 2, 3), keepdim=False)[:, None]
            self.y = (self.y - self.y.mean()) / self.y.std()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Net(nn.Module):
    """Two convolutions, the second in a residual branch, and a head."""

    def __init__(self, fault: str = "", outputs: int = 10) -> None:
        super().__init__()
        self.fault = fault
        self.first, self.norm = nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8) if fault == "batch norm" else nn.GroupNorm(2, 8)
        self.second, self.head, self.spare = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8 * 169, outputs), nn.Identity()
        if fault == "frozen":
            self.first.requires_grad_(False)
        if fault == "forgotten":
            self.spare = nn.Conv2d(8, 8, 1)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        if self.fault == "no grad":
            with torch.no_grad():
                branch = self.second(x)
        else:
            branch = self.second(x)
        if self.fault == "attention":
            branch = branch * torch.softmax(branch.mean((2, 3), keepdim=True), 0)
        x = (x + branch).flatten(1)
        if self.fault == "dropout":
            x = F.dropout(x, 0.2, self.training)
        x = self.head(x)
        if self.fault == "root":
            x = x + (0 * x).sum(1, keepdim=True).abs().sqrt()
        return torch.sigmoid(x) if self.fault == "sigmoid" else x


def classify(model: nn.Module, batch: Any, **options: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], **options)


def binary(model: nn.Module, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]), F.one_hot(batch[1], 10).float())


def squared(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def evaluate(model: nn.Module) -> dict[str, float]:
    model.train()
    return {"mean": float(model(torch.ones(8, 1, 28, 28)).mean())}


def task(fault: str = "", **changes: Any) -> wb.Task:
    given: dict[str, Any] = {"model": lambda: Net(fault), "dataset": Clothes, "loss": classify, "optimizer": "adamw(lr=0.003)"}
    return wb.Task(**given | {"name": fault or "sound"} | changes)


CASES: list[tuple[str, wb.Task, str]] = [
    ("a frozen convolution", task("frozen"), "frozen"),
    ("a residual branch without gradients", task("no grad"), "detached"),
    ("a module that forward forgot", task("forgotten"), "unused"),
    ("a sigmoid before the loss that takes logits", task("sigmoid", loss=binary), "sigmoid_before_logits_loss"),
    ("labels that are those of the next sample", task(dataset=lambda: Clothes(lambda x, y: (x, y.roll(1)))), "labels_carry_nothing"),
    ("pixels from 0 to 255", task(dataset=lambda: Clothes(lambda x, y: (x * 90 + 73, y))), "input_scale"),
    ("a sum over the batch", task(loss=lambda m, b: classify(m, b, reduction="none").sum()), "sum_reduction"),
    ("an optimizer of the head alone", task(optimizer=lambda w: torch.optim.AdamW(list(w)[-2:], lr=0.003)), "not_in_optimizer"),
    ("a softmax over the batch", task("attention"), "batch_leak"),
    ("a learning rate of 1e-10", task(optimizer="adamw(lr=1e-10)"), "learning_rate"),
    ("an evaluation in training mode", task(evaluate=evaluate), "evaluates_in_train_mode"),
    ("the root of zero", task("root"), "nonfinite_gradient"),
    ("one picture again and again", task(dataset=lambda: Clothes(lambda x, y: (x[y], y))), "duplicate_samples"),
    ("nothing", task(), ""),
    ("nothing, with batch norm", task("batch norm"), ""),
    ("nothing, with dropout", task("dropout"), ""),
    ("nothing, SGD with momentum", task(optimizer="sgd(lr=0.02, momentum=0.9)"), ""),
    ("nothing, binary losses", task(loss=binary), ""),
    ("nothing, a regression", task(model=lambda: Net(outputs=1), dataset=lambda: Clothes(regress=True), loss=squared), ""),
]  # fmt: skip


def main() -> None:
    """Print a line per case."""
    right = [0, 0]
    for name, planted, cause in CASES:
        torch.manual_seed(0)
        report = wb.sanity(planted)
        right[not cause] += report.cause == cause
        print(f"{'right' if report.cause == cause else 'WRONG'}  {name}: {report.cause or 'sound'}, {report.seconds:.0f} s", flush=True)
        if report.cause != cause:
            print(report.verdict)
    faults = sum(bool(cause) for *_, cause in CASES)
    print(f"{right[0]} of {faults} planted faults are named, {right[1]} of {len(CASES) - faults} sound trainings are not blamed")


if __name__ == "__main__":
    main()
