"""Reservations: a job that has waited too long gets nodes for itself. Also what is told again and what is forgotten."""

from __future__ import annotations

import heapq
import itertools

import pytest
from core_builder import Pool, codes, first_fit, placed, reloaded, stops, stored
from hypothesis import given, settings
from hypothesis import strategies as st

from streamsched.core import events as ev
from streamsched.core.config import SchedulerConfig
from streamsched.core.inventory import Inventory
from streamsched.core.model import WHOLE_GPU, Job, JobSpec, JobState, NodeSpec, NodeState
from streamsched.core.node import Node, NodeRecord
from streamsched.core.problem import Assignment, Solution, SolveStatus
from streamsched.core.reservations import choose_nodes, lay_out
from streamsched.core.room import slots
from streamsched.core.tenants import TenantPolicy
from streamsched.placement.solve import SolveLimits, solve

# ── the bound ────────────────────────────────────────────────────────────────────────────────────────────────────────


def stream(pool: Pool, until: float, window_s: float = 5.0) -> dict[str, float]:
    """1x8; a 1-GPU job of 60 s every 5 s, the 8-GPU one after a minute; returns when each was placed."""
    pool.node("n0", 8)
    begin, ends, at = pool.now, [], {}
    while pool.now < begin + until:
        while ends and ends[0][0] <= pool.now:
            pool.complete(heapq.heappop(ends)[1])
        pool.arrive(f"s{pool.now:g}")
        if pool.now == begin + 60.0:
            pool.arrive("big", 8)
        for job_id in placed(pool.solve()):
            at[job_id] = pool.now
            pool.start(job_id)
            heapq.heappush(ends, (pool.now + 60.0, job_id))
        pool.later(window_s)
    return at


def test_case_01_a_large_job_starts_within_the_bound_however_many_small_ones_come(make_pool):
    pool = make_pool(reserve_after_s=600.0)
    at = stream(pool, 1500.0)
    came = pool.job("big").spec.submitted_at
    assert came + 600.0 <= at["big"] <= came + 600.0 + 60.0 + 5.0
    small = [time for job_id, time in at.items() if job_id != "big"]
    assert sum(time < at["big"] for time in small) > 80, "small jobs run until the nodes are reserved"
    assert sum(time > at["big"] + 60.0 for time in small) > 80, "and after it"


def test_without_a_reservation_it_would_starve(make_pool):
    """The case itself: the test above can fail."""
    assert "big" not in stream(make_pool(reserve_after_s=1e9), 1500.0)


# ── a reserved node is for one job ───────────────────────────────────────────────────────────────────────────────────


def full(make_pool, nodes: int = 2, **config: object) -> Pool:
    """Every node has a run on it; "big" (8 GPUs) is overdue and has n0 or none yet (no window since)."""
    pool = make_pool(**{"reserve_after_s": 100.0, **config})
    pool.nodes(nodes)
    for i in range(nodes):
        pool.arrive(f"r{i}", 5)
    pool.running(*(f"r{i}" for i in range(nodes)))
    pool.arrive("big", 8)
    pool.later(100)
    return pool


def test_backfill_does_not_use_reserved_nodes_and_says_so(make_pool):
    pool = full(make_pool)
    pool.arrive("small", 3)
    pool.arrive("small2", 3)
    assert placed(pool.solve()) == {"small": {"n1": 3}}
    assert pool.job("big").reservation == ("n0",)
    assert pool.why("big") == "reserved: 1 nodes are kept free for it and drain"
    pool.window()
    assert pool.why("small2").startswith("gpus: 1 x 3 of any type needed, room now for 0")
    pool.complete("r0")
    assert placed(pool.solve()) == {"big": {"n0": 8}}
    assert pool.placements["big"].why.policy == "reservation"
    assert pool.state.reserved == {}


def test_a_node_that_comes_free_takes_the_place_of_one_that_drains(make_pool):
    """The run on n0 goes on for ever; that on n1 ends."""
    pool = full(make_pool)
    pool.window()
    assert pool.job("big").reservation == ("n0",)
    pool.complete("r1")
    assert placed(pool.solve()) == {"big": {"n1": 8}}
    assert pool.state.reserved == {}


