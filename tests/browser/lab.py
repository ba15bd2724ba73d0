"""A JupyterLab of our own, and one notebook at a time in it: driven by Lab's own commands, waiting on state, never on time."""

import json
import os
import secrets
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from playwright.sync_api import BrowserContext, Locator, Page, expect

TIMEOUT = 45_000  # milliseconds; for a machine that is busy
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
SETTINGS: dict[str, dict[str, Any]] = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},  # its toast covers the page even without news
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells are there though they are not on the screen
}
THEMES = {"JupyterLab Dark": "dark", "JupyterLab Light": "light"}
FOLDERS = {
    "JUPYTER_CONFIG_DIR": "config",
    "JUPYTER_DATA_DIR": "data",
    "JUPYTER_RUNTIME_DIR": "runtime",
    "IPYTHONDIR": "ipython",
    "JUPYTERLAB_SETTINGS_DIR": "settings",
    "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
}
expect.set_options(timeout=TIMEOUT)


class Lab:
    """JupyterLab on loopback with nothing of the user's: own configuration, data, settings and workspaces."""

    def __init__(self, folder: Path) -> None:
        self.root, self.token = folder / "root", secrets.token_hex(16)
        self.root.mkdir()
        for name, value in SETTINGS.items():
            path = folder / f"settings/@jupyterlab/{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(value))
        flags = f"""--no-browser --allow-root --ServerApp.ip=127.0.0.1 --ServerApp.port=0 --ServerApp.terminals_enabled=False
            --IdentityProvider.token={self.token} --ServerApp.root_dir={self.root} --LabApp.expose_app_in_browser=True
            --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate --LabApp.news_url=None
            --LabApp.extension_manager=readonly --LanguageServerManager.autodetect=False""".split()
        with open(folder / "lab.log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {name: str(folder / sub) for name, sub in FOLDERS.items()},
            )
        limit = time.monotonic() + 60
        while not self._answers(folder / "runtime"):
            if self.process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError((folder / "lab.log").read_text())
            time.sleep(0.1)

    def _answers(self, runtime: Path) -> bool:
        for info in runtime.glob("jpserver-*.json"):  # the port it chose is written here
            try:
                self.url = f"http://127.0.0.1:{json.loads(info.read_text())['port']}"
                self.request("/api/status")
                return True
            except (OSError, ValueError):
                pass
        return False

    def request(self, path: str, **options: Any) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self.url}{path}?token={self.token}", **options), timeout=10).close()

    def stop(self) -> None:
        try:
            self.request("/api/shutdown", method="POST", data=b"")
            self.process.wait(15)
        except (OSError, subprocess.TimeoutExpired):  # seen when a kernel was just restarting
            self.process.kill()  # its kernels notice and end by themselves
            self.process.wait()


class Pages:
    """A page with JupyterLab, which takes seconds to load, for one notebook after the other; a new one after a test that has failed."""

    def __init__(self, lab: Lab, context: BrowserContext) -> None:
        self._lab, self._context = lab, context
        self._page: Page | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []

    def page(self) -> Page:
        """With no notebook open."""
        if self._page is None:
            self._page = page = self._context.new_page()
            page.set_default_timeout(TIMEOUT)
            page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: self.errors.append(str(error)))
            page.on("request", lambda request: self.requests.append(request.url) if request.url.startswith("http") else None)
            page.goto(f"{self._lab.url}/lab?token={self._lab.token}&reset")
            page.wait_for_selector("#jupyterlab-splash", state="detached")
            page.evaluate("() => window.jupyterapp.restored")
            page.evaluate("() => { window.jupyterapp.commands.execute('application:toggle-left-area') }")
        return self._page

    def close(self) -> None:
        """The next notebook gets a page of its own."""
        if self._page is not None:
            self._page.close()
            self._page = None
        self.errors.clear()
        self.requests.clear()

    def path(self, notebook: Path) -> str:
        """Its name on the server."""
        return str(notebook.relative_to(self._lab.root))


class Notebook:
    """One notebook, alone in its page."""

    def __init__(self, pages: Pages, path: Path) -> None:
        self._pages, self.page, self.errors = pages, pages.page(), pages.errors
        self.command("docmanager:open", path=pages.path(path))
        self.until("w => w.sessionContext.session?.kernel?.status === 'idle'")

    def until(self, test: str) -> None:
        """Wait until a JavaScript function of the notebook's widget is true."""
        widget = "const w = window.jupyterapp?.shell?.currentWidget"
        self.page.wait_for_function(f"() => {{ {widget}; return w?.sessionContext && ({test})(w) }}")

    def command(self, name: str, **arguments: object) -> None:
        """Start one of Lab's commands."""
        self.page.evaluate("([name, args]) => { window.jupyterapp.commands.execute(name, args) }", [name, arguments])

    def run(self, cell: int, wait: bool = True) -> None:
        """Run a cell, counted from 0; wait until it has ended."""
        content = "window.jupyterapp.shell.currentWidget.content"
        self.page.evaluate(f"() => {{ {content}.activeCellIndex = {cell}; {content}.deselectAll() }}")
        self.command("notebook:run-cell")
        if wait:
            self.until_run(cell)

    def until_run(self, cell: int) -> None:
        self.until(f"w => (m => m.executionCount && m.executionState !== 'running')(w.content.widgets[{cell}].model)")

    def output(self, cell: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(cell).locator(".jp-Cell-outputArea")

    def see(self, name: str) -> None:
        """Take a picture in each theme, first in the one that is on; the other stays. What has the focus keeps it."""
        folder = Path(os.environ.get("WORKBENCH_SHOTS") or Path(__file__).parents[2] / "shots")
        folder.mkdir(exist_ok=True)
        focused = self.page.evaluate_handle("() => document.activeElement")
        now = self.page.evaluate("() => document.body.dataset.jpThemeName")
        for theme in sorted(THEMES, key=lambda theme: theme != now):
            if theme != now:
                self.theme(theme)
            self.page.screenshot(path=folder / f"{name}-{THEMES[theme]}.png")
        focused.evaluate("element => element.focus({ preventScroll: true })")

    def theme(self, name: str) -> None:
        """Change the theme. Lab hides itself for a frame then, and where that frame is long, the browser takes the focus away."""
        self.command("apputils:change-theme", theme=name)
        self.page.wait_for_selector(f'body[data-jp-theme-name="{name}"]', state="attached")
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")  # it came before the name, and goes after Lab is shown again

    def close(self) -> None:
        """Close, and see that the page had no error and asked nobody outside this machine."""
        self.page.evaluate(
            "() => (w => w.sessionContext.shutdown().then(() => { w.context.model.dirty = false; w.dispose() }))"
            "(window.jupyterapp.shell.currentWidget)"
        )
        self.page.wait_for_selector(".jp-NotebookPanel", state="detached")
        own = [text for text in self.errors if "Canceled future" not in text]  # Lab says so itself when a kernel is restarted
        foreign = [url for url in self._pages.requests if "//127.0.0.1:" not in url]
        self.errors.clear()
        self._pages.requests.clear()
        assert not own, f"errors of the page: {own}"
        assert not foreign, f"the page asked {foreign}"


def write(folder: Path, cells: Sequence[str], execute: bool) -> Path:
    """A notebook of code cells; with `execute`, with outputs as somebody else would have committed them (so it is not trusted here)."""
    import nbformat  # here: this module is imported wherever tests are collected, and these take seconds
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    if execute:
        NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(folder)}}).execute()
    path = folder / f"{secrets.token_hex(4)}.ipynb"
    nbformat.write(notebook, path)
    return path
