"""Makes everything in this folder from three Debian packages: `python data_samples/build.py` (half a minute; Debian or Ubuntu, no root).

The recipe is deterministic: the same package versions and the same Pillow give the same bytes, which `manifest.json` names. Without
arguments the packages are fetched with `apt-get download`; `--debs DIR` takes the .deb files from a folder instead.
"""

import argparse
import gzip
import hashlib
import io
import json
import random
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
PACKAGES = {
    "openclipart-png": "1:0.18+dfsg-19",
    "dataset-fashion-mnist": "0.0~git20200523.55506a9-1",
    "r-cran-janeaustenr": "1.0.0-1",
}
"""Debian packages and the versions the committed files were made from."""

CLASSES = ("animals", "buildings", "education", "food", "geography", "office", "plants", "recreation", "tools", "transportation")
LEFT_OUT = {"weapons", "religion", "christianity", "hummers"}  # not for a tutorial; logos and people are in none of the classes either
PER_CLASS, PAIRS, SIDE, QUALITY, SHARDS = 150, 40, 64, 85, 4
COLUMNS = ("name", "shard", "offset", "length", "crc32", "label", "group", "split", "source")
VALIDATION = 0.2  # fraction of the groups of equal pictures


def main() -> None:
    """Fetch, unpack, build, and write the manifest last: a manifest means that all is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debs", type=Path, help="folder with the .deb files (default: apt-get download)")
    parser.add_argument("--target", type=Path, default=HERE, help="where to write (default: this folder)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        unpacked = unpack(given.debs, Path(temporary))
        openclipart(unpacked, given.target / "openclipart")
        fashion_mnist(unpacked, given.target / "fashion_mnist")
        austen(unpacked, given.target / "austen")
    files = sorted(p for name in ("openclipart", "fashion_mnist", "austen") for p in (given.target / name).iterdir())
    described = {p.relative_to(given.target).as_posix(): {"bytes": p.stat().st_size, "sha256": sha256(p.read_bytes())} for p in files}
    (given.target / "manifest.json").write_text(json.dumps({"packages": PACKAGES, "files": described}, indent=1) + "\n")
    print(f"{len(files)} files, {sum(p.stat().st_size for p in files):,} bytes in {given.target}")


def unpack(debs: Path | None, temporary: Path) -> Path:
    """Unpack the packages, after a look at their versions."""
    if debs is None:
        debs = temporary
        subprocess.run(["apt-get", "download", *(f"{name}={version}" for name, version in PACKAGES.items())], cwd=debs, check=True)
    for name, version in PACKAGES.items():
        found = sorted(debs.glob(f"{name}_*.deb"))
        if not found:
            raise SystemExit(f"no {name}_*.deb in {debs}: get it with `apt-get download {name}={version}`")
        given = subprocess.run(["dpkg-deb", "-f", found[0], "Version"], check=True, capture_output=True, text=True).stdout.strip()
        if given != version:
            raise SystemExit(f"{found[0]} is version {given}; this recipe was written for {version}")
        subprocess.run(["dpkg", "-x", found[0], temporary / "unpacked"], check=True)
    return temporary / "unpacked"


def sha256(data: bytes) -> str:
    """Hexadecimal SHA-256."""
    return hashlib.sha256(data).hexdigest()


# --- openclipart: pictures, kept as JPEG files in tar shards, so that reading one costs what it costs in life


def openclipart(unpacked: Path, target: Path) -> None:
    """Choose, shrink, shard, and write `index.json` with a line per picture."""
    target.mkdir(parents=True, exist_ok=True)
    Image.MAX_IMAGE_PIXELS = None  # some are above Pillow's guard against decompression bombs; they are left out before they are decoded
    pictures = []  # (path in the package, JPEG bytes)
    root = unpacked / "usr/share/openclipart/png"
    for relative in choose(root):
        path = root / relative
        with Image.open(path) as image:  # reads the header only
            if image.width * image.height > 4_000_000 or path.stat().st_size > 300_000:
                continue
            pictures.append((relative, thumbnail(image.convert("RGBA"))))
    groups = [sha256(Image.open(io.BytesIO(data)).tobytes()) for _, data in pictures]
    validation = held_out([path.parts[0] for path, _ in pictures], groups)
    number = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    order = list(range(len(pictures)))
    random.Random(0).shuffle(order)  # a shard is a sample of all classes
    rows, shards = {}, []
    for shard in range(SHARDS):
        name = f"openclipart-{shard}.tar"
        with tarfile.open(target / name, "w", format=tarfile.USTAR_FORMAT) as tar:
            members = order[shard::SHARDS]
            for i in members:
                path, data = pictures[i]
                info = tarfile.TarInfo(f"{path.parts[0]}/{i:05d}.jpg")  # time, owner and mode are TarInfo's constants
                info.size = len(data)
                split = "validation" if groups[i] in validation else "train"
                where = (shard, tar.offset + tarfile.BLOCKSIZE, len(data), zlib.crc32(data))
                rows[i] = (info.name, *where, CLASSES.index(path.parts[0]), number[groups[i]], split, path.as_posix())
                tar.addfile(info, io.BytesIO(data))
        shards.append({"name": name, "bytes": (target / name).stat().st_size, "sha256": sha256((target / name).read_bytes())})
    head = json.dumps({"classes": CLASSES, "side": SIDE, "shards": shards, "columns": COLUMNS}, indent=1).removesuffix("\n}")
    lines = ",\n".join("  " + json.dumps(rows[i]) for i in sorted(rows))  # a line per picture: differences stay readable
    (target / "index.json").write_text(f'{head},\n "samples": [\n{lines}\n ]\n}}\n')
    shutil.copyfile(unpacked / "usr/share/doc/openclipart-png/copyright", target / "LICENSE.txt")


def choose(root: Path) -> list[Path]:
    """A sample of every class, and pairs that are one file in the package, reached by two paths.

    1,221 of the 8,121 paths are symbolic links: upstream filed a picture in several categories, and the packager replaced equal files
    by links (Debian bug 298390). Following them, as most copies do, brings the duplicates back, some of them under two labels.
    """
    paths = [p.relative_to(root) for name in CLASSES for p in sorted((root / name).rglob("*.png"))]
    paths = [p for p in paths if not LEFT_OUT & set(p.parts)]
    rng, chosen = random.Random(0), set()
    for name in CLASSES:
        members = [p for p in paths if p.parts[0] == name]
        chosen |= set(rng.sample(members, min(PER_CLASS, len(members))))
    by_file = defaultdict(list)
    for path in paths:
        by_file[(root / path).resolve()].append(path)
    groups = [group for group in by_file.values() if len(group) > 1]
    for crossing in (True, False):  # pairs across classes, then within one
        kind = [group for group in groups if (len({p.parts[0] for p in group}) > 1) == crossing]
        for group in rng.sample(kind, min(PAIRS, len(kind))):
            chosen |= set(group)
    return sorted(chosen)


def thumbnail(image: Image.Image) -> bytes:
    """The picture on white, shrunk into a square, as JPEG."""
    canvas = Image.new("RGBA", image.size, (255, 255, 255, 255))
    canvas.alpha_composite(image)
    small = canvas.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    square = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    square.paste(small, ((SIDE - small.width) // 2, (SIDE - small.height) // 2))
    buffer = io.BytesIO()
    square.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def held_out(labels: Iterable[str], groups: list[str]) -> set[str]:
    """Groups of equal pictures to validate on: a fifth of each class, and never a part of a group, so that nothing leaks."""
    first = dict(zip(reversed(groups), reversed(list(labels)), strict=True))  # a group that crosses classes counts for its first
    chosen = set()
    for name in CLASSES:
        members = sorted(group for group, label in first.items() if label == name)  # by digest: as good as a shuffle
        chosen |= set(members[: round(VALIDATION * len(members))])
    return chosen


# --- the other two


def fashion_mnist(unpacked: Path, target: Path) -> None:
    """The test part (10,000 pictures), as it is in the package."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"):
        shutil.copyfile(unpacked / "usr/share/datasets/fashion-mnist" / name, target / name)
    shutil.copyfile(unpacked / "usr/share/doc/dataset-fashion-mnist/copyright", target / "LICENSE.txt")


