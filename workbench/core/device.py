"""The table of GPUs: memory, bandwidth, peak FLOP/s, watts and links from their datasheets. Unknown devices raise ValueError."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
        alike = [*names, *(alias for device in DEVICES for alias in device.aliases)]
        hint = f"{near}Known" if (near := did_you_mean(name.upper(), alike, cutoff=0.5)) else "known"
        raise ValueError(
            f"unknown device {name!r}: {hint} are {', '.join(names)}. For another one make it: "
            "Device(name=…, memory=bytes, bandwidth=bytes_per_sec, flops_per_sec={'bf16': …}, source='its datasheet')"
        )

    @classmethod
    def known(cls, name: str) -> "Device | None":
        """The device of that name, or None where the table has none."""
        if slice_ := _MIG.search(name):
            whole = cls.known(name[: slice_.start()])
            return whole and whole.mig_slice(**{word: int(figure) for word, figure in slice_.groupdict().items() if figure})
        return next((device for device in DEVICES if _key(name) in {_key(n) for n in (device.name, *device.aliases)}), None)

    def mig_slice(self, slices: int, memory: int, shared: int | None = None) -> "Device":
        """A part of this GPU as MIG makes it, such as 1g.5gb; a process sees no more than one.

        Args:
            slices: of compute that the GPU instance has, of 7 (an A30 or RTX PRO 6000: of 4).
            memory: its GB; bandwidth is divided in eighths (fourths) of the whole, as memory is.
            shared: slices of compute of this part, where several parts share the instance; None = all.

        Source: docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-mig-profiles.html
        """
        parts = 4 if self.name in ("A30", "RTX-PRO-6000") else 8
        peak = (shared or slices) / (4 if parts == 4 else 7)
        bandwidth = min(1.0, round(parts * memory * 1e9 / self.memory) / parts)
        return replace(
            self,
            name=f"{self.name} MIG {f'{shared}c.' if shared else ''}{slices}g.{memory}gb",
            memory=memory * 10**9,
            bandwidth=self.bandwidth * bandwidth,
            flops_per_sec={dtype: flops * peak for dtype, flops in self.flops_per_sec.items()},
            source=f"{self.source}; of these {units.percent(peak)} of the peaks and {units.percent(bandwidth)} of the bandwidth",
            aliases=(),
            watts=None,
            watts_source="",
            nvlink=None,
        )

    @property
    def table(self) -> display.Table:
        """What the datasheet says."""
        rows = [["memory", units.bytes_(self.memory)], ["bandwidth", units.count(self.bandwidth, "B/s")]]
        rows += [[f"{dtype}, dense", units.count(peak, "FLOP/s")] for dtype, peak in self.flops_per_sec.items()]
        return display.Table(columns=("figure", "at best"), rows=rows, title=self.name, note=self.source)


_MIG = re.compile(r"\s+MIG\s+(?:(?P<shared>\d+)c\.)?(?P<slices>\d+)g\.(?P<memory>\d+)gb(?:\+\S+)?$", re.IGNORECASE)
"""What drivers append to a GPU's name for a part of it, such as " MIG 1g.5gb"."""
NOT_READ = "the page itself was not read"
"""Said of figures that are cited from memory of a page."""


def _key(name: str) -> str:
    words = name.lower().replace("-", " ").replace("_", " ").split()
    return "".join(word for word in words if word not in ("nvidia", "tesla", "geforce", "amd", "instinct"))


