"""The table of GPUs: memory, bandwidth, peak FLOP/s, watts and links from their datasheets. Unknown devices raise ValueError."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from workbench.core import units
from workbench.core.checks import nearest
from workbench.core.display import table as display

MARGIN = 0.05
"""Share of a device's memory that stays free in every answer on what fits, unless `margin=` says another: fragmentation grows over a run,
and a driver's share of the memory varies."""


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
    """Bytes as torch reports them, where `source` says so; else those of the datasheet (GB = 1e9), and a driver reports a little more."""
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
    gb: float | None = None
    """GB on the datasheet, as in the card's name; None = not known."""

    def __post_init__(self) -> None:
        for name in ("aliases", "capability"):  # JSON has lists
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))

    @classmethod
    def named(cls, name: str) -> "Device":
        """The device of that name; case and the maker's prefix do not matter.

        Raises:
            ValueError: not in the table; the message lists the known devices.
        """
        if device := cls.known(name):
            return device
        if amount := re.fullmatch(r"(\d+) ?Gi?B?", name.strip(), re.IGNORECASE):
            by_size = sorted(DEVICES, key=lambda device: abs((device.gb or 0) - int(amount[1])))
            same = [device for device in by_size if device.gb == int(amount[1])] or by_size[:3]
            raise ValueError(f"device {name!r} is an amount of memory; name a GPU that has it, or nearly: {', '.join(map(_sized, same))}")
        if re.fullmatch(r"cuda|cuda:\d+|cpu", name.strip()):
            raise ValueError(f"device {name!r} does not say which GPU: name one, such as 'H100' or 'RTX-4090'")
        names = [device.name for device in DEVICES]
        alike = [*names, *(alias for device in DEVICES for alias in device.aliases)]
        numbers = set(re.findall(r"\d{4,}", name))
        meant = [known for known in names if numbers & set(re.findall(r"\d{4,}", known))]  # A4090: RTX-4090
        meant = meant or list(filter(None, [nearest(name.upper(), alike, cutoff=0.5)]))
        near = f"did you mean {' or '.join(map(repr, meant))}? " if meant else ""
        series = re.match("[A-Z]+", meant[0]) if meant else None
        kin = [device for device in DEVICES if series and re.match(rf"{series[0]}(?![A-Z])", device.name)]
        known = f"{'Known' if near else 'known'}{' GPUs of that series' if kin else ''} are {', '.join(map(_sized, kin or DEVICES))}"
        error = ValueError(f"unknown device {name!r}: {near}{known}")
        error.add_note(  # the command line, which cannot, prints no notes of a ValueError
            "For another one, define it: "
            "wb.Device(name=…, memory=bytes, bandwidth=bytes_per_sec, flops_per_sec={'bf16': …}, source='its datasheet')"
        )
        raise error

    @classmethod
    def known(cls, name: str) -> "Device | None":
        """The device of that name, or None if the table does not have it."""
        if slice_ := _MIG.search(name):
            whole = cls.known(name[: slice_.start()])
            return whole and whole.mig_slice(**{word: int(figure) for word, figure in slice_.groupdict().items() if figure})
        return next((device for device in DEVICES if _key(name) in {_key(n) for n in (device.name, *device.aliases)}), None)

    def mig_slice(self, slices: int, memory: int, shared: int | None = None) -> "Device":
        """A MIG slice of this GPU, such as 1g.5gb; a process sees at most one.

        Args:
            slices: compute slices of the GPU instance, out of 7 (out of 4 for an A30 or RTX PRO 6000).
            memory: its memory in GB; bandwidth is divided into eighths (or fourths) of the whole, like memory.
            shared: compute slices of this part, if several parts share the instance; None = all.

        Source: docs.nvidia.com/datacenter/tesla/mig-user-guide/supported-mig-profiles.html
        """
        parts = 4 if self.name in ("A30", "RTX-PRO-6000") else 8
        peak = (shared or slices) / (4 if parts == 4 else 7)
        bandwidth = min(1.0, round(parts * memory / (self.gb or self.memory / 1e9)) / parts)
        return replace(
            self,
            name=f"{self.name} MIG {f'{shared}c.' if shared else ''}{slices}g.{memory}gb",
            memory=memory * 10**9,
            gb=memory,
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


def _sized(device: Device) -> str:
    return f"{device.name} ({device.gb:g} GB)"


def _key(name: str) -> str:
    words = name.lower().replace("-", " ").replace("_", " ").split()
    return "".join(word for word in words if word not in ("nvidia", "tesla", "geforce", "amd", "instinct"))


def _devices(table: str) -> tuple[Device, ...]:
    """The devices of the table below."""
    head, *lines = table.splitlines()
    columns = head.split()
    rows: list[dict[str, str]] = []
    for line in lines:
        if line.startswith(" "):
            word, _, text = line.strip().partition(": ")
            rows[-1][f"{word}:"] = text
        else:
            rows.append(dict(zip(columns, line.split(maxsplit=len(columns) - 1), strict=True)))
    return tuple(map(_device, rows))


def _device(row: Mapping[str, str]) -> Device:
    figures = {column: float(row[column]) for column in ("memory", "bandwidth", "nvlink", *_FORMATS) if row[column] != "-"}
    source = "; ".join(filter(None, (row["source"], row.get("note:"))))
    reported, _, by = row.get("reported:", "").partition(" GiB, ")
    context, _, context_source = row.get("context:", "").partition(" MiB, ")
    return Device(
        name=row["name"],
        memory=round(float(reported) * 2**30) if reported else round(figures["memory"] * 1e9),
        gb=figures["memory"],
        bandwidth=figures["bandwidth"] * 1e9,
        flops_per_sec={dtype: figures[dtype] * 1e12 for dtype in _FORMATS if dtype in figures},
        source=f"{source}; dense, without sparsity" + f"; memory as torch reports it ({by})" * bool(by),
        aliases=tuple(row["also:"].split(", ")) if "also:" in row else (),
        capability=None if row["capability"] == "-" else _version(row["capability"]),
        watts=int(row["watts"]),
        watts_source=row.get("watts:", f"{source}: {row['watts']} W, not read").replace("not read", NOT_READ),
        nvlink=figures["nvlink"] * 1e9 if "nvlink" in figures else None,
        context=int(context) * 2**20 if context else None,
        context_source=context_source,
    )


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


_FORMATS = ("bf16", "fp16", "tf32", "fp32")
DEVICES = _devices(
    """\
name            memory  bandwidth  nvlink    bf16    fp16   tf32   fp32  capability  watts  source
GB300              279       8000     900    2500    2500   1250     80        10.3   1400  NVIDIA GB300 NVL72 datasheet, one of 72
    watts: 1.4 kW in GB300 NVL72 (verda.com/blog/gb300-nvl72-architecture)
B300               270       7700     900    2250    2250   1125     75        10.3   1100  NVIDIA HGX B300 datasheet, one of eight
    also: B300 SXM6 AC
    watts: 1.1 kW in HGX B300 (verda.com/blog/gb300-nvl72-architecture)
GB200              186       8000     900    2500    2500   1250     80        10.0   1200  NVIDIA GB200 NVL72 datasheet, one of 72
    watts: 1,200 W in GB200 (glennklockwood.com/garden/processors/B200)
B200               180       7700     900    2250    2250   1125     75        10.0   1000  NVIDIA HGX B200 datasheet, one of eight
    watts: 1,000 W in HGX B200 (glennklockwood.com/garden/processors/B200)
H200               141       4800     450   989.4   989.4  494.7   66.9         9.0    700  NVIDIA H200 SXM datasheet
    also: H200 SXM
    watts: H200 TGP 700 W: NVIDIA in MLPerf Inference v4.1, H200-SXM-141GBx8_TRT_MaxQ.json
H200-NVL           141       4800     450   835.5   835.5  417.5     60         9.0    600  NVIDIA H200 NVL datasheet
GH200               96       4000     450   989.4   989.4  494.7   66.9         9.0   1000  NVIDIA GH200 datasheet, with 96 GB of HBM3
    also: GH200 480GB, GH200 96GB
    watts: NVIDIA GH200 datasheet: up to 1,000 W with its CPU and the CPU's memory, not read
GH200-144GB        144       4900     450   989.4   989.4  494.7   66.9         9.0   1000  NVIDIA GH200 datasheet, with 144 GB of HBM3e
    also: GH200 144G HBM3e
    watts: NVIDIA GH200 datasheet: up to 1,000 W with its CPU and the CPU's memory, not read
H100-SXM            80       3350     450   989.4   989.4  494.7   66.9         9.0    700  NVIDIA H100 SXM datasheet
    also: H100, H100 80GB HBM3
    watts: NVIDIA H100 datasheet: up to 700 W, not read
H100-NVL            94       3938     300   835.5   835.5  417.5     60         9.0    400  NVIDIA H100 NVL datasheet, one of two
H100-PCIe           80       2000       -     756     756    378     51         9.0    350  NVIDIA H100 PCIe datasheet
    also: H100 PCIe
    watts: NVIDIA H100 PCIe product brief PB-11133: 350 W
H20                 96       4000     450     148     148     74     44         9.0    400  NVIDIA H20 datasheet
A100-80GB           80       2039     300     312     312    156   19.5         8.0    400  NVIDIA A100 SXM datasheet
    also: A100 SXM4 80GB
    watts: NVIDIA A100 datasheet: SXM 400 W, not read
A100-40GB           40       1555     300     312     312    156   19.5         8.0    400  NVIDIA A100 SXM datasheet
    also: A100 SXM4 40GB, A100
    watts: NVIDIA A100 datasheet: SXM 400 W, not read
A100-PCIe-80GB      80       1935       -     312     312    156   19.5         8.0    300  NVIDIA A100 PCIe datasheet
    also: A100 80GB PCIe
A100-PCIe-40GB      40       1555       -     312     312    156   19.5         8.0    250  NVIDIA A100 PCIe datasheet
    also: A100 40GB PCIe
A30                 24        933       -     165     165     82   10.3         8.0    165  NVIDIA A30 datasheet
RTX-PRO-6000        96       1792       -   503.8   503.8  251.9    125        12.0    600  NVIDIA RTX Blackwell PRO architecture whitepaper
    also: RTX PRO 6000 Blackwell Workstation Edition
RTX-6000-Ada        48        960       -   364.2   364.2  182.1   91.1         8.9    300  NVIDIA RTX 6000 Ada Generation datasheet
    also: RTX 6000 Ada Generation
L40                 48        864       -     181     181   90.5   90.5         8.9    300  NVIDIA L40 datasheet
    reported: 44.40 GiB, github.com/QwenLM/Qwen3-VL/issues/2097
L40S                48        864       -     362     362    183   91.6         8.9    350  NVIDIA L40S datasheet
L4                  24        300       -     121     121     60   30.3         8.9     72  NVIDIA L4 datasheet
    reported: 22.03 GiB, github.com/ArcInstitute/evo2/issues/190
A40                 48        696       -   149.7   149.7   74.8   37.4         8.6    300  NVIDIA A40 datasheet
RTX-A6000           48        768       -   154.8   154.8   77.4   38.7         8.6    300  NVIDIA RTX A6000 datasheet
A10G                24        600       -      70      70     35     35         8.6    300  NVIDIA A10G datasheet of AWS
    reported: 22.06 GiB, 22,587 MB in TorchCodec's page on decoding with CUDA
A10                 24        600       -     125     125   62.5   31.2         8.6    150  NVIDIA A10 datasheet
    reported: 21.99 GiB, github.com/zai-org/CogVLM/issues/236
V100-32GB           32        900     150       -     125      -   15.7         7.0    300  NVIDIA V100 SXM2 datasheet
    also: V100 SXM2 32GB, V100
    watts: NVIDIA V100 datasheet: SXM2 300 W, not read
V100-16GB           16        900     150       -     125      -   15.7         7.0    300  NVIDIA V100 SXM2 datasheet
    also: V100 SXM2 16GB
V100-PCIe-32GB      32        900       -       -     112      -     14         7.0    250  NVIDIA V100 PCIe datasheet
V100-PCIe-16GB      16        900       -       -     112      -     14         7.0    250  NVIDIA V100 PCIe datasheet
V100S               32       1134       -       -     130      -   16.4         7.0    250  NVIDIA V100S PCIe datasheet
    also: V100S PCIE 32GB
T4                  16        320       -       -      65      -    8.1         7.5     70  NVIDIA T4 datasheet
    reported: 14.57 GiB, github.com/QwenLM/Qwen3-VL/issues/1046
RTX-5090            32       1792       -   209.5   209.5  104.8  104.8        12.0    575  NVIDIA RTX Blackwell architecture whitepaper
    reported: 31.36 GiB, github.com/TrajectoryCrafter/TrajectoryCrafter/issues/20
    also: RTX 5090
RTX-4090            24       1008       -   165.2   165.2   82.6   82.6         8.9    450  NVIDIA Ada architecture whitepaper
    reported: 23.64 GiB, github.com/ali-vilab/VGen/issues/104
    also: RTX 4090
    watts: NVIDIA GeForce RTX 4090 specifications: 450 W, not read
RTX-3090            24        936       -      71      71   35.6   35.6         8.6    350  NVIDIA GA102 whitepaper
    reported: 23.70 GiB, 24,268 MB in Hugging Face Transformers' page on DeepSpeed
    also: RTX 3090
    watts: NVIDIA GeForce RTX 3090 specifications: 350 W, not read
    context: 1001 MiB, context of this GPU, as published: at most 1,001 MiB (pytorch #54564, before modules were loaded lazily)
MI355X             288       8000   537.6  2516.6  2516.6      -  157.3           -   1400  AMD Instinct MI355X datasheet
MI325X             256       6000     448  1307.4  1307.4  653.7  163.4           -   1000  AMD Instinct MI325X datasheet
MI300X             192       5300     448  1307.4  1307.4  653.7  163.4           -    750  AMD Instinct MI300X datasheet
MI250X              64     1638.4       -   191.5   191.5      -   47.9           -    280  AMD Instinct MI250X datasheet
    note: one of its two dies, which torch has as a device each; fp32 by matrix cores
MI250               64     1638.4       -     181     181      -   45.3           -    280  AMD Instinct MI250 datasheet
    note: one of its two dies, which torch has as a device each; fp32 by matrix cores
    also: MI250X/MI250
MI210               64     1638.4       -     181     181      -   45.3           -    300  AMD Instinct MI210 datasheet
    note: fp32 by matrix cores
"""
)
"""Accelerators by name. GB of memory, GB/s to it, GB/s of NVLink each way (half of what is printed), teraflops per number format, the
compute capability of NVIDIA's, watts, and the source of the figures; - = has none. Indented below: other names, the source of the watts
(else that of the row), CUDA's context and its source, a note; reported: the GiB of memory that torch reports (get_device_properties, or
the "total capacity" of an out-of-memory error), and where that was read: GB of such cards are GiB, less what the driver and ECC keep.
bf16 and fp16: tensor cores with fp32 accumulation; fp32: without tensor cores. Sources of capabilities: developer.nvidia.com/cuda-gpus;
of NVLink and AMD's Infinity Fabric: the same datasheets, and those of `workbench.cluster.analysis.cluster.CLUSTERS`."""
