"""Numbers that decide a verdict or a prediction say where they come from."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import workbench

ROOT = Path(workbench.__file__).parent
PLACES = ("diagnosis/analysis/*.py", "diagnosis/measure/inside.py", "harness/blocks.py", "harness/device_clock.py", "core/system_load.py")
ORIGIN = re.compile(r"\b([Cc]hosen|[Mm]easured|[Dd]erived|[Ff]itted|Source|`fit_errors`|That of)\b|`fit_errors`")
NO_LIMITS = {"IQR_SIGMAS", "SIGMAS_90"}
"""Of mathematics."""


def limits(path: Path) -> Iterator[tuple[str, str]]:
    """Constants of a module with a fraction or a time among their numbers, and their docstrings."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for here, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(here, ast.Assign) or not (name := re.match(r"\(?([A-Z][A-Z0-9_]+)\b", ast.unparse(here.targets[0]))):
            continue
        numbers = [node.value for node in ast.walk(here.value) if isinstance(node, ast.Constant)]
        if any(isinstance(number, float) and number not in (0.0, 1.0) for number in numbers) and name[1] not in NO_LIMITS:
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            yield name[1], str(text)


@pytest.mark.parametrize("place", PLACES)
def test_where_each_limit_comes_from(place: str) -> None:
    """Chosen, measured (on what), derived, or fitted; and what a factor of two would change, as far as that is known."""
    some = {f"{path.stem}.{name}": text for path in sorted(ROOT.glob(place)) for name, text in limits(path)}
    assert some
    assert [name for name, text in some.items() if not ORIGIN.search(text)] == []
