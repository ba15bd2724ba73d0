"""Memory, pure: the log of a step's storages, what its fullest moment is made of, the allocator under it, and what fits where."""
