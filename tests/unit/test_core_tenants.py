"""Tenants: decayed usage, weights, quotas."""

from __future__ import annotations

import heapq

import msgspec
import pytest
from core_builder import Pool, codes, first_fit, placed
from hypothesis import given, settings
from hypothesis import strategies as st

from streamsched.core import events as ev
from streamsched.core import tenants
from streamsched.core.cluster import ClusterState
from streamsched.core.config import SchedulerConfig
from streamsched.core.errors import BrokenInvariant
from streamsched.core.instructions import Place, SolveWindow
from streamsched.core.model import WHOLE_GPU, JobSpec, NodeSpec
from streamsched.core.problem import Assignment, Problem, Solution, SolveStatus
from streamsched.core.tenants import TenantPolicy, TenantUsage, usage_at, with_change
from streamsched.placement import SolveLimits, greedy, solve
from streamsched.policy import by_name
from streamsched.policy.rules import FairShare

# ── usage ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    changes=st.lists(st.tuples(st.floats(0.0, 400.0), st.sampled_from([300, 1000, 2500, -300, -1000])), max_size=6),
    half_life=st.floats(50.0, 2000.0),
)
def test_decayed_usage_is_what_integrating_step_by_step_gives(changes, half_life):
    """du/dt = held - u ln 2 / H, by the midpoint rule in steps of 0.1 s or less."""
    usage, now, held, integral = TenantUsage(), 0.0, 0, 0.0
    for gap, milli in [*changes, (100.0, 0)]:
        steps = max(1, int(gap / 0.1))
        step = gap / steps
        decay = 2.0 ** (-step / half_life)
        for _ in range(steps):
            integral = integral * decay + held / WHOLE_GPU * step * 2.0 ** (-step / 2 / half_life)
        now += gap
        if held + milli >= 0:
            usage = with_change(usage, now, half_life, milli)
            held += milli
    assert usage.held_milli == held
    assert usage_at(usage, now, half_life) == pytest.approx(integral, rel=1e-6, abs=1e-9)


def test_case_22_usage_stays_above_zero_and_falls_monotonically():
    """Half-life 168 h, looked at (and accounted anew) every 5 minutes for two years."""
    half_life = 168 * 3600.0
    usage = with_change(with_change(TenantUsage(), 0.0, half_life, 8000), 3600.0, half_life, -8000)
    before = usage_at(usage, 3600.0, half_life)
    assert before == pytest.approx(8 * 3600.0, rel=0.01)
    for sample in range(1, 2 * 365 * 24 * 12):
        now = 3600.0 + 300.0 * sample
        usage = with_change(usage, now, half_life, 0)
        assert 0.0 < usage.usage_gpu_s < before
        before = usage.usage_gpu_s
    assert before == pytest.approx(8 * 3600.0 * 2.0 ** (-(now - 3600.0) / half_life), rel=0.01)


def test_time_that_goes_back_neither_adds_nor_takes():
    usage = with_change(TenantUsage(), 100.0, 50.0, 1000)
    assert usage_at(usage, 0.0, 50.0) == 0.0
    assert with_change(usage, 0.0, 50.0, 0).as_of == 100.0


def test_usage_of_what_is_held_for_ever_approaches_the_limit():
    usage = with_change(TenantUsage(), 0.0, 100.0, 2000)
    assert usage_at(usage, 1e6, 100.0) == pytest.approx(2 * 100.0 / 0.6931471805599453)


def test_a_tenant_is_charged_from_the_placement_to_the_end(make_pool):
    pool = make_pool(usage_half_life_s=1e9)
    pool.node("n0")
    pool.arrive("a", 4, tenant="x")
    pool.arrive("b", gpu_milli=300, tenant="x")
    pool.running("a", "b")
    assert pool.state.usage("x").held_milli == 4300
    pool.later(10)
    pool.complete("a")
    assert pool.state.usage("x").held_milli == 300
    assert pool.state.usage("x").usage_gpu_s == pytest.approx(43.0)
    assert pool.state.usage("y") == TenantUsage()


