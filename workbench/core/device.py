"""The table of GPUs: memory, bandwidth, peak FLOP/s, watts and links from their datasheets. Unknown devices raise ValueError."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from workbench.core import units
from workbench.core.checks import did_you_mean
from workbench.core.display import table as display


@dataclass(frozen=True, slots=True, kw_only=True)
class Device(display.Shown):
    """An accelerator, as its datasheet describes it.

    >>> Device.named("h200").memory
    141000000000
    >>> Device.named("NVIDIA A100-SXM4-80GB").name
    'A100-80GB'
    """

    name: str
    """Short name, form factor included where it matters."""
    memory: int
    """Bytes on the datasheet (GB = 1e9); a driver reports a little more or less."""
    bandwidth: float
    """Bytes per second between memory and chip, at best."""
    flops_per_sec: Mapping[str, float]
    """Dense peak per number format, FLOP/s; figures "with sparsity" are twice these."""
    source: str
    """Where the figures are from."""
    aliases: tuple[str, ...] = field(default=(), repr=False)
    """Other names, as drivers and clouds print them."""
    capability: tuple[int, int] | None = None
    """Compute capability, by which kernels are chosen; None = not known."""
    watts: float | None = None
    """Thermal design power; None = not known."""
    watts_source: str = field(default="", repr=False)
    """Where the watts are from."""
    nvlink: float | None = None
    """Bytes per second to its neighbours in a node, each way (half of what is printed); None = has none, or not known."""
    context: int | None = None
    """The most bytes that CUDA's context took, as published for this GPU; None = nothing was published."""
    context_source: str = field(default="", repr=False)
    """Where the context's size is from."""

    def __post_init__(self) -> None:
        for name in ("aliases", "capability"):  # JSON has lists
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))

    @classmethod
    def named(cls, name: str) -> "Device":
        """The device of that name, case and maker's prefix aside.

        Raises:
            ValueError: not in the table; the message lists what is.
        """
        if device := cls.known(name):
            return device
        names = [device.name for device in DEVICES]
        hint = f"{near}Known" if (near := did_you_mean(name.upper(), names, cutoff=0.5)) else "known"
        raise ValueError(
            f"unknown device {name!r}: {hint} are {', '.join(names)}. For another one make it: "
            "Device(name=…, memory=bytes, bandwidth=bytes_per_sec, flops_per_sec={'bf16': …}, source='its datasheet')"
        )

    @classmethod
    def known(cls, name: str) -> "Device | None":
        """The device of that name, or None where the table has none."""
        return next((device for device in DEVICES if _key(name) in {_key(n) for n in (device.name, *device.aliases)}), None)

    @property
    def table(self) -> display.Table:
        """What the datasheet says."""
        rows = [["memory", units.bytes_(self.memory)], ["bandwidth", units.count(self.bandwidth, "B/s")]]
        rows += [[f"{dtype}, dense", units.count(peak, "FLOP/s")] for dtype, peak in self.flops_per_sec.items()]
        return display.Table(columns=("figure", "at best"), rows=rows, title=self.name, note=self.source)


def _key(name: str) -> str:
    words = name.lower().replace("-", " ").replace("_", " ").split()
    return "".join(word for word in words if word not in ("nvidia", "tesla", "geforce", "amd", "instinct"))


def _device(
    name: str,
    source: str,
    *aliases: str,
    figures: Mapping[str, float],
    capability: tuple[int, int],
    watts: tuple[float, str],
    context: tuple[int, str] | None = None,
) -> Device:
    """A row of the table.

    Args:
        name: of the device.
        source: of the figures.
        aliases: other names.
        figures: GB of memory, GB/s to it ("bandwidth"), GB/s of NVLink each way, and teraflops per number format.
        capability: for kernels.
        watts: the figure and its source.
        context: bytes and their source.
    """
    teraflops = {name: figure for name, figure in figures.items() if name not in ("memory", "bandwidth", "nvlink")}
    return Device(
        name=name,
        memory=round(figures["memory"] * 1e9),
        bandwidth=figures["bandwidth"] * 1e9,
        flops_per_sec={dtype: peak * 1e12 for dtype, peak in teraflops.items()},
        source=f"{source}; dense, without sparsity",
        aliases=aliases,
        capability=capability,
        watts=watts[0],
        watts_source=watts[1],
        nvlink=figures["nvlink"] * 1e9 if "nvlink" in figures else None,
        context=context and context[0],
        context_source=context[1] if context else "",
    )


