"""The ScalingExplorer panel: a slider of GPUs with predicted throughput, limits, cost and energy."""