def test_tenants_are_as_many_as_are_at_work_and_a_bounded_number_of_others(monkeypatch, make_pool):
    """Their names are free to choose. Those with most usage and those with settings stay."""
    monkeypatch.setattr(tenants, "TENANTS_KEPT", 20)
    pool = make_pool(tenants={"t00": TenantPolicy(weight=2.0)}, finished_keep_s=5.0)
    pool.node("n0")
    pool.arrive("holder", tenant="holder")
    pool.running("holder")
    for i in range(60):
        pool.arrive(f"j{i}", tenant=f"t{i:02}")
        pool.running(f"j{i}")
        pool.later(100 if i in (0, 7) else 1)
        pool.complete(f"j{i}")
        assert len(pool.state.tenants) <= 21
    assert {"t00", "t07", "t59", "holder"} <= pool.state.tenants.keys()
    assert "t01" not in pool.state.tenants


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_refused(weight):
    with pytest.raises(ValueError, match="weight"):
        TenantPolicy(weight=weight)


@pytest.mark.parametrize("quota", [-1.0, float("nan")])
def test_a_quota_below_nothing_is_refused(quota):
    with pytest.raises(ValueError, match="quota"):
        TenantPolicy(quota_gpus=quota)


@pytest.mark.parametrize("half_life", [0.0, -5.0, float("nan"), float("inf")])
def test_a_half_life_that_is_no_time_is_refused(half_life):
    with pytest.raises(ValueError, match="half_life"):
        SchedulerConfig(usage_half_life_s=half_life)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"usage_half_life_s": half_life}, SchedulerConfig)


# ── fair share ───────────────────────────────────────────────────────────────────────────────────────────────────────


def by_greedy(problem: Problem) -> Solution:
    return Solution(window=problem.window, status=SolveStatus.GREEDY, assignments=greedy(problem))


def by_milp(problem: Problem) -> Solution:
    return solve(problem, SolveLimits(time_s=None, gap=0.01))


def gpu_seconds(solver, sizes, weights, until: float, run_s: float, window_s: float) -> dict[str, float]:
    """GPU-seconds per tenant on a 4x8 pool where each always has 40 jobs waiting."""
    policies = {name: TenantPolicy(weight=weight) for name, weight in weights.items()}
    state = ClusterState("p", SchedulerConfig(policy="fairshare", tenants=policies), by_name("fairshare"))
    for i in range(4):
        state.handle(ev.NodeJoined(spec=NodeSpec(node_id=f"n{i}", gpu_type="V100", gpus=8)), 0.0)
    used = dict.fromkeys(weights, 0.0)
    waiting = dict.fromkeys(weights, 0)
    ends: list[tuple[float, str, str]] = []
    serial, now = 0, 0.0
    while now < until:
        while ends and ends[0][0] <= now:
            end, placement_id, job_id = heapq.heappop(ends)
            state.handle(ev.RunCompleted(placement_id=placement_id, job_id=job_id, time=end), now)
        for tenant in weights:
            for _ in range(40 - waiting[tenant]):
                gpus = sizes[tenant][serial % len(sizes[tenant])]
                spec = JobSpec(job_id=f"{tenant}{serial}", submitted_at=now, gpus_per_worker=gpus, tenant=tenant)
                state.handle(ev.JobArrived(spec=spec), now)
                serial += 1
            waiting[tenant] = 40
        for ask in [i for i in state.handle(ev.WindowElapsed(), now) if isinstance(i, SolveWindow)]:
            for place in state.handle(ev.WindowSolved(solution=solver(ask.problem)), now):
                assert isinstance(place, Place)
                started = ev.RunStarted(placement_id=place.placement_id, job_id=place.job_id, time=now)
                state.handle(started, now)
                length = run_s * (0.5 + (hash_of(place.job_id) % 100) / 100)
                heapq.heappush(ends, (now + length, place.placement_id, place.job_id))
                waiting[place.tenant] -= 1
                gpus = sum(len(a.gpus) for a in place.allocations)
                used[place.tenant] += gpus * min(length, until - now)
        now += window_s
    state.verify()
    return used