def test_a_node_with_no_more_room_takes_nobodys_place(make_pool):
    pool = full(make_pool)
    pool.window()
    pool.arrive("small", 3)
    assert placed(pool.solve()) == {"small": {"n1": 3}}
    pool.running("small")
    pool.complete("r1")  # n1 has 5 free, n0 has 3
    pool.window()
    assert pool.job("big").reservation == ("n1",)
    pool.complete("small")  # started by then
    assert placed(pool.solve()) == {"big": {"n1": 8}}


def test_the_oldest_has_the_first_choice_also_of_what_is_kept_for_others(make_pool):
    pool = full(make_pool, nodes=3)
    pool.arrive("later", 8)
    pool.later(100)
    pool.window()
    assert pool.state.reserved == {"n0": "big", "n1": "later"}
    pool.complete("r1")
    assert placed(pool.window()) == {"big": {"n1": 8}}
    pool.running("big")
    pool.window()
    assert set(pool.state.reserved.values()) == {"later"}


def test_an_older_answer_does_not_place_on_a_node_reserved_since(make_pool):
    pool = full(make_pool)
    assignment = Assignment(job_id="small", attempt=0, workers=(("n0", 3),))
    pool.arrive("small", 3)
    pool.window()
    out = pool.send(ev.WindowSolved(solution=Solution(window=1, status=SolveStatus.GREEDY, assignments=(assignment,))))
    assert codes(out) == ["absorb:stale-assignment"]
    assert out[0].detail == "node n0 is kept free for job big"


def test_not_before_the_bound(make_pool):
    pool = full(make_pool)
    pool.later(-0.5)
    pool.window()
    assert not pool.state.reserved
    pool.later(0.5)
    pool.window()
    assert pool.state.reserved == {"n0": "big"}


@pytest.mark.parametrize(
    ("what", "after"),
    [
        (lambda pool: pool.lose("n0"), ("n1",)),
        (lambda pool: pool.send(ev.NodeCordoned(node_id="n0")), ("n1",)),
        (lambda pool: pool.send(ev.NodeDrained(node_id="n0")), ("n1",)),
        (lambda pool: pool.send(ev.NodeCapacityChanged(node_id="n0", gpus=7)), ("n1",)),
        (lambda pool: pool.node("n0", 4), ("n1",)),
        (lambda pool: pool.send(ev.NodeCordoned(node_id="n1")), ("n0",)),
    ],
    ids=["lost", "cordoned", "drained", "smaller", "declared-smaller", "another"],
)
def test_when_a_reserved_node_goes_away_another_is_chosen(make_pool, what, after):
    pool = full(make_pool)
    pool.window()
    assert pool.job("big").reservation == ("n0",)
    what(pool)
    pool.window()
    assert pool.job("big").reservation == after


def test_a_reserved_node_of_another_type_now_is_given_up(make_pool):
    pool = make_pool(reserve_after_s=100.0)
    pool.nodes(2)
    pool.arrive("r0", 5)
    pool.arrive("r1", 5)
    pool.running("r0", "r1")
    pool.arrive("big", 8, gpu_types=("V100",))
    pool.later(100)
    pool.window()
    pool.node("n0", 8, "A100")
    pool.window()
    assert pool.job("big").reservation == ("n1",)


def test_when_no_node_is_left_to_reserve_the_job_waits_without_and_gets_the_next(make_pool):
    pool = full(make_pool, nodes=1)
    pool.window()
    pool.send(ev.NodeCordoned(node_id="n0"))
    pool.window()
    assert pool.job("big").reservation == ()
    assert pool.job("big").reason == ""
    pool.node("n9", 8)
    assert placed(pool.solve()) == {"big": {"n9": 8}}


def test_a_reserved_node_that_was_forgotten_between_two_windows_is_no_trouble(make_pool):
    pool = full(make_pool, finished_keep_s=50.0)
    pool.complete("r0")
    pool.arrive("x", 3, gpu_types=("V100",))
    pool.state.ranker = None
    pool.arrive("huge", 8, 2)
    pool.later(100)
    pool.window()
    assert set(pool.state.reserved) >= {"n0"} or pool.states("big") == ["placed"]
    for node_id in ("n0", "n1"):
        pool.lose(node_id, fenced=True)
    pool.later(51)
    pool.window()
    assert not pool.state.inventory.nodes
    assert not pool.state.reserved
    assert pool.states("big", "huge") == ["unfit", "unfit"]


