"""A small result for every picture of `wb.plot`, made by hand or by arithmetic: nothing is trained, started or fetched.

`draw(name, folder)` draws one. The tests look at all of them, and `docs/generated.py` shows them in the gallery.
"""

import base64
import io
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

import workbench as wb
from tests.memory_logs import training
from tests.planted_gap import planted
from tests.slow_loader import diagnosis
from tests.traced import data, event, launched, op, step, write
from workbench import plot
from workbench.batch.analysis.critical_batch import CriticalBatch
from workbench.batch.analysis.lengths import BatchLengths, LengthPlan
from workbench.batch.analysis.lr_race import conclude, first_candidates, race
from workbench.batch.analysis.lr_range import LrFound, LrSweep, geometric, suggestions_over_seeds
from workbench.batch.analysis.lr_scaling_rules import scale_lr
from workbench.batch.analysis.noise_scale import NoiseScale
from workbench.batch.analysis.plan import BatchPlan
from workbench.batch.analysis.proof import Gain, LossCurve, PlanProof
from workbench.batch.analysis.schedule import Schedule
from workbench.batch.analysis.steps_to_target import StepsToTarget
from workbench.batch.analysis.trials import Target, Trial
from workbench.cluster.analysis.collective_call import CollectiveCall
from workbench.cluster.analysis.collective_cost import Link, collective_seconds
from workbench.cluster.analysis.iteration import buckets
from workbench.cluster.analysis.links import LinkPoint, Links
from workbench.cluster.analysis.operator_time import Operator
from workbench.cluster.analysis.plan.plans import Plans
from workbench.cluster.analysis.step_time import StepTime
from workbench.cluster.analysis.traffic import Traffic
from workbench.cluster.analysis.transformer import Transformer
from workbench.cluster.analysis.twin_run import TwinBucket, TwinLayer, TwinRun, closed_form
from workbench.core import run_directory
from workbench.core.statistics import Interval
from workbench.data.analysis.data_audit import DataAudit, Group, Member
from workbench.data.analysis.format_costs import AS_IT_IS, PLAIN, FormatComparison, Reading, StoredFormat
from workbench.data.data_card import DataCard
from workbench.diagnosis.analysis.bisection import Bisection, Commit
from workbench.diagnosis.analysis.loader_model import LoaderModel
from workbench.diagnosis.analysis.owner_search import Rerun
from workbench.diagnosis.analysis.proof import Ladder, Proof, Rung
from workbench.diagnosis.analysis.what_changed import RunDifference, WhatChanged
from workbench.memory.analysis.breakdown import MemoryBreakdown
from workbench.memory.analysis.whatif import MemoryLadder, MemoryRung
from workbench.runs.spec import RunSpec
from workbench.scaling.analysis.curve.curve import ScalingCurve
from workbench.scaling.analysis.law.fit import losses
from workbench.scaling.analysis.law.law import ScalingLaw
from workbench.traces.analysis.trace import Trace
from workbench.traces.analysis.trace_set import TraceSet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 2**30


# --- runs


def run(folder: Path, name: str, **changes: float) -> wb.Run:
    """A run of two ranks, as its directory keeps it."""
    path = folder / name
    if path.exists():
        return wb.Run.load(path)
    path.mkdir(parents=True)
    spec = RunSpec(task="clipart-resnet", nproc_per_node=2, steps=120).to_json()
    about = {"format": run_directory.FORMAT, "id": name, "name": name, "created": 1.0, "host": "here", "launch_dir": "."}
    outcome = {"state": "finished", "returncode": 0, "seconds": 9.0}
    run_directory.write_json(path / run_directory.RUN_JSON, {**about, "spec": spec, "outcome": outcome})
    (path / run_directory.LOCK).touch()
    phases = {"data_wait": 0.021, "h2d": 0.003, "forward": 0.012, "backward": 0.02, "optimizer": 0.004, "other": 0.002, **changes}
    for rank in (0, 1):
        writer = run_directory.LineWriter(path / run_directory.rank_file(rank))
        writer.write([{"rank": rank, "world_size": 2, "clock": "host", "pid": 1, "device": "cpu"}])
        own = {name: seconds * (1 + 0.15 * rank) for name, seconds in phases.items()}
        writer.write({"step": i, "samples": 32, **own} for i in range(120))
        writer.close()
    writer = run_directory.LineWriter(path / run_directory.METRICS)
    for i in range(120):
        loss = 0.4 + 1.9 * math.exp(-i / 30) + 0.05 * math.sin(7 * i)
        writer.write([{"step": i + 1, "steps": 120, "loss": loss, "lr": 0.1 * (1 + math.cos(i / 38)) / 2, "samples": 64 * (i + 1)}])
    writer.write([{"step": 120, "steps": 120, "accuracy": 0.862}])
    writer.close()
    return wb.Run.load(path)


