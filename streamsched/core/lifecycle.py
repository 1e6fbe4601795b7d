"""The life of a job, as one table.

    arrive → QUEUED ⇄ HELD            QUEUED ⇄ UNFIT (no set of nodes could hold it)
    QUEUED → PLACED → RUNNING → COMPLETED | FAILED
    PLACED | RUNNING → STOPPING → QUEUED | HELD | CANCELLED | COMPLETED   (once its GPUs are known to be free)
    QUEUED | HELD | UNFIT → CANCELLED

A run's GPUs are held from `place` until it has ended, so a job in STOPPING cannot be placed again. The exception is a
run on a node thought lost: after a grace its job goes back to QUEUED while the run (LOST) keeps its GPUs until it is
heard of; should that run turn out to have completed, the job is COMPLETED from wherever it is. A run that was told to
stop and then fails is not held against its job: that is how many stops end.
Terminal states have no way out.
"""

from __future__ import annotations

import enum
from typing import Final

from .errors import InvalidTransition
from .model import Job, JobState


class Trigger(enum.StrEnum):
    PLACE = "place"
    START = "start"
    STOP = "stop"
    REQUEUE = "requeue"
    HOLD = "hold"
    RELEASE = "release"
    UNFIT = "unfit"
    FIT = "fit"
    CANCEL = "cancel"
    COMPLETE = "complete"
    FAIL = "fail"


_S, _T = JobState, Trigger

TRANSITIONS: Final[dict[tuple[JobState, Trigger], JobState]] = {
    (_S.QUEUED, _T.PLACE): _S.PLACED,
    (_S.QUEUED, _T.HOLD): _S.HELD,
    (_S.QUEUED, _T.UNFIT): _S.UNFIT,
    (_S.QUEUED, _T.CANCEL): _S.CANCELLED,
    (_S.QUEUED, _T.COMPLETE): _S.COMPLETED,  # a run thought lost had completed
    (_S.UNFIT, _T.FIT): _S.QUEUED,
    (_S.UNFIT, _T.HOLD): _S.HELD,
    (_S.UNFIT, _T.CANCEL): _S.CANCELLED,
    (_S.UNFIT, _T.COMPLETE): _S.COMPLETED,
    (_S.HELD, _T.RELEASE): _S.QUEUED,
    (_S.HELD, _T.CANCEL): _S.CANCELLED,
    (_S.HELD, _T.COMPLETE): _S.COMPLETED,
    (_S.PLACED, _T.START): _S.RUNNING,
    (_S.PLACED, _T.STOP): _S.STOPPING,
    (_S.PLACED, _T.REQUEUE): _S.QUEUED,
    (_S.PLACED, _T.COMPLETE): _S.COMPLETED,
    (_S.PLACED, _T.FAIL): _S.FAILED,
    (_S.RUNNING, _T.STOP): _S.STOPPING,
    (_S.RUNNING, _T.REQUEUE): _S.QUEUED,
    (_S.RUNNING, _T.COMPLETE): _S.COMPLETED,
    (_S.RUNNING, _T.FAIL): _S.FAILED,
    (_S.STOPPING, _T.REQUEUE): _S.QUEUED,
    (_S.STOPPING, _T.HOLD): _S.HELD,
    (_S.STOPPING, _T.CANCEL): _S.CANCELLED,
    (_S.STOPPING, _T.COMPLETE): _S.COMPLETED,
}

END_OF_STOP: Final[dict[JobState, Trigger]] = {
    JobState.QUEUED: Trigger.REQUEUE,
    JobState.HELD: Trigger.HOLD,
    JobState.CANCELLED: Trigger.CANCEL,
}
"""`Job.then` → what happens to the job when the run that was being stopped has ended."""


def next_state(job: Job, trigger: Trigger) -> JobState:
    """The state after `trigger`; raises InvalidTransition and changes nothing when the table has no such way."""
    try:
        return TRANSITIONS[job.state, trigger]
    except KeyError:
        raise InvalidTransition(f"job {job.spec.job_id} is {job.state}: no way to {trigger} it") from None