@pytest.mark.parametrize("kind", [ev.CancelRequested, ev.HoldRequested])
def test_a_command_that_takes_the_job_out_of_the_queue_frees_its_nodes(make_pool, kind):
    pool = full(make_pool)
    pool.arrive("small", 3)
    pool.arrive("small2", 3)
    pool.window()
    assert pool.state.reserved == {"n0": "big"}
    pool.command(kind, "big")
    assert pool.state.reserved == {}
    assert set(placed(pool.solve())) == {"small", "small2"}


def test_a_job_that_can_never_fit_any_more_frees_its_nodes(make_pool):
    pool = full(make_pool, nodes=1)
    pool.window()
    pool.node("n0", 6)
    pool.window()
    assert pool.states("big") == ["unfit"]
    assert pool.state.reserved == {}


def test_only_so_many_jobs_have_reservations_the_oldest_first(make_pool):
    pool = full(make_pool, nodes=4, reservations_max=2)
    for i in range(3):
        pool.arrive(f"later{i}", 8)
    pool.later(100)
    pool.window()
    assert sorted(set(pool.state.reserved.values())) == ["big", "later0"]
    pool.command(ev.CancelRequested, "big")
    pool.window()
    assert sorted(set(pool.state.reserved.values())) == ["later0", "later1"]


def test_one_that_no_nodes_are_left_for_does_not_hold_up_the_next(make_pool):
    pool = full(make_pool, nodes=2, reservations_max=3)
    pool.arrive("gang", 8, 2)
    pool.arrive("other", 8)
    pool.later(100)
    pool.window()
    assert pool.state.reserved == {"n0": "big", "n1": "other"}


def test_a_job_in_backoff_gets_none_before_its_time(make_pool):
    pool = make_pool(reserve_after_s=0.0, backoff_s=50.0)
    pool.nodes(1)
    pool.arrive("a", 8)
    pool.running("a")
    pool.report(ev.RunFailed, "a", retryable=True)
    pool.later(49)
    pool.window()
    assert not pool.state.reserved
    pool.later(1)
    assert placed(pool.window()) == {"a": {"n0": 8}}


def test_a_node_that_refused_the_job_is_the_last_to_be_kept_for_it(make_pool):
    pool = make_pool(reserve_after_s=100.0, backoff_s=1.0)
    pool.nodes(2)
    pool.arrive("big", 8)
    pool.solve()
    pool.report(ev.RunRejected, "big", node_id="n0")
    pool.arrive("r", 5)
    pool.running("r")  # on n0
    pool.arrive("r2", 6)
    pool.running("r2")  # on n1, which has less room
    pool.later(100)
    pool.window()
    assert pool.job("big").refused_by == ("n0",)
    assert pool.job("big").reservation == ("n1",)


# ── tenants ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_that_its_tenants_quota_never_allows_gets_none(make_pool):
    pool = make_pool(reserve_after_s=100.0, tenants={"q": TenantPolicy(quota_gpus=7.0)})
    pool.nodes(2)
    pool.arrive("big", 8, tenant="q")
    pool.later(200)
    pool.window()
    assert not pool.state.reserved
    assert pool.why("big") == "quota: tenant q may hold 7 more GPUs"


def test_a_quota_drains_for_a_job_that_has_waited_too_long(make_pool):
    pool = make_pool(reserve_after_s=100.0, tenants={"q": TenantPolicy(quota_gpus=8.0)})
    pool.nodes(2)
    pool.arrive("r", 1, tenant="q")
    pool.running("r")
    pool.arrive("big", 8, tenant="q")
    pool.later(100)
    pool.window()
    assert pool.state.reserved == {"n1": "big"}
    pool.arrive("small", 1, tenant="q")
    pool.arrive("other", 1, tenant="another")
    assert placed(pool.solve()) == {"other": {"n0": 1}}
    pool.complete("r")
    assert placed(pool.solve()) == {"big": {"n1": 8}}
    pool.verify()


def test_case_01_inside_a_quota_a_large_job_starts_however_many_small_ones_come(make_pool):
    pool = make_pool(reserve_after_s=600.0, tenants={"default": TenantPolicy(quota_gpus=8.0)})
    pool.node("n1", 8)
    at = stream(pool, 1500.0)
    came = pool.job("big").spec.submitted_at
    assert came + 600.0 <= at["big"] <= came + 600.0 + 60.0 + 5.0
    assert sum(time > at["big"] + 60.0 for time in at.values()) > 80, "and small ones after it"


