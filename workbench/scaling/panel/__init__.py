"""The ScalingExplorer panel."""
