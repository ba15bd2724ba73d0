"""The documentation: its code runs, its commands exist, its figures are those of the results, and its words those of the code."""

import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

import workbench as wb
from tests.forked import Forks
from workbench.batch.analysis.lengths import BatchLengths
from workbench.batch.batch_plan import ProposedPlan
from workbench.core import run_directory

for name in ("ipywidgets", "anywidget"):
    pytest.importorskip(name, reason="the reference has the panels, too: extra notebooks")

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/pages"
sys.path.append(str(ROOT / "docs"))
import generated  # noqa: E402
import make_site  # noqa: E402
import notebook_pages  # noqa: E402

BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>slow|skip|needs)(?:: (?P<why>[^>]*))? -->\n)?^```python(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```",
    re.S | re.M,
)
QUICK = {
    "wb.diagnose(step, loader)": "wb.diagnose(step, loader, budget_s=4)",
    "* 64).brief()": "* 64, budget_s=4).brief()",
    "wb.diagnose(spec)": "wb.diagnose(spec, budget_s=8)",
    ".prove()": ".prove(budget_s=4)",
    "wb.why_not_linear(spec, budget_s=20)": "wb.why_not_linear(spec, budget_s=8)",
    "answer.prove(budget_s=15)": "answer.prove(budget_s=5)",
    "range(3)": "range(1)",
    'for script in ("train_trainer.py", "train_accelerate.py")': 'for script in ("train_trainer.py",)',  # test_frameworks.py has both
    "steps=40": "steps=12",
    "steps=20, ": "steps=8, ",
    "< 1.5, ratios": "< 10, ratios",  # others compute beside a test
}
"""What a reader has time for → what a test has."""
RUNNER = """
import functools, json, os, sys, traceback
from pathlib import Path
from tests.forked import torchrun
from workbench.runs.launch import environment
environment.torchrun = functools.partial(torchrun, sys.argv[1])  # what is launched has forks for ranks
os.chdir(sys.argv[2])
for page, files, blocks in json.loads(Path("pages.json").read_text()):
    os.makedirs(page)
    os.chdir(page)
    for name, code in files:
        open(name, "w").write(code)
    names = {"__name__": "__main__"}
    for code in blocks:
        try:
            exec(compile(code, page, "exec"), names)
        except BaseException:
            sys.exit(f"{page}:\\n{code}\\n{traceback.format_exc()}")
    os.chdir("..")
"""


@dataclass(frozen=True)
class Block:
    """A block of Python of a page."""

    code: str
    mark: str
    """"slow", "skip" (nothing runs it), "needs" (a package) or ""."""
    why: str
    title: str
    """The file that it is; "" = it is run."""


def blocks(page: Path) -> Iterator[Block]:
    for match in BLOCK.finditer(page.read_text()):
        code = match["code"]
        for slow, quick in QUICK.items():
            code = code.replace(slow, quick)
        yield Block(code=code, mark=match["mark"] or "", why=match["why"] or "", title=match["title"] or "")


