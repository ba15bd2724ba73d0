"""Benchmarks: what the library costs and how accurate it is, against named peers (RESULTS.md); `gpu_check` is what needs a GPU."""
