"""Runs a user's training step in this process again and again, safely, and times it against changed variants of itself.

`observe.py` discovers what the step trains (`discover.py`: a `ReachableState`) and takes its first steps. A `SavedState` is a copy of that,
which `restore()` puts back bit for bit. A `Feed` gives batches without end from any loader. A `BlockTimer` times blocks of steps, which
alternate between the variants that are compared; a `Variant` has one part of the step switched off or changed, and its timing is a
`VariantTimes`. `peers.py` lets all ranks of an experiment decide by the same numbers.
"""
