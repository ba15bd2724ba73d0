"""What fills a training step's memory: predicted without a GPU or measured, whether it fits a device, and what would make it fit.

A Recorder writes each allocation and free of a step's storages into a MemoryLog. It records real steps (`measure/memory.py`) as well as
fake ones (`estimate/dry_run.py`), in which the Trainer of real runs works on tensors without values, and CPU tensors take the memory that
CUDA's would (`estimate/cuda/`). A Replay finds the peak, CachingAllocator adds what CUDA reserves for it, `analysis/non_pytorch.py` what
the process takes beside PyTorch: together a MemoryBreakdown. Logs of one program at a few sizes form a Family, exact for every size
between. `api.py` has `estimate_memory`, `measure_memory`, `compare_memory` and `find_leaks`.
"""
