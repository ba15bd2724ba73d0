"""Memory, pure: the log of a step's storages, what its fullest moment is made of, the allocator under it, and what fits where."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.memory.breakdown import MemoryBreakdown as MemoryBreakdown

__all__ = ["MemoryBreakdown"]


def __getattr__(name: str) -> Any:
    if name != "MemoryBreakdown":
        raise AttributeError(f"module 'workbench.memory' has no attribute {name!r}: it offers MemoryBreakdown")
    from workbench.memory.breakdown import MemoryBreakdown

    return MemoryBreakdown
