"""Turning: what becomes of a spec when a remedy is followed."""

import ast

from workbench.diagnosis.remedy import Remedy
from workbench.spec import IMPLEMENTATIONS, RunSpec, check_names


def turned(spec: RunSpec, remedy: Remedy) -> RunSpec:
    """The spec with a remedy's knobs turned, and with those that hang on them: without workers nothing is prefetched.

    Raises:
        SpecError: a knob that a spec does not have, or a value it does not take.
    """
    change = dict(remedy.change)
    check_names(RunSpec, change)
    if change.get("num_workers") == 0:
        change = {"prefetch_factor": None, "persistent_workers": False} | change
    if spec.optimizer and spec.optimizer not in IMPLEMENTATIONS and change.get("optimizer") in IMPLEMENTATIONS:
        change["optimizer"] = _implemented(spec.optimizer, change["optimizer"])
    return spec.replace(**change)


def _implemented(optimizer: str, how: str) -> str:
    """An optimizer's name and options, with its implementation among them.

    >>> _implemented("adamw(betas=(0.9, 0.95), foreach=True)", "fused")
    'adamw(betas=(0.9, 0.95), fused=True)'
    """
    node = ast.parse(optimizer.strip(), mode="eval").body
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    options = [option for option in call.keywords if option.arg not in IMPLEMENTATIONS]
    return ast.unparse(ast.Call(func=call.func, args=call.args, keywords=[*options, ast.keyword(how, ast.Constant(True))]))
