"""Predicts throughput for more processes, and loss for larger models and more data, from measured runs, with intervals.

Throughput (`analysis/curve/`): a `ScalingCurve` is made of `ScalingPoint`s (`point.py`), from runs or by hand. `curve.fit()`
fits every form of `forms.py`, weighs each by how well it predicts the last point from the others (`fit.py`), and their ensemble gives a
`CurveForecast` for any number of processes: low, mid, high, and beside it `naive`, the linear extrapolation of the largest measured point.

Loss (`analysis/law/`): `Points` are measured runs, `ScalingLaw.fit(points)` is L(N, D) = E + A/N^α + B/D^β through them. A law gives a
`Forecast` of a run, the `Allocation` of a compute budget, and its own `HeldOut` test.

`api.py` has `scaling_curve`, which launches the runs of a curve and keeps them in a `CurveDirectory`, and `scaling_law`.
`plot.py` draws both; `panel/` is the ScalingExplorer.
"""