def run(wanted: dict[Path, list[Block]], folder: Path, forks: Forks) -> None:
    """Run blocks in one process: each page in a folder of its own, with its files."""
    pages = [
        (page.stem, [(block.title, block.code) for block in blocks(page) if block.title], [block.code for block in chosen])
        for page, chosen in wanted.items()
    ]
    (folder / "pages.json").write_text(json.dumps(pages))
    done = forks.run(folder, "-c", RUNNER, forks.orders, folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_code_of_the_pages_runs(tmp_path: Path, forks: Forks) -> None:
    wanted = {page: [block for block in blocks(page) if not block.mark and not block.title] for page in sorted(PAGES.rglob("*.md"))}
    run({page: chosen for page, chosen in wanted.items() if chosen}, tmp_path, forks)


LAUNCHING = (
    ("frameworks", "training-loops", "my-task", "replay"),
    ("resume", "ci-gate", "evaluate", "repeat", "report", "why-not-linear", "stages", "low-utilisation"),
)
"""Pages whose code launches something, in two processes."""


@pytest.mark.slow
@pytest.mark.parametrize("names", LAUNCHING, ids=" ".join)
def test_the_code_that_launches_runs(names: tuple[str, ...], tmp_path: Path, forks: Forks) -> None:
    pages = {PAGES / f"how-to/{name}.md": list[Block]() for name in names}
    for page, chosen in pages.items():
        there = [block for block in blocks(page) if not block.title and block.mark != "skip"]
        chosen += [block for block in there if block.mark != "needs" or find_spec(block.why)]
    run({page: chosen for page, chosen in pages.items() if chosen}, tmp_path, forks)


def test_each_launching_page_is_tested() -> None:
    launching = {page.stem for page in PAGES.rglob("*.md") if any(block.mark in ("slow", "needs") for block in blocks(page))}
    assert launching == {name for names in LAUNCHING for name in names}


def test_commands_and_their_options_exist() -> None:
    known = {name: generated._help(name) for name in generated.commands() if name != "lab"}
    texts = [page.read_text() for page in (*PAGES.rglob("*.md"), ROOT / "README.md")]
    lines = [line for text in texts for line in re.findall(r"(?:^|`)(workbench [a-z][^`\n]*)", text, re.M)]
    assert len(lines) > 10
    for line in lines:
        command, *words = line.partition(" -- ")[0].split()[1:]
        assert command in (*known, "lab"), line
        for option in (word for word in words if word.startswith("--")):
            assert re.search(rf"{option}\b", known[command]), line


def figures(text: str) -> set[str]:
    """What a text states as measured: percentages, seconds, megabytes, factors, and counts such as "11 of 12"."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    return set(re.findall(r"(?<![\d.,])(?:\d+ of \d+|\d+(?:\.\d+)? (?:%|s|MB)(?!\w)|\d+\.\d+ times)", text))


def measured_text(page: str) -> str:
    """The sentences of a how-to page that refer to a measurement: other numbers there are settings and examples."""
    return "\n".join(part for part in page.split("\n\n") if "RESULTS.md" in part)


def test_figures_are_those_of_the_results() -> None:
    results = (ROOT / "benchmarks/RESULTS.md").read_text().replace("**", "")
    stated = {
        page: page.read_text().partition("## Measured error")[2].partition("\n## ")[0] for page in (PAGES / "how-it-knows").glob("*.md")
    }
    stated |= {page: page.read_text() for page in (PAGES / "limits.md",)}
    stated |= {page: measured_text(page.read_text()) for page in (PAGES / "how-to").glob("*.md")}
    stated[ROOT / "README.md"] = (ROOT / "README.md").read_text().partition("## Compared with other tools")[2]
    assert sum(len(figures(text)) for text in stated.values()) > 40
    for page, text in stated.items():
        strange = sorted(figure for figure in figures(text) if not re.search(rf"(?<![\d.]){re.escape(figure)}", results))
        assert not strange, f"{page.relative_to(ROOT)} states {strange}, which benchmarks/RESULTS.md does not have"


def test_the_page_of_budgets_has_every_call_with_its_default() -> None:
    page = (PAGES / "reference/budgets.md").read_text()
    listed = {
        name: None if default == "None" else float(default) for name, default in re.findall(r"(?m)^\| `([\w.]+)` \| (None|\d+)", page)
    }
    data = {name: getattr(wb.data, name) for name in dir(wb.data) if not name.startswith("_")}
    named = {f"wb.{name}": getattr(wb, name) for name in wb.__all__} | {f"wb.data.{name}": each for name, each in data.items()}
    named |= {f"{each.__name__}.prove": each.prove for each in (wb.Diagnosis, wb.WhyNotLinear, BatchLengths, ProposedPlan)}
    takes = {
        name: inspect.signature(each).parameters["budget_s"].default
        for name, each in named.items()
        if inspect.isfunction(each) and "budget_s" in inspect.signature(each).parameters
    }
    assert listed == takes
    longer = {name for name, default in takes.items() if default is None or default > 60}
    assert longer == {"wb.bisect", "wb.scaling_law", "wb.sweep", "wb.calibrate"}
    assert all(f"* `{name}`" in page for name in longer)


@pytest.mark.parametrize("made", [generated.verdicts(), generated.limits()], ids=["verdicts", "limits"])
def test_the_tables_of_verdicts_are_those_of_the_code(made: str) -> None:
    assert made in (PAGES / "reference/verdicts.md").read_text(), f"docs/pages/reference/verdicts.md should have:\n{made}"


def test_every_insert_has_a_page_and_every_page_a_place() -> None:
    texts, pictures = make_site.pages()
    assert all(make_site.INSERT.search(text) is None for text in texts.values())
    asked = {name for page in PAGES.rglob("*.md") for name in make_site.INSERT.findall(page.read_text())}
    assert asked == set(generated.INSERTS)
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "docs/mkdocs.yml").read_text())
    assert sorted(listed) == sorted(name for name in texts if not name.startswith("notebooks/"))
    assert {name for name in pictures if name.startswith("notebooks/")}
    assert not [page for page, text in texts.items() if re.search(r"!\[[^\]]*\]\(\)", text)], "a picture without its file"
    assert {"pictures/panel.png", "pictures/diagnosis.png"} <= set(pictures)


def test_every_verdict_cause_and_file_is_explained() -> None:
    words = (PAGES / "reference/verdicts.md").read_text()
    assert generated.causes()
    for cause in generated.causes():
        assert f"`{cause}`" in words, f"reference/verdicts.md does not explain the cause {cause!r}"
    names = (PAGES / "reference/run-directory.md").read_text()
    own = {
        value for name, value in vars(run_directory).items() if name.isupper() and isinstance(value, str) and not name.startswith("ENV_")
    }
    for name in own:
        assert f"`{name}" in names, f"reference/run-directory.md does not list {name}"


def test_no_page_has_the_marks_of_a_merge() -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *PAGES.rglob("*.md"), *ROOT.glob("notebooks/*.ipynb")]
    assert len(texts) > 60
    marks = re.compile(r'^\s*"?(<<<<<<<|>>>>>>>) ', re.M)
    assert not [text.name for text in texts if marks.search(text.read_text())]


def test_a_page_links_to_pages_and_not_to_files() -> None:
    texts, _ = make_site.pages()
    assert "](results.md#on-a-gpu)" not in texts["limits.md"]
    assert "](results.md)" in texts["limits.md"]
    assert "](notebooks/01_where_does_the_time_go.md)" in texts["tutorials.md"]
    assert "example in the README," in texts["index.md"] or "example in the README:" in texts["index.md"]
    assert make_site.outside_code("a `[b](c)` [d](e)\n```\n[f](g)\n```\n", lambda part: part.replace("](", "]<")) == (
        "a `[b](c)` [d]<e)\n```\n[f](g)\n```\n"
    )


def test_what_a_notebook_folds_is_folded_in_its_page(tmp_path: Path) -> None:
    output = {"output_type": "stream", "name": "stdout", "text": ["3 workers\n"]}
    code = {"cell_type": "code", "source": ["guess = None"], "metadata": {"jupyter": {"outputs_hidden": True}}, "outputs": [output]}
    text = "<details><summary>Hint</summary>\n\nLook at `wait`.\n\n</details>"
    notebook = tmp_path / "00_x.ipynb"
    notebook.write_text(
        json.dumps({"cells": [{"cell_type": "markdown", "source": ["# X?"]}, {"cell_type": "markdown", "source": [text]}, code]})
    )
    page, _ = notebook_pages.markdown(notebook)
    assert '<details markdown="1"><summary>Hint</summary>\n\nLook at `wait`.' in page
    assert '<details markdown="1"><summary>Output</summary>\n\n```text\n3 workers\n```\n\n</details>' in page


def test_a_broken_link_or_anchor_fails_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    checks = (ROOT / "docs/mkdocs.yml").read_text().partition("\nvalidation:")[2].partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: broken\ndocs_dir: pages\ntheme: null\nplugins: []\nvalidation:{checks}\n")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/index.md").write_text("# Here\n\n[a](#there) [b](none.md) [c](other.md#there)\n")
    (tmp_path / "pages/other.md").write_text("# Other\n")
    status, said = make_site.site(tmp_path)
    assert status
    assert len(re.findall("^WARNING", said, re.M)) == 3, said
