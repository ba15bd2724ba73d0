"""Notebook panels: the trace explorer (`explorer` with `model` and `html`), and `perfetto`, which shows Perfetto without a network."""
