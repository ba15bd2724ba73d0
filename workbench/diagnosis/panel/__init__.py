"""The ThroughputDoctor panel: knobs with predicted steps, a verdict, and remedies to prove."""
