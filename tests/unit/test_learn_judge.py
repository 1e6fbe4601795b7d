"""Policies on the parts of a slice: who counts where, what intervals tell, and that nothing comes from later."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from predict_jobs import finished

from streamsched.errors import UserError
from streamsched.learn import cards, judge
from streamsched.learn.judge import Candidate, Judge, Judged, Measure, Part, Regime, Sees, Slice, Split
from streamsched.policy.expression import parse
from streamsched.policy.features import FEATURES, INDEX, Float32s
from streamsched.policy.network import Network
from streamsched.predict import Finished
from streamsched.sim import foresight, scored
from streamsched.sim.fast import (
    COSTS,
    LAS_LEVELS_GPU_S,
    SPARING,
    Backfill,
    Floats,
    Outcome,
    Preemption,
    Rule,
    Workload,
    las_index,
    simulate,
    simulate_index,
)

DAY_S = 86_400.0
NODES = [8, 8]
SPLIT = Split.of_four_weeks(0.0)


def trace(jobs: int = 400, seed: int = 3, first: int = 0, begins: float = 0.0, days: float = 28.0) -> list[Finished]:
    draw, rows = random.Random(seed), []
    for number, at in enumerate(sorted(draw.uniform(begins, begins + days * DAY_S) for _ in range(jobs))):
        user = draw.randrange(4)
        run_s = draw.choice([2_000.0, 20_000.0, 90_000.0]) * (1 + user)
        gpus = draw.choice([1, 2, 8, 12])
        rows.append(finished(run_s, user=f"u{user}", gpus=gpus, job_id=f"j{first + number}", submitted_at=at))
    return rows


def slice_of(jobs: list[Finished], history: list[Finished] | None = None) -> Slice:
    return Slice("drawn", jobs, history or [], NODES, SPLIT)


@pytest.fixture(scope="module")
def drawn() -> Slice:
    return slice_of(trace(), trace(60, seed=9, first=1_000, begins=-10 * DAY_S, days=8.0))


def fcfs(jobs: Workload, spread: Floats) -> Outcome:
    return simulate(jobs, NODES)


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_job_is_of_one_part() -> None:
    submit = np.array([0.0, 14 * DAY_S - 1, 14 * DAY_S, 21 * DAY_S - 1, 21 * DAY_S, 28 * DAY_S - 1])
    masks = [SPLIT.of(part, submit).tolist() for part in Part]
    assert masks == [
        [True, True, False, False, False, False],
        [False, False, True, True, False, False],
        [False, False, False, False, True, True],
    ]
    assert not SPLIT.of(Part.REPORT, np.array([28 * DAY_S])).any()


def test_edges_ascend() -> None:
    with pytest.raises(ValueError, match="ascend"):
        Split((0.0, 2.0, 2.0, 3.0))


def test_the_queue_is_warm_and_later_parts_are_not_seen(drawn: Slice) -> None:
    seen: dict[int, Workload] = {}

    def run(jobs: Workload, spread: Floats) -> Outcome:
        seen[len(jobs)] = jobs
        assert len(spread) == len(jobs)
        return simulate(jobs, NODES)

    judged = Judge(drawn, draws=50)
    found = judged.judge(Candidate("spy", run), Part.CHOOSE)
    jobs = seen[drawn.until(Part.CHOOSE)]
    assert jobs.submit_s[0] == drawn.seen.submit_s[0]
    assert jobs.submit_s[-1] < 21 * DAY_S <= drawn.seen.submit_s[len(jobs)]
    own = SPLIT.of(Part.CHOOSE, jobs.submit_s)
    assert found.values[Measure.MEAN_WAIT] == pytest.approx(simulate(jobs, NODES).wait_s[own].mean())
    assert found.days == 7


def test_what_was_judged_is_kept(drawn: Slice) -> None:
    calls = []

    def run(jobs: Workload, spread: Floats) -> Outcome:
        calls.append(len(jobs))
        return simulate(jobs, NODES)

    judged, candidate = Judge(drawn, draws=50), Candidate("spy", run)
    assert judged.judge(candidate, Part.REPORT) is judged.judge(candidate, Part.REPORT)
    assert len(calls) == 1


def test_a_part_without_jobs_is_refused() -> None:
    early = slice_of(trace(20, days=13.0))
    with pytest.raises(ValueError, match="no job is submitted in the part choose"):
        Judge(early, draws=50).judge(Candidate("fcfs", fcfs), Part.CHOOSE)


def test_weights_count_in_the_weighted_wait_alone(drawn: Slice) -> None:
    weight = np.where(np.arange(len(drawn.jobs)) % 2 == 0, 3.0, 1.0)
    weighted = Slice("drawn", drawn.jobs, drawn.history, NODES, SPLIT, weight)
    found = Judge(weighted, draws=50).judge(Candidate("fcfs", fcfs), Part.REPORT)
    own = SPLIT.of(Part.REPORT, drawn.seen.submit_s)
    wait = fcfs(drawn.seen, drawn.spread).wait_s[own]
    assert found.values[Measure.WEIGHTED_WAIT] == pytest.approx(np.average(wait, weights=weight[own]))
    assert found.values[Measure.WEIGHTED_WAIT_MAX] == (wait * weight[own]).max()
    assert found.values[Measure.MAX_WAIT] == wait.max()
    plain = Judge(drawn, draws=50).judge(Candidate("fcfs", fcfs), Part.REPORT)
    assert plain.values[Measure.WEIGHTED_WAIT] == pytest.approx(plain.values[Measure.MEAN_WAIT])


# ── useful time ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_useful_time_is_all_work_and_nothing_else(drawn: Slice) -> None:
    """Over the whole time the kept parts of stretches are the run times, whatever was stopped, lost and moved."""
    costs = Preemption(bound_s=50_000.0, move_after_s=1_800.0)
    outcome = simulate_index(drawn.seen, NODES, las_index(), costs)
    assert outcome.preemptions.sum() > 50
    job, begin, end = judge._kept(outcome, costs)
    worked = np.bincount(job, weights=end - begin, minlength=len(drawn.seen))
    assert worked == pytest.approx(drawn.seen.duration_s, abs=1e-3)


def test_useful_share_by_day() -> None:
    jobs = Workload(np.array([0.0]), np.array([1.5 * DAY_S]), np.array([4]))
    share = judge.useful_share(jobs, simulate(jobs, [8]), (0.0, 3 * DAY_S))
    assert share.tolist() == [0.5, 0.25, 0.0]


# ── intervals ────────────────────────────────────────────────────────────────────────────────────────────────────────


def delayed(extra: Floats) -> Candidate:
    """FCFS, and jobs reported as having waited longer."""

    def run(jobs: Workload, spread: Floats) -> Outcome:
        found = simulate(jobs, NODES)
        return dataclasses.replace(found, wait_s=found.wait_s + extra[: len(jobs)])

    return Candidate("delayed", run)


def test_a_known_difference_is_found_in_pairs(drawn: Slice) -> None:
    """The waits themselves vary by far more than the 100 s that one policy is worse."""
    judged = Judge(drawn)
    extra = np.random.default_rng(4).normal(100.0, 10.0, len(drawn.jobs))
    one, other = judged.judge(delayed(extra), Part.REPORT), judged.judge(Candidate("fcfs", fcfs), Part.REPORT)
    found = judge.difference(one, other, Measure.MEAN_WAIT)
    assert found.interval is not None
    low, high = found.interval
    assert low < found.value < high
    assert 90.0 < low < 100.0 < high < 110.0
    alone = other.interval(Measure.MEAN_WAIT)
    assert alone is not None
    assert alone[1] - alone[0] > 50 * (high - low)
    assert judge.difference(other, one, Measure.MEAN_WAIT).value == -found.value


def test_equal_policies_do_not_differ(drawn: Slice) -> None:
    judged = Judge(drawn)
    one, other = (judged.judge(Candidate(name, fcfs), Part.CHOOSE) for name in ("one", "other"))
    for measure in Measure:
        found = judge.difference(one, other, measure)
        assert found.value == 0.0
        assert found.interval in (None, (0.0, 0.0))


def test_intervals_of_seven_days_cover(drawn: Slice) -> None:
    """Of days that are alike the interval of the mean holds it about as often as it should, unlike the bare one."""
    draw, held, bare = np.random.default_rng(5), 0, 0
    for _ in range(300):
        days = draw.normal(0.0, 1.0, 7)
        means = draw.choice(days, (2_000, 7)).mean(axis=1)
        low, high = judge._between(means, 7)
        held += low <= 0.0 <= high
        bare_low, bare_high = np.percentile(means, [2.5, 97.5])
        bare += bare_low <= 0.0 <= bare_high
    assert bare < 275 < held


@pytest.mark.parametrize(("freedom", "quantile"), [(6, 2.447), (13, 2.160), (27, 2.052)])
def test_quantiles_of_student(freedom: int, quantile: float) -> None:
    assert judge._t_975(freedom) == pytest.approx(quantile, abs=2e-3)


def test_maxima_have_no_interval(drawn: Slice) -> None:
    found = Judge(drawn, draws=50).judge(Candidate("fcfs", fcfs), Part.REPORT)
    assert found.interval(Measure.MAX_WAIT) is None
    assert all(found.interval(m) is not None for m in Measure if m not in (Measure.MAX_WAIT, Measure.WEIGHTED_WAIT_MAX))


def test_seeds_make_one_row(drawn: Slice) -> None:
    judged = Judge(drawn, draws=50)
    runs = []
    for seed, extra in enumerate((0.0, 300.0, 60.0), start=1):
        candidate = delayed(np.full(len(drawn.jobs), extra))
        runs.append(judged.judge(Candidate("learned", candidate.run, seed=seed), Part.REPORT))
    row = judge.over_seeds(runs)
    least = runs[0].values[Measure.MEAN_WAIT]
    assert row.seeds == (1, 2, 3)
    assert row.least[Measure.MEAN_WAIT] == least
    assert row.most[Measure.MEAN_WAIT] == pytest.approx(least + 300.0)
    assert row.values[Measure.MEAN_WAIT] == pytest.approx(least + 120.0)
    assert judge.difference(row, runs[0], Measure.MEAN_WAIT).interval == pytest.approx((120.0, 120.0))


def test_the_best_can_be_deployed(drawn: Slice) -> None:
    judged = Judge(drawn, draws=50)
    rows = [judged.judge(candidate, Part.REPORT) for candidate in (*judge.rules(NODES), *judge.oracles(NODES))]
    found = judge.best_rule(row for row in rows if row.regime is Regime.PLAIN)
    assert not found.oracle
    assert found.values[Measure.MEAN_WAIT] == min(
        row.values[Measure.MEAN_WAIT] for row in rows if row.regime is Regime.PLAIN and row.sees is not Sees.TRUE
    )


# ── candidates ───────────────────────────────────────────────────────────────────────────────────────────────────────


def las(features: Float32s) -> Floats:
    attained = features[:, INDEX["attained_gpu_s"]]
    return np.searchsorted(np.array(LAS_LEVELS_GPU_S), attained, side="right").astype(np.float64)


@pytest.mark.parametrize("costs", [COSTS, SPARING], ids=str)
def test_las_as_a_table_of_ranks_is_las(drawn: Slice, costs: Preemption) -> None:
    candidate = judge.by_rank("las", las, NODES, costs, LAS_LEVELS_GPU_S)
    found, wanted = candidate.run(drawn.seen, drawn.spread), simulate_index(drawn.seen, NODES, las_index(), costs)
    assert wanted.preemptions.sum() > 50
    assert found.start_s.tolist() == wanted.start_s.tolist()
    assert found.finish_s.tolist() == wanted.finish_s.tolist()
    assert found.preemptions.tolist() == wanted.preemptions.tolist()
    assert found.placed.tolist() == wanted.placed.tolist()


def test_ranks_see_predictions_and_service(drawn: Slice) -> None:
    asked: list[Float32s] = []

    def ranks(features: Float32s) -> Floats:
        asked.append(features.copy())
        return np.zeros(len(features))

    candidate = judge.by_rank("nobody", ranks, NODES, COSTS, (100.0, 200.0))
    candidate.run(drawn.seen, drawn.spread)
    [features] = asked
    for column, expected in (("run_s", drawn.foreseen.first), ("spread", drawn.spread), ("gpus", drawn.seen.gpus)):
        assert set(features[:, INDEX[column]].tolist()) == set(expected.astype(np.float32).tolist())
    at_level = np.unique(features[:, [INDEX["attained_gpu_s"], INDEX["running"]]], axis=0)
    assert at_level.tolist() == [[0.0, 0.0], [100.0, 1.0], [200.0, 1.0]]
    with pytest.raises(ValueError, match="predicted run times"):
        candidate.run(foresight.workload_of(drawn.jobs), drawn.spread)


def test_an_expression_is_its_rule(drawn: Slice) -> None:
    judged = Judge(drawn, draws=50)
    learned = judged.judge(judge.by_expression("sjf", parse("-run_s"), NODES), Part.REPORT)
    instance = scored.Instance(drawn.seen, NODES, spread=drawn.spread)
    own = SPLIT.of(Part.REPORT, drawn.seen.submit_s)
    wait = scored.simulate_expression(instance, parse("-run_s")).wait_s[own]
    assert learned.values[Measure.MEAN_WAIT] == wait.mean()


def test_a_network_sees_predictions_and_their_spread(drawn: Slice) -> None:
    weights = np.zeros(len(FEATURES) + 1)
    weights[INDEX["run_s"]], weights[INDEX["spread"]] = -1.0, -0.5
    network = Network.blank().with_weights(weights)
    found = judge.by_network("linear", network, NODES).run(drawn.seen, drawn.spread)
    instance = scored.Instance(drawn.seen, NODES, spread=drawn.spread)
    assert found.start_s.tolist() == scored.simulate_network(instance, network).start_s.tolist()
    without = scored.simulate_network(scored.Instance(drawn.seen, NODES), network)
    assert found.start_s.tolist() != without.start_s.tolist()


def test_rules_without_run_times_say_so() -> None:
    sees = {candidate.name: candidate.sees for candidate in judge.rules(NODES)}
    assert len(sees) == len(Rule) * len(Backfill)
    assert sees["smallest, skip"] is sees["multifactor, none"] is Sees.NOTHING
    assert sees["fcfs, easy"] is sees["sjf, none"] is Sees.BEFORE
    assert {candidate.sees for candidate in judge.oracles(NODES)} == {Sees.TRUE}


# ── nothing from later ───────────────────────────────────────────────────────────────────────────────────────────────


def deployable(where: Slice) -> list[Candidate]:
    by_class = judge.Index(np.array([1_000.0]), np.tile([[0.0, 1.0]], (len(where.jobs), 1)), np.arange(len(where.jobs)))
    steps = foresight.by_service(NODES, foresight.coarse(foresight.gittins_per_gpu), SPARING)
    return [
        *judge.plain_baselines(where),
        *judge.preemptive_baselines(where, by_class),
        judge.by_day("gittins by day", where, steps, Regime.PREEMPTIVE),
        judge.by_expression("sjf", parse("-run_s"), NODES),
        judge.by_rank("las", las, NODES, SPARING, LAS_LEVELS_GPU_S),
    ]


def test_what_comes_later_changes_no_start() -> None:
    """From the 20th day on other jobs come, and what had not ended by then under a policy runs longer than it did."""
    history = trace(60, seed=9, first=1_000, begins=-10 * DAY_S, days=8.0)
    jobs, moment = trace(160), 20 * DAY_S
    where = slice_of(jobs, history)
    for place, candidate in enumerate(deployable(where)):
        outcome = candidate.run(where.seen, where.spread)
        count = int(np.searchsorted(where.seen.submit_s, moment))
        open_then = outcome.finish_s[:count] > moment
        assert open_then.any()
        changed = [
            replace(job, run_s=job.run_s + 99_999.0) if late else job
            for job, late in zip(jobs[:count], open_then.tolist(), strict=True)
        ]
        others = slice_of([*changed, *trace(80, seed=8, first=2_000, begins=moment, days=8.0)], history)
        again = deployable(others)[place].run(others.seen, others.spread)
        begun = outcome.start_s[:count] < moment
        assert again.start_s[:count][begun].tolist() == outcome.start_s[:count][begun].tolist(), candidate.name
        assert (again.start_s[:count][~begun] >= moment).all(), candidate.name


def test_days_are_learned_once(drawn: Slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for the first parts the same was foreseen as when nothing else came."""
    policy = foresight.by_estimate(NODES, Rule.SJF)
    candidate = judge.by_day("sjf", drawn, policy)
    count = drawn.until(Part.TRAIN)
    early = candidate.run(drawn.seen.take(slice(count)), drawn.spread[:count])
    alone, _ = foresight.foresee(drawn.jobs[:count], policy, drawn.history)
    assert early.start_s.tolist() == alone.start_s.tolist()
    monkeypatch.setattr(foresight, "foresee", None)
    candidate.run(drawn.seen, drawn.spread)


