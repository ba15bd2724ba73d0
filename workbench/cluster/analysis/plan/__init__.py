"""Search for the layouts of a model on a cluster: workload, layouts, memory, timing, selection."""
