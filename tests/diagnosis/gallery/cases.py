"""The gallery: small training loops in which one bottleneck was planted, so that the right verdict is known. No torch in here.

Every case has its planted cost taken away again by `judge.py CASE truth`: what that saves is measured, not assumed. A case is either a
RunSpec of a task in `tasks.py` (where the fix is a knob, it can be proved), or a loop of its own in `loops.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import workbench as wb

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training loop and what is wrong with it."""

    name: str
    """Also the name of the function that builds it."""
    plants: str
    """For people."""
    answers: Mapping[str, tuple[str, ...]]
    """Right verdicts, and what the cause of each may begin with; () = any cause."""
    spec: Mapping[str, Any] | None = None
    """Knobs of its RunSpec; None = a loop in `loops.py`."""
    removed: Mapping[str, Any] | None = None
    """Knobs that take the planted cost away; None = the builder does, with `planted=False`."""
    ranks: int = 1
    settle: int = 8
    """Steps before what was planted shows in full, such as those of a full queue."""
    period: int = 1
    """Steps from one occurrence of what was planted to the next."""
    file: Path = field(default=Path())
    """Where the builder is; empty = `tasks.py` for a spec, else `loops.py`."""
    gpu: bool = False
    """Can be shown on a GPU only."""

    @property
    def healthy(self) -> bool:
        return not self.plants

    @property
    def source(self) -> Path:
        """The file of its builder."""
        return self.file if self.file.name else HERE / ("loops.py" if self.spec is None else "tasks.py")

    def run_spec(self, **changes: Any) -> wb.RunSpec:
        """Its RunSpec."""
        assert self.spec is not None
        return wb.RunSpec(task=f"{self.source}:{self.name}", nproc_per_node=self.ranks, device="cpu", **{**self.spec, **changes})

    def right(self, verdict: str, cause: str | None = None) -> bool:
        """Is that the right verdict (and, if given, the right cause)?"""
        causes = self.answers.get(verdict)
        return causes is not None and (cause is None or not causes or cause.startswith(causes))


INPUT, HOST, COMPUTE, STALLED = "input-bound", "host-bound", "compute-bound", "stalled"

