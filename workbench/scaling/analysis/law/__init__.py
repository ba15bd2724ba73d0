"""Laws of scale: how the loss falls with parameters and data, fitted to runs that were made, with intervals, for those that were not.

`Points` are what was measured. `ScalingLaw.fit(points)` is L(N, D) = E + A/N^α + B/D^β through them (`objective`: the robust procedure;
`bootstrap`: how sure it is; `doubt`: what cannot be told from so few). A law gives a `Forecast` of one run, the `Allocation` of a compute
budget, and its own `HeldOut` test: fitted to small compute, held against large (`answers`).
"""
