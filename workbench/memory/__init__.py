"""What fills a training step's memory: predicted without a GPU or measured, whether it fits a device, and what would make it fit.

A Recorder (`measure/recorder.py`) writes each allocation and free of a step's storages into a MemoryLog (`analysis/log.py`). It records
real steps (`measure/memory.py`) as well as fake ones (`estimate/dry_run.py`), in which the Trainer of real runs works on tensors without
values, and CPU tensors take the memory that CUDA's would (`estimate/cuda/`).

A log is read by a Replay (`analysis/replay.py`), which finds the peak. CachingAllocator (`analysis/caching_allocator.py`) adds what CUDA
reserves for it, `analysis/non_pytorch.py` what the process takes beside PyTorch. Together they are a MemoryBreakdown
(`analysis/breakdown.py`), with Holders by module and operator (`analysis/holders.py`), a MemoryTimeline (`analysis/over_time.py`) and the
answer whether it fits (`analysis/fit.py`). Logs of one program at a few sizes form a Family (`analysis/family.py`): exact for every size
between.

`api.py` has `estimate_memory`, `measure_memory`, `compare_memory` and `find_leaks`; `max_micro_batch.py`, `ladder.py` and `would_fit.py`
search for what fits; `calibrate.py` fits what a process takes on a GPU outside of PyTorch. The explorer (`panel/`) has dry
runs made in another process (`estimator_process.py`) and interpolates between them (`estimate_curves.py`).
"""
