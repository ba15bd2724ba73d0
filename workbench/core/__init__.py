"""What every other package uses. Nothing here depends on another package, and nothing loads torch.

* Facts, each in one place: `device.py` (GPUs and their datasheets), `optimizer_table.py`, `vocabulary.py` (phases of a step, parts of
  memory), `display/colors.py`.
* Values: `units.py` formats numbers as text, `statistics.py` has the `Interval`, `codec.py` converts dataclasses to JSON and back,
  `checks.py` checks arguments and raises errors that say what to try.
* The run directory: `run_directory.py` names its files and reads and writes them whole. It is the contract between processes.
* Display: `display/table.py` is how results show themselves (`Table`, `Shown`), `display/axes.py` draws on matplotlib,
  `display/html.py` makes the HTML of panels. `late.py` names the few things that a lower package uses of a higher one.
* This process and machine: `machine_speeds.py` (what basic operations cost here, on file in the user's `cache.py`), `system_load.py`,
  `energy_counters.py`, `gc.py`, `interrupts.py`, `progress.py`, `package.py`, `variables.py` (which environment variables a run keeps).
"""
