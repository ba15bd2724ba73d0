"""Records what real training steps hold in memory."""
