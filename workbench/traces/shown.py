"""How an answer shows itself: text and HTML from its table."""

from workbench import display


class Shown:
    """An answer with a `table`."""

    __slots__ = ()

    @property
    def table(self) -> display.Table:
        """The answer as a table."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()