# ── RLTune's protocol ────────────────────────────────────────────────────────────────────────────────────────────────


def test_batches_begin_on_an_empty_cluster(drawn: Slice) -> None:
    candidates = [candidate for candidate in judge.rules(NODES) if candidate.name in ("fcfs, none", "sjf, skip")]
    base, other = judge.in_protocol(drawn.seen, drawn.spread, candidates, size=50)
    alone = Workload(drawn.seen.submit_s[50:100], drawn.seen.duration_s[50:100], drawn.seen.gpus[50:100])
    wanted = simulate(alone, NODES, Rule.FCFS, Backfill.NONE)
    assert len(base.batches[Measure.MEAN_WAIT]) == 8
    assert base.batches[Measure.MEAN_WAIT][1] == wanted.mean_wait_s
    assert base.stream[Measure.MEAN_WAIT] == simulate(drawn.seen, NODES, Rule.FCFS, Backfill.NONE).mean_wait_s
    found = judge.change(other, base, Measure.MEAN_WAIT)
    means = [of.batches[Measure.MEAN_WAIT].mean() for of in (other, base)]
    assert found.value == means[0] / means[1] - 1.0
    assert found.interval is not None
    assert found.interval[0] <= found.value <= found.interval[1]
    assert judge.change_in_stream(base, base, Measure.MEAN_JCT) == 0.0


