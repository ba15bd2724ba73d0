"""Style: the style sheet of a panel that has no view of its own in the page."""

from pathlib import Path

import anywidget

_HERE = Path(__file__).parent


class Style(anywidget.AnyWidget):
    """Shows nothing; where it is shown, the sheet of our panels applies."""

    _esm = "export default { render({ el }) { el.hidden = true } }"
    _css = "".join(
        (_HERE / name).read_text(encoding="utf-8") for name in ("panel.css", "doctor.css", "explorer.css", "planner.css", "trace.css")
    )

    def __repr__(self) -> str:
        return "Style()"