def test_pledges_of_one_tenant_stay_within_its_quota_so_that_they_do_not_wait_for_each_other(make_pool):
    pool = make_pool(reserve_after_s=100.0, tenants={"default": TenantPolicy(quota_gpus=12.0)})
    pool.nodes(3)
    pool.arrive("r", 5)
    pool.running("r")
    pool.arrive("a", 8)
    pool.arrive("b", 8)
    pool.later(100)
    pool.window()
    assert set(pool.state.reserved.values()) == {"a"}
    pool.complete("r")
    assert set(placed(pool.solve())) == {"a"}
    pool.window()
    assert set(pool.state.reserved.values()) == {"b"}
    pool.running()
    pool.start("a")
    pool.complete("a")
    assert set(placed(pool.solve())) == {"b"}
    pool.verify()


def test_a_smaller_quota_leaves_the_oldest_its_pledge(make_pool):
    pool = make_pool(reserve_after_s=100.0, tenants={"default": TenantPolicy(quota_gpus=20.0)})
    pool.nodes(3)
    for i in range(3):
        pool.arrive(f"r{i}", 5, tenant="other")
    pool.running("r0", "r1", "r2")
    pool.arrive("a", 8)
    pool.arrive("b", 8)
    pool.later(100)
    pool.window()
    assert set(pool.state.reserved.values()) == {"a", "b"}
    config = SchedulerConfig(reserve_after_s=100.0, tenants={"default": TenantPolicy(quota_gpus=8.0)})
    pool.send(ev.EpochStarted(epoch=1, config=config))
    pool.window()
    assert set(pool.state.reserved.values()) == {"a"}


def test_a_loss_does_not_start_the_bound_anew_but_a_refusal_does(make_pool):
    pool = make_pool(reserve_after_s=100.0, backoff_s=0.0)
    pool.nodes(2)
    pool.arrive("r0", 8)
    pool.arrive("r1", 8)
    pool.running("r0", "r1")
    pool.arrive("big", 8)
    pool.later(60)
    pool.complete("r0")
    pool.running("big")
    pool.later(1000)
    pool.lose(pool.run("big").allocations[0].node_id, fenced=True)
    assert (pool.job("big").queued_at, pool.job("big").waited_s) == (pool.now, 60.0)
    pool.later(39)
    pool.window()
    assert not pool.state.reserved
    pool.later(1)
    pool.window()
    assert set(pool.state.reserved.values()) == {"big"}
    pool.complete("r1")
    pool.solve()
    pool.report(ev.RunRejected, "big", node_id="n1")
    assert pool.job("big").waited_s == 0.0
    pool.verify()


def test_what_a_reserved_job_will_take_is_not_left_for_its_tenants_others(make_pool):
    """They would use up the quota while the nodes stand empty for it."""
    pool = make_pool(reserve_after_s=100.0, tenants={"q": TenantPolicy(quota_gpus=10.0)})
    pool.nodes(2)
    pool.arrive("x0", 5)
    pool.arrive("x1", 5)
    pool.running("x0", "x1")
    pool.arrive("big", 8, tenant="q")
    pool.later(100)
    pool.window()
    assert pool.state.reserved == {"n0": "big"}
    pool.arrive("small", 3, tenant="q")
    pool.arrive("tiny", 2, tenant="q")
    assert set(placed(pool.solve())) == {"tiny"}
    assert pool.why("small") == "quota: tenant q may hold 2 more GPUs"
    pool.complete("x0")
    assert set(placed(pool.solve())) == {"big"}


def test_a_quota_that_became_too_small_ends_the_reservation(make_pool):
    pool = full(make_pool, tenants={"default": TenantPolicy(quota_gpus=20.0)})
    pool.window()
    assert pool.state.reserved
    config = SchedulerConfig(reserve_after_s=100.0, tenants={"default": TenantPolicy(quota_gpus=7.0)})
    pool.send(ev.EpochStarted(epoch=1, config=config))
    pool.window()
    assert not pool.state.reserved


# ── only saving looks ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_that_fits_again_waits_from_then_on(make_pool):
    """Its time as unfit does not count, so nothing that only saves looking can miss it."""
    pool = make_pool(reserve_after_s=100.0)
    pool.node("n0", 4)
    pool.arrive("r", 4)
    pool.running("r")
    pool.arrive("big", 8)
    assert pool.states("big") == ["unfit"]
    pool.later(500)
    pool.window()
    pool.node("n1", 8)
    pool.arrive("r8", 8)
    pool.window()
    assert pool.job("big").queued_at == pool.now
    pool.verify()


