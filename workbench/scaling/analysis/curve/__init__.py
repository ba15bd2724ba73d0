"""Throughput over the number of processes: points, curve, forms, fit, forecast."""