def austen(unpacked: Path, target: Path) -> None:
    """Jane Austen, Pride and Prejudice (1813): the lines of the R object `prideprejudice`."""
    target.mkdir(parents=True, exist_ok=True)
    folder = unpacked / "usr/lib/R/site-library/janeaustenr/data"
    packed = (folder / "Rdata.rdb").read_bytes()
    start, length = PRIDE_AND_PREJUDICE
    text = "\n".join(r_strings(zlib.decompress(packed[start + 4 : start + length]))) + "\n"  # 4 bytes: length when unpacked
    if not text.startswith("PRIDE AND PREJUDICE\n\nBy Jane Austen\n"):
        raise SystemExit(f"{folder / 'Rdata.rdb'} does not hold Pride and Prejudice where this recipe looks for it")
    (target / "pride_and_prejudice.txt.gz").write_bytes(gzip.compress(text.encode("ascii"), 9, mtime=0))
    shutil.copyfile(unpacked / "usr/share/doc/r-cran-janeaustenr/copyright", target / "LICENSE.txt")


PRIDE_AND_PREJUDICE = (0x103B3E, 0x422BD)
"""Offset and length in `Rdata.rdb`, as `Rdata.rdx` (the package's table of contents) gives them."""


def r_strings(data: bytes) -> list[str]:
    """The character vector in R's serialisation format (XDR, version 3).

    Source: R Internals, section 1.8, "Serialization Formats".
    """
    cursor = io.BytesIO(data)

    def integer() -> int:
        return int.from_bytes(cursor.read(4), "big")

    if cursor.read(2) != b"X\n" or integer() != 3:
        raise ValueError("not R's serialisation format, version 3")
    cursor.seek(8, io.SEEK_CUR)  # the R versions that wrote it and can read it
    cursor.seek(integer(), io.SEEK_CUR)  # the name of the native encoding
    if integer() & 0xFF != 16:
        raise ValueError("not a character vector (STRSXP)")
    strings = []
    for _ in range(integer()):
        cursor.seek(4, io.SEEK_CUR)  # flags of each string
        strings.append(cursor.read(integer()).decode("ascii"))
    return strings


if __name__ == "__main__":
    main()
