"""Part `proofs`: the predicted gain of a remedy, against `prove`, and against the same change made by hand, by the wall clock."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import workbench as wb
from benchmarks.gpu_check import loops
from benchmarks.gpu_check.loops import Loop, Sizes
from benchmarks.gpu_check.machine import Bench, percent, spread
from benchmarks.gpu_check.report import Report

BUDGET_S, PROOF_S = 30.0, 12.0
"""Seconds of a diagnosis, and of a proof."""
MAX_PREDICTION_ERROR = 0.25
"""The library's own limit (`MAX_ERROR` of `diagnosis/analysis/proof.py`): further off, another remedy could have been the better choice."""
MAX_PROOF_ERROR = 0.10
"""By how much a proof, which ran the change, may differ from the wall clock's loops, beside what these differ among themselves."""
MAX_DRIFT = 0.10
"""Most of that difference that is granted: the loops are seconds apart, and on a host that launches small kernels they vary."""
TURNS = 2
"""Of the two loops by hand."""


class Repeated(Dataset[Tensor]):
    """Batches that are ready, or samples that a loader puts together."""

    def __init__(self, item: Tensor, count: int, sleep: float = 0.0) -> None:
        self.item, self.count, self.sleep = item, count, sleep

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.count:
            raise IndexError(index)
        if self.sleep:
            time.sleep(self.sleep)
        return self.item


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A loop, the remedy that is looked for, and the same change made by hand."""

    name: str
    remedy: str
    """How its name begins."""
    build: Callable[[Sizes, dict[str, Any]], Loop]
    """Sizes and the remedy's change ({} = none) → the loop."""


def _precision(sizes: Sizes, change: dict[str, Any]) -> Loop:
    model = sizes.model()
    optimizer = loops.adamw(model)
    mixed = change.get("precision") == "amp_bf16"

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(sizes.device, torch.bfloat16, enabled=mixed):
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()

    return step, loops.Batches([loops.resident(sizes)], 60)


def _optimizer(sizes: Sizes, change: dict[str, Any]) -> Loop:
    step, loader = loops.CASES["optimizer loops over many tensors"].build(sizes, True)
    if how := change.get("optimizer"):
        model = loops.Pieces(sizes.width, min(256, sizes.width // 8)).to(sizes.device)
        return loops.train(model, torch.optim.AdamW(model.parameters(), lr=1e-6, **{how: True}), item=10), loader
    return step, loader


def _pinned(sizes: Sizes, change: dict[str, Any]) -> Loop:
    model = sizes.model(1)
    loader = DataLoader(Repeated(sizes.numbers(), 60), batch_size=None, pin_memory=bool(change.get("pin_memory")))
    return loops.train(model, loops.adamw(model), item=10), loader


def _workers(sizes: Sizes, change: dict[str, Any]) -> Loop:
    model = sizes.model()
    knobs = {
        name: value for name, value in change.items() if name in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
    }
    dataset = Repeated(torch.randn(256, sizes.width), 60, 2 * sizes.seconds)
    return _repeating(model, sizes), DataLoader(dataset, batch_size=None, **knobs)


def _repeating(model: nn.Module, sizes: Sizes) -> Callable[[Tensor], None]:
    """A step as long as a plain one, from a small batch: what workers hand over is small."""
    optimizer, many = loops.adamw(model), -(-sizes.rows // 256)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        x = batch.to(sizes.device, non_blocking=True).repeat(many, 1)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def _batch(sizes: Sizes, change: dict[str, Any]) -> Loop:
    size = int(change.get("micro_batch", 256))
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(60)]).to(sizes.device)
    loader = DataLoader(Repeated(torch.randn(128), 100 * 256), batch_size=size, drop_last=True)
    return loops.train(model, loops.adamw(model), item=10), loader


CASES = (
    Case(name="fp32 matrix products", remedy="precision=amp_bf16", build=_precision),
    Case(name="AdamW that loops over 512 tensors", remedy="optimizer=", build=_optimizer),
    Case(name="large pageable batches", remedy="pin_memory=True", build=_pinned),
    Case(name="a dataset that sleeps", remedy="num_workers=", build=_workers),
    Case(name="many small kernels", remedy="micro_batch=", build=_batch),
)


def run(report: Report, bench: Bench) -> None:
    """Add a row per case."""
    sizes = loops.sizes(bench)
    for case in report.todo(CASES, name=lambda case: case.name):
        with report.guard(case.name):
            _prove(report, bench, sizes, case)
        bench.clear()


def _prove(report: Report, bench: Bench, sizes: Sizes, case: Case) -> None:
    step, loader = case.build(sizes, {})
    diagnosis = wb.diagnose(step, loader, budget_s=bench.pick(BUDGET_S, 5.0))
    named = f"{diagnosis.verdict} ({diagnosis.cause})"
    remedy = next((remedy for remedy in diagnosis.remedies if remedy.name.startswith(case.remedy) and remedy.provable), None)
    if remedy is None:
        offered = ", ".join(remedy.name for remedy in diagnosis.remedies) or "none"
        notes = "; ".join(diagnosis.evidence.notes)
        values = {"text": str(diagnosis), "notes": notes}
        report.row(
            case.name, False if bench.gpu else None, values=values, verdict=named, result=f"{case.remedy} is not offered, but {offered}"
        )
        return
    proof = diagnosis.prove(remedy, budget_s=bench.pick(PROOF_S, 4.0))
    change = dict(remedy.change)
    more = change.get("micro_batch", 256) / 256 if "micro_batch" in change else 1.0
    del step, loader
    walls: list[tuple[float, float]] = []
    for _ in range(TURNS):
        before, after = (bench.seconds_per_step(*case.build(sizes, each), at_least=0.6) for each in ({}, change))
        walls.append((before, after))
    gains = [before / after * more for before, after in walls]
    gain = statistics.median(gains)
    allowed = MAX_PROOF_ERROR + min(MAX_DRIFT, spread(gains))
    predicted, proved = remedy.speedup / gain - 1, proof.measured.mid / gain - 1
    right = gain <= remedy.high * (1 + MAX_PROOF_ERROR) if remedy.ceiling else abs(predicted) <= MAX_PREDICTION_ERROR
    report.row(
        case.name,
        right and abs(proved) <= allowed if bench.gpu else None,
        values={
            "remedy": remedy.name,
            "predicted": [remedy.low, remedy.speedup, remedy.high],
            "ceiling": remedy.ceiling,
            "proved": [proof.measured.low, proof.measured.mid, proof.measured.high],
            "wall": gain,
            "walls": walls,
            "step": diagnosis.evidence.step,
            "text": str(diagnosis),
        },
        verdict=named,
        remedy=remedy.name,
        predicted=remedy.gain,
        proved=f"{proof.measured.mid:.2f}×",
        result=f"{gain:.2f}× by the wall clock: predicted {percent(predicted)}, proved {percent(proved)}",
        expected=f"{'a ceiling' if remedy.ceiling else f'± {MAX_PREDICTION_ERROR:.0%}'}, ± {allowed:.0%}",
    )
