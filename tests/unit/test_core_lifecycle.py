"""The table of a job's life: what is in it leads where it says, everything else raises and changes nothing."""

from __future__ import annotations

import itertools

import pytest

from streamsched.core.errors import InvalidTransition
from streamsched.core.lifecycle import END_OF_STOP, TRANSITIONS, Trigger, next_state
from streamsched.core.model import TERMINAL, Job, JobSpec, JobState

# Written out once more, by the drawing in lifecycle.py and not by its table.
WAYS = {
    "queued": {"place": "placed", "hold": "held", "unfit": "unfit", "cancel": "cancelled", "complete": "completed"},
    "unfit": {"fit": "queued", "hold": "held", "cancel": "cancelled", "complete": "completed"},
    "held": {"release": "queued", "cancel": "cancelled", "complete": "completed"},
    "placed": {
        "start": "running",
        "stop": "stopping",
        "requeue": "queued",
        "complete": "completed",
        "fail": "failed",
    },
    "running": {"stop": "stopping", "requeue": "queued", "complete": "completed", "fail": "failed"},
    "stopping": {"requeue": "queued", "hold": "held", "cancel": "cancelled", "complete": "completed"},
    "completed": {},
    "failed": {},
    "cancelled": {},
}


def job(state: JobState) -> Job:
    return Job(spec=JobSpec(job_id="j", submitted_at=0.0, gpus_per_worker=1), seq=0, state=state, queued_at=0.0)


@pytest.mark.parametrize(("state", "trigger"), list(itertools.product(JobState, Trigger)), ids=str)
def test_every_pair_leads_where_the_drawing_says_or_raises(state: JobState, trigger: Trigger) -> None:
    before = job(state)
    if trigger in WAYS[state]:
        assert next_state(before, trigger) == WAYS[state][trigger]
    else:
        with pytest.raises(InvalidTransition, match=f"job j is {state}: no way to {trigger}"):
            next_state(before, trigger)
    assert before == job(state)


def test_terminal_states_have_no_way_out() -> None:
    assert not [state for state, _ in TRANSITIONS if state in TERMINAL]
    assert {"completed", "failed", "cancelled"} == TERMINAL


def test_every_state_can_be_reached_and_every_other_can_be_left() -> None:
    assert {JobState.QUEUED, JobState.UNFIT} | set(TRANSITIONS.values()) == set(JobState)
    assert {state for state, _ in TRANSITIONS} == set(JobState) - TERMINAL


def test_the_end_of_a_stop_is_in_the_table() -> None:
    for then, trigger in END_OF_STOP.items():
        assert TRANSITIONS[JobState.STOPPING, trigger] is then
