"""Style: the style sheet of a panel that has no view of its own in the page."""

from pathlib import Path

import anywidget

from workbench.core.display import colors

_HERE = Path(__file__).parent


def sheet() -> str:
    """The style sheet of all panels, after the variables that name our colours."""
    return colors.CSS + (_HERE / "panels.css").read_text(encoding="utf-8")


class Style(anywidget.AnyWidget):
    """Shows nothing; where it is shown, the sheet of our panels applies."""

    _esm = "export default { render({ el }) { el.hidden = true } }"
    _css = sheet()

    def __repr__(self) -> str:
        return "Style()"
