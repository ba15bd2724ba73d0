"""Runs a user's training step in this process again and again, safely, and times it against changed variants of itself.

* `observe.py` checks the arguments, discovers what the step trains and takes its first steps. `discover.py` walks from the step's closure,
  `self` and globals to a `ReachableState`: models, optimizers and all else that a step may change.
* `restore.py`: a `SavedState` is a copy of it. `restore()` puts everything back bit for bit, in place.
* `feed.py`: a `Feed` gives batches without end from any loader and leaves the loader as it was. `loaders.py` copies DataLoaders with other
  options. `batches.py` looks into batches, whatever containers they come in, and caches some to train on again.
* `blocks.py`: a `BlockTimer` times blocks of successive steps. Everything compared is interleaved: blocks of variants alternate.
* `measure_speeds.py` measures what basic operations cost on this machine, once for each machine and its versions.
* `device_clock.py` times steps by events where the device runs behind the host.
* `ablations.py`: a `Variant` of the step has one part switched off or changed. Its timing is a `VariantTimes` (`results.py`, no torch).
* `interleave.py`: rounds of the loader alone, the full loop and cached batches. `ab_test.py`: two ways to do a step, side by side.
* `stack_sampler.py` samples which line of the user's code runs; `peers.py` lets all ranks of an experiment decide by the same numbers.
"""
