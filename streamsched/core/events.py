"""What happened, in the past tense: the only input of the core.

The same values are written to `scheduler.journal`, so their JSON form is a contract: fields are only ever added, with
defaults. Times are UTC epoch seconds as told by whoever reports; the scheduler's own `now` is passed beside the event.
"""

from __future__ import annotations

from msgspec import Struct

from .config import SchedulerConfig
from .model import JobSpec, NodeSpec
from .problem import Solution


class Event(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event"):
    """Base of all events."""


# ── jobs and commands ────────────────────────────────────────────────────────────────────────────────────────────────


class JobArrived(Event, frozen=True, kw_only=True, tag="job_arrived"):
    spec: JobSpec


class CancelRequested(Event, frozen=True, kw_only=True, tag="cancel_requested"):
    job_id: str
    offset: int = -1
    """Position of the command in its origin partition; all commands of a job share one partition."""


class HoldRequested(Event, frozen=True, kw_only=True, tag="hold_requested"):
    job_id: str
    offset: int = -1


class ReleaseRequested(Event, frozen=True, kw_only=True, tag="release_requested"):
    job_id: str
    offset: int = -1


class ReprioritiseRequested(Event, frozen=True, kw_only=True, tag="reprioritise_requested"):
    job_id: str
    offset: int = -1
    priority_class: str | None = None
    weight: float | None = None


# ── runs, as executors report them ───────────────────────────────────────────────────────────────────────────────────


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    placement_id: str
    job_id: str
    time: float


class RunProgressed(Event, frozen=True, kw_only=True, tag="run_progressed"):
    placement_id: str
    job_id: str
    time: float
    fraction: float | None = None
    step: int | None = None
    checkpointed: bool = False


class RunCompleted(Event, frozen=True, kw_only=True, tag="run_completed"):
    placement_id: str
    job_id: str
    time: float
    exit_code: int = 0


class RunFailed(Event, frozen=True, kw_only=True, tag="run_failed"):
    """`retryable`: not the job's own fault (node, network); it is queued again."""

    placement_id: str
    job_id: str
    time: float
    exit_code: int | None = None
    reason: str = ""
    retryable: bool = False


class RunPreempted(Event, frozen=True, kw_only=True, tag="run_preempted"):
    placement_id: str
    job_id: str
    time: float


class RunRejected(Event, frozen=True, kw_only=True, tag="run_rejected"):
    """The executor would not start it; nothing of it runs."""

    placement_id: str
    job_id: str
    time: float
    node_id: str | None = None
    reason: str = ""


class RunReleased(Event, frozen=True, kw_only=True, tag="run_released"):
    """GPUs of a run are free again: those on `node_ids`, or all of them when it is empty."""

    placement_id: str
    job_id: str
    time: float
    node_ids: tuple[str, ...] = ()


# ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class NodeJoined(Event, frozen=True, kw_only=True, tag="node_joined"):
    """A node is there with this inventory; said again with another inventory it replaces the old one."""

    spec: NodeSpec


class NodeCapacityChanged(Event, frozen=True, kw_only=True, tag="node_capacity_changed"):
    node_id: str
    gpus: int


class NodeHeard(Event, frozen=True, kw_only=True, tag="node_heard"):
    """A sign of life. Only those that may change the state (of a lost node) reach the core."""

    node_id: str


class NodeCordoned(Event, frozen=True, kw_only=True, tag="node_cordoned"):
    node_id: str


class NodeUncordoned(Event, frozen=True, kw_only=True, tag="node_uncordoned"):
    node_id: str


class NodeDrained(Event, frozen=True, kw_only=True, tag="node_drained"):
    node_id: str


class NodeLost(Event, frozen=True, kw_only=True, tag="node_lost"):
    """The node is gone or has been silent for too long. `fenced`: it is certain that nothing runs there any more.

    `time`: when that was so, by the clock of whoever said it. The news may be old: what was placed since is not meant.
    """

    node_id: str
    fenced: bool = False
    time: float | None = None


# ── the scheduler's own ──────────────────────────────────────────────────────────────────────────────────────────────


class EpochStarted(Event, frozen=True, kw_only=True, tag="epoch_started"):
    """A worker took the pool over. Decisions of earlier epochs that come later do not count."""

    epoch: int
    config: SchedulerConfig


class WindowElapsed(Event, frozen=True, kw_only=True, tag="window_elapsed"):
    """Time to look at leases, backoffs and the queue."""


class WindowSolved(Event, frozen=True, kw_only=True, tag="window_solved"):
    solution: Solution


CoreEvent = (
    JobArrived
    | CancelRequested
    | HoldRequested
    | ReleaseRequested
    | ReprioritiseRequested
    | RunStarted
    | RunProgressed
    | RunCompleted
    | RunFailed
    | RunPreempted
    | RunRejected
    | RunReleased
    | NodeJoined
    | NodeCapacityChanged
    | NodeHeard
    | NodeCordoned
    | NodeUncordoned
    | NodeDrained
    | NodeLost
    | EpochStarted
    | WindowElapsed
    | WindowSolved
)
