"""Placement: field cases, and how an answer says how it was got."""

from __future__ import annotations

import msgspec
import pytest

from streamsched.core.problem import Assignment, Candidate, NodeClass, Problem, Solution, SolveStatus
from streamsched.placement import SolveLimits, check, greedy, milp, solve
from streamsched.placement import solve as placement_solve
from streamsched.placement.stock import Stock

EXACT = SolveLimits(time_s=None, gap=0.0)


def job(job_id: str, gpus: int, workers: int = 1, value: float = 1.0, **more: object) -> Candidate:
    return Candidate(job_id=job_id, attempt=0, chunks=((gpus, workers),), value=value, **more)  # type: ignore[arg-type]


def nodes(gpu_type: str, free: int, *node_ids: str, **more: object) -> NodeClass:
    return NodeClass(gpu_type=gpu_type, free_gpus=free, node_ids=node_ids, total_gpus=8, **more)  # type: ignore[arg-type]


def problem(candidates: list[Candidate], classes: list[NodeClass]) -> Problem:
    return Problem(pool="p", window=4, now=0.0, policy="t", candidates=tuple(candidates), classes=tuple(classes))


def placed(solution: Solution) -> dict[str, list[str]]:
    return {a.job_id: [n for n, _ in a.workers] for a in solution.assignments}


# ── cases from the field ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_job_that_does_not_fit_blocks_nobody() -> None:
    """Field case 4: fits, does not fit, fits: both that fit start."""
    p = problem([job("a", 4), job("b", 16), job("c", 4)], [nodes("V100", 8, "n1")])
    solution = solve(p)
    assert set(placed(solution)) == {"a", "c"}
    assert solution.unplaced == {"b": "gpus: needs 16 free GPUs on one node of any type, best node has 8"}


def test_of_two_gangs_that_each_need_everything_one_is_placed_whole() -> None:
    """Field case 5: 100 free GPUs on 100 nodes; two 100-worker gangs in one window."""
    free = nodes("V100", 1, *(f"n{i:03d}" for i in range(100)))
    solution = solve(problem([job("a", 1, 100), job("b", 1, 100, value=2.0)], [free]))
    assert {j: len(set(ns)) for j, ns in placed(solution).items()} == {"b": 100}
    assert solution.unplaced["a"].startswith("outranked:")
    assert solution.status is SolveStatus.OPTIMAL


@pytest.mark.parametrize("order", [(3, 5), (5, 3)])
def test_best_fit_places_both(order: tuple[int, int]) -> None:
    """Field case 6: free GPUs 5 and 3 on two nodes; tasks of 3 and 5, in both orders: always both placed."""
    p = problem([job(f"g{g}", g) for g in order], [nodes("V100", 3, "n2"), nodes("V100", 5, "n1")])
    assert {a.job_id: a.workers[0][0] for a in greedy(p)} == {"g3": "n2", "g5": "n1"}


def test_types_are_exact_names() -> None:
    """Field case 26: jobs that ask for A100, A100-80GB, A10; nodes with each: never by prefix."""
    names = ("A10", "A100", "A100-80GB")
    classes = [nodes(name, 2, f"n-{name}") for name in names]
    p = problem([job(f"j-{name}", 2, gpu_types=(name,)) for name in reversed(names)], classes)
    assert placed(solve(p, EXACT)) == {f"j-{name}": [f"n-{name}"] for name in names}
    only_a100 = problem([job("j", 1, gpu_types=("A10",))], classes[1:])
    assert solve(only_a100).unplaced == {"j": "type: no free node of type A10"}


# ── greedy ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_gang_without_room_leaves_no_trace() -> None:
    classes = [nodes("V100", 2, "n1", "n2", free_cpu_milli=4000), nodes("V100", 2, "n3", free_cpu_milli=500)]
    p = problem([job("gang", 2, 3, cpu_milli=1000), job("pair", 2, 2, cpu_milli=4000)], classes)
    assert {a.job_id: a.workers for a in greedy(p)} == {"pair": (("n1", 2), ("n2", 2))}


def test_workers_come_in_the_order_of_the_chunks() -> None:
    mixed = Candidate(job_id="j", attempt=3, chunks=((2, 1), (6, 1)), value=1.0)
    (assignment,) = greedy(problem([mixed], [nodes("V100", 6, "n1"), nodes("V100", 2, "n2")]))
    assert assignment == Assignment(job_id="j", attempt=3, workers=(("n2", 2), ("n1", 6)))


