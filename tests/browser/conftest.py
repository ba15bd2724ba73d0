"""One JupyterLab, one Chromium and one page for all browser tests of a worker, in which each notebook is opened and closed."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, sync_playwright

from tests.browser.lab import FLAGS, Lab, Notebook, Pages, write
from tests.conftest import FAILED
from workbench import launch
from workbench.runs.run import Run
from workbench.runs.spec import RunSpec

SCRIPT = Path(__file__).with_name("train_slowly.py")
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def context() -> Iterator[BrowserContext]:
    """What the pages of all notebooks share: the browser's cache, so that it loads and compiles JupyterLab once."""
    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None:
        message = f"no Chromium on PATH (looked for {', '.join(CHROMIUMS)}). Debian: apt-get install chromium"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium.new_context(viewport={"width": 1180, "height": 980})
        chromium.close()


@pytest.fixture(scope="session")
def lab(context: BrowserContext, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    server = Lab(tmp_path_factory.mktemp("lab"))
    shutil.copy(SCRIPT, server.root)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def pages(lab: Lab, context: BrowserContext) -> Pages:
    return Pages(lab, context)


@pytest.fixture
def open_notebook(lab: Lab, pages: Pages, request: pytest.FixtureRequest) -> Iterator[Callable[..., Notebook]]:
    """`open_notebook("cell", "cell", …)`, or with a Path; `execute=True` runs it first and stores its outputs."""
    opened: list[Notebook] = []

    def open_one(*cells: str | Path, execute: bool = False) -> Notebook:
        path = cells[0] if isinstance(cells[0], Path) else write(lab.root, [str(cell) for cell in cells], execute)
        opened.append(Notebook(pages, path))
        return opened[-1]

    yield open_one
    try:
        for notebook in opened:
            notebook.close()
    except BaseException:
        request.node.stash[FAILED] = True
        raise
    finally:
        if request.node.stash[FAILED]:
            pages.close()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A real run of two ranks that has finished."""
    spec = RunSpec(task="clipart-resnet", nproc_per_node=2, steps=24, micro_batch=16, schedule="cosine", lr=0.05, evaluate=True)
    return launch(spec, runs_dir=tmp_path_factory.mktemp("runs"), name="before").wait(timeout=120, check=True)
