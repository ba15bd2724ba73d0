"""Text that somebody else wrote to harm: as a name of a run, a module, an operator or a device it has to be shown as text."""

from html.parser import HTMLParser

EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\"' onmouseover='alert(1)"
CONTROLS = "\x1b[2J\x1b]0;title\x07\x00\x9b\x7f"
"""Clears a terminal, renames its window and rings; and characters that no page should get."""
STEERING = "\x1b\x07\x00\x9b\x7f"
TAGS = {"script", "img", "iframe", "object", "embed", "link", "form", "meta", "base"}
"""What no result of ours shows: tags that load or execute; and no handlers."""


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.harmful: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        odd = [name for name, value in attributes if name.startswith("on") or (value or "").strip().lower().startswith("javascript:")]
        if tag in TAGS or odd:
            self.harmful.append(f"<{tag} {' '.join(odd)}>")


def harmful(page: str) -> list[str]:
    """Tags of a page that load or execute something, or have a handler.

    >>> harmful('<p title="<script onload=x>">text</p><b onclick=x>')
    ['<b onclick>']
    """
    read = _Page()
    read.feed(page)
    read.close()
    return read.harmful


def assert_is_text(*pages: str) -> None:
    """All of them show the hostile words, and as words only."""
    for page in pages:
        assert "alert(1)" in page
        assert harmful(page) == []
        assert not set(page) & set(STEERING)
