"""RemedyRows: a row per remedy, with its predicted gain, a button that proves it, and what a proof measured."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from workbench.diagnosis.analysis.proof import Proof
from workbench.diagnosis.analysis.remedy import Remedy
from workbench.diagnosis.panel import html

WIDEST = 10.0
"""Speedup beyond which bars grow no further."""


class RemedyRows:
    """Remedies below each other.

    Attributes:
        box: all of them.
        proves: the buttons, by the name of the remedy.
    """

    def __init__(self, prove: Callable[[Remedy], None]) -> None:
        """
        Args:
            prove: called with a remedy when its button is pressed.
        """
        self._prove = prove
        self.box = ipywidgets.VBox().add_class("wb-remedies")
        self.proves: dict[str, ipywidgets.Button] = {}
        self._rows: dict[str, ipywidgets.HBox] = {}
        self._remedies: Sequence[Remedy] = ()

    def show(self, remedies: Sequence[Remedy], proofs: Sequence[Proof], *, busy: bool) -> None:
        """Show other remedies; while something runs, none can be proved."""
        self.proves, self._remedies = {}, remedies
        self._rows = {remedy.name: self._row(remedy, busy) for remedy in remedies}
        self.box.children = tuple(self._rows.values())
        self.update(proofs)

    def update(self, proofs: Sequence[Proof]) -> None:
        """Show the same remedies with what was proved by now. All, since they share a scale."""
        gains = [remedy.speedup for remedy in self._remedies] + [proof.measured.mid for proof in proofs]
        scale = max([1.0, *(gain for gain in gains if math.isfinite(gain))])
        for remedy in self._remedies:
            proof = next((proof for proof in reversed(proofs) if proof.remedy.name == remedy.name), None)
            self._rows[remedy.name].children[0].value = html.remedy(remedy, proof, min(scale, WIDEST))

    def proof(self, remedy: Remedy, result: Callable[[], Any], budget_s: float) -> Callable[[], None]:
        """What proves a remedy, and shows the proof if the panel still has the same result then."""
        proved = result()

        def work() -> None:
            proved.prove(remedy, budget_s=budget_s)
            if result() is proved:
                self.update(proved.proofs)

        return work

    def hold(self, busy: bool) -> None:
        """Lock all buttons, or unlock them."""
        for button in self.proves.values():
            button.disabled = busy

    def _row(self, remedy: Remedy, busy: bool) -> ipywidgets.HBox:
        words = ipywidgets.HTML()
        if not remedy.provable:
            return ipywidgets.HBox([words]).add_class("wb-choice")
        button = ipywidgets.Button(description="Prove", tooltip=f"Alternate {remedy.name} with the step as it is, and see what it gains")
        button.disabled = busy  # until what runs has ended
        button.add_class("wb-prove")
        button.on_click(lambda _: self._prove(remedy))
        self.proves[remedy.name] = button
        return ipywidgets.HBox([words, button]).add_class("wb-choice")
