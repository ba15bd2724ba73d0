"""Data: samples in any storage format, shards with checksums, orders that resume anywhere, and the repository's sample data.

`wb.data.open_source` and `as_source` (`adapters.py`) read samples from a folder, tar shards and other formats (`formats/`) behind one
interface; `samples.py` has the repository's data as datasets: `ClipArt` (pictures to decode), `FashionMnist` (pictures that cost nothing),
`Fashion` (the same, smaller, whole batches at once) and `ByteText` (a novel), which it reads by `shards.py`. Your own data come with a
`Task`, see `runs/task.py`.

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

_PATHS = """
    adapters.as_source adapters.open_source analysis.data_audit.DataAudit analysis.format_costs.FormatComparison
    analysis.loader_report.LoaderReport analysis.packing.Packing analysis.packing.PackingPolicies analysis.packing.compare_packing
    analysis.packing.pack augmentation.Augmentation augmentation.Augmented augmentation.mix conversion.Conversion conversion.convert
    data_card.DataCard data_card.Verification data_card.describe data_card.verify format_comparison.compare_formats loader_doctor.doctor
    manifest.Manifest quality.audit quality.shuffle_quality resumable_sampler.Mixture resumable_sampler.ResumableSampler
    resume_histories.ResumeHistories resume_histories.prove_resumable shard_plan.ShardPlan shard_plan.plan_shards
    shard_writer.write_shards source.Source
"""
"""Where the public names are, below this package: the imports above say the same to type checkers."""

_HOMES = {path.rpartition(".")[2]: f"workbench.data.{path.rpartition('.')[0]}" for path in _PATHS.split()}


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
