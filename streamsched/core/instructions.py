"""What the core wants done, in the imperative. The runner (live) or the kernel (simulation) carries it out."""

from __future__ import annotations

from msgspec import Struct

from .model import Allocation
from .problem import Problem, SolveStatus


class Why(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a placement came about, for its owner and for audits."""

    policy: str = ""
    score: float = 0.0
    solver: SolveStatus = SolveStatus.EMPTY
    gap: float | None = None
    window: int = 0


class Instruction(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of all instructions."""


class Place(Instruction, frozen=True, kw_only=True, tag="place"):
    """Start all workers of a job; `started` is expected before `lease_until`."""

    placement_id: str
    job_id: str
    attempt: int
    allocations: tuple[Allocation, ...]
    lease_until: float
    why: Why
    labels: dict[str, str] = {}
    tenant: str = "default"
    traceparent: str | None = None


class Preempt(Instruction, frozen=True, kw_only=True, tag="preempt"):
    """Let the run save its work and stop; answered by `preempted`."""

    placement_id: str
    job_id: str
    attempt: int
    reason: str


class Revoke(Instruction, frozen=True, kw_only=True, tag="revoke"):
    """Stop the run, or never start it; answered by `released`, also when nothing of it runs."""

    placement_id: str
    job_id: str
    attempt: int
    reason: str


class SolveWindow(Instruction, frozen=True, kw_only=True, tag="solve_window"):
    """Solve this, off the event loop, and come back with `WindowSolved`."""

    problem: Problem


class Refuse(Instruction, frozen=True, kw_only=True, tag="refuse"):
    """This input cannot be applied and is to be kept with its reason; the state did not change."""

    code: str
    detail: str


class Absorb(Instruction, frozen=True, kw_only=True, tag="absorb"):
    """This input was late, early or a duplicate and had no effect; counted, not kept."""

    code: str
    detail: str


Decision = Place | Preempt | Revoke
"""Instructions that go to executors."""