def test_a_share_takes_the_smallest_share_that_suffices_then_opens_a_device_of_the_fullest_node() -> None:
    classes = [
        nodes("T4", 4, "idle"),
        nodes("T4", 1, "full"),
        nodes("T4", 0, "wide", shares=(250, 800)),
        nodes("T4", 0, "snug", shares=(500,)),
    ]
    jobs = [job(f"j{i}", 1, gpu_milli=400) for i in range(6)]
    where = [a.workers[0][0] for a in greedy(problem(jobs, classes))]
    assert where == ["snug", "wide", "wide", "full", "full", "idle"]


def test_avoided_nodes_are_left_to_others() -> None:
    p = problem([job("shy", 4, avoid_nodes=("n1", "n2")), job("any", 4)], [nodes("V100", 4, "n1", "n2", "n3")])
    assert {a.job_id: a.workers[0][0] for a in greedy(p)} == {"shy": "n3", "any": "n1"}
    alone = problem([job("shy", 4, avoid_nodes=("n1",))], [nodes("V100", 4, "n1")])
    assert solve(alone).unplaced["shy"].startswith("avoided:")


# ── the model ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_model_beats_rank_order_where_that_pays() -> None:
    p = problem([job("wide", 8, value=5.0), job("x", 4, value=4.0), job("y", 4, value=4.0)], [nodes("V", 8, "n")])
    solution = solve(p)
    assert set(placed(solution)) == {"x", "y"}
    assert (solution.status, solution.gap, solution.objective) == (SolveStatus.OPTIMAL, 0.0, 8.0)


def test_whole_nodes_stay_whole() -> None:
    p = problem([job("j", 2, 2)], [nodes("V100", 8, "n1"), nodes("V100", 4, "n2"), nodes("V100", 3, "n3")])
    assert placed(solve(p, EXACT)) == {"j": ["n2", "n2"]}


def test_shares_never_crowd_out_whole_devices_that_greedy_would_place() -> None:
    p = problem(
        [job("s1", 1, gpu_milli=500), job("s2", 1, gpu_milli=500), job("w", 1, value=2.0)],
        [nodes("T4", 2, "n")],
    )
    solution = solve(p)
    assert set(placed(solution)) == {"s1", "s2", "w"}


def test_cpu_and_memory_bind_exactly() -> None:
    """Two of three fit by cpu, and one kind's memory rules the other pair out."""
    classes = [nodes("V100", 8, "n", free_cpu_milli=10_000, free_memory_mib=100)]
    jobs = [
        job("a", 2, cpu_milli=5000, memory_mib=60, value=3.0),
        job("b", 2, cpu_milli=5000, memory_mib=50, value=2.0),
        job("c", 2, cpu_milli=5000, memory_mib=40, value=1.5),
    ]
    assert set(placed(solve(problem(jobs, classes), EXACT))) == {"a", "c"}


# ── how it was got ───────────────────────────────────────────────────────────────────────────────────────────────────


def crowded() -> Problem:
    return problem([job("w", 8, value=5.0), job("x", 4, value=4.0), job("y", 4, value=4.0)], [nodes("V", 8, "n")])


def test_nothing_to_place_is_empty() -> None:
    assert solve(problem([], [nodes("V", 8, "n")])).status is SolveStatus.EMPTY
    assert solve(problem([job("j", 1)], [])).status is SolveStatus.EMPTY


def test_when_greedy_is_proved_good_enough_no_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milp, "Model", None)
    p = problem([job(f"j{i}", 4) for i in range(4)], [nodes("V", 8, "n1", "n2")])
    solution = solve(p)
    assert (solution.status, solution.gap, len(solution.assignments)) == (SolveStatus.OPTIMAL, 0.0, 4)


def test_a_model_that_would_be_too_large_is_not_built() -> None:
    solution = solve(crowded(), SolveLimits(variables_max=3))
    assert solution.status is SolveStatus.GREEDY
    assert solution.note.startswith("too large:")
    assert set(placed(solution)) == {"w"}
    assert solution.gap == pytest.approx((13 - 5) / 5)


def test_a_limit_leaves_greedys_answer_or_the_incumbent() -> None:
    solution = solve(crowded(), SolveLimits(time_s=0.0))
    assert solution.status in (SolveStatus.GREEDY, SolveStatus.INCUMBENT, SolveStatus.OPTIMAL)
    assert solution.objective >= 5.0
    assert check(crowded(), solution) == []


def test_a_refused_answer_of_the_model_is_replaced_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([["node n: 9 GPUs of 8"]])
    module = __import__("sys").modules[placement_solve.__module__]
    monkeypatch.setattr(module, "check", lambda *_: next(answers))
    solution = solve(crowded())
    assert solution.status is SolveStatus.GREEDY
    assert "bug" in solution.note
    assert set(placed(solution)) == {"w"}


