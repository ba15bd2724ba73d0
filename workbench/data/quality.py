"""`audit` and `shuffle_quality`: what is wrong with data, and how well an order mixes the classes of its batches."""

import base64
import contextlib
import hashlib
import io
import math
import os
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from PIL import Image

from workbench.core import units
from workbench.core.checks import check_budget, whole_number
from workbench.core.progress import INTERRUPTED, Waiting
from workbench.core.synonyms import accept_synonyms
from workbench.data.adapters import as_source
from workbench.data.analysis.data_audit import EVALUATION, DataAudit, Group, Member, Sizes, Unusable
from workbench.data.analysis.duplicates import Look, look_of, near_pictures, near_texts, normalised, shingles, star_groups
from workbench.data.sample import KEY, PICTURES, Sample
from workbench.data.source import Source

LABELS = ("cls", "label", "labels", "class", "target", "category")
"""Names of fields that hold a label."""
TEXTS = ("txt", "text", "transcript", "json", "md")
"""Names of fields that hold encoded text."""
MOST_PIXELS = 90_000_000
"""A picture that declares more pixels is not decoded: 270 MB; Pillow warns from there on."""
MOST_RATIO = 2000
"""A picture that declares so many bytes for each that it has, and is larger than SANE_BYTES, is not decoded either."""
SANE_BYTES = 64 << 20
COMPARING = 0.25
"""Share of the budget that is left for the search for near duplicates."""
PICTURES_KEPT, PICTURE_SIDE = 24, 64
"""Groups of which small pictures are kept, four of each, and their side in pixels."""


@dataclass(slots=True)
class _Seen:
    """What is kept of a sample."""

    member: Member
    kind: str = ""
    digests: dict[str, bytes] = field(default_factory=dict)
    look: Look | None = None
    shingles: Any = None
    sizes: dict[str, float] = field(default_factory=dict)


@accept_synonyms
def audit(data: Any, *, near: bool = True, label: str | None = None, budget_s: float | None = 60.0) -> DataAudit:
    """Look for what is wrong with data: duplicates, leakage between splits, conflicting labels, unreadable samples, unequal classes.

    Each sample is read once, and decoded if it is a picture. 4 kB are kept of each picture, and the shingles of each text.

    Args:
        data: a folder whose files have their folders' names as labels; shards or files of any format that `open_source` reads; a dataset
            whose samples are (input, label) or dicts; or a mapping from names of splits to such data. A dataset must not augment at random.
        near: also look for near duplicates.
        label: name of the field with the label; None = the usual names, or else the first folder in the sample's name.
        budget_s: approximate seconds; None = no limit. A quarter is reserved for the search for near duplicates; the splits share the rest.
            What was read by then, or by Ctrl-C, is judged, and notes say how much was read and how much was compared. Nothing is known
            about the rest, and pairs with an unread sample are not found.

    Raises:
        ValueError: nothing could be read, or an invalid budget.
    """
    begun = time.monotonic()
    budget_s = None if budget_s == math.inf else budget_s
    check_budget(budget_s)
    splits = dict(data) if isinstance(data, Mapping) else {"": data}
    seen: list[_Seen] = []
    unusable: list[Unusable] = []
    notes: list[str] = []
    samples: dict[str, int] = {}
    if not splits:
        raise ValueError("audit({}): give at least one split, such as {'train': dataset}")
    sources = {name: as_source(each) for name, each in splits.items()}
    lengths = {name: None if source.format == "iterable" else len(source) for name, source in sources.items()}
    every = "all" if None in lengths.values() else f"{sum(filter(None, lengths.values())):,}"
    begin = f"reading {every} samples once, then comparing them"
    stopped = ""
    comparing = COMPARING * budget_s if near and budget_s else 0.0
    with Waiting("audit", budget_s, begin=begin) as line:
        for place, (name, source) in enumerate(sources.items()):
            until = line.seconds + (line.left - comparing) / (len(sources) - place)
            count, size, of = 0, lengths[name], f" of {name}" if name else ""
            there = "samples" if size is None else f"of {size:,} samples"
            try:
                if not stopped:
                    notes += _unstable(name, source)
                for count, (found, bad) in enumerate(() if stopped else _read(source, name, label, near), 1):
                    if found:
                        seen.append(found)
                    if bad:
                        unusable.append(bad)
                    if count % 64 == 0:
                        line.say(f"reading {every} samples", f"{len(seen) + len(unusable):,} samples are read")
                    if line.seconds > until and count != size:
                        over = f"{until:.3g} s of the budget of {budget_s:g} s were over"
                        notes.append(f"{over} after {count:,} {there}{of}; budget_s=None reads all")
                        break
            except KeyboardInterrupt:
                if not seen:
                    raise
                stopped = INTERRUPTED
            if stopped:
                notes.append(f"{stopped} after {count:,} {there}{of}: nothing is known of the others")
            samples[name] = count
        if not sum(samples.values()):
            raise ValueError(f"there are no samples in {', '.join(map(repr, sources.values()))}")
        line.say("comparing", f"{len(seen):,} samples")
        groups, more = _groups(seen, near, line)
        notes += more
    groups = _with_pictures(groups, sources)
    links = sum(getattr(source, "links_left_out", 0) for source in sources.values())
    if links:
        notes.append(f"{links:,} symbolic links were not followed: what copies them as files makes duplicates of them")
    kinds = Counter(each.kind for each in seen)
    sizes = defaultdict(list)
    for each in seen:
        for name, value in each.sizes.items():
            sizes[name].append(value)
    classes = {name: Counter(s.member.label for s in seen if s.member.split == name and s.member.label is not None) for name in sources}
    return DataAudit(
        target=_name_of(data),
        samples=samples,
        kinds=dict(kinds),
        classes={name: dict(sorted(counts.items())) for name, counts in classes.items() if counts},
        groups=tuple(groups),
        unusable=tuple(unusable),
        sizes=tuple(Sizes.of(name, values) for name, values in sizes.items()),
        seconds=time.monotonic() - begun,
        notes=tuple(notes),
        order=_numbered(seen, samples),
    )


