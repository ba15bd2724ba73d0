"""Results and closed forms; pure arithmetic, no torch."""
