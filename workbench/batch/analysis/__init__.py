"""Types and arithmetic of batch size and learning rate: scaling rules, noise scale, range test, trials and plans; without torch."""