def test_a_shorter_bound_counts_at_once(make_pool):
    pool = full(make_pool, reserve_after_s=1e6)
    pool.window()
    assert not pool.state.reserved
    config = SchedulerConfig(reserve_after_s=50.0)
    pool.send(ev.EpochStarted(epoch=1, config=config))
    pool.window()
    assert pool.state.reserved == {"n0": "big"}


def test_reservations_outlive_a_crash(make_pool):
    pool = full(make_pool)
    pool.window()
    pool.crash()
    assert pool.state.reserved == {"n0": "big"}
    pool.complete("r0")
    assert placed(pool.window()) == {"big": {"n0": 8}}


@pytest.mark.parametrize("seconds", [0.0, 1e-7, 0.1, 1 / 3, 599.9999999])
def test_a_process_that_loads_sees_the_bound_at_the_same_moment(make_pool, seconds):
    """Sums of floats: who kept the time in mind and who reckons it anew must agree to the last bit."""
    pool = make_pool(reserve_after_s=600.1)
    pool.later(seconds)
    pool.node("n0", 8)
    pool.arrive("r", 5)
    pool.running("r")
    pool.arrive("big", 8)
    came = pool.now
    pool.window()
    for ulps in range(-3, 4):
        pool.now = came + 600.1 + ulps * 2.3e-13
        other = reloaded(pool.state)
        other.handle(ev.WindowElapsed(), pool.now)
        pool.window()
        assert stored(other) == stored(pool.state)
    assert pool.state.reserved


def test_jobs_that_no_nodes_can_be_kept_for_cost_no_look_at_the_nodes(make_pool, monkeypatch):
    """Counted, not timed: many overdue jobs and many refused ones, window after window."""
    pool = make_pool(reserve_after_s=100.0, backoff_s=0.0)
    pool.nodes(6)
    for i in range(6):
        pool.arrive(f"r{i}", 7)
    pool.running(*(f"r{i}" for i in range(6)))
    for i in range(50):
        pool.arrive(f"gang{i}", 8, 6)
    pool.send(ev.NodeCordoned(node_id="n0"))
    pool.later(99)
    pool.arrive("small", 1)
    pool.solve()
    pool.report(ev.RunRejected, "small", node_id="n1")
    pool.later(1)
    looks = []
    whole = Inventory.__iter__
    monkeypatch.setattr(Inventory, "__iter__", lambda self: looks.append(1) or whole(self))
    for _ in range(3):
        pool.window()
    assert not looks
    pool.send(ev.NodeUncordoned(node_id="n0"))
    pool.window()
    assert len(looks) == 1
    assert set(pool.state.reserved.values()) == {"gang0"}


# ── which nodes: against brute force ─────────────────────────────────────────────────────────────────────────────────


@st.composite
def inventories(draw: st.DrawFn) -> list[Node]:
    nodes = []
    for i in range(draw(st.integers(0, 4))):
        spec = NodeSpec(
            node_id=f"n{i}",
            gpu_type=draw(st.sampled_from("AAB")),
            gpus=draw(st.integers(0, 4)),
            cpu_milli=draw(st.sampled_from([0, 0, 2, 4, 5])),
            memory_mib=draw(st.sampled_from([0, 0, 3, 6])),
        )
        state = draw(st.sampled_from([NodeState.UP, NodeState.UP, NodeState.UP, NodeState.CORDONED]))
        capacity = draw(st.integers(0, spec.gpus))
        lost = draw(st.sampled_from([False, False, False, True]))
        nodes.append(Node(NodeRecord(spec=spec, capacity=capacity, state=state, lost=lost)))
    return nodes


@st.composite
def gangs(draw: st.DrawFn) -> JobSpec:
    gpus = draw(st.integers(1, 3))
    share = draw(st.sampled_from([WHOLE_GPU, WHOLE_GPU, 500, 400, 334]))
    whole = share == WHOLE_GPU
    return JobSpec(
        job_id="j",
        submitted_at=0.0,
        gpus_per_worker=gpus if whole else 1,
        workers=draw(st.integers(1, 5)),
        remainder_gpus=draw(st.integers(0, gpus - 1)) if whole else 0,
        gpu_milli=share,
        gpu_types=draw(st.sampled_from([(), ("A",), ("B",), ("A", "B")])),
        mixed_types=draw(st.booleans()),
        cpu_milli=draw(st.integers(0, 3)),
        memory_mib=draw(st.integers(0, 3)),
    )


