"""The audit finds each kind of wrong in histories broken on purpose and nothing in sound ones; the summary adds up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.fleet import DURATION_LABEL
from loadgen.history import Audit, History, Stamped, audit
from loadgen.report import RunFacts, Summary, percentile, summarise, table
from streamsched.bus import messages as m
from streamsched.core.instructions import Place, Preempt, Revoke, Why
from streamsched.core.model import Allocation
from streamsched.core.problem import SolveStatus
from streamsched.errors import UserError

CAPACITIES = {"n1": 4, "n2": 4}


class Story:
    """Builds a history in a few words; times are Kafka's."""

    def __init__(self) -> None:
        self.history = History()

    def arrives(self, at: float, job: str, gpus: int = 1, duration_s: float = 10.0) -> Story:
        labels = {DURATION_LABEL: str(duration_s)}
        arrival = m.JobArrival(job_id=job, submitted_at=at, gpus_per_worker=gpus, labels=labels)
        self.history.arrivals.append(Stamped(at, arrival))
        return self

    def asks(self, at: float, job: str, **asked: Any) -> Story:
        self.history.arrivals.append(Stamped(at, m.JobArrival(job_id=job, submitted_at=at, **asked)))
        return self

    def gives(self, at: float, run: str, job: str, *workers: tuple[str, tuple[int, ...]], milli: int = 1000) -> Story:
        """A placement by (node, GPUs) of each worker, which completes a second later."""
        allocations = tuple(Allocation(node_id=node, gpus=gpus, gpu_milli=milli) for node, gpus in workers)
        why = Why(solver=SolveStatus.OPTIMAL, window=int(at))
        place = Place(placement_id=run, job_id=job, attempt=1, allocations=allocations, lease_until=1e9, why=why)
        return self._decides(at, place).reports(at + 1, m.Completed, run, job)

    def places(self, at: float, run: str, job: str, *gpus: int, node: str = "n1", milli: int = 1000) -> Story:
        allocation = Allocation(node_id=node, gpus=gpus or (0,), gpu_milli=milli)
        why = Why(solver=SolveStatus.OPTIMAL, window=int(at))
        return self._decides(
            at, Place(placement_id=run, job_id=job, attempt=1, allocations=(allocation,), lease_until=1e9, why=why)
        )

    def preempts(self, at: float, run: str, job: str) -> Story:
        return self._decides(at, Preempt(placement_id=run, job_id=job, attempt=1, reason=""))

    def revokes(self, at: float, run: str, job: str) -> Story:
        return self._decides(at, Revoke(placement_id=run, job_id=job, attempt=1, reason=""))

    def reports(self, at: float, kind: type[m.Completion], run: str, job: str, **more: Any) -> Story:
        message = kind(pool="p", job_id=job, placement_id=run, time=at, **more)
        self.history.completions.append(Stamped(at, message))
        return self

    def node(self, at: float, event: type[m.NodeEvent], node: str, **more: Any) -> Story:
        self.history.nodes.append(Stamped(at, event(pool="p", node_id=node, time=at, **more)))
        return self

    def _decides(self, at: float, decision: Place | Preempt | Revoke) -> Story:
        placement = m.Placement(pool="p", time=at, epoch=1, seq=1, decision=decision)
        self.history.placements.append(Stamped(at, placement))
        return self

    def audit(self, **options: Any) -> dict[str, int]:
        return dict(audit(self.history, **({"capacities": CAPACITIES} | options)).counts)


def sound() -> Story:
    """a runs and completes; b waits for its device, is preempted, and completes in a second run."""
    return (
        Story()
        .arrives(0, "a")
        .arrives(1, "b", duration_s=20)
        .places(1, "a1", "a")
        .reports(2, m.Started, "a1", "a")
        .reports(12, m.Completed, "a1", "a")
        .places(12, "b1", "b")
        .reports(13, m.Started, "b1", "b")
        .preempts(15, "b1", "b")
        .reports(16, m.Preempted, "b1", "b")
        .places(16, "b2", "b", 3, node="n2")
        .reports(17, m.Started, "b2", "b")
        .reports(37, m.Completed, "b2", "b")
    )


def test_a_sound_history_has_no_violation() -> None:
    assert sound().audit() == {}


def test_duplicates_and_late_reports_are_no_violation() -> None:
    story = sound().reports(38, m.Completed, "b2", "b").reports(39, m.Started, "a1", "a")
    story.reports(40, m.Released, "a1", "a")
    assert story.audit() == {}


