"""The simulated fleet: each decision has the effect of once, each run frees what it held, wrong placements are seen."""

from __future__ import annotations

import pytest

from loadgen.fleet import DURATION_LABEL, FleetOptions, SimulatedFleet, nodes_of
from streamsched.bus import codec
from streamsched.bus import messages as m
from streamsched.core.instructions import Decision, Place, Preempt, Revoke, Why
from streamsched.core.model import Allocation
from streamsched.errors import UserError
from streamsched.sim.nodes import NodeGroup, parse_nodes

NODE = "p-p100-0000"
OTHER = "p-p100-0001"


def fleet(**options: float) -> SimulatedFleet:
    return SimulatedFleet("p", parse_nodes("2x4:P100"), FleetOptions(start_delay_s=0.0, **options))  # type: ignore[arg-type]


def place(run: str, job: str = "", gpus: tuple[int, ...] = (0,), node: str = NODE, **more: object) -> Place:
    allocation = Allocation(node_id=node, gpus=gpus, gpu_milli=more.pop("milli", 1000))  # type: ignore[arg-type]
    return Place(
        placement_id=run,
        job_id=job or f"job-{run}",
        attempt=1,
        allocations=(allocation,),
        lease_until=1e9,
        why=Why(),
        labels={DURATION_LABEL: str(more.pop("duration_s", 10.0))},
    )


def told(decision: Decision, pool: str = "p") -> m.Placement:
    return m.Placement(pool=pool, time=0.0, epoch=1, seq=1, decision=decision)


def revoke(run: str) -> Revoke:
    return Revoke(placement_id=run, job_id=f"job-{run}", attempt=1, reason="")


def preempt(run: str) -> Preempt:
    return Preempt(placement_id=run, job_id=f"job-{run}", attempt=1, reason="")


def names(reports: list[m.Completion]) -> list[str]:
    return [f"{type(report).__name__.lower()} {report.placement_id}" for report in reports]


def test_a_run_starts_ends_and_frees_its_devices() -> None:
    nodes = fleet()
    nodes.handle(told(place("a")), 100.0)
    assert names(nodes.advance(100.0)) == ["started a"]
    assert nodes.live_runs == 1
    assert nodes.next_due() == 110.0
    assert nodes.advance(109.9) == []
    (completed,) = nodes.advance(110.0)
    assert completed == m.Completed(pool="p", job_id="job-a", placement_id="a", time=110.0)
    nodes.handle(told(place("b")), 110.0)
    assert names(nodes.advance(110.0)) == ["started b"]
    assert not nodes.counts.violations


def test_reports_satisfy_the_contract() -> None:
    nodes = fleet()
    nodes.handle(told(place("a")), 100.0)
    for report in nodes.advance(200.0):
        assert codec.decode_completion(codec.encode(report)) == report
    for event in nodes.joined(1.0) + nodes.heartbeats(2.0):
        assert codec.decode_node(codec.encode(event)) == event
    for sample in nodes.telemetry(3.0):
        assert codec.decode_telemetry(codec.encode(sample)) == sample


def test_telemetry_shows_what_runs() -> None:
    nodes = fleet()
    nodes.handle(told(place("a", gpus=(1, 2))), 0.0)
    nodes.advance(0.0)
    first, second = nodes.telemetry(1.0)
    assert [bool(gpu.utilization) for gpu in first.gpus] == [False, True, True, False]
    assert not any(gpu.utilization for gpu in second.gpus)


def test_a_repeated_place_is_no_second_run_and_is_answered_with_how_it_stands() -> None:
    nodes = fleet()
    for _ in range(3):
        nodes.handle(told(place("a")), 0.0)
    assert names(nodes.advance(0.0)) == ["started a"]
    nodes.handle(told(place("a")), 5.0)
    assert names(nodes.advance(5.0)) == ["started a"]
    assert names(nodes.advance(10.0)) == ["completed a"]
    nodes.handle(told(place("a")), 20.0)
    assert names(nodes.advance(20.0)) == ["completed a"]
    assert nodes.counts.placed == nodes.counts.completed == 1
    assert not nodes.counts.violations


def test_revoke_is_always_answered_by_released() -> None:
    nodes = fleet()
    nodes.handle(told(revoke("unknown")), 0.0)
    assert names(nodes.advance(0.0)) == ["released unknown"]
    nodes.handle(told(place("unknown")), 1.0)
    assert names(nodes.advance(1.0)) == ["released unknown"], "a place that comes after its revoke starts nothing"
    nodes.handle(told(place("a")), 2.0)
    nodes.advance(2.0)
    nodes.handle(told(revoke("a")), 3.0)
    nodes.handle(told(revoke("a")), 3.5)
    assert names(nodes.advance(3.5)) == ["released a", "released a"]
    assert nodes.advance(100.0) == [], "a revoked run never completes"
    assert nodes.live_runs == 0


