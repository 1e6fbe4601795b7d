"""Map the jobs of a window onto nodes: `solve` (greedy, then a MILP, bounded) and `check` (is a solution allowed?)."""

from .check import check
from .greedy import greedy
from .solve import SolveLimits, solve

__all__ = ["SolveLimits", "check", "greedy", "solve"]