# --- diagnoses


def proof(mid: float = 1.94, baseline: float = 640.0) -> Proof:
    return Proof(remedy=diagnosis().remedies[0], measured=Interval(low=mid - 0.1, mid=mid, high=mid + 0.1), baseline=baseline)


def proved(folder: Path) -> wb.Diagnosis:
    """A diagnosis whose first remedy was tried."""
    return replace(diagnosis(), proofs=(proof(),))


def ladder(folder: Path) -> Ladder:
    """Two remedies that helped, and between them one that did not."""
    now, rungs = 640.0, []
    remedies = diagnosis().remedies
    for remedy, gain in zip([*remedies, *remedies][:3], (1.94, 0.97, 1.31), strict=True):
        tried = replace(proof(gain, now), remedy=remedy)
        now *= gain if tried.gained else 1.0
        rungs.append(Rung(verdict="input-bound", cause="dataset code", proof=tried, samples_per_sec=now))
    return Ladder(start=640.0, rungs=tuple(rungs))


RAW = LoaderModel(cpu=0.030, worker_cpu=0.032, handover=0.0005, compute=0.020, cores=4)
READY = LoaderModel(cpu=0.0005, worker_cpu=0.004, handover=0.0005, compute=0.020, cores=4)


def why_not_linear(folder: Path) -> wb.WhyNotLinear:
    """Four ranks, one of them slow, with reductions and a loader that suffers."""
    evidence = planted(ranks=4, slow=0.004, loaders=0.002, reduction=0.005, buckets=12, start=0.05, unexplained=0.0008)
    return wb.WhyNotLinear(evidence=evidence)


# --- memory


def needs(batch: int, kind: Any = "predicted", device: str = "RTX-4090") -> MemoryBreakdown:
    return MemoryBreakdown.from_log(training(batch), kind=kind, title="", device=device)


def memories(folder: Path) -> list[MemoryBreakdown]:
    """Predicted and measured."""
    return [needs(1_000_000), needs(1_040_000, "measured")]


def memory_ladder(folder: Path) -> MemoryLadder:
    changes: list[tuple[dict[str, Any], int, float]] = [
        ({"precision": "amp_bf16"}, 1_700_000, 0.9),
        ({"checkpointing": "full"}, 700_000, 1.3),
    ]
    rungs = tuple(MemoryRung(change=change, breakdown=needs(batch), slowdown=slowdown, price="") for change, batch, slowdown in changes)
    return MemoryLadder(start=needs(3_400_000), rungs=rungs, device="RTX-4090", capacity=int(0.95 * 24 * GIB), margin=0.05)


# --- batch and learning rate

BATCHES = (4, 16, 64, 256, 1024)


def schedule(steps: int, warmup: int, peak: float, batch: int) -> Schedule:
    """A warm-up and half a cosine."""
    rates = [
        peak * (i + 1) / warmup if i < warmup else peak * (1 + math.cos(math.pi * (i - warmup) / (steps - warmup))) / 2
        for i in range(steps)
    ]
    return Schedule(lrs=tuple(rates), steps=tuple(range(steps)), batch=batch, label="")


def sweep(seed: int) -> LrSweep:
    """Losses that fall until 0.1 and then explode."""
    noise, rates, values = np.random.default_rng(seed), geometric(1e-4, 10, 100), list[float]()
    for rate in rates:
        x = math.log10(rate / 0.1)
        values.append(2.3 - 1.5 / (1 + math.exp(-3 * (x + 0.5))) + math.exp(4 * (x - 1)) + 0.02 * noise.standard_normal())
        if values[-1] > 9:
            break
    return LrSweep(lrs=rates[: len(values)], losses=tuple(values), planned=100, seed=seed, stopped="diverged")