@pytest.mark.parametrize(
    ("broken", "kind"),
    [
        (sound().arrives(2, "c"), "lost"),
        (sound().arrives(2, "c").places(3, "c1", "c", 2), "lost"),
        (sound().arrives(2, "c").places(3, "c1", "c", 2).reports(4, m.Completed, "c1", "c", exit_code=1), "lost"),
        (sound().places(38, "a2", "a").reports(39, m.Completed, "a2", "a"), "completed-twice"),
        (sound().reports(38, m.Completed, "x", "a"), "completed-unplaced"),
        (sound().places(38, "x1", "x").reports(39, m.Failed, "x1", "x"), "placed-unsubmitted"),
        (sound().places(38, "a1", "a", 1).reports(39, m.Completed, "a1", "a"), "placement-id-reused"),
        (sound().places(5, "a2", "a", 1).reports(39, m.Failed, "a2", "a"), "job-running-twice"),
        (sound().places(38, "a2", "a", 1, 2).reports(39, m.Failed, "a2", "a"), "wrong-size"),
        (sound().places(38, "a2", "a", node="n9").reports(39, m.Failed, "a2", "a"), "unknown-node"),
        (sound().places(38, "a2", "a", 4).reports(39, m.Failed, "a2", "a"), "over-capacity"),
        (sound().places(38, "a2", "a", -1).reports(39, m.Failed, "a2", "a"), "over-capacity"),
        (sound().places(11, "b3", "b").reports(11.5, m.Failed, "b3", "b"), "device-conflict"),
    ],
)
def test_each_kind_of_wrong_is_found(broken: Story, kind: str) -> None:
    assert broken.audit() == {kind: 1}


PAIR = {"workers": 2, "gpus_per_worker": 2}
AND_ONE = PAIR | {"remainder_gpus": 1}
SHARE = {"gpu_fraction": 0.25, "workers": 2}
ELASTIC = {"workers": 2, "gpus_per_worker": 1, "elastic": m.Elastic(min_workers=1, max_workers=3)}
TYPED = {"gpus_per_worker": 1, "gpu_types": ("P100", "V100")}
N1, N2 = "n1", "n2"


@pytest.mark.parametrize(
    ("asked", "workers", "milli", "kind"),
    [
        (PAIR, [(N1, (0, 1)), (N1, (2, 3))], 1000, None),
        (PAIR, [(N1, (0, 1)), (N2, (0, 1))], 1000, None),
        (PAIR, [(N1, (0, 1, 2, 3))], 1000, "wrong-shape"),
        (PAIR, [(N1, (0, 1, 2)), (N2, (0,))], 1000, "wrong-shape"),
        (PAIR, [(N1, (0,)), (N1, (1,)), (N1, (2,)), (N1, (3,))], 1000, "wrong-shape"),
        (PAIR, [(N1, (0, 1))], 1000, "wrong-size"),
        (AND_ONE, [(N1, (0, 1)), (N1, (2, 3)), (N2, (0,))], 1000, None),
        (AND_ONE, [(N1, (0, 1)), (N1, (2, 3))], 1000, "wrong-size"),
        (AND_ONE, [(N1, (0, 1)), (N2, (0, 1, 2))], 1000, "wrong-shape"),
        (SHARE, [(N1, (0,)), (N1, (0,))], 250, None),
        (SHARE, [(N1, (0,)), (N1, (0,))], 260, "wrong-share"),
        (SHARE, [(N1, (0,)), (N1, (1,))], 1000, "wrong-share"),
        (SHARE, [(N1, (0,))], 250, "wrong-size"),
        (PAIR, [(N1, (0, 1)), (N2, (0, 1))], 500, "wrong-share"),
        (ELASTIC, [(N1, (0,)), (N1, (1,)), (N1, (2,))], 1000, None),
        (ELASTIC, [(N1, (0,))], 1000, None),
        (ELASTIC, [(N1, (0, 1))], 1000, "wrong-shape"),
        (ELASTIC, [(N1, (0,)), (N1, (1,)), (N1, (2,)), (N1, (3,))], 1000, "wrong-size"),
        (TYPED, [(N1, (0,))], 1000, None),
        (TYPED, [(N2, (0,))], 1000, "wrong-type"),
    ],
)
def test_a_run_is_the_gang_that_was_asked_for(
    asked: dict[str, Any], workers: list[tuple[str, tuple[int, ...]]], milli: int, kind: str | None
) -> None:
    story = Story().node(0, m.Joined, N1, gpu_type="P100", gpus=4).node(0, m.Joined, N2, gpu_type="T4", gpus=4)
    story.asks(1, "a", **asked).gives(2, "a1", "a", *workers, milli=milli)
    assert story.audit() == ({kind: 1} if kind else {})


def test_types_are_those_that_the_caller_knows_or_the_node_has_had() -> None:
    story = Story().asks(0, "a", **TYPED).gives(2, "a1", "a", (N1, (0,)))
    assert story.audit() == {}, "nothing is known of the node"
    assert story.audit(gpu_types={N1: "T4"}) == {"wrong-type": 1}
    story.node(1, m.Joined, N1, gpu_type="V100", gpus=4)
    assert story.audit(gpu_types={N1: "T4"}) == {}, "it has joined as another machine"


def test_of_two_jobs_with_one_id_either_may_have_run() -> None:
    """The second is refused, but for one whose first is forgotten; the topics do not say which it was."""
    story = Story().asks(0, "a", **PAIR).asks(1, "a", gpus_per_worker=1).gives(2, "a1", "a", (N1, (0,)))
    assert story.audit() == {}
    story = Story().asks(0, "a", **PAIR).asks(1, "a", gpus_per_worker=1).gives(2, "a1", "a", (N1, (0, 1, 2)))
    assert story.audit() == {"wrong-size": 1}