def test_a_solver_that_fails_leaves_greedys_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise milp.SolverFailed("HiGHS ended with error")

    monkeypatch.setattr(milp, "run", fail)
    solution = solve(crowded())
    assert (solution.status, solution.note) == (SolveStatus.GREEDY, "solver: HiGHS ended with error")


def test_values_that_are_not_numbers_cost_only_their_job() -> None:
    solution = solve(problem([job("j", 1, value=float("nan")), job("k", 1)], [nodes("V", 8, "n")]))
    assert set(placed(solution)) == {"k"}
    assert solution.unplaced == {"j": "invalid: value nan"}


# ── one job costs the others nothing ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("workers", [500, 8000, 10_000])
def test_a_job_of_very_many_tiny_shares_leaves_bystanders_theirs(workers: int) -> None:
    p = problem([job("dust", 1, workers, gpu_milli=1), job("by", 4)], [nodes("V", 8, "n1"), nodes("V", 8, "n2")])
    first: list[Solution] = []
    solution = solve(p, on_greedy=first.append)
    assert [set(placed(s)) for s in (*first, solution)] == [{"dust", "by"}] * 2
    assert check(p, solution) == []
    assert solution.note == ""


def test_a_candidate_that_greedy_fails_on_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Stock.place

    def fail(self: Stock, candidate: Candidate, **more: bool) -> object:
        if candidate.job_id == "bad":
            raise RecursionError("deep")
        return place(self, candidate, **more)

    monkeypatch.setattr(Stock, "place", fail)
    solution = solve(problem([job("bad", 1), job("by", 1)], [nodes("V", 8, "n")]))
    assert set(placed(solution)) == {"by"}
    assert solution.unplaced == {"bad": "failed: RecursionError: deep"}


def test_what_the_check_refuses_of_greedy_is_dropped_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__("sys").modules[placement_solve.__module__]
    monkeypatch.setattr(module, "sift", lambda _, found: (found[1:], ["job a: no good"]))
    solution = solve(problem([job("a", 1), job("by", 1)], [nodes("V", 8, "n")]))
    assert set(placed(solution)) == {"by"}
    assert solution.unplaced["a"].startswith("failed:")
    assert "job a: no good" in solution.note


@pytest.mark.parametrize("name", ["sift", "layout_of"])
def test_what_fails_after_greedy_leaves_greedys_answer(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*_: object) -> None:
        raise RecursionError("deep")

    monkeypatch.setattr(__import__("sys").modules[placement_solve.__module__], name, fail)
    first: list[Solution] = []
    solution = solve(crowded(), SolveLimits(time_s=5.0), first.append)
    assert set(placed(first[0])) == {"w"}
    assert solution.assignments
    assert "RecursionError" in solution.note


def test_one_window_handles_so_many_workers_and_the_rest_waits() -> None:
    """The first job beyond takes part, and so do small ones after it."""
    jobs = [job(f"big{i}", 1, 10_000, gpu_milli=1) for i in range(3)] + [job("small", 1, gpu_milli=500), job("by", 8)]
    solution = solve(problem(jobs, [nodes("V", 8, *(f"n{i}" for i in range(9)))]))
    assert set(placed(solution)) == {"big0", "small", "by"}
    assert set(solution.unplaced) == {"big1", "big2"}
    assert all(why.startswith("window:") for why in solution.unplaced.values())


@pytest.mark.parametrize(
    ("candidate", "why"),
    [
        (job("j", 8), "gpus: needs 8 free GPUs on one node of any type, best node has 5"),
        (job("j", 5, 3), "gpus: needs 3 workers with 5 free GPUs each on any type, there is room for 2"),
        (job("j", 1, cpu_milli=9000), "cpu: needs 9000 milli-cores beside 1 free GPU"),
        (job("j", 1, memory_mib=99), "memory: needs 99 MiB beside 1 free GPU"),
        (job("j", 1, gpu_types=("H100",)), "type: no free node of type H100"),
        (job("j", 0), "invalid: "),
    ],
)
def test_reasons(candidate: Candidate, why: str) -> None:
    room = nodes("V100", 5, "n1", "n2", free_cpu_milli=8000, free_memory_mib=64)
    assert solve(problem([candidate], [room])).unplaced["j"].startswith(why)


def test_solutions_cross_process_borders() -> None:
    solution = solve(crowded())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(solution), type=Solution) == solution
