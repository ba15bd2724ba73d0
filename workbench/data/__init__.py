"""Data: samples in any storage format, shards with checksums, orders that resume anywhere, and the repository's sample data.

`wb.data.open_source` and `as_source` (`adapters.py`) read samples from a folder, tar shards and other formats (`formats/`) behind one
interface; `samples.py` has the repository's data as datasets, which it reads with `shards.py`: `ClipArt` (pictures to decode),
`FashionMnist` (small pictures, ready in memory), `Fashion` (the same, smaller, whole batches at once) and `ByteText` (a novel). Your own
data come with a `Task`, see `runs/task.py`.

Names are loaded when they are used: importing this package loads neither torch nor numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.data.adapters import as_source as as_source, open_source as open_source
    from workbench.data.analysis.data_audit import DataAudit as DataAudit
    from workbench.data.analysis.format_costs import FormatComparison as FormatComparison
    from workbench.data.analysis.loader_report import LoaderReport as LoaderReport
    from workbench.data.analysis.packing import Packing as Packing, PackingPolicies as PackingPolicies, compare_packing as compare_packing
    from workbench.data.analysis.packing import pack as pack
    from workbench.data.augmentation import Augmentation as Augmentation, Augmented as Augmented, mix as mix
    from workbench.data.conversion import Conversion as Conversion, convert as convert
    from workbench.data.data_card import DataCard as DataCard, Verification as Verification, describe as describe, verify as verify
    from workbench.data.format_comparison import compare_formats as compare_formats
    from workbench.data.loader_doctor import doctor as doctor
    from workbench.data.manifest import Manifest as Manifest
    from workbench.data.quality import audit as audit, shuffle_quality as shuffle_quality
    from workbench.data.resumable_sampler import Mixture as Mixture, ResumableSampler as ResumableSampler
    from workbench.data.resume_histories import ResumeHistories as ResumeHistories, prove_resumable as prove_resumable
    from workbench.data.shard_plan import ShardPlan as ShardPlan, plan_shards as plan_shards
    from workbench.data.shard_writer import write_shards as write_shards
    from workbench.data.source import Source as Source

_NAMES = {
    "workbench.data.adapters": "as_source open_source",
    "workbench.data.analysis.data_audit": "DataAudit",
    "workbench.data.analysis.format_costs": "FormatComparison",
    "workbench.data.analysis.loader_report": "LoaderReport",
    "workbench.data.analysis.packing": "Packing PackingPolicies compare_packing pack",
    "workbench.data.augmentation": "Augmentation Augmented mix",
    "workbench.data.conversion": "Conversion convert",
    "workbench.data.data_card": "DataCard Verification describe verify",
    "workbench.data.format_comparison": "compare_formats",
    "workbench.data.loader_doctor": "doctor",
    "workbench.data.manifest": "Manifest",
    "workbench.data.quality": "audit shuffle_quality",
    "workbench.data.resumable_sampler": "Mixture ResumableSampler",
    "workbench.data.resume_histories": "ResumeHistories prove_resumable",
    "workbench.data.shard_plan": "ShardPlan plan_shards",
    "workbench.data.shard_writer": "write_shards",
    "workbench.data.source": "Source",
}
"""Module → the public names that it has, as `wb.data.NAME`: what the imports above say to type checkers."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench.data' has no attribute {name!r}; it offers {', '.join(sorted(_HOMES))}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    if isinstance(value, type):
        from workbench.core.synonyms import explain_calls

        explain_calls(value, "wb.data")
    return value


def __dir__() -> list[str]:
    return sorted(_HOMES)
