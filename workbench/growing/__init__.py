"""Growing: a scaling curve is measured, by launches that take turns, kept as it grows, and gone on with another day.

An `Order` says what is measured (`order`); its `Folder` keeps the runs (`folder`); `curves` makes those that are missing, and has the share
of communication measured beside them (`sharing`). What comes of it is a `scaling.ScalingCurve`.
"""

from workbench.growing.curves import scaling_curve

__all__ = ["scaling_curve"]
