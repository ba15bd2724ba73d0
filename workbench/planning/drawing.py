"""Drawing power: the energy of a run or of a plan, asked in one way."""

from typing import Any

from workbench.checks import whole_number
from workbench.cost.energy import Energy
from workbench.planning.plans import Plan
from workbench.planning.power import checked
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
            which nothing is known. A plan has those that it was made with; these go before them.

    Raises:
        PlanError: something else was given.
        CostError: nothing was counted and the device's power is not known; or a number out of bounds.
    """
    checked(inputs)
    if isinstance(target, Run):
        if steps is not None:
            raise PlanError(f"steps={steps}: a run has the steps that it has; steps are of a plan")
        drawn: Energy = target.energy(**inputs)
        return drawn
    plan = target.best if isinstance(target, Plans) else target
    if not isinstance(plan, Plan):
        raise PlanError(f"energy({target!r:.60}): a Run, a Plan or Plans is wanted, not a {type(target).__name__}")
    if steps is not None:
        whole_number("steps", steps, least=1, also=f", or None for the {plan.steps:,} that were planned", error=PlanError)
    return plan.drawn(steps, **inputs)
