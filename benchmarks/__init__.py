"""What the library costs and how right it is, against named peers (RESULTS.md), and what only a GPU can tell (`gpu_check`)."""