def test_devices_are_held_until_the_run_is_known_to_have_ended() -> None:
    """A revoked run holds its device until it is released: placing at the revoke is too early."""
    story = Story().arrives(0, "a").arrives(0, "b").places(1, "a1", "a").revokes(5, "a1", "a").places(6, "b1", "b")
    story.reports(7, m.Released, "a1", "a").places(7, "a2", "a", 1)
    story.reports(8, m.Completed, "a2", "a").reports(8, m.Completed, "b1", "b")
    assert story.audit() == {"device-conflict": 1}


def test_a_partial_release_frees_only_its_nodes() -> None:
    story = Story().arrives(0, "a", gpus=1).arrives(0, "b").places(1, "a1", "a")
    story.reports(5, m.Released, "a1", "a", node_ids=("n2",)).places(6, "b1", "b")
    story.reports(7, m.Completed, "b1", "b").reports(8, m.Completed, "a1", "a")
    assert story.audit() == {"device-conflict": 1}


def test_a_fenced_node_holds_nothing_any_more() -> None:
    story = Story().arrives(0, "a").places(1, "a1", "a").node(5, m.Lost, "n1", fenced=True)
    story.places(6, "a2", "a").reports(9, m.Completed, "a2", "a")
    assert story.audit() == {}
    story.history.nodes.clear()
    assert story.audit() == {"device-conflict": 1, "job-running-twice": 1}


def test_shares_add_up_to_a_whole_device() -> None:
    story = Story()
    for job, milli in (("a", 500), ("b", 500), ("c", 100)):
        story.asks(0, job, gpu_fraction=milli / 1000).places(1, f"{job}1", job, milli=milli)
    for job in "abc":
        story.reports(9, m.Completed, f"{job}1", job)
    assert story.audit() == {"device-conflict": 1}


def test_capacities_come_from_joined_events_too() -> None:
    story = Story().node(0, m.Joined, "n7", gpu_type="P100", gpus=2).node(1, m.Capacity, "n7", gpus=1)
    story.arrives(0, "a").places(1, "a1", "a", 1, node="n7").reports(2, m.Completed, "a1", "a")
    assert story.audit(capacities=None) == {}


def test_what_is_not_judged() -> None:
    story = sound().arrives(2, "other-1").places(3, "x1", "others", 2)
    assert story.audit(prefix="a") == {}
    assert story.audit(may_stay_unfinished=frozenset({"other-1"})) == {"placed-unsubmitted": 1}
    again = sound()
    again.history.placements.append(again.history.placements[0])
    assert again.audit() == {"placement-id-reused": 1}
    assert again.audit(allow_repeats=True) == {}


def test_details_are_limited_and_counts_are_not() -> None:
    story = Story()
    for number in range(500):
        story.arrives(0, f"j{number}")
    found = audit(story.history)
    assert (found.total, len(found.details)) == (500, 100)


def summary_of(story: Story, **facts: Any) -> Summary:
    found = audit(story.history, capacities=CAPACITIES)
    return summarise(story.history, found, RunFacts(jobs=2, speed=10.0, gpus=8, wall_s=40.0, **facts))


def test_the_figures_of_a_summary() -> None:
    summary = summary_of(sound(), refused={"cpu-job": 3}, clamped=1)
    assert (summary.jobs, summary.completed, summary.placements, summary.preemptions) == (2, 2, 3, 1)
    assert summary.max_wait_s == 160.0, "b: 37 - 1 - 20, in trace seconds"
    assert summary.mean_wait_s == pytest.approx((20.0 + 160.0) / 2), "a: started 2 s after it came"
    assert summary.mean_jct_s == pytest.approx((120.0 + 360.0) / 2)
    assert summary.gpu_utilisation == pytest.approx((11 + 4 + 21) / (8 * 37))
    assert (summary.decision_latency_ms_p50, summary.solver) == (6000.0, {"optimal": 3})
    assert summary.refused_rows == 3


def test_the_report_has_the_documented_keys(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    summary_of(sound()).write(path)
    report = json.loads(path.read_text())
    assert set(report) >= {
        "jobs", "refused_rows", "mean_wait_s", "p50_wait_s", "p99_wait_s", "max_wait_s", "mean_jct_s",
        "gpu_utilisation", "decision_latency_ms_p50", "decision_latency_ms_p99", "solver", "violations", "wall_s",
    }  # fmt: skip
    assert report["violations"] == 0
    with pytest.raises(UserError, match="no such file"):
        summary_of(sound()).write(tmp_path / "absent" / "report.json")


def test_a_summary_of_nothing_is_no_error() -> None:
    summary = summarise(History(), Audit(), RunFacts(jobs=0, speed=1.0, gpus=0, wall_s=0.0))
    assert summary.mean_wait_s is None
    assert summary.gpu_utilisation is None
    assert table(summary).row_count > 5


def test_percentiles_are_linear_between_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None