PLANTED = (
    # --- input-bound
    Case(
        name="slow_storage",
        plants="each sample waits half a millisecond for its storage",
        answers={INPUT: ("storage",)},
        spec={"micro_batch": 32},
    ),
    Case(
        name="small_files",
        plants="each sample lies in 64 small files",
        answers={INPUT: ("small files", "storage")},
        spec={"micro_batch": 16},
    ),
    Case(
        name="heavy_decode",
        plants="JPEG pictures are decoded in the loop",
        answers={INPUT: ("dataset code",)},
        spec={"micro_batch": 8},
    ),
    Case(
        name="heavy_collate",
        plants="batches are put together in pure Python",
        answers={INPUT: ("collate",)},
        spec={"micro_batch": 16},
    ),
    Case(
        name="respawned_workers",
        plants="workers are started again for every epoch of eight steps",
        answers={INPUT: ("worker start-up",)},
        spec={"micro_batch": 32, "num_workers": 2},
        removed={"persistent_workers": True},
        period=8,
    ),
    Case(
        name="too_many_workers",
        plants="two ranks have four workers each on two cores, for data that cost next to nothing",
        answers={INPUT: ("oversubscribed", "transport")},
        spec={"micro_batch": 32, "num_workers": 4},
        removed={"num_workers": 0},
        ranks=2,
        settle=12,
    ),
    Case(
        name="hidden_by_the_queue",
        plants="one worker is too slow, which a full queue hides for dozens of steps",
        answers={INPUT: ("storage",)},
        spec={"micro_batch": 32, "num_workers": 1, "prefetch_factor": 40},
        settle=140,
    ),
    Case(
        name="one_slow_sample_in_twenty",
        plants="one sample in twenty takes twenty milliseconds",
        answers={INPUT: ("slow samples", "storage")},
        spec={"micro_batch": 10},
        period=2,
    ),
    Case(
        name="own_iterable",
        plants="a hand-written loader augments pictures with numpy; it is no DataLoader",
        answers={INPUT: ()},
    ),
    # --- transfer-bound
    Case(
        name="heavy_transfer",
        plants="48 MB of pageable memory per step go to the GPU",
        answers={"transfer-bound": ()},
        gpu=True,
    ),
    # --- host-bound
    Case(
        name="item_in_a_loop",
        plants="loss and prediction of each sample are fetched with .item()",
        answers={HOST: ("syncs", "launches", "python")},
    ),
    Case(
        name="printing",
        plants="gradients are printed in every step",
        answers={HOST: ("python", "syncs", "launches")},
    ),
    Case(
        name="tiny_batches",
        plants="a batch of two keeps the CPU busy with calling operators",
        answers={HOST: ("launches",), COMPUTE: ("small batch",)},
        spec={"micro_batch": 2},
        removed={"micro_batch": 64},
    ),
    Case(
        name="python_metric",
        plants="a metric in pure Python in every step",
        answers={HOST: ("python",)},
    ),
    Case(
        name="sleeping_forward",
        plants="the forward pass waits for an answer over the network",
        answers={HOST: ("sleeping or I/O",)},
    ),
    Case(
        name="oversubscribed_threads",
        plants="two ranks with eight threads each on two cores",
        answers={HOST: ("oversubscribed",)},
        spec={"micro_batch": 32, "threads": 8},
        removed={"threads": 1},
        ranks=2,
    ),
    # --- optimizer-bound
    Case(
        name="many_tensors",
        plants="AdamW without foreach over 500 small tensors",
        answers={"optimizer-bound": ()},
        spec={"micro_batch": 16, "optimizer": "adamw(lr=0.001, foreach=False)"},
        removed={"optimizer": "adamw(lr=0.001, fused=True)"},
    ),
    # --- communication-bound
    Case(
        name="big_gradients",
        plants="eight million gradients are reduced after little compute",
        answers={"communication-bound": ("gradient volume",)},
        spec={"micro_batch": 4},
        removed={},
        ranks=2,
    ),
    Case(
        name="small_buckets",
        plants="gradients are reduced in buckets of fifty kilobytes",
        answers={"communication-bound": ("small buckets", "latency")},
        spec={"micro_batch": 32, "bucket_cap_mb": 0.05},
        removed={"bucket_cap_mb": 25.0},
        ranks=2,
    ),
    # --- straggler
    Case(
        name="slow_input_on_rank_1",
        plants="the storage of rank 1 is slow",
        answers={"straggler": ("slow rank 1: input",)},
        spec={"micro_batch": 32},
        ranks=2,
    ),
    Case(
        name="slow_compute_on_rank_1",
        plants="rank 1 computes twice as much",
        answers={"straggler": ("slow rank 1: compute",)},
        spec={"micro_batch": 48},
        ranks=2,
    ),
    Case(
        name="pauses_of_rank_1",
        plants="rank 1 pauses for an eighth of a second every twelfth step",
        answers={"straggler": ("slow rank 1: pauses",)},
        ranks=2,
        period=12,
    ),
    # --- stalled
    Case(
        name="checkpoint_stall",
        plants="a checkpoint every twenty steps",
        answers={STALLED: ("checkpoint",)},
        period=20,
    ),
    Case(
        name="evaluation_stall",
        plants="an evaluation every 25 steps",
        answers={STALLED: ("evaluation",)},
        period=25,
    ),
    Case(
        name="logging_stall",
        plants="histograms of all weights go into the log every thirty steps",
        answers={STALLED: ("logging",)},
        period=30,
    ),
    Case(
        name="gc_collect",
        plants="gc.collect() every sixteen steps, beside an index of many objects",
        answers={STALLED: ("garbage collection",)},
        period=16,
    ),
    Case(
        name="gc_of_a_cache",
        plants="a cache of many small objects comes and goes, and Python's collector runs after it",
        answers={STALLED: ("garbage collection",), HOST: ("garbage collection",)},
        period=40,
    ),
    # --- compute-bound
    Case(
        name="padding_waste",
        plants="one long sequence in each batch makes all the others long",
        answers={COMPUTE: ("padding",)},
    ),
)

HEALTHY = (
    Case(name="healthy_mlp", plants="", answers={COMPUTE: ()}, spec={"micro_batch": 64}),
    Case(name="healthy_convnet", plants="", answers={COMPUTE: ()}, spec={"micro_batch": 32}),
    Case(name="healthy_gpt", plants="", answers={COMPUTE: ()}),
    Case(name="healthy_adamw", plants="", answers={COMPUTE: ()}),
    Case(name="healthy_workers", plants="", answers={COMPUTE: ()}, spec={"micro_batch": 64, "num_workers": 1}),
    Case(name="healthy_ddp", plants="", answers={COMPUTE: ()}, spec={"micro_batch": 64}, ranks=2),
    Case(name="healthy_lengths", plants="", answers={COMPUTE: ()}),
    Case(name="healthy_now_and_then", plants="", answers={COMPUTE: ()}),
)

CASES = {case.name: case for case in (*PLANTED, *HEALTHY)}