def can_hold(nodes: list[Node], spec: JobSpec) -> bool:
    """Every number of full workers per node, and the smaller one on each; the nodes as they are now."""
    nodes = [node for node in nodes if not spec.gpu_types or node.spec.gpu_type in spec.gpu_types]
    if spec.mixed_types:
        return _holds_all(nodes, spec)
    return any(_holds_all([node for node in nodes if node.spec.gpu_type == kind], spec) for kind in "AB")


def _holds_all(nodes: list[Node], spec: JobSpec) -> bool:
    tops = [range(spec.workers + 1) for _ in nodes]
    for counts in itertools.product(*tops):
        if sum(counts) != spec.workers:
            continue
        for extra in range(len(nodes)) if spec.remainder_gpus else [None]:
            if all(_takes(node, spec, n, i == extra) for i, (node, n) in enumerate(zip(nodes, counts, strict=True))):
                return True
    return False


def _takes(node: Node, spec: JobSpec, workers: int, extra: bool) -> bool:
    """By taking device after device, in thousandths."""
    room = node.free_milli[: node.record.capacity]
    for _ in range(workers if spec.gpu_milli < WHOLE_GPU else 0):
        fitting = [i for i, free in enumerate(room) if free >= spec.gpu_milli]
        if not fitting:
            return False
        best = min(fitting, key=lambda i: room[i])
        room[best] -= spec.gpu_milli
    everything = workers + extra
    if spec.gpu_milli == WHOLE_GPU:
        wanted = workers * spec.gpus_per_worker + extra * spec.remainder_gpus
        if wanted > sum(free == WHOLE_GPU for free in room):
            return False
    cpu = not node.spec.cpu_milli or everything * spec.cpu_milli <= node.free_cpu_milli
    return cpu and (not node.spec.memory_mib or everything * spec.memory_mib <= node.free_memory_mib)


@given(nodes=inventories(), spec=gangs(), taken=st.sets(st.sampled_from(["n0", "n1"])), refused=st.booleans())
@settings(max_examples=400)
def test_nodes_are_chosen_when_and_only_when_the_gang_fits_on_some(nodes, spec, taken, refused):
    job = Job(spec=spec, seq=0, state=JobState.QUEUED, queued_at=0.0, refused_by=("n0",) if refused else ())
    usable = [node for node in nodes if node.usable and node.node_id not in taken]
    chosen = choose_nodes(job, nodes, dict.fromkeys(taken, "other"))
    assert bool(chosen) == can_hold(usable, spec)
    assert set(chosen) <= {node.node_id for node in usable}
    inventory = Inventory()
    for node in nodes:
        inventory.add(node)
    assert inventory.holds_without(spec, taken) == bool(chosen)
    if chosen:
        assert inventory.would_hold(spec, chosen)
        workers = lay_out(spec, [node for node in nodes if node.node_id in chosen])
        assert workers is not None
        assert sorted(gpus for _, gpus in workers) == sorted(g for g, count in spec.chunks() for _ in range(count))
        _put(nodes, spec, workers)


def _put(nodes: list[Node], spec: JobSpec, workers: tuple[tuple[str, int], ...]) -> None:
    """Really take the devices; raises when one is given twice or there are too few."""
    by_id = {node.node_id: node for node in nodes}
    for node_id, gpus in workers:
        node = by_id[node_id]
        allocation = node.allocate(spec, gpus)
        assert len(allocation.gpus) == gpus
        node.take("p", allocation)


@given(
    nodes=inventories(),
    spec=gangs(),
    busy=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1000, 500, 300])), max_size=5),
)
@settings(max_examples=400)
def test_a_gang_is_laid_out_when_and_only_when_it_fits_on_what_is_free(nodes, spec, busy):
    nodes = [node for node in nodes if node.record.capacity == node.spec.gpus]
    for i, milli in busy:
        other = JobSpec(job_id="x", submitted_at=0.0, gpus_per_worker=1, gpu_milli=milli, cpu_milli=1, memory_mib=1)
        if i < len(nodes) and slots(nodes[i].room(), other):
            nodes[i].take(f"p{i}", nodes[i].allocate(other, 1))
    workers = lay_out(spec, nodes)
    assert (workers is not None) == can_hold(nodes, spec)
    if workers is not None:
        _put(nodes, spec, workers)


