"""The HTML of the DataExplorer: findings, classes, groups with their pictures, the classes along an epoch, samples and shards."""

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from workbench.core import units
from workbench.core.display.colors import LINE, OUTLINE, SERIES, SIZES, mixed
from workbench.core.display.html import piece, row
from workbench.core.display.table import escape
from workbench.data.analysis.data_audit import DataAudit, Group
from workbench.data.analysis.orders import AsStored, InBlocks, Order, Shuffled, block_sizes
from workbench.data.data_card import DataCard, picture_of
from workbench.data.manifest import Manifest
from workbench.data.sample import CorruptSampleError

BATCHES, BATCH = 12, 32
"""Batches of an epoch that are drawn, evenly over it, and their samples."""
_CLASSES = 12
_SHARDS = 24
"""Shards, and readers, that are drawn."""


def head(result: DataAudit | DataCard) -> str:
    """What was audited, and the verdict; or what a dataset is."""
    if isinstance(result, DataCard):
        size = f", {units.bytes_(result.stored_bytes)}" if result.stored_bytes else ""
        checked = "with checksums" if result.manifest is not None else "without checksums"
        fields = ", ".join(f"{name} ({kind})" for name, kind in result.schema.items())
        named = f"<strong>{escape(result.path or 'dataset')}</strong>"
        return f"<p>{named} · {result.count:,} samples as {escape(result.format)}{size}, {checked}<br>{escape(fields)}</p>"
    counts = ", ".join(f"{units.count(count)} samples{f' of {split}' if split else ''}" for split, count in result.samples.items())
    return f"<p><strong>{escape(result.target)}</strong> · {escape(counts)}<br>{escape(result.verdict)}</p>"


def health(audit: DataAudit) -> str:
    """A bar for each finding, and one for each class."""
    total = max(1, sum(audit.samples.values()))
    bars = [
        row(name, [piece(count / total, SERIES[1], title=f"{name}: {count:,}")], f"{count:,}", f"{count:,}", wide=150)
        for name, count in audit.figures.items()
        if count
    ]
    classes: dict[str, int] = {}
    for counts in audit.classes.values():
        for name, count in counts.items():
            classes[name] = classes.get(name, 0) + count
    largest = max(classes.values(), default=1)
    common = sorted(classes.items(), key=lambda item: -item[1])[:_CLASSES]
    bars += [
        row(f"class {name}"[:24], [piece(count / largest, LINE, title=f"{name}: {count:,}")], f"{count:,}", f"{count:,}", wide=150)
        for name, count in common
    ]
    more = f"<p>{len(classes) - _CLASSES:,} more classes</p>" if len(classes) > _CLASSES else ""
    notes = "".join(f"<p>{escape(note)}</p>" for note in audit.notes)
    return f'<div class="wb-health">{"".join(bars)}{more}{notes}</div>'


def groups(shown: Sequence[Group], count: int) -> str:
    """Rows of pictures, or of names where there are none."""
    if not shown:
        return "<p>no such group</p>"
    rows = []
    for group in shown:
        cells = "".join(_cell(member.picture, member.where, member.label) for member in group.members[:4])
        more = f" and {len(group.members) - 4:,} more" if len(group.members) > 4 else ""
        labels = f"; labelled {', '.join(group.labels)}" if group.labels else ""
        said = f"{f'equal by {group.kind}' if group.exact else group.kind}{more}{labels}"
        rows.append(f'<div style="display:flex;align-items:center;margin-top:6px">{cells}<span>{escape(said)}</span></div>')
    return f'<div class="wb-groups"><p>{len(shown)} of {count:,} groups</p>{"".join(rows)}</div>'


def _cell(picture: str, where: str, label: str | None) -> str:
    title = escape(f"{where}, {label}" if label else where)
    if picture:
        return f'<img alt="{title}" title="{title}" width="64" src="data:image/jpeg;base64,{escape(picture)}" style="margin-right:6px">'
    return f'<span title="{title}" style="border:1px solid {OUTLINE};padding:2px 4px;margin-right:6px">{title[:40]}</span>'


