"""Planning: which layout of a model on a cluster fits and is fast, before anything is rented; closed forms only, nothing is run.

`subject` is what is trained, by its sizes or counted from a module by fake runs (`reading`). `space` lists all layouts as columns of
numbers; `memory` and `timing` say what each takes; `choosing` makes a short list that differs. `making` checks what was asked,
`answering` puts all together, `plans` and `short_list` show it; `drawing` is about energy. `ranges` has the shares of the hardware's
peaks, and of the reckoned memory, from which every interval comes.
"""

from workbench.planning.drawing import energy
from workbench.planning.making import plan
from workbench.planning.plans import Plan
from workbench.planning.ranges import EFFICIENCY, HELD, LINKS, PlanError
from workbench.planning.short_list import Front, Plans

__all__ = ["plan", "energy", "Plan", "Plans", "Front", "EFFICIENCY", "LINKS", "HELD", "PlanError"]
