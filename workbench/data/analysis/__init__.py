"""What was found out about data, and orders of samples: arithmetic that needs no torch."""