# ── said again, forgotten, redelivered ───────────────────────────────────────────────────────────────────────────────


def test_an_order_to_stop_is_said_again_once_per_lease_until_it_is_answered(make_pool):
    pool = make_pool(lease_s=60.0)
    pool.nodes(1)
    pool.arrive("a", 8, preemptible=True)
    pool.running("a")
    assert stops(pool.send(ev.NodeDrained(node_id="n0"))) == [("preempt", "a:0:1")]
    said = []
    for _ in range(50):
        pool.later(10)
        said += [(pool.now, *stop) for stop in stops(pool.window())]
    assert [(time - 1000.0, how) for time, how, _ in said] == [(70.0 * i, "revoke") for i in range(1, 8)]
    pool.report(ev.RunPreempted, "a")
    pool.later(1000)
    assert pool.window() == []


def test_a_run_that_was_given_up_is_told_again_when_its_node_is_back_but_not_while_it_is_silent(make_pool):
    pool = make_pool(lease_s=60.0, lost_grace_s=30.0)
    pool.nodes(1)
    pool.arrive("a", 8)
    pool.running("a")
    pool.lose("n0")
    pool.later(30)
    assert stops(pool.window()) == [("revoke", "a:0:1")]
    for _ in range(10):
        pool.later(100)
        assert pool.window() == []
    pool.send(ev.NodeHeard(node_id="n0"))
    assert stops(pool.window()) == [("revoke", "a:0:1")]
    assert pool.window() == []
    pool.report(ev.RunReleased, "a")
    assert set(placed(pool.solve())) == {"a"}


def test_a_node_lost_for_long_is_forgotten_when_nothing_is_held_there(make_pool):
    pool = make_pool(finished_keep_s=1000.0, lost_grace_s=1.0)
    pool.nodes(2)
    pool.arrive("a", 8)
    pool.running("a")  # on n0
    pool.lose("n0")
    pool.lose("n1")
    pool.later(1000)
    pool.window()
    assert set(pool.state.inventory.nodes) == {"n0", "n1"}
    pool.later(1)
    pool.window()
    assert set(pool.state.inventory.nodes) == {"n0"}
    assert pool.states("a") == ["queued"]
    assert codes(pool.send(ev.NodeHeard(node_id="n1"))) == ["refuse:unknown-node"]
    pool.lose("n0", fenced=True)
    pool.window()
    assert set(pool.state.inventory.nodes) == set()
    assert pool.states("a") == ["unfit"]
    pool.node("n1")
    assert set(placed(pool.solve())) == {"a"}


def test_a_node_that_comes_and_goes_is_forgotten_only_after_a_long_silence(make_pool):
    pool = make_pool(finished_keep_s=1000.0)
    pool.nodes(1)
    for _ in range(5):
        pool.lose("n0")
        pool.later(900)
        pool.window()
        pool.send(ev.NodeHeard(node_id="n0"))
        pool.later(900)
        pool.window()
    assert set(pool.state.inventory.nodes) == {"n0"}