def hash_of(text: str) -> int:
    """The same in every process."""
    return sum(ord(c) * 31**i for i, c in enumerate(text))


@pytest.mark.parametrize(
    ("solver", "sizes", "window_s"),
    [
        (by_greedy, {"a": (1,), "b": (1,)}, 5.0),
        (by_greedy, {"a": (1, 2, 4), "b": (2, 1, 4)}, 5.0),
        (by_milp, {"a": (1, 2), "b": (2, 1)}, 20.0),
    ],
    ids=["greedy-ones", "greedy-mixed", "milp-mixed"],
)
def test_case_21_saturated_tenants_share_gpu_time_by_weight(solver, sizes, window_s):
    used = gpu_seconds(solver, sizes, {"a": 1.0, "b": 3.0}, until=3600.0, run_s=90.0, window_s=window_s)
    assert sum(used.values()) > 0.75 * 32 * 3600.0
    assert used["b"] / used["a"] == pytest.approx(3.0, rel=0.05)


def test_who_has_used_less_goes_first_and_turns_are_dealt_out_in_one_look(make_pool):
    pool = make_pool(ranker=FairShare(run_s=100.0), tenants={"b": TenantPolicy(weight=2.0)}, usage_half_life_s=1e9)
    pool.node("n0", 1)
    for i in range(4):
        pool.arrive(f"a{i}", tenant="a")
    for i in range(4):
        pool.arrive(f"b{i}", tenant="b")
    pool.window()
    order = [r.job_id for r in pool.state.window.ranking]
    assert order == ["a0", "b0", "b1", "a1", "b2", "b3", "a2", "a3"]
    pool.running("a0")
    pool.later(500)
    pool.complete("a0")
    pool.window()
    assert [r.job_id for r in pool.state.window.ranking][:4] == ["b0", "b1", "b2", "b3"]


# ── quotas ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def quota_pool(make_pool, gpus: float, **config: object) -> Pool:
    pool = make_pool(tenants={"q": TenantPolicy(quota_gpus=float(gpus))}, **config)
    pool.nodes(2)
    return pool


def test_a_window_asks_for_no_more_than_the_quota_leaves(make_pool):
    pool = quota_pool(make_pool, 5)
    for i, gpus in enumerate((3, 3, 2, 1)):
        pool.arrive(f"q{i}", gpus, tenant="q")
    pool.arrive("other", 8)
    assert set(placed(pool.solve())) == {"q0", "q2", "other"}
    pool.window()
    assert pool.why("q1") == "quota: tenant q may hold 0 more GPUs"
    pool.start("q0")
    pool.complete("q0")
    assert set(placed(pool.solve())) == {"q1"}


def test_a_quota_may_be_a_fraction_and_is_met_exactly(make_pool):
    pool = quota_pool(make_pool, 1.001)
    pool.arrive("whole", tenant="q")
    pool.arrive("share", gpu_milli=1, tenant="q")
    pool.arrive("more", gpu_milli=1, tenant="q")
    assert set(placed(pool.solve())) == {"whole", "share"}
    assert pool.state.quota_left("q") == 0


def test_a_stale_solution_does_not_exceed_the_quota(make_pool):
    pool = quota_pool(make_pool, 4)
    pool.arrive("a", 3, tenant="q")
    (first,) = pool.window()
    pool.command(ev.HoldRequested, "a")
    pool.arrive("b", 3, tenant="q")
    (second,) = pool.window()
    pool.command(ev.ReleaseRequested, "a")
    assert set(placed(pool.send(ev.WindowSolved(solution=first_fit(first.problem))))) == {"a"}
    out = pool.send(ev.WindowSolved(solution=first_fit(second.problem)))
    assert codes(out) == ["absorb:stale-assignment"]
    assert "at its quota" in out[0].detail


