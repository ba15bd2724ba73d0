"""Throughput that others have measured on 8 to 512 GPUs and published, by number of GPUs, with the sources.

The figures are facts, keyed in again.
In each curve nothing but the number of GPUs, and the global batch with it, changes much. Rows of another precision, sharding or section of
the source are other curves: one mixed row is worth 20 % of error.
"""

from dataclasses import dataclass

FOUNDRY = "github.com/mosaicml/llm-foundry at 8c8dd48, scripts/train/benchmarking/README.md (2,048 tokens, FSDP, no checkpointing)"
PLAYBOOK = "Hugging Face, The Ultra-Scale Playbook, 2025, figure on data-parallel scaling (H100, 8 per node, nanotron)"
KORTHIKANTI = "Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198, Table 5"
COMPUTE, COMMUNICATION = "compute-bound", "communication-bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One curve of weak scaling."""

    name: str
    source: str
    per_gpu: dict[int, float]
    """GPUs → tokens per second of each."""
    bound: str = COMPUTE


def _foundry(name: str, **per_gpu: float) -> Published:
    return Published(name=f"llm-foundry, {name}", source=FOUNDRY, per_gpu={int(gpus[1:]): rate for gpus, rate in per_gpu.items()})


CURVES = (
    _foundry("H100, 3B, large scale", n128=23422, n256=22772, n512=21664),
    _foundry("H100, 1B, large scale", n128=44123, n256=42555, n512=39837),
    _foundry("H100, 3B", n16=24142, n32=23021, n64=22525),
    _foundry("H100, 1B", n8=45455, n16=46037, n32=45130, n64=44402),
    _foundry("H100, 760M", n8=63147, n16=68551, n32=67971),
    _foundry("A100-40GB, 3B", n8=10065, n16=9750, n32=9914, n64=9736, n128=9538),
    _foundry("A100-40GB, 1B", n8=19271, n16=19085, n32=15555, n64=19001, n128=18647),
    _foundry("A100-40GB, 760M", n8=30173, n16=29607, n32=29648, n64=29344, n128=28940),
    _foundry("A100-40GB, 350M", n8=55995, n16=55413, n32=53811, n64=52689, n128=51934),
    _foundry("A100-40GB, 125M", n8=136334, n16=130535, n32=127122, n64=125234, n128=123936),
    Published(
        name="Playbook, data parallel",
        source=PLAYBOOK,
        per_gpu={8: 40149.94, 16: 37609.69, 32: 35367.61, 64: 31112.23},
        bound=COMMUNICATION,
    ),
)
SCALE = {
    "llm-foundry, H100, 3B, large scale": {128: (8, 1, 42.43), 256: (8, 1, 41.25), 512: (8, 1, 39.24)},
    "llm-foundry, H100, 1B, large scale": {128: (12, 1, 40.6), 256: (12, 1, 39.15), 512: (12, 1, 36.65)},
    "llm-foundry, H100, 3B": {16: (10, 3, 43.73), 32: (6, 3, 41.7), 64: (6, 3, 40.8)},
    "llm-foundry, H100, 1B": {16: (20, 1, 42.36), 32: (20, 1, 41.52), 64: (20, 1, 40.85)},
    "llm-foundry, H100, 760M": {16: (24, 1, 37.89), 32: (24, 1, 37.57)},
    "llm-foundry, A100-40GB, 3B": {16: (5, 1, 56.02), 32: (6, 1, 56.96), 64: (6, 1, 55.94), 128: (6, 1, 54.8)},
    "llm-foundry, A100-40GB, 1B": {16: (8, 1, 55.69), 32: (10, 1, 45.39), 64: (10, 1, 55.44), 128: (10, 1, 54.41)},
    "llm-foundry, A100-40GB, 760M": {16: (12, 1, 51.9), 32: (12, 1, 51.97), 64: (12, 1, 51.44), 128: (12, 1, 50.73)},
    "llm-foundry, A100-40GB, 350M": {16: (18, 1, 48.66), 32: (18, 1, 47.26), 64: (18, 1, 46.27), 128: (18, 1, 45.61)},
    "llm-foundry, A100-40GB, 125M": {16: (26, 1, 40.93), 32: (26, 1, 39.86), 64: (26, 1, 39.27), 128: (26, 1, 38.86)},
}
"""Curve of llm-foundry → GPUs → micro-batch, accumulation and the published MFU in percent (FOUNDRY)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """Seconds per iteration of a GPT on A100s (Selene), tensor × pipeline parallel, one copy; 2,048 tokens, vocabulary 51,200."""

    name: str
    hidden: int
    layers: int
    batch: int
    """Sequences per iteration."""
    micro_batch: int
    tensor: int
    pipeline: int
    chunks: int
    """Of layers on each stage (interleaved schedule)."""
    full: float
    """Seconds with everything recomputed."""
    selective: float
    """Seconds with sequence parallelism and only attention recomputed."""


SIZES_22B = {"hidden": 6144, "layers": 48, "batch": 4, "micro_batch": 4, "tensor": 8, "pipeline": 1, "chunks": 1}
SIZES_175B = {"hidden": 12288, "layers": 96, "batch": 64, "micro_batch": 1, "tensor": 8, "pipeline": 8, "chunks": 3}
SIZES_530B = {"hidden": 20480, "layers": 105, "batch": 280, "micro_batch": 1, "tensor": 8, "pipeline": 35, "chunks": 3}
SIZES_1T = {"hidden": 25600, "layers": 128, "batch": 512, "micro_batch": 1, "tensor": 8, "pipeline": 64, "chunks": 1}
ITERATIONS = (
    Iteration(name="22B", **SIZES_22B, full=1.42, selective=1.10),
    Iteration(name="175B", **SIZES_175B, full=18.13, selective=13.75),
    Iteration(name="530B", **SIZES_530B, full=49.05, selective=37.83),
    Iteration(name="1T", **SIZES_1T, full=94.42, selective=71.49),
)
"""Source: KORTHIKANTI; layouts as re-keyed in github.com/calculon-ai/calculon at caa4b11."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """Llama 3.1 8B under FSDP2 (8,192 tokens, 2 sequences per GPU) on few and on more GPUs: tokens per second of each."""

    name: str
    cluster: str
    few: tuple[int, float]
    more: tuple[int, float]


TORCHTITAN = "github.com/pytorch/torchtitan at b5bcd76, benchmarks: llama3_h100_202412_torchtitan, llama3-8b_h200_202506_trainy-whitefiber"
SHARDED = (
    Sharded(name="H100, bf16", cluster="DGX-H100", few=(8, 5762), more=(128, 5605)),
    Sharded(name="H100, bf16, compiled", cluster="DGX-H100", few=(8, 6667), more=(128, 6514)),
    Sharded(name="H100, fp8, compiled", cluster="DGX-H100", few=(8, 8532), more=(128, 8380)),
    Sharded(name="H200, fp8, compiled", cluster="DGX-H200", few=(32, 10938), more=(64, 10753)),
)
"""Source: TORCHTITAN. NVLink and 400 Gb/s per GPU, as in the cluster named."""

_RATES = "1.2 2.17 4.86 9.54 18.71 36.06 63.09 76.48 126.49 254.96 325.97 400.6 568.38 646.11 688.99 723.34 734.97 740.64 839.07 845.67"
ALL_REDUCE = dict(
    zip(
        (2**power for power in range(15, 35)),
        [float(rate) for rate in _RATES.split()],
        strict=True,
    )
)
"""Bytes → bus bandwidth in GB/s of an all-reduce of 8 B200 in one node (torch 2.9.1, NCCL 2.27.7; AWS P6-B200).
Source: github.com/stas00/ml-engineering at 744d01e, network/README.md."""