def _device(
    name: str,
    source: str,
    *aliases: str,
    figures: Mapping[str, float],
    capability: tuple[int, int] | None,
    watts: float | tuple[float, str],
    context: tuple[int, str] | None = None,
) -> Device:
    """A row of the table.

    Args:
        name: of the device.
        source: of the figures.
        aliases: other names.
        figures: GB of memory, GB/s to it ("bandwidth"), GB/s of NVLink each way, and teraflops per number format.
        capability: for kernels; None = a GPU that is not NVIDIA's.
        watts: the figure and its source; a figure alone is from `source`.
        context: bytes and their source.
    """
    power, power_source = watts if isinstance(watts, tuple) else (watts, f"{source}: {watts:g} W, {NOT_READ}")
    teraflops = {name: figure for name, figure in figures.items() if name not in ("memory", "bandwidth", "nvlink")}
    return Device(
        name=name,
        memory=round(figures["memory"] * 1e9),
        bandwidth=figures["bandwidth"] * 1e9,
        flops_per_sec={dtype: peak * 1e12 for dtype, peak in teraflops.items()},
        source=f"{source}; dense, without sparsity",
        aliases=aliases,
        capability=capability,
        watts=power,
        watts_source=power_source,
        nvlink=figures["nvlink"] * 1e9 if "nvlink" in figures else None,
        context=context and context[0],
        context_source=context[1] if context else "",
    )


