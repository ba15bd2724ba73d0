"""Scaling: throughput against the number of processes (or another knob), measured; and what more processes would bring, with an interval.

A `ScalingCurve` is made of `ScalingPoint`s, from runs (`reading`) or by hand. `curve.fit()` holds the laws of `forms` against it, each
scored on the last point by the others (`fitting`), and together they give a `CurveForecast` of any number of processes: low, mid, high,
and always the naive line beside it, on which every process goes on as in the largest measured point. `mechanisms`: laws for curves that
say more of themselves (`How`). `doubt`: what would narrow an interval.
"""