def lr_found(folder: Path) -> LrFound:
    def loss(rate: float, number: int) -> float:
        return math.inf if rate > 6 else 1 + 0.2 * math.log(rate / 0.2) ** 2

    sweeps = [sweep(seed) for seed in range(5)]
    return conclude(sweeps, race(first_candidates(suggestions_over_seeds(sweeps)), loss), race_steps=80, batch=32, steps=1800, notes=())


def noise(folder: Path) -> NoiseScale:
    random = np.random.default_rng(0)
    direction = random.standard_normal(20)
    gradients = direction * 0.1 / np.linalg.norm(direction) + random.standard_normal((300, 4, 20)) / math.sqrt(20 * 64)
    pairs = zip(np.square(gradients).sum(2).mean(1).tolist(), np.square(gradients.mean(1)).sum(1).tolist(), strict=True)
    return NoiseScale.of(list(pairs), micro_batch=64, groups=4)


def needed_steps(batch: float) -> float:
    return 70 * (1 + 128 / batch)


def trial(batch: int, steps: float | None, seed: int = 0, rule: str = "tuned") -> Trial:
    after, outcome = math.ceil(steps or 900), "stopped" if steps is None else "reached"
    return Trial(batch=batch, steps=steps, rule=rule, lr=0.1, optimizer="sgd", seed=seed, best=0.5, after=after, outcome=outcome)


def steps_to_target(folder: Path) -> StepsToTarget:
    """Tuned at every batch, by the linear rule, and by none, which does not reach the target."""
    trials = [trial(batch, needed_steps(batch) * (1 + seed / 8), seed) for batch in BATCHES for seed in (0, 1)]
    trials += [trial(batch, needed_steps(batch) * (1.1 + batch / 600), rule="linear") for batch in BATCHES[:4]]
    trials += [trial(batch, None if batch > 100 else needed_steps(batch) * 1.7, rule="sqrt") for batch in BATCHES[:4]]
    target = Target(name="loss", value=0.5, rises=False)
    made = StepsToTarget(task="fashion-mlp", target=target, base_batch=64, planned=len(trials), trials=tuple(trials))
    return made.fitted_to([4, 16, 64, 256])


def plan_proof(folder: Path) -> PlanProof:
    old = BatchPlan(micro_batch=16, world_size=2, lr=0.1, optimizer="sgd")
    places = tuple(range(200, 20_001, 200))

    def course(plan: str, rate: float, slow: float, seed: int) -> LossCurve:
        values = tuple(0.5 + 1.5 * math.exp(-at / slow) + 0.02 * math.sin(at / 700 + 2 * seed) for at in places)
        return LossCurve(plan=plan, seed=seed, samples=places, losses=values, samples_per_sec=rate)

    courses = [course(*one, seed) for one in (("old", 1000.0, 4500.0), ("new", 1900.0, 5200.0)) for seed in (0, 1)]
    new = old.scaled_to(global_batch=64, micro_batch=32)
    return PlanProof(old=old, new=new, predicted=Gain(throughput=1.9, samples=0.8), samples=20_000, courses=tuple(courses))


# --- clusters

LARGE = Transformer(layers=80, hidden=8192, vocabulary=32_000, sequence=2048, heads=64)
LAYERS = [TwinLayer(size=2**20, forward=0.002, backward=0.004) for _ in range(6)]


def plans(gpus: int | None = 64) -> Plans:
    found = wb.plan(LARGE, "DGX-H100", gpus=gpus, global_batch=512)
    assert isinstance(found, Plans)
    return found