def test_a_share_of_no_wait_is_refused() -> None:
    idle = Workload(np.arange(4) * DAY_S, np.ones(4), np.ones(4, np.int64), np.ones(4))
    found = judge.in_protocol(idle, np.zeros(4), judge.rules(NODES)[:1], size=2)
    with pytest.raises(ValueError, match="0 in all batches"):
        judge.change(found[0], found[0], Measure.MEAN_WAIT)


# ── cards ────────────────────────────────────────────────────────────────────────────────────────────────────────────

TRAINING = cards.Training(
    name="first",
    method="genetic programming",
    command="streamsched train gp",
    slice="philly-4w",
    trained_on="2017-10-02 to 2017-10-16",
    chosen_on="2017-10-16 to 2017-10-23",
    seeds=[1, 2, 3],
    commit="0123abc",
    features=["gpus", "run_s"],
    features_version=1,
    limits=["One cluster."],
)


def rows_of(where: Slice) -> list[Judged]:
    judged = Judge(where, draws=50)
    seeds = [
        judged.judge(judge.by_expression("first", parse(f"-run_s * {seed}"), NODES, seed), Part.REPORT)
        for seed in (1, 2, 3)
    ]
    chosen = ("fcfs, skip", "smallest, skip", "fcfs, easy")
    rules = [*(c for c in judge.rules(NODES) if c.name in chosen), judge.oracles(NODES)[1]]
    return [*(judged.judge(candidate, Part.REPORT) for candidate in rules), judge.over_seeds(seeds)]


