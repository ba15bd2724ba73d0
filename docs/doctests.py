"""Shows doctests of docstrings as code: an extension of griffe, which reads the docstrings for the reference."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)


def fenced(text: str) -> str:
    """A docstring with each doctest in a fence, so that Markdown leaves it as it is."""
    return DOCTEST.sub(lambda match: f"{match[1]}```pycon\n{match[0]}\n{match[1]}```", text)


class Doctests(griffe.Extension):
    """Puts the doctests of every docstring into fences."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of whatever was read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