def estimated_time(folder: Path) -> StepTime:
    sizes = [("aten.mm", "forward", 2e12, 4e8, 96), ("aten.mm", "backward", 2e12, 4e8, 192), ("aten.add", "forward", 0, 3e8, 200)]
    sizes += [("aten._flash_attention_forward", "forward", 4e11, 2e8, 24), ("aten._fused_adamw_", "update", 0, 1e10, 1)]
    return StepTime(
        title="gpt, 16 samples, amp_bf16, adamw",
        device=wb.Device.named("H100"),
        operators=tuple(
            Operator(name=name, phase=phase, dtype="bf16", flops=flops, bytes=moved, calls=calls)
            for name, phase, flops, moved, calls in sizes
        ),
        samples=128,
        ranks=8,
        exposed=Interval(low=0.01, mid=0.02, high=0.05),
    )


def batch_lengths(folder: Path) -> BatchLengths:
    """A thousand steps, of which a few are too long."""
    lengths = [int(256 + 900 * (math.sin(7 * step) ** 8) + (2500 if step in (412, 871) else 0)) for step in range(1000)]
    memory = {length: int(9 * GIB + length * 6e6 + length**2 * 900) for length in range(256, 4000, 256)}
    plan = LengthPlan(name="as it is", longest=max(lengths), tokens=9_000_000, padding=0.41, seconds=900.0, needed=42 * GIB, fits=False)
    return BatchLengths(
        title="words, 16 samples",
        device="RTX-4090",
        capacity=int(22.5 * GIB),
        micro_batch=16,
        steps=1000,
        lengths=tuple(lengths),
        memory=memory,
        fitting=1500,
        plans=(plan, replace(plan, name="bucketed", tokens=6_000_000, padding=0.08, seconds=610.0)),
    )


def traffic(folder: Path) -> Traffic:
    kinds = (("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward"))
    modules = ("embedding", "layers.0", "layers.1", "layers.2", "head")
    calls = [
        CollectiveCall(kind=kind, size=(9 - 2 * at) * 2**20, ranks=8, phase=phase, module=name)
        for kind, phase in kinds
        for at, name in enumerate(modules)
    ]
    calls += [CollectiveCall(kind="all_reduce", size=2**20, ranks=8, phase="optimizer", module="")]
    return Traffic(calls=tuple(calls), world_size=8, parameters=10**7)


def links(folder: Path) -> Links:
    link, points = Link(latency=2e-5, bandwidth=5e9), []
    for at, kind in enumerate(("all_reduce", "all_gather", "reduce_scatter", "broadcast")):
        for size in (2**12, 2**15, 2**18, 2**21, 2**24):
            seconds = collective_seconds(kind, size, 8, link) * 1.3**at
            points.append(LinkPoint(kind=kind, size=size, seconds=(0.85 * seconds, seconds, 1.2 * seconds)))
    return Links(points=tuple(points), ranks=8, backend="nccl", device="H100")


def twin(folder: Path) -> TwinRun:
    def seconds(size: float) -> float:
        return 1e-4 + size / 4e8

    ready, free, made = 0.0, 0.0, []
    for group in buckets([layer.size for layer in LAYERS], 2**21):
        ready += sum(LAYERS[index].backward for index in group)
        size = sum(LAYERS[index].size for index in group)
        start = max(ready, free)
        free = start + seconds(size)
        made.append(TwinBucket(size=size, ready=ready, start=start, end=free))
    return TwinRun(
        ranks=8, buckets=tuple(made), forward=0.012, backward=ready, step=0.012 + free, closed=closed_form(LAYERS, seconds, 2**21)
    )


# --- scaling


def curve(folder: Path) -> ScalingCurve:
    return ScalingCurve([(1, 500, 0.0), (2, 960, 0.03), (2, 940, 0.03), (4, 1790, 0.08), (8, 3280, 0.14), (8, 3200, 0.15)], slots=8)


def law(folder: Path) -> ScalingLaw:
    noise, true = np.random.default_rng(0), (1.8, 480.0, 2100.0, 0.35, 0.37)
    pairs = [(size, tokens) for size in (1e6, 3e6, 1e7, 3e7, 1e8) for tokens in (2e7, 6e7, 2e8, 6e8, 2e9)]
    return ScalingLaw.fit([(n, d, float(losses(true, n, d)) * math.exp(noise.normal(0, 0.004))) for n, d in pairs], draws=30)