def test_a_card_tells_all_and_is_the_same_again(drawn: Slice, tmp_path: Path) -> None:
    table = cards.Table("drawn", Part.REPORT, Regime.PLAIN, rows_of(drawn))
    cards.write(tmp_path, TRAINING, [table], chosen_seed=2)
    first = [(tmp_path / name).read_bytes() for name in ("card.md", "card.json")]
    again = cards.Table("drawn", Part.REPORT, Regime.PLAIN, rows_of(drawn))
    cards.write(tmp_path, TRAINING, [again], chosen_seed=2)
    assert [(tmp_path / name).read_bytes() for name in ("card.md", "card.json")] == first
    text = first[0].decode()
    for told in ("philly-4w", "2017-10-16 to 2017-10-23", "1, 2, 3; 2 is used", "0123abc", "version 1: gpus, run_s"):
        assert told in text
    assert "| **first** | before |" in text
    assert "ORACLE" in text
    assert "- One cluster." in text
    assert "Drawn, report part, without preemption (cross-trace)" in text
    assert "- first against " in text
    rows = msgspec.json.decode(first[1])["tables"][0]["rows"]
    assert [row["name"] for row in rows if row["learned"]] == ["first"]
    for row in rows:
        low, high = row["intervals"]["mean_wait_s"]
        assert low <= row["values"]["mean_wait_s"] <= high
        assert len(row["to_best_rule"]["p99_wait_s"]) == 3
        assert len(row["to_best_rule"]["max_wait_s"]) == 1


