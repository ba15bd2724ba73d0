"""Predicts throughput for more processes, and loss for larger models and more data, from measured runs, with intervals.

Throughput (`analysis/curve/`): `curve.fit()` of a `ScalingCurve` fits several forms, weighs each by how well it predicts the last point
from the others, and their ensemble gives a `CurveForecast` for any number of processes. Loss (`analysis/law/`): `ScalingLaw.fit(points)`
is L(N, D) = E + A/N^α + B/D^β, which gives a `Forecast` of a run and the `Allocation` of a compute budget. `api.py` has `scaling_curve`,
which launches the runs of a curve, and `scaling_law`.
"""
