"""What a stack is at: an operator of torch, or Python and all else that a line of the user's may do."""

import dis
import linecache
import re
import sys
import sysconfig
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

import torch

_TORCH = f"{Path(torch.__file__).parent.as_posix()}/"
_STANDARD = f"{sysconfig.get_paths()['stdlib']}/"
WAITS = re.compile(r"\.(item|tolist|cpu|numpy|synchronize)\(")
"""Calls of torch in which a line waits for the device: that is a matter of the line."""
ARITHMETIC = ("BINARY_", "COMPARE_OP", "UNARY_", "STORE_SUBSCR", "CONTAINS_OP")
"""Instructions at which Python never lets another thread look: it was C code that let go, and on numbers and lists none does."""
ROOT = re.compile(r"[\s(\[]*([^\W\d]\w*)")

_texts: dict[tuple[int, int], tuple[CodeType, str, bool]] = {}
"""By id of the code, and instruction."""


def in_torch(frame: FrameType) -> bool:
    """Is an operator of torch running, or torch's own Python around it? Looked at from a thread that has just got the interpreter.

    Args:
        frame: the innermost one of the stack.
    """
    code = frame.f_code
    if code.co_filename.startswith(_TORCH) or _serves_torch(frame):
        return True
    text, arithmetic = _instruction(code, frame.f_lasti)
    if not text or WAITS.search(text):
        return False
    root = ROOT.match(text)
    name = root.group(1) if root else ""
    value = frame.f_locals.get(name, frame.f_globals.get(name))
    if isinstance(value, torch.Tensor | torch.nn.Module):
        return True
    if arithmetic:
        numpy = sys.modules.get("numpy")
        return not (numpy and isinstance(value, numpy.ndarray))
    origin = getattr(value, "__name__", "") if isinstance(value, type(sys)) else getattr(value, "__module__", "")
    return isinstance(origin, str) and origin.partition(".")[0] == "torch"


def _serves_torch(frame: FrameType) -> bool:
    """Is it the standard library, called by torch?"""
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith(_STANDARD) and "-packages/" not in at.f_code.co_filename:
        at = at.f_back
    return at is not None and at is not frame and at.f_code.co_filename.startswith(_TORCH)


def _instruction(code: CodeType, at: int) -> tuple[str, bool]:
    """The source of what an instruction does, and whether it is arithmetic."""
    key = id(code), at
    if (known := _texts.get(key)) is None:
        known = _texts[key] = (code, *_find(code, at))
    return known[1:]


def _find(code: CodeType, at: int) -> tuple[str, bool]:
    if at < 0:
        return "", False
    number, last, begin, end = next(islice(code.co_positions(), at // 2, None), (None,) * 4)
    name = dis.opname[code.co_code[at]]
    if number is None or begin is None or not (name.startswith(ARITHMETIC) or "CALL" in name):
        return "", False
    line = linecache.getline(code.co_filename, number).encode()
    text = line[begin : end if last == number else None].decode(errors="replace")
    return text, name.startswith(ARITHMETIC)