def test_a_smaller_quota_takes_nothing_away_but_gives_nothing_more(make_pool):
    pool = quota_pool(make_pool, 8)
    pool.arrive("a", 6, tenant="q")
    pool.running("a")
    pool.arrive("b", 1, tenant="q")
    config = SchedulerConfig(tenants={"q": TenantPolicy(quota_gpus=2.0)})
    pool.send(ev.EpochStarted(epoch=1, config=config))
    assert pool.solve() == []
    assert pool.why("b") == "quota: tenant q may hold 0 more GPUs"
    pool.complete("a")
    assert set(placed(pool.solve())) == {"b"}


_STEPS = st.one_of(
    st.tuples(st.just("arrive"), st.integers(1, 4), st.integers(1, 2), st.sampled_from("pqr")),
    st.tuples(st.just("ask"), st.just(0), st.just(0), st.just("")),
    st.tuples(st.just("answer"), st.integers(0, 5), st.just(0), st.just("")),
    st.tuples(st.just("end"), st.integers(0, 5), st.just(0), st.just("")),
    st.tuples(st.just("later"), st.integers(1, 40), st.just(0), st.just("")),
)


@given(steps=st.lists(_STEPS, min_size=5, max_size=40), quotas=st.tuples(st.integers(0, 6), st.integers(0, 6)))
@settings(max_examples=150)
def test_no_order_of_questions_and_answers_exceeds_a_quota(steps, quotas):
    policies = {name: TenantPolicy(quota_gpus=float(quota)) for name, quota in zip("pq", quotas, strict=True)}
    pool = Pool(tenants=policies, reserve_after_s=30.0, ranker=FairShare())
    pool.nodes(2, 4)
    questions: list[Problem] = []
    for number, (what, size, workers, tenant) in enumerate(steps):
        if what == "arrive":
            pool.arrive(f"j{number}", size, workers, tenant=tenant)
        elif what == "later":
            pool.later(size)
        elif what == "ask":
            questions += [i.problem for i in pool.window() if isinstance(i, SolveWindow)]
        elif what == "answer" and questions:
            problem = questions[size % len(questions)]
            pool.send(ev.WindowSolved(solution=first_fit(problem)))
            pool.send(ev.WindowSolved(solution=greedy_of_any(problem)))
        elif what == "end" and pool.state.runs:
            run = sorted(pool.state.runs.values(), key=lambda run: run.placement_id)[size % len(pool.state.runs)]
            pool.send(ev.RunReleased(placement_id=run.placement_id, job_id=run.job_id, time=pool.now))
        for name, quota in zip("pq", quotas, strict=True):
            held = [run for run in pool.state.runs.values() if pool.job(run.job_id).spec.tenant == name]
            assert sum(len(a.gpus) for run in held for a in run.allocations) <= quota
    pool.verify()


def greedy_of_any(problem: Problem) -> Solution:
    """All candidates at once on the first nodes, as no sane solver would answer."""
    nodes = [node_id for c in problem.classes for node_id in c.node_ids]
    gangs = {c.job_id: [gpus for gpus, count in c.chunks for _ in range(count)] for c in problem.candidates}
    return Solution(
        window=problem.window,
        status=SolveStatus.GREEDY,
        assignments=tuple(
            Assignment(
                job_id=c.job_id,
                attempt=c.attempt,
                workers=tuple((nodes[i % len(nodes)], gpus) for i, gpus in enumerate(gangs[c.job_id])),
            )
            for c in problem.candidates
        ),
    )


def test_verify_sees_what_a_tenant_does_not_hold(make_pool):
    pool = make_pool()
    pool.node("n0")
    pool.arrive("a", 2, tenant="x")
    pool.running("a")
    state = ClusterState("p")
    everything = pool.state.everything()
    state.load(msgspec.structs.replace(everything, tenants={"x": TenantUsage(held_milli=1000)}))
    with pytest.raises(BrokenInvariant, match="tenant x"):
        state.verify()