@accept_synonyms
def shuffle_quality(order: Iterable[int], labels: Sequence[int], batch_size: int) -> float:
    """Measure how well an order mixes classes: the mean entropy of labels in its batches, over that of full shuffles of the same labels.

    1 is as good as a full shuffle; 0 means one class in each batch. Orders of the same quality may differ by about 1 / √batches.

    Args:
        order: indices of samples, such as a sampler or `loader.sampler`.
        labels: labels of all samples, by index.
        batch_size: samples in a batch; a smaller last batch is left out.

    Raises:
        ValueError: there is no whole batch.
    """
    whole_number("batch_size", batch_size, least=2)
    kinds, numbers = np.unique(np.asarray(labels), return_inverse=True)
    given = numbers[np.fromiter((int(index) for index in order), np.int64)]
    batches = len(given) // batch_size
    if not batches:
        raise ValueError(f"batch_size={batch_size}: the order has {len(given)} samples, not one whole batch")
    if len(kinds) < 2:
        return 1.0
    rng = np.random.Generator(np.random.Philox(key=1))
    repeat = max(1, -(-200 // batches))  # 200 batches give the mean of full shuffles to about a percent
    shuffled = [_entropy(rng.permutation(given)[: batches * batch_size], batch_size, len(kinds)) for _ in range(repeat)]
    return float(_entropy(given[: batches * batch_size], batch_size, len(kinds)) / np.mean(shuffled))


def _entropy(numbers: Any, batch_size: int, kinds: int) -> float:
    """Mean over batches, in nats."""
    batches = numbers.reshape(-1, batch_size)
    total = 0.0
    for batch in batches:
        shares = np.bincount(batch, minlength=kinds) / batch_size
        shares = shares[shares > 0]
        total -= float((shares * np.log(shares)).sum())
    return total / len(batches)


def _read(source: Source, split: str, label: str | None, near: bool) -> Iterator[tuple[_Seen | None, Unusable | None]]:
    classes = tuple(getattr(source, "classes", ()))
    keys = source.keys() if source.format not in ("iterable", "dataset") else None
    for index, sample in enumerate(_scanned(source)):
        if isinstance(sample, Exception):
            key = keys[index] if keys is not None and index < len(keys) else f"{index:08d}"
            yield None, Unusable(member=Member(split=split, index=index, key=key), reason="unreadable", why=str(sample)[:200])
            continue
        key = str(sample.get(KEY, f"{index:08d}"))
        named, payload = _payload(sample)
        member = Member(split=split, index=index, key=key, label=_label(sample, key, label, named, classes))
        try:
            yield _look_at(member, named, payload, near), None
        except _Huge as error:
            yield None, Unusable(member=member, reason="huge", why=str(error))
        except Exception as error:  # whatever a decoder raises on damaged bytes
            yield None, Unusable(member=member, reason="unreadable", why=f"{type(error).__name__}: {error}"[:200])


def _scanned(source: Source) -> Iterator[Sample | Exception]:
    """All samples in the order of storage; what a dataset raises is an error of its sample."""
    if source.format != "dataset":
        yield from source._scan(0, sys.maxsize if source.format == "iterable" else len(source))
        return
    for index in range(len(source)):
        try:
            yield source._read(index)
        except Exception as error:  # of a user's dataset
            yield error


class _Huge(ValueError):
    pass


def _payload(sample: Sample) -> tuple[str, Any]:
    """The field that is looked at, and its name: a picture before a text before anything else that is no label."""
    names = [name for name in sample if name != KEY and name not in LABELS]
    for wanted in (PICTURES, TEXTS, ("input", "image", "img")):
        for name in names:
            if name.rpartition(".")[2].lower() in wanted:
                return name, sample[name]
    return (names[0], sample[names[0]]) if names else ("", b"")


def _label(sample: Sample, key: str, wanted: str | None, payload: str, classes: Sequence[str]) -> str | None:
    for name in (wanted,) if wanted else LABELS:
        value = sample.get(name or "")
        if value is not None and name != payload:
            value = value.item() if hasattr(value, "item") and getattr(value, "size", 2) == 1 else value
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(classes):
                return str(classes[value])
            return value.decode(errors="replace").strip() if isinstance(value, bytes) else str(value)[:80]
    return key.split("/")[0] if "/" in key and not wanted else None


def _look_at(member: Member, name: str, value: Any, near: bool) -> _Seen:
    seen = _Seen(member)
    if isinstance(value, bytes):
        seen.digests["bytes"] = hashlib.sha256(value).digest()
        seen.sizes["bytes"] = len(value)
        if not value:
            raise ValueError("it is empty")
        ending = name.rpartition(".")[2].lower()
        if ending in PICTURES or (ending not in TEXTS and _is_picture(value)):
            return _picture(seen, _decoded(value), near)
        text = value.decode() if ending in TEXTS else _text(value)
        return _words(seen, text, near) if text is not None else _of_kind(seen, "values")
    if isinstance(value, str):
        return _words(seen, value, near)
    array: Any = np.asarray(value)
    if array.ndim == 3 and (array.shape[0] in (1, 3, 4) or array.shape[2] in (1, 3, 4)) and min(sorted(array.shape)[1:]) >= 8:
        return _picture(seen, _as_picture(array), near, values=array)
    if array.ndim == 2 and min(array.shape) >= 8 and array.dtype == np.uint8:
        return _picture(seen, Image.fromarray(array), near, values=array)
    seen.digests["values"] = hashlib.sha256(f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes()).digest()
    if array.ndim == 1 and array.dtype.kind in "iu" and array.size > 8:
        seen.sizes["tokens"] = array.size
        if near:
            seen.shingles = shingles(array.tolist())
        return _of_kind(seen, "tokens")
    return _of_kind(seen, "values")


def _of_kind(seen: _Seen, kind: str) -> _Seen:
    seen.kind = kind
    return seen


def _is_picture(data: bytes) -> bool:
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Image.open(io.BytesIO(data))
        return True
    return False


def _decoded(data: bytes) -> Image.Image:
    """The picture, decoded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(data))
        except Image.DecompressionBombError as error:
            raise _Huge(str(error)) from None
        pixels = image.width * image.height
        if pixels > MOST_PIXELS or (pixels * 4 > SANE_BYTES and pixels * 4 > MOST_RATIO * len(data)):
            raise _Huge(f"it declares {image.width:,} × {image.height:,} pixels in {len(data):,} bytes")
        image.load()
    return image


def _text(data: bytes) -> str | None:
    """The text that bytes are; None = they are none."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _as_picture(array: Any) -> Image.Image:
    """A picture of an array (channels first or last); values that are no bytes are stretched to their range."""
    if array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)
    array = array[..., :3] if array.shape[2] == 4 else array
    if array.dtype != np.uint8:
        if not np.isfinite(array).all():
            raise ValueError("it has NaN or infinite values")
        low, high = float(array.min()), float(array.max())
        array = ((array - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(array[..., 0] if array.shape[2] == 1 else array))


def _picture(seen: _Seen, image: Image.Image, near: bool, values: Any = None) -> _Seen:
    if values is None:
        colours = image.convert("RGBA")
        seen.digests["pixels"] = hashlib.sha256(f"{image.size}".encode() + colours.tobytes()).digest()
        if np.asarray(colours)[..., 3].min() < 255:  # as seen on white
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), colours)
    else:
        seen.digests["values"] = hashlib.sha256(f"{values.shape}".encode() + np.ascontiguousarray(values).tobytes()).digest()
    seen.sizes["pixels"] = image.width * image.height
    if near:
        seen.look = look_of(image.convert("L"))
    return _of_kind(seen, "picture")