def epoch(audit: DataAudit, how: str, block: int, window: int) -> str:
    """The classes of batches along an epoch, and how well they are mixed beside a full shuffle."""
    split, labels = max(audit.order.items(), key=lambda item: len(item[1]), default=("", ()))
    if len(set(labels)) < 2 or len(labels) < BATCH:
        return "<p>the samples have no labels, so their order cannot be judged</p>"
    order: Order = AsStored(len(labels)) if how == "as stored" else Shuffled(len(labels))
    if how == "in blocks":
        order = InBlocks(block_sizes(min(block, len(labels)), len(labels)), window)
    known = np.asarray(labels)[order.indices(np.arange(len(labels)), 0, 0)]
    kinds = sorted(set(labels))
    ends = SIZES["light"]
    colors = {kind: mixed(ends[1], ends[0], number / max(1, len(kinds) - 1)) for number, kind in enumerate(kinds)}
    bars = []
    whole = len(known) // BATCH
    for number in np.unique(np.linspace(0, whole - 1, min(BATCHES, whole)).astype(int)).tolist():
        batch = known[number * BATCH : (number + 1) * BATCH]
        pieces = [piece(float((batch == kind).mean()), colors[kind], title=f"class {kind}") for kind in kinds if (batch == kind).any()]
        several = f"{len(np.unique(batch))} classes"
        bars.append(row(f"batch {number + 1}", pieces, several, several, wide=76))
    title = f"classes in batches of {BATCH}, {how}{f', {split}' if split else ''}"
    return f'<div class="wb-epoch"><p>{escape(title)}</p>{"".join(bars)}</div>'


def samples(card: DataCard) -> str:
    """Some samples with their labels: pictures, or the beginning of their texts."""
    cells = []
    for sample in card.examples:
        try:
            pixels, label = picture_of(sample)
        except CorruptSampleError:
            pixels, label = None, "cannot be decoded"
        picture = ""
        if pixels is not None:
            image = Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
            image.thumbnail((96, 96))
            image.save(kept := io.BytesIO(), "JPEG", quality=85)
            picture = base64.b64encode(kept.getvalue()).decode()
        cells.append(
            f'<div style="display:inline-block;margin:4px;text-align:center">{_cell(picture, label, None)}<br>{escape(label[:24])}</div>'
        )
    return f'<div class="wb-samples">{"".join(cells) or "<p>the card has no samples: describe the dataset again</p>"}</div>'


def shards(manifest: Manifest, readers: int) -> str:
    """A bar for each shard, and one for each reader's share where whole shards are dealt in turn."""
    counts = [shard.count for shard in manifest.shards]
    most = max(counts, default=1)
    bars = [
        row(
            shard.name,
            [piece(shard.count / most, LINE)],
            f"{shard.count:,}",
            f"{shard.count:,}, {units.bytes_(shard.bytes)}",
            wide=150,
            room=140,
        )
        for shard in manifest.shards[:_SHARDS]
    ]
    more = f"<p>{len(counts) - _SHARDS:,} more shards</p>" if len(counts) > _SHARDS else ""
    shares = [sum(counts[reader::readers]) for reader in range(min(readers, _SHARDS))]
    largest = max(1, *shares) if shares else 1
    dealt = [
        row(f"reader {number}", [piece(share / largest, SERIES[1])], f"{share:,}", f"{share:,}", wide=150, room=140)
        for number, share in enumerate(shares)
    ]
    others = f"<p>{readers - _SHARDS:,} more readers</p>" if readers > _SHARDS else ""
    slowest = f"<p>On {readers:,} readers (ranks × workers) the slowest reads {units.times(manifest.imbalance(readers))} the mean.</p>"
    return f'<div class="wb-shards">{"".join(bars)}{more}{slowest}{"".join(dealt)}{others}</div>'
