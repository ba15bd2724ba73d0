"""Diagnosis: what holds a training step back, what would help and by how much. Pure: evidence goes in, nothing is run here."""
