"""Builds the documentation as a site: python docs/make_site.py (make docs). It needs no network, and a broken link or anchor fails it.

`pages()` makes all pages as plain Markdown: those of docs/pages, where `<!-- insert: NAME -->` stands for what `docs/generated.py` makes of
the code, the notebooks as they are stored, and a few files of the repository. MkDocs only turns them into HTML, so another generator could.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import generated
import notebook_pages

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/pages"
BUILD = ROOT / "build"
COPIED = {
    ROOT / "benchmarks/RESULTS.md": "results.md",
    ROOT / "docs/architecture.md": "about/architecture.md",
    ROOT / "CHANGELOG.md": "about/changelog.md",
    ROOT / "CONTRIBUTING.md": "about/contributing.md",
    ROOT / "SECURITY.md": "about/security.md",
}
"""File of the repository → its page."""
NOTEBOOKS = "      # docs/make_site.py puts the notebooks here"
INSERT = re.compile(r"^<!-- insert: ([a-z-]+) -->(?:\n\*This part is generated: .*\*)?$", re.MULTILINE)
"""A marker, and what a reader of the source is told there."""
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
FENCE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def sources() -> dict[Path, str]:
    """Every file that becomes a page → the path of that page."""
    own = {path: path.relative_to(PAGES).as_posix() for path in sorted(PAGES.rglob("*.md"))}
    return own | COPIED | {path: f"notebooks/{path.stem}.md" for path in notebook_pages.paths()}


def pages() -> tuple[dict[str, str], dict[str, bytes]]:
    """All pages as Markdown, and the pictures beside them: path in the site → content.

    Raises:
        ValueError: a page asks for an insert that does not exist.
    """
    own, texts, pictures = sources(), dict[str, str](), dict[str, bytes]()
    known = own | beside()
    for source, page in own.items():
        if source.suffix == ".ipynb":
            text, images = notebook_pages.markdown(source)
            pictures |= {f"notebooks/{name}": content for name, content in images.items()}
        else:
            text = INSERT.sub(lambda match, page=page: insert(match[1], page), source.read_text())
        texts[page] = outside_code(text, lambda part, source=source, page=page: relinked(part, source, page, known))
    for path, name in beside().items():
        pictures[name] = path.read_bytes()
    return texts, pictures


def beside() -> dict[Path, str]:
    """Every file of the repository that lies beside the pages as it is → its path in the site."""
    own = {path: path.relative_to(PAGES).as_posix() for path in sorted(PAGES.rglob("*.*")) if path.suffix != ".md"}
    return own | {path: f"pictures/{path.name}" for path in sorted((ROOT / "notebooks/pictures").glob("*.png"))}


def insert(name: str, page: str) -> str:
    """What stands for a marker.

    Raises:
        ValueError: there is no such insert.
    """
    if name not in generated.INSERTS:
        raise ValueError(f"{page}: <!-- insert: {name} -->, but docs/generated.py has {', '.join(generated.INSERTS)}")
    return generated.INSERTS[name]()


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The text with everything changed but code."""
    return "".join(part if i % 2 else change(part) for i, part in enumerate(FENCE.split(text)))


def relinked(text: str, source: Path, page: str, known: Mapping[Path, str]) -> str:
    """A text whose links lead to pages where they led to files; a link to a file without a page becomes plain text."""

    def link(match: re.Match[str]) -> str:
        if "://" in match["path"] or match["path"].startswith("mailto:"):
            return match[0]
        path = (source.parent / match["path"]).resolve()
        if path in known:
            target = known[path]
        elif path.parent in (PAGES / "notebooks", PAGES / "drawn"):  # a picture of a notebook, or one that is drawn here: no file holds it
            target = path.relative_to(PAGES).as_posix()
        else:
            return "" if path.exists() else match[0]
        return os.path.relpath(target, Path(page).parent) + (match["anchor"] or "")

    return re.sub(r"(?<!!)\[([^\]]*)\]\(\)", r"\1", LINK.sub(link, text))


def main() -> int:
    """Write the pages into build/docs/pages, and the site into build/docs/site; returns MkDocs's exit status."""
    folder = BUILD / "docs"
    shutil.rmtree(folder, ignore_errors=True)
    print("docs: pages, pictures, then the site: one to three minutes", flush=True)
    texts, pictures = pages()
    for page, text in texts.items():
        (path := folder / "pages" / page).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, content in pictures.items():
        (path := folder / "pages" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    print(f"docs: {len(texts)} pages are written; drawing the pictures of wb.plot", flush=True)
    generated.draw_pictures(folder / "pages/drawn")
    listed = "\n".join(f"      - notebooks/{path.stem}.md" for path in notebook_pages.paths())
    (folder / "mkdocs.yml").write_text((ROOT / "docs/mkdocs.yml").read_text().replace(NOTEBOOKS, listed))
    print("docs: MkDocs makes the site", flush=True)
    status, said = site(folder, *sys.argv[1:])
    print(said if status else f"{len(texts)} pages: {folder / 'site/index.html'}")
    return status


def site(folder: Path, *options: str) -> tuple[int, str]:
    """Make HTML of the pages in a folder; the exit status of MkDocs, and what it printed."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    # no --quiet: it would keep the warnings from --strict, too
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(folder / "mkdocs.yml"), *options]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
