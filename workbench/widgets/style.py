"""Style: the style sheet of a panel that has no view of its own in the page."""

from pathlib import Path

import anywidget

from workbench.plot import colors

_HERE = Path(__file__).parent


def sheet(*names: str) -> str:
    """Style sheets of this folder, after the variables that name our colours."""
    return colors.CSS + "".join((_HERE / name).read_text(encoding="utf-8") for name in names)


class Style(anywidget.AnyWidget):
    """Shows nothing; where it is shown, the sheet of our panels applies."""

    _esm = "export default { render({ el }) { el.hidden = true } }"
    _css = sheet("panel.css", "doctor.css", "explorer.css", "planner.css", "trace.css")

    def __repr__(self) -> str:
        return "Style()"
