"""Pictures of traces: `timeline` (steps and lanes), `operators`, `step`, `curves`, `flame`, `roofline`."""
