"""Drawing power: the energy of a run or of a plan, asked in one way."""

import dataclasses
from typing import Any

from workbench.cost.energy import Energy, estimated
from workbench.planning.plans import Plan
from workbench.planning.ranges import PlanError
from workbench.planning.short_list import Plans
from workbench.run import Run


def energy(target: Run | Plan | Plans, *, steps: int | None = None, **inputs: Any) -> Energy:
    """Energy, money and carbon: of a run as its hardware told or by the design power of its devices, of a plan by the latter.

    `measured` says which. Embodied carbon, the loader's disks and the network are left out.

    Args:
        target: a Run, a Plan, or Plans (of which the best counts).
        steps: of a plan; None = as it was planned.
        inputs: `price` (money per GPU and hour), `electricity` (money per kWh), `intensity` (gCO2e per kWh), `pue`; `watts` of a device of
            which nothing is known.

    Raises:
        PlanError: something else was given.
        CostError: nothing was counted and the device's power is not known; or a number that is none.
    """
    if isinstance(target, Run):
        if steps is not None:
            raise PlanError(f"steps={steps}: a run has the steps that it has; steps are of a plan")
        return target.energy(**inputs)
    plan = target.best if isinstance(target, Plans) else target
    if not isinstance(plan, Plan):
        raise PlanError(f"energy({type(target).__name__}): a Run, a Plan or Plans is wanted")
    count = plan.steps if steps is None else steps
    if plan.energy is None or inputs.get("watts") is not None:
        seconds, busy = plan.seconds.mid * count, plan.parts["compute"] / plan.seconds.mid
        return estimated(seconds, plan.gpus, plan.device, utilization=min(1.0, busy), per_node=plan.gpus_per_node, **inputs)
    known, share = plan.energy, count / plan.steps
    parts = {name: getattr(known, name) * share for name in ("joules", "seconds", "low", "high") if getattr(known, name) is not None}
    return dataclasses.replace(known, **parts, **{name: value for name, value in inputs.items() if name != "watts"})
