"""The ThroughputDoctor and WhyNotLinear panels: knobs with predicted steps, a verdict, and remedies to prove."""
