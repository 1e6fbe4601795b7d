"""Map the jobs of a window onto nodes: `solve` (greedy, then a MILP, bounded) and `check` (is a solution allowed?).

`solve_in_parts` divides a large window into parts that may be solved at the same time.
"""

from .check import check
from .greedy import greedy
from .parts import split
from .solve import SolveLimits, solve, solve_in_parts

__all__ = ["SolveLimits", "check", "greedy", "solve", "solve_in_parts", "split"]
