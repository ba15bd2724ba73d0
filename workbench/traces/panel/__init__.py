"""Notebook panels: the trace explorer (`model`, `html`, `explorer`) and Perfetto without a network."""