@pytest.mark.parametrize(("checkpoint_s", "left_s"), [(None, 10.0), (2.0, 6.0), (20.0, 10.0)])
def test_a_preempted_job_resumes_at_its_last_checkpoint(checkpoint_s: float, left_s: float) -> None:
    nodes = fleet(checkpoint_s=checkpoint_s)
    nodes.handle(told(place("a", job="j")), 0.0)
    nodes.advance(0.0)
    nodes.handle(told(Preempt(placement_id="a", job_id="j", attempt=1, reason="")), 5.0)
    assert names(nodes.advance(5.0)) == ["preempted a"]
    nodes.handle(told(place("b", job="j")), 50.0)
    assert names(nodes.advance(50.0)) == ["started b"]
    assert nodes.next_due() == 50.0 + left_s


def test_preempt_of_an_ended_or_unknown_run() -> None:
    nodes = fleet()
    nodes.handle(told(place("a")), 0.0)
    nodes.advance(50.0)
    nodes.handle(told(preempt("a")), 60.0)
    nodes.handle(told(preempt("never")), 60.0)
    assert names(nodes.advance(60.0)) == ["completed a", "preempted never"]
    assert nodes.counts.unknown == 1


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (place("b", gpus=(0, 1)), "device-conflict"),
        (place("b", gpus=(2, 2)), "device-conflict"),
        (place("b", gpus=(4,)), "over-capacity"),
        (place("b", node="elsewhere"), "unknown-node"),
        (place("b", job="job-a", node=OTHER), "job-running-twice"),
    ],
)
def test_wrong_placements_are_rejected_and_counted(wrong: Place, kind: str) -> None:
    nodes = fleet()
    nodes.handle(told(place("a", gpus=(1,))), 0.0)
    nodes.handle(told(wrong), 0.0)
    assert names(nodes.advance(0.0)) == ["rejected b", "started a"]
    assert nodes.counts.violations == {kind: 1}
    assert nodes.counts.details[0].startswith(f"{kind}: b of job")
    assert names(nodes.advance(10.0)) == ["completed a"], "the run that was there is not harmed"


def test_shares_of_one_device_fit_up_to_a_whole() -> None:
    nodes = fleet()
    for run in "abc":
        nodes.handle(told(place(run, milli=400)), 0.0)
    assert sorted(names(nodes.advance(0.0))) == ["rejected c", "started a", "started b"]


def test_faults_on_request() -> None:
    nodes = fleet(reject_share=1.0)
    nodes.handle(told(place("a")), 0.0)
    assert names(nodes.advance(99.0)) == ["rejected a"]
    nodes = fleet(fail_share=1.0)
    nodes.handle(told(place("a")), 0.0)
    started, failed = nodes.advance(99.0)
    assert isinstance(failed, m.Failed)
    assert failed.retryable
    assert 0.0 <= failed.time - started.time < 10.0  # type: ignore[operator]
    nodes = fleet(lose_started_share=1.0, duplicate_share=1.0)
    nodes.handle(told(place("a")), 0.0)
    assert names(nodes.advance(99.0)) == ["completed a", "completed a"]
    nodes = fleet(delay_s=5.0)
    nodes.handle(told(place("a", duration_s=0.0)), 0.0)
    assert sorted(names(nodes.advance(5.0))) == ["completed a", "started a"]


def test_equal_seeds_behave_equally() -> None:
    def history(seed: int) -> list[m.Completion]:
        nodes = SimulatedFleet(
            "p", parse_nodes("9x8:P100"), FleetOptions(seed=seed, delay_s=3.0, duplicate_share=0.3, fail_share=0.3)
        )
        for number in range(8):
            nodes.handle(told(place(f"r{number}", gpus=(number,))), number)
        return nodes.advance(1000.0)

    assert history(1) == history(1) != history(2)


def test_other_pools_and_odd_labels() -> None:
    nodes = fleet(default_duration_s=3.0)
    nodes.handle(told(place("a"), pool="elsewhere"), 0.0)
    assert nodes.next_due() is None
    for run, text in enumerate(("nan", "-1", "soon")):
        nodes.handle(told(place(f"r{run}", gpus=(run,), duration_s=text)), 0.0)
    nodes.advance(0.0)
    assert nodes.next_due() == 3.0


def test_node_specifications() -> None:
    assert parse_nodes("80x8:P100, 16x4:T4") == (NodeGroup(80, 8, "P100"), NodeGroup(16, 4, "T4"))
    assert parse_nodes("2x8") == (NodeGroup(2, 8, "any"),)
    nodes = nodes_of("p", parse_nodes("1x8:A100,1x8:a100"))
    assert len({node.node_id for node in nodes}) == 2
    for spec in ("", "8:P100", "0x8:P100", "8x0:P100", "8x8:", "8x8:P 100", "8x8:-a", "8x8:P100,", "-1x8:P100"):
        with pytest.raises(UserError, match=r"is not COUNTxGPUS\[:TYPE\]"):
            parse_nodes(spec)