def test_rows_are_set_against_the_best_rule(drawn: Slice) -> None:
    rows = rows_of(drawn)
    lines = cards.markdown(rows)[2:]
    rule = judge.best_rule(rows)
    assert not rule.learned
    assert [line.split(" | ")[3] for line in lines if line.startswith(f"| {rule.name} | {rule.sees}")] == ["-"]
    assert sum(" | - | " in line for line in lines) == 1
    waits = [float(line.split(" | ")[2].split(" ")[0].replace(",", "")) for line in lines]
    assert waits == sorted(waits)


def test_leading_rows(drawn: Slice) -> None:
    rows = rows_of(drawn)
    rule = judge.best_rule(rows)
    assert {row.name for row in cards.leading(rows, rules=1, oracles=0)} == {"first", rule.name, "fcfs, skip"}
    assert len(cards.leading(rows)) == len(rows)


def test_one_day_has_no_interval() -> None:
    jobs = trace(30, days=0.9)
    day = Slice("day", jobs, [], NODES, Split((0.0, 0.3 * DAY_S, 0.6 * DAY_S, DAY_S)))
    judged = Judge(day, draws=50)
    rows = [judged.judge(candidate, Part.REPORT) for candidate in judge.rules(NODES)[:2]]
    assert rows[0].interval(Measure.MEAN_WAIT) is None
    assert judge.difference(rows[0], rows[1], Measure.P99_WAIT).interval is None
    assert "(" not in "".join(cards.markdown(rows)[2:])


def test_training_is_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        cards.read_training(tmp_path)
    (tmp_path / cards.TRAINING_FILE).write_text("{}")
    with pytest.raises(UserError, match="name"):
        cards.read_training(tmp_path)
    (tmp_path / cards.TRAINING_FILE).write_bytes(msgspec.json.encode(TRAINING))
    assert cards.read_training(tmp_path) == TRAINING
