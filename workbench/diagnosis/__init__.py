"""Diagnosis: what holds a training step back, what would help and by how much. Pure: evidence goes in, nothing is run here."""

from workbench.diagnosis.diagnosis import Diagnosis
from workbench.diagnosis.evidence import Evidence
from workbench.diagnosis.proof import Ladder, Proof

__all__ = ["Diagnosis", "Evidence", "Ladder", "Proof"]