_HOPPER = {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9}
_A100 = {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5}
_MI300 = {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp32": 163.4}
DEVICES = (
    _device(
        "GB300",
        "NVIDIA GB300 NVL72 datasheet, one of 72",
        figures={"memory": 279, "bandwidth": 8000, "nvlink": 900, "bf16": 2500, "fp16": 2500, "tf32": 1250, "fp32": 80},
        capability=(10, 3),
        watts=(1400, "1.4 kW in GB300 NVL72 (verda.com/blog/gb300-nvl72-architecture)"),
    ),
    _device(
        "B300",
        "NVIDIA HGX B300 datasheet, one of eight",
        "B300 SXM6 AC",
        figures={"memory": 270, "bandwidth": 7700, "nvlink": 900, "bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75},
        capability=(10, 3),
        watts=(1100, "1.1 kW in HGX B300 (verda.com/blog/gb300-nvl72-architecture)"),
    ),
    _device(
        "GB200",
        "NVIDIA GB200 NVL72 datasheet, one of 72",
        figures={"memory": 186, "bandwidth": 8000, "nvlink": 900, "bf16": 2500, "fp16": 2500, "tf32": 1250, "fp32": 80},
        capability=(10, 0),
        watts=(1200, "1,200 W in GB200 (glennklockwood.com/garden/processors/B200)"),
    ),
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
        figures={"memory": 141, "bandwidth": 4800, "nvlink": 450, **_HOPPER},
        capability=(9, 0),
        watts=(700, "H200 TGP 700 W: NVIDIA in MLPerf Inference v4.1, H200-SXM-141GBx8_TRT_MaxQ.json"),
    ),
    _device(
        "H200-NVL",
        "NVIDIA H200 NVL datasheet",
        figures={"memory": 141, "bandwidth": 4800, "nvlink": 450, "bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60},
        capability=(9, 0),
        watts=600,
    ),
    _device(
        "GH200",
        "NVIDIA GH200 datasheet, with 96 GB of HBM3",
        "GH200 480GB",
        "GH200 96GB",
        figures={"memory": 96, "bandwidth": 4000, "nvlink": 450, **_HOPPER},
        capability=(9, 0),
        watts=(1000, f"NVIDIA GH200 datasheet: up to 1,000 W with its CPU and the CPU's memory, {NOT_READ}"),
    ),
    _device(
        "GH200-144GB",
        "NVIDIA GH200 datasheet, with 144 GB of HBM3e",
        "GH200 144G HBM3e",
        figures={"memory": 144, "bandwidth": 4900, "nvlink": 450, **_HOPPER},
        capability=(9, 0),
        watts=(1000, f"NVIDIA GH200 datasheet: up to 1,000 W with its CPU and the CPU's memory, {NOT_READ}"),
    ),
    _device(
        "H100-SXM",
        "NVIDIA H100 SXM datasheet",
        "H100",
        "H100 80GB HBM3",
        figures={"memory": 80, "bandwidth": 3350, "nvlink": 450, **_HOPPER},
        capability=(9, 0),
        watts=(700, f"NVIDIA H100 datasheet: up to 700 W, {NOT_READ}"),
    ),
    _device(
        "H100-NVL",
        "NVIDIA H100 NVL datasheet, one of two",
        figures={"memory": 94, "bandwidth": 3938, "nvlink": 300, "bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60},
        capability=(9, 0),
        watts=400,
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
        "H20",
        "NVIDIA H20 datasheet",
        figures={"memory": 96, "bandwidth": 4000, "nvlink": 450, "bf16": 148, "fp16": 148, "tf32": 74, "fp32": 44},
        capability=(9, 0),
        watts=400,
    ),
    _device(
        "A100-80GB",
        "NVIDIA A100 SXM datasheet",
        "A100 SXM4 80GB",
        figures={"memory": 80, "bandwidth": 2039, "nvlink": 300, **_A100},
        capability=(8, 0),
        watts=(400, f"NVIDIA A100 datasheet: SXM 400 W, {NOT_READ}"),
    ),
    _device(
        "A100-40GB",
        "NVIDIA A100 SXM datasheet",
        "A100 SXM4 40GB",
        "A100",
        figures={"memory": 40, "bandwidth": 1555, "nvlink": 300, **_A100},
        capability=(8, 0),
        watts=(400, f"NVIDIA A100 datasheet: SXM 400 W, {NOT_READ}"),
    ),
    _device(
        "A100-PCIe-80GB",
        "NVIDIA A100 PCIe datasheet",
        "A100 80GB PCIe",
        figures={"memory": 80, "bandwidth": 1935, **_A100},
        capability=(8, 0),
        watts=300,
    ),
    _device(
        "A100-PCIe-40GB",
        "NVIDIA A100 PCIe datasheet",
        "A100 40GB PCIe",
        figures={"memory": 40, "bandwidth": 1555, **_A100},
        capability=(8, 0),
        watts=250,
    ),
    _device(
        "A30",
        "NVIDIA A30 datasheet",
        figures={"memory": 24, "bandwidth": 933, "bf16": 165, "fp16": 165, "tf32": 82, "fp32": 10.3},
        capability=(8, 0),
        watts=165,
    ),
    _device(
        "RTX-PRO-6000",
        "NVIDIA RTX Blackwell PRO architecture whitepaper",
        "RTX PRO 6000 Blackwell Workstation Edition",
        figures={"memory": 96, "bandwidth": 1792, "bf16": 503.8, "fp16": 503.8, "tf32": 251.9, "fp32": 125},
        capability=(12, 0),
        watts=600,
    ),
    _device(
        "RTX-6000-Ada",
        "NVIDIA RTX 6000 Ada Generation datasheet",
        "RTX 6000 Ada Generation",
        figures={"memory": 48, "bandwidth": 960, "bf16": 364.2, "fp16": 364.2, "tf32": 182.1, "fp32": 91.1},
        capability=(8, 9),
        watts=300,
    ),
    _device(
        "L40",
        "NVIDIA L40 datasheet",
        figures={"memory": 48, "bandwidth": 864, "bf16": 181, "fp16": 181, "tf32": 90.5, "fp32": 90.5},
        capability=(8, 9),
        watts=300,
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
        "A40",
        "NVIDIA A40 datasheet",
        figures={"memory": 48, "bandwidth": 696, "bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},
        capability=(8, 6),
        watts=300,
    ),
    _device(
        "RTX-A6000",
        "NVIDIA RTX A6000 datasheet",
        figures={"memory": 48, "bandwidth": 768, "bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7},
        capability=(8, 6),
        watts=300,
    ),
    _device(
        "A10G",
        "NVIDIA A10G datasheet of AWS",
        figures={"memory": 24, "bandwidth": 600, "bf16": 70, "fp16": 70, "tf32": 35, "fp32": 35},
        capability=(8, 6),
        watts=300,
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
        figures={"memory": 32, "bandwidth": 900, "nvlink": 150, "fp16": 125, "fp32": 15.7},
        capability=(7, 0),
        watts=(300, f"NVIDIA V100 datasheet: SXM2 300 W, {NOT_READ}"),
    ),
    _device(
        "V100-16GB",
        "NVIDIA V100 SXM2 datasheet",
        "V100 SXM2 16GB",
        figures={"memory": 16, "bandwidth": 900, "nvlink": 150, "fp16": 125, "fp32": 15.7},
        capability=(7, 0),
        watts=300,
    ),
    *(
        _device(
            f"V100-PCIe-{memory}GB",
            "NVIDIA V100 PCIe datasheet",
            figures={"memory": memory, "bandwidth": 900, "fp16": 112, "fp32": 14},
            capability=(7, 0),
            watts=250,
        )
        for memory in (32, 16)
    ),
    _device(
        "V100S",
        "NVIDIA V100S PCIe datasheet",
        "V100S PCIE 32GB",
        figures={"memory": 32, "bandwidth": 1134, "fp16": 130, "fp32": 16.4},
        capability=(7, 0),
        watts=250,
    ),
    _device(
        "T4",
        "NVIDIA T4 datasheet",
        figures={"memory": 16, "bandwidth": 320, "fp16": 65, "fp32": 8.1},
        capability=(7, 5),
        watts=(70, f"NVIDIA T4 datasheet: 70 W, {NOT_READ}"),
    ),
    _device(
        "RTX-5090",
        "NVIDIA RTX Blackwell architecture whitepaper",
        "RTX 5090",
        figures={"memory": 32, "bandwidth": 1792, "bf16": 209.5, "fp16": 209.5, "tf32": 104.8, "fp32": 104.8},
        capability=(12, 0),
        watts=575,
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
    _device(
        "MI355X",
        "AMD Instinct MI355X datasheet",
        figures={"memory": 288, "bandwidth": 8000, "nvlink": 537.6, "bf16": 2516.6, "fp16": 2516.6, "fp32": 157.3},
        capability=None,
        watts=1400,
    ),
    _device(
        "MI325X",
        "AMD Instinct MI325X datasheet",
        figures={"memory": 256, "bandwidth": 6000, "nvlink": 448, **_MI300},
        capability=None,
        watts=1000,
    ),
    _device(
        "MI300X",
        "AMD Instinct MI300X datasheet",
        figures={"memory": 192, "bandwidth": 5300, "nvlink": 448, **_MI300},
        capability=None,
        watts=750,
    ),
    _device(
        "MI250X",
        "AMD Instinct MI250X datasheet, one of its two dies, which torch has as a device each; fp32 by matrix cores",
        figures={"memory": 64, "bandwidth": 1638.4, "bf16": 191.5, "fp16": 191.5, "fp32": 47.9},
        capability=None,
        watts=280,
    ),
    _device(
        "MI250",
        "AMD Instinct MI250 datasheet, one of its two dies, which torch has as a device each; fp32 by matrix cores",
        "MI250X/MI250",
        figures={"memory": 64, "bandwidth": 1638.4, "bf16": 181, "fp16": 181, "fp32": 45.3},
        capability=None,
        watts=280,
    ),
    _device(
        "MI210",
        "AMD Instinct MI210 datasheet; fp32 by matrix cores",
        figures={"memory": 64, "bandwidth": 1638.4, "bf16": 181, "fp16": 181, "fp32": 45.3},
        capability=None,
        watts=300,
    ),
)
"""Accelerators by name. bf16 and fp16: tensor cores with fp32 accumulation; fp32: without tensor cores.
Sources of capabilities: developer.nvidia.com/cuda-gpus; of NVLink and AMD's Infinity Fabric: the same datasheets, and those of
`workbench.cluster.analysis.cluster.CLUSTERS`."""