def _words(seen: _Seen, text: str, near: bool) -> _Seen:
    plain = normalised(text)
    words = plain.split()
    seen.digests["text"] = hashlib.sha256((plain or text).encode("utf-8", "replace")).digest()
    seen.sizes["words"] = len(words)
    if near and len(words) > 3:
        seen.shingles = shingles(words)
    return _of_kind(seen, "text")


def _unstable(name: str, source: Source) -> list[str]:
    """A note where a sample is another each time it is read."""
    if source.format != "dataset" or not len(source):
        return []
    try:
        once, again = (repr({k: np.asarray(v).tobytes() if hasattr(v, "shape") else v for k, v in source[0].items()}) for _ in range(2))
    except Exception:  # it will be counted as unreadable
        return []
    where = f" of {name}" if name else ""
    return [f"the first sample{where} is another each time: give the dataset without random augmentation"] if once != again else []


def _name_of(data: Any) -> str:
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    if isinstance(data, Mapping):
        return ", ".join(map(str, data))
    return type(data).__name__


def _numbered(seen: Sequence[_Seen], samples: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    names = {name: number for number, name in enumerate(sorted({each.member.label for each in seen if each.member.label is not None}))}
    order = {split: [-1] * count for split, count in samples.items()}
    for each in seen:
        if each.member.label is not None:
            order[each.member.split][each.member.index] = names[each.member.label]
    return {split: tuple(numbers) for split, numbers in order.items()}


def _groups(seen: list[_Seen], near: bool, line: Waiting) -> tuple[list[Group], list[str]]:
    """Groups of equal samples, the largest first, then of near ones, where one sample stands for its equals; and what was not compared."""
    first_of: dict[tuple[str, bytes], int] = {}
    unit = list(range(len(seen)))
    kind_of: dict[int, str] = {}

    def root(place: int) -> int:
        while unit[place] != place:
            place = unit[place]
        return place

    for place, each in enumerate(seen):
        for kind, digest in each.digests.items():
            first = root(first_of.setdefault((kind, digest), place))
            mine = root(place)
            if first != mine:
                unit[max(first, mine)] = min(first, mine)
                kind_of[place] = kind_of.get(place, kind)
    together: dict[int, list[int]] = defaultdict(list)
    for place in range(len(seen)):
        together[root(place)].append(place)
    groups = []
    for places in together.values():
        if len(places) > 1:
            weakest = max((kind_of[place] for place in places if place in kind_of), key=("bytes", "values", "pixels", "text").index)
            groups.append(Group(kind=weakest, members=_ordered(seen, places)))
    groups.sort(key=lambda group: (-len(group.members), group.members[0].where))
    notes: list[str] = []
    share, ended, why = 0.0, "", "the budget ended"

    def go_on(compared: float) -> bool:
        nonlocal share, ended
        line.say(f"comparing {kind}: {units.percent(compared)} of {len(kept):,} are compared")
        share, ended = compared, why if line.left <= 0 else ""
        return not ended

    for kind, of in (("near pictures", "look"), ("near texts", "shingles")) if near else ():
        places = [place for place in together if getattr(seen[place], of) is not None]
        kept = [getattr(seen[place], of) for place in places]
        pairs: Any = []
        share, ended = 0.0, ""
        try:
            pairs = (near_pictures if of == "look" else near_texts)(kept, go_on=go_on)
        except KeyboardInterrupt:
            share, ended = 0.0, (why := INTERRUPTED)
            line.spend()
        if ended:
            others = "the others" if of == "look" else "each other"
            said = f"only the first {units.percent(share)} of {len(kept):,} were compared with {others}"
            notes.append(f"{ended} when {kind} were looked for: {said}")
        stars = star_groups(pairs)
        groups += [Group(kind=kind, members=_ordered(seen, [places[i] for i in star], sort=False)) for star in stars]
    return groups, notes


def _ordered(seen: Sequence[_Seen], places: Iterable[int], *, sort: bool = True) -> tuple[Member, ...]:
    """The members, and the one that is to be kept first: of an evaluation split before others."""
    members = [seen[place].member for place in places]
    rank = {name: number for number, name in enumerate(EVALUATION)}
    if sort:
        members.sort(key=lambda member: rank.get(member.split, len(rank)))
    return tuple(members)


def _with_pictures(groups: list[Group], sources: Mapping[str, Source]) -> list[Group]:
    """With small pictures of the groups that are looked at first: leaks, conflicts, then the largest of either kind."""
    urgent = sorted(range(len(groups)), key=lambda i: (len(groups[i].splits) < 2, len(groups[i].labels) < 2, not groups[i].exact, i))
    for place in urgent[:PICTURES_KEPT]:
        members = [replace(m, picture=_small(sources[m.split], m.index)) if n < 4 else m for n, m in enumerate(groups[place].members)]
        groups[place] = replace(groups[place], members=tuple(members))
    return groups


def _small(source: Source, index: int) -> str:
    """A small JPEG as base64; "" = it is no picture, or cannot be read again."""
    if source.format == "iterable":  # has no random access, and to find its length would be to read it
        return ""
    with contextlib.suppress(Exception):
        _, value = _payload(source[index])
        image = _decoded(value) if isinstance(value, bytes) else _as_picture(np.asarray(value))
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
        image.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
        kept = io.BytesIO()
        image.save(kept, "JPEG", quality=80)
        return base64.b64encode(kept.getvalue()).decode()
    return ""