def draw_law(folder: Path, ax: "Axes | None") -> "Axes":
    fitted = law(folder)
    held = fitted.held_out(0.2)
    return plot.scaling_law(fitted.refitted(fitted.points.where(work <= held.limit for work in fitted.compute)), ax, held_out=held)


# --- traces


def on_gpu(folder: Path) -> Trace:
    """Three steps of 1 ms: a slow loader, a copy, kernels, an all-reduce that half of a kernel hides, pauses, and what it allocates."""
    rows: list[dict[str, Any]] = []
    held, number = 0, 1
    for step_number, at in ((3, 0), (4, 1000), (5, 2000)):
        rows += [step(step_number, at, 1000), data(at, 180), event("nn.Module: Net_0", "python_function", at + 200, 300)]
        rows += [
            event("nn.Module: Linear_0", "python_function", at + 210, 90),
            event("nn.Module: Linear_1", "python_function", at + 320, 150),
        ]
        rows += launched("Memcpy HtoD (Pinned -> Device)", at + 185, at + 190, 60, number, "gpu_memcpy", bytes=600_000)
        rows += launched("Memcpy DtoH (Device -> Pageable)", at + 910, at + 930, 30, number + 1, "gpu_memcpy", bytes=100_000)
        number += 2
        shapes = {"Input Dims": [[256, 512], [512, 2048]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
        for i, (name, begin, length) in enumerate(
            (("aten::mm", 215, 110), ("aten::gelu", 300, 40), ("aten::mm", 330, 140), ("aten::add", 400, 30))
        ):
            rows.append(op(name, at + begin, 40, args={**shapes, "External id": number}))
            kernel = (
                "void cutlass::Kernel<cutlass_80_tensorop_bf16_s16816gemm>"
                if name == "aten::mm"
                else f"vectorized_elementwise_kernel_{name[6:]}"
            )
            rows += launched(
                kernel, at + begin + 5, at + begin + 30, length, number, **{"est. achieved occupancy %": 25 + 15 * i, "blocks per SM": 2.0}
            )
            number += 1
            held += 8 << 20
            told = {"Bytes": 8 << 20, "Total Allocated": held, "Addr": number, "Device Type": 1, "Device Id": 0}
            rows.append({"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": at + begin + 8, "args": told})
        rows.append(event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", at + 520, 160))
        rows += launched("void cutlass::Kernel<cutlass_80_tensorop_bf16_s16816gemm>", at + 540, at + 560, 200, number)
        rows += launched("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", at + 600, at + 690, 150, number + 1)
        rows += [event("Optimizer.step#AdamW.step", "user_annotation", at + 720, 140)]
        rows += launched("multi_tensor_apply_kernel", at + 740, at + 850, 60, number + 2)
        number += 3
        told = {"Bytes": -held, "Total Allocated": 0, "Addr": number, "Device Type": 1, "Device Id": 0}
        rows.append({"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": at + 700, "args": told})
        held = 0
    return Trace.load(write(folder / "gpu.json", rows, deviceProperties=[{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]))


def ranks(folder: Path) -> TraceSet:
    """Two ranks, of which the second waits longer for data."""
    paths, at = [], 1e6
    for rank, wait in enumerate((100, 500)):
        rows: list[dict[str, Any]] = []
        for number in range(5):
            begin = at + 1400 * number
            rows += [data(begin, wait), op("aten::mm", begin + wait, 600), step(number + 7, begin, 1300)]
            rows.append(event("gloo:all_reduce", "user_annotation", begin + wait + 600, 700 - wait, lane=9))
        paths.append(write(folder / f"host_rank{rank}.{rank + 1}.pt.trace.json", rows, distributedInfo={"rank": rank, "world_size": 2}))
    return TraceSet.load(paths)


# --- data


def comparison(costs: dict[str, float], *, decode: float = 0.0, cpu: float = 0.5, now: float = 1.0) -> FormatComparison:
    """Formats that take so many milliseconds per sample, half of it CPU; what is there takes 10, and 1 of CPU if not said otherwise."""
    readings = [
        Reading(format=name, place="local", order="random", cache="cold", seconds=1e-3 * cost, cpu=1e-3 * cpu * cost)
        for name, cost in costs.items()
    ]
    readings.append(Reading(format=AS_IT_IS, place="local", order="random", cache="cold", seconds=10e-3, cpu=1e-3 * now))
    stored = [
        StoredFormat(format=name, stored_bytes=4096, write_seconds=1e-4, needs="" if name in PLAIN else name, rows_read_for_one=1)
        for name in (AS_IT_IS, *costs)
    ]
    return FormatComparison(samples=100, payload_bytes=3400, readings=tuple(readings), formats=tuple(stored), decode_cpu=1e-3 * decode)


def card() -> DataCard:
    """A dataset with pictures of two shapes, a text, and a picture that cannot be decoded."""
    pixels = [np.full((20 + 8 * (i % 2), 24, 3), 20 * i, np.uint8) for i in range(9)]
    examples: list[dict[str, Any]] = [{"__key__": f"{i}", "image": pixels[i], "cls": i} for i in range(9)]
    examples += [{"__key__": "9", "txt": "Once upon a time"}, {"__key__": "10", "jpg": b"no picture", "cls": 3}]
    return DataCard(
        path="", format="tar", count=11, stored_bytes=4096, schema={"image": "array", "cls": "int"}, looked_at=11, examples=tuple(examples)
    )


Draw = Callable[[Path, "Axes | None"], "Axes"]
"""Draws a picture into Axes, or a new figure; traces and runs are written into the folder."""


def of(name: str, make: Callable[[Path], Any], **options: Any) -> Draw:
    return lambda folder, ax: getattr(plot, name)(make(folder), ax, **options)


def changed(folder: Path) -> WhatChanged:
    values = ((), 0.1), (("precision", "NCCL_ALGO"), 0.141), ((), 0.101), (("precision",), 0.102), (("NCCL_ALGO",), 0.142), ((), 0.1)
    rows = (("spec", "precision", "amp_bf16", "fp32"), ("variables", "NCCL_ALGO", "–", "Ring"))
    return WhatChanged(
        of="time",
        runs=("a", "b"),
        recorded=(0.1, 0.14),
        change=Interval(low=0.31, mid=0.336, high=0.36),
        differences=tuple(RunDifference(section=section, name=name, a=a, b=b, change=name) for section, name, a, b in rows),
        reruns=tuple(Rerun(changes=names, value=value) for names, value in values * 2),
        kind="owner",
        owner=("NCCL_ALGO",),
    )


def bisected(folder: Path) -> Bisection:
    words = {"a": "faster", "b": "new loader", "c": "typo", "d": "docs"}
    commits = tuple(Commit(id=name * 40, subject=f"{name * 7} {said}") for name, said in words.items())
    values = ((), 0.1), (("d" * 40,), 0.12), ((), 0.101), (("b" * 40,), 0.121), ((), 0.1), (("a" * 40,), 0.1), ((), 0.1)
    reruns = tuple(Rerun(changes=names, value=value) for names, value in values * 2)
    good = Commit(id="0" * 40, subject="0000000 first")
    return Bisection(of="time", good=good, commits=commits, reruns=reruns, kind="commit", first_bad=("b" * 40,), steps=40)


def audited() -> DataAudit:
    """Three groups of small pictures."""

    def picture(shade: int) -> str:
        pixels = np.full((32, 32, 3), 235, np.uint8)
        pixels[6:26, 4 + shade % 9 : 22] = (shade, 90, 140)
        kept = io.BytesIO()
        Image.fromarray(pixels).save(kept, "JPEG")
        return base64.b64encode(kept.getvalue()).decode()

    def group(kind: str, shades: list[int], splits: str, labels: str) -> Group:
        each = zip(shades, splits, labels, strict=True)
        names = {"t": "train", "v": "validation", "b": "boats", "f": "food"}
        return Group(
            kind=kind,
            members=tuple(
                Member(split=names[split], index=shade, key=str(shade), label=names[label], picture=picture(shade))
                for shade, split, label in each
            ),
        )

    groups = (
        group("pixels", [40, 40], "vt", "bb"),
        group("bytes", [90] * 5, "ttttt", "bfbbf"),
        group("near pictures", [150, 158], "tt", "ff"),
    )
    samples = {"train": 200, "validation": 50}
    empty: dict[str, Any] = {"kinds": {"picture": 250}, "classes": {}, "unusable": (), "sizes": ()}
    return DataAudit(target="clip art", samples=samples, groups=groups, seconds=1.0, **empty)


PICTURES: dict[str, Draw] = {
    "step_time": of("step_time", lambda folder: run(folder, "as it is")),
    "compare": of("compare", lambda folder: [run(folder, "as it is"), run(folder, "three workers", data_wait=0.002)]),
    "metrics": of("metrics", lambda folder: run(folder, "as it is")),
    "diagnosis": of("diagnosis", proved),
    "proof": of("proof", lambda folder: proof()),
    "ladder": of("ladder", ladder),
    "loader_curve": of("loader_curve", lambda folder: RAW.curve(5).with_measured(step={0: 0.052, 2: 0.024}, loader={0: 0.029, 2: 0.0175})),
    "duplicates": of("duplicates", lambda folder: audited()),
    "unprepared": lambda folder, ax: plot.unprepared(RAW, READY, num_workers=2, ax=ax),
    "memory": of("memory", memories),
    "memory_ladder": of("memory_ladder", memory_ladder),
    "memory_timeline": of("memory_timeline", lambda folder: needs(4096)),
    "scaled_lr": of("scaled_lr", lambda folder: scale_lr(0.1, batch=32, to_batch=512, noise_scale=200)),
    "schedule": of("schedule", lambda folder: {"old": schedule(200, 30, 0.2, 4), "new": schedule(50, 8, 0.4, 16)}),
    "lr_range": of("lr_range", lr_found),
    "noise_scale": of("noise_scale", noise),
    "steps_to_target": of("steps_to_target", steps_to_target),
    "critical_batch": of("critical_batch", lambda folder: CriticalBatch.fit({2: 1128, 8: 315, 32: 125, 128: 85, 512: 75, 1400: 75})),
    "time_to_target": of(
        "time_to_target",
        lambda folder: steps_to_target(folder).time_to_target({(n, b): 1000 * n * b / (b + 20) for n in (1, 4) for b in (8, 32, 128)}),
    ),
    "plan_proof": of("plan_proof", plan_proof),
    "plan": of("plan", lambda folder: plans()),
    "plan_memory": of("plan_memory", lambda folder: plans()),
    "plan_front": of("plan_front", lambda folder: plans(None)),
    "estimated_time": of("estimated_time", estimated_time),
    "batch_lengths": of("batch_lengths", batch_lengths),
    "traffic": of("traffic", traffic),
    "links": of("links", links),
    "twin": of("twin", twin),
    "samples": of("samples", lambda folder: card()),
    "formats": of("formats", lambda folder: comparison({"tar": 1.0, "lmdb": 0.9, "hdf5": 4.0})),
    "scaling": of("scaling", curve),
    "scaling_efficiency": of("scaling_efficiency", curve),
    "scaling_law": draw_law,
    "why_not_linear": of("why_not_linear", why_not_linear),
    "breakdown": of("breakdown", on_gpu),
    "ranks": of("ranks", ranks),
    "critical": of("critical", on_gpu),
    "critical_path": of("critical_path", on_gpu),
    "idle": of("idle", on_gpu),
    "flame": of("flame", on_gpu),
    "kernels": of("kernels", on_gpu),
    "modules": of("modules", on_gpu),
    "sequences": of("sequences", lambda folder: on_gpu(folder).sequences(length=2)),
    "roofline": of("roofline", on_gpu),
    "copies": of("copies", on_gpu),
    "launches": of("launches", on_gpu),
    "memory_curve": of("memory_curve", on_gpu),
    "timeline": of("timeline", on_gpu),
    "what_changed": of("what_changed", changed),
    "bisection": of("bisection", bisected),
}
"""Name in `wb.plot` → how to draw it."""


def draw(name: str, folder: Path, ax: "Axes | None" = None) -> "Axes":
    """Draw one picture; what it reads is written into the folder."""
    return PICTURES[name](folder, ax)