NOT_READ = "the page itself was not read"
"""Said of figures that are cited from memory of a page."""
DEVICES = (
    _device(
        "B200",
        "NVIDIA HGX B200 datasheet, one of eight",
        figures={"memory": 180, "bandwidth": 7700, "nvlink": 900, "bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75},
        capability=(10, 0),
        watts=(1000, "1,000 W in HGX B200 (glennklockwood.com/garden/processors/B200)"),
    ),
    _device(
        "H200",
        "NVIDIA H200 SXM datasheet",
        "H200 SXM",
        figures={"memory": 141, "bandwidth": 4800, "nvlink": 450, "bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9},
        capability=(9, 0),
        watts=(700, "H200 TGP 700 W: NVIDIA in MLPerf Inference v4.1, H200-SXM-141GBx8_TRT_MaxQ.json"),
    ),
    _device(
        "H100-SXM",
        "NVIDIA H100 SXM datasheet",
        "H100",
        "H100 80GB HBM3",
        figures={"memory": 80, "bandwidth": 3350, "nvlink": 450, "bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9},
        capability=(9, 0),
        watts=(700, f"NVIDIA H100 datasheet: up to 700 W, {NOT_READ}"),
    ),
    _device(
        "H100-PCIe",
        "NVIDIA H100 PCIe datasheet",
        "H100 PCIe",
        figures={"memory": 80, "bandwidth": 2000, "bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51},
        capability=(9, 0),
        watts=(350, "NVIDIA H100 PCIe product brief PB-11133: 350 W"),
    ),
    _device(
        "A100-80GB",
        "NVIDIA A100 SXM datasheet",
        "A100 SXM4 80GB",
        figures={"memory": 80, "bandwidth": 2039, "nvlink": 300, "bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
        capability=(8, 0),
        watts=(400, f"NVIDIA A100 datasheet: SXM 400 W, {NOT_READ}"),
    ),
    _device(
        "A100-40GB",
        "NVIDIA A100 SXM datasheet",
        "A100 SXM4 40GB",
        "A100",
        figures={"memory": 40, "bandwidth": 1555, "nvlink": 300, "bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
        capability=(8, 0),
        watts=(400, f"NVIDIA A100 datasheet: SXM 400 W, {NOT_READ}"),
    ),
    _device(
        "L40S",
        "NVIDIA L40S datasheet",
        figures={"memory": 48, "bandwidth": 864, "bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6},
        capability=(8, 9),
        watts=(350, f"NVIDIA L40S datasheet: 350 W, {NOT_READ}"),
    ),
    _device(
        "L4",
        "NVIDIA L4 datasheet",
        figures={"memory": 24, "bandwidth": 300, "bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3},
        capability=(8, 9),
        watts=(72, f"NVIDIA L4 datasheet: 72 W, {NOT_READ}"),
    ),
    _device(
        "A10",
        "NVIDIA A10 datasheet",
        figures={"memory": 24, "bandwidth": 600, "bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2},
        capability=(8, 6),
        watts=(150, f"NVIDIA A10 datasheet: 150 W, {NOT_READ}"),
    ),
    _device(
        "V100-32GB",
        "NVIDIA V100 SXM2 datasheet",
        "V100 SXM2 32GB",
        "V100",
        figures={"memory": 32, "bandwidth": 900, "fp16": 125, "fp32": 15.7},
        capability=(7, 0),
        watts=(300, f"NVIDIA V100 datasheet: SXM2 300 W, {NOT_READ}"),
    ),
    _device(
        "T4",
        "NVIDIA T4 datasheet",
        figures={"memory": 16, "bandwidth": 320, "fp16": 65, "fp32": 8.1},
        capability=(7, 5),
        watts=(70, f"NVIDIA T4 datasheet: 70 W, {NOT_READ}"),
    ),
    _device(
        "RTX-4090",
        "NVIDIA Ada architecture whitepaper",
        "RTX 4090",
        figures={"memory": 24, "bandwidth": 1008, "bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6},
        capability=(8, 9),
        watts=(450, f"NVIDIA GeForce RTX 4090 specifications: 450 W, {NOT_READ}"),
    ),
    _device(
        "RTX-3090",
        "NVIDIA GA102 whitepaper",
        "RTX 3090",
        figures={"memory": 24, "bandwidth": 936, "bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6},
        capability=(8, 6),
        watts=(350, f"NVIDIA GeForce RTX 3090 specifications: 350 W, {NOT_READ}"),
        context=(1001 * 2**20, "context of this GPU, as published: at most 1,001 MiB (pytorch #54564, before modules were loaded lazily)"),
    ),
)
"""Accelerators by name. bf16 and fp16: tensor cores with fp32 accumulation; fp32: without tensor cores.
Sources of capabilities: developer.nvidia.com/cuda-gpus; of NVLink: those of `workbench.cluster.analysis.cluster.CLUSTERS`."""