def test_a_refused_command_has_no_effect_when_it_is_redelivered_later(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a")
    pool.running("a")
    assert codes(pool.command(ev.HoldRequested, "a", offset=5)) == ["refuse:not-applicable"]
    pool.report(ev.RunFailed, "a", retryable=True)
    assert pool.states("a") == ["queued"]
    assert codes(pool.command(ev.HoldRequested, "a", offset=5)) == ["absorb:duplicate-command"]
    pool.crash()
    assert codes(pool.command(ev.HoldRequested, "a", offset=5)) == ["absorb:duplicate-command"]
    assert pool.states("a") == ["queued"]
    pool.command(ev.HoldRequested, "a", offset=6)
    assert pool.states("a") == ["held"]


# ── what changes nothing leaves no trace ─────────────────────────────────────────────────────────────────────────────


def test_an_event_that_changes_nothing_leaves_no_trace_not_even_in_the_time(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a", 8)
    pool.running("a")
    before = stored(pool.state)
    pool.state.take_changes()
    pool.later(500)
    pool.window()
    pool.send(ev.NodeHeard(node_id="n0"))
    pool.command(ev.HoldRequested, "nobody", offset=3)
    pool.start("a")
    assert not pool.state.take_changes()
    assert stored(pool.state) == before


def test_only_what_changed_something_is_needed_to_get_the_same_state(make_pool):
    """A clock that steps back (another worker's) between an idle window and a change is the hard part."""
    pool = make_pool(reserve_after_s=30.0)
    journal = []

    def send(event, now):
        pool.now = now
        out = pool.send(event)
        if pool.state.take_changes():
            journal.append((event, now))
        return out

    def arrive(job_id, now, gpus=8):
        send(ev.JobArrived(spec=JobSpec(job_id=job_id, submitted_at=0.0, gpus_per_worker=gpus)), now)

    send(ev.NodeJoined(spec=NodeSpec(node_id="n0", gpu_type="V100", gpus=8)), 1000.0)
    send(ev.WindowElapsed(), 1500.0)
    arrive("a", 1200.0, 5)
    (ask,) = send(ev.WindowElapsed(), 1201.0)
    send(ev.WindowSolved(solution=first_fit(ask.problem)), 1202.0)
    arrive("b", 1203.0)
    for now in (1210.0, 1220.0, 1300.0, 1231.0, 1233.0, 1240.0):
        send(ev.WindowElapsed(), now)
    assert pool.job("a").queued_at == 1200.0
    assert pool.state.reserved == {"n0": "b"}
    assert len(journal) < len(pool.history)
    pool.history = journal
    assert pool.replayed() == stored(pool.state)


# ── priority classes ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_number_of_lower_jobs_outweighs_a_higher_one(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("r", 1)
    pool.running("r")
    for i in range(40):
        pool.arrive(f"low{i}", 1, priority_class="low")
    pool.arrive("normal", 5)
    pool.arrive("high", 4, priority_class="high")
    (ask,) = pool.window()
    worth = {c.job_id: c.value for c in ask.problem.candidates}
    lower = sum(value for job_id, value in worth.items() if job_id.startswith("low"))
    assert worth["normal"] > lower
    assert worth["high"] > worth["normal"] + lower
    pool.send(ev.WindowSolved(solution=solve(ask.problem, SolveLimits(time_s=None))))
    assert pool.states("high", "normal") == ["placed", "queued"], "normal does not fit beside high"
    assert sum(pool.state.jobs[f"low{i}"].state == "placed" for i in range(40)) == 3


def test_lower_jobs_take_what_higher_ones_leave_in_the_same_window(make_pool):
    pool = make_pool()
    pool.node("n0", 8, gpu_type="A")
    pool.node("n1", 8, gpu_type="B")
    pool.arrive("high", 8, gpu_types=("A",), priority_class="high")
    pool.arrive("low", 8, priority_class="low")
    assert set(placed(pool.solve())) == {"high", "low"}


def test_a_higher_job_that_cannot_start_now_does_not_keep_lower_ones_out(make_pool):
    pool = make_pool()
    pool.node("n0", 8)
    pool.arrive("r", 1)
    pool.running("r")
    pool.arrive("high", 8, priority_class="high")
    pool.arrive("low", 1, priority_class="low")
    assert set(placed(pool.solve())) == {"low"}


def test_case_02_a_higher_job_that_its_only_free_node_refuses_does_not_keep_lower_ones_out(make_pool):
    """It avoids n0, and n1 is busy: it is a candidate that no solver could place, in every window."""
    pool = make_pool(backoff_s=1.0, backoff_max_s=600.0)
    pool.nodes(2)
    pool.arrive("r", 8)
    pool.running("r")
    pool.arrive("high", 8, priority_class="high")
    pool.solve()
    pool.report(ev.RunRejected, "high", node_id="n1")
    pool.arrive("low", 2, priority_class="low")
    pool.later(10)
    assert placed(pool.solve()) == {"low": {"n1": 2}}
    pool.window()
    assert pool.why("high").startswith("gpus:") or pool.why("high").startswith("refused lately by n1")


def test_a_gang_whose_smaller_worker_has_no_room_is_no_candidate(make_pool):
    """Nor does it keep lower classes out: GPUs enough in all, but not where the cpu is."""
    pool = make_pool()
    pool.node("n0", 4, cpu_milli=4)
    pool.node("n1", 2, cpu_milli=8)
    pool.arrive("r", 1, cpu_milli=0)
    pool.running("r")
    pool.arrive("x", 1, cpu_milli=2)
    pool.running("x")
    pool.arrive("high", 2, 1, remainder_gpus=1, cpu_milli=4, priority_class="high")
    pool.arrive("low", 1, priority_class="low")
    assert "low" in placed(pool.solve())
