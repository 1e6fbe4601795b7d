"""The environment against the compiled episodes, what its rewards sum to, and Gymnasium's own check."""

from __future__ import annotations

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from streamsched.errors import UserError
from streamsched.learn.env import QueueEnv, scaled
from streamsched.learn.windows import (
    REWARDS,
    Reward,
    Sampling,
    Window,
    by_rule,
    cut,
    drawn_instance,
    rollouts,
)
from streamsched.policy.features import FEATURES
from streamsched.policy.network import Network
from streamsched.sim.fast import Rule
from streamsched.sim.scored import Instance, episode

SOURCE = drawn_instance(1, jobs=600, load=1.3)
SMALL = Sampling(jobs=(20, 60), load=(0.8, 1.5), nodes=(0.5, 1.0), warm_jobs=100)


def network_of(seed: int) -> Network:
    like = Network.blank(8)
    return like.with_weights(np.random.default_rng(seed).normal(0.0, 1.0, len(like.weights)))


def window_of(seed: int) -> Window:
    return SMALL.draw(SOURCE, Rule.SJF, np.random.default_rng(seed))


@given(seed=st.integers(0, 10_000), choices=st.sampled_from([2, 5, 32]))
@settings(max_examples=25, deadline=None)
def test_the_environment_decides_as_the_compiled_episode(seed: int, choices: int) -> None:
    """The same network, always the best: the same features to the bit, the same jobs, the same starts."""
    window, network = window_of(seed), network_of(seed)
    told = episode(window.instance, network, 0, choices, temperature=0.0)
    if not len(told.job):
        return
    env = QueueEnv(SOURCE, choices=choices)
    env.reset(seed=0, options={"window": window})
    for number in range(len(told.job)):
        raw = env.raw()
        assert raw.tobytes() == told.features[number, : told.choices[number]].tobytes()
        assert env.world.now == told.time_s[number]
        action = np.int64(np.argmax(network.scores(raw)))
        assert action == told.chosen[number]
        over = env.step(action)[2]
        assert over == (number == len(told.job) - 1)
    assert env.world.start_s.tolist() == told.outcome.start_s.tolist()


@given(seed=st.integers(0, 10_000), name=st.sampled_from(REWARDS), relative=st.booleans())
@settings(max_examples=25, deadline=None)
def test_rewards_sum_to_what_the_window_costs(seed: int, name: str, relative: bool) -> None:
    window = window_of(seed)
    env = QueueEnv(SOURCE, reward=name, base=Rule.SJF, relative=relative, scale=1.0, choices=8)
    random = np.random.default_rng(seed)
    try:
        _, info = env.reset(seed=0, options={"window": window})
    except UserError:
        return
    total, over = 0.0, False
    while not over:
        action = np.int64(random.choice(np.flatnonzero(info["action_mask"])))
        job = env.world.fitting[action]
        seen, reward, over, cut_off, info = env.step(action)
        assert env.world.start_s[job] < np.inf
        assert not info["invalid"]
        assert not cut_off
        assert seen["mask"].tolist() == info["action_mask"].tolist()
        assert (seen["features"] >= 0).all()
        assert (seen["features"] <= 1).all()
        total += float(reward)
    jobs, start = window.instance.jobs, env.world.start_s
    assert np.isfinite(start).all()
    least = np.maximum(jobs.duration_s, 10.0)

    def costs(start: np.ndarray) -> np.ndarray:
        wait = start - jobs.submit_s
        return {"wait": wait, "jct": wait + jobs.duration_s,
                "bounded_slowdown": np.maximum(1.0, (wait + jobs.duration_s) / least) - 1.0}[name]  # fmt: skip

    early = Reward.parse(name).ramps(jobs, start, start + jobs.duration_s).until(np.array([window.begin_s]))[0]
    expected = early - costs(start).sum()
    if relative:
        outcome = by_rule(window.instance, Rule.SJF)
        before = Reward.parse(name).ramps(jobs, outcome.start_s, outcome.finish_s).until(np.array([window.begin_s]))[0]
        expected += costs(outcome.start_s).sum() - before
    assert total == pytest.approx(expected, rel=1e-9, abs=1e-4)


def test_without_warm_start_rewards_are_minus_the_total_wait() -> None:
    window = cut(SOURCE, Rule.SJF, 100, 80)
    (done,) = rollouts([window], network_of(1), [7], threads=1)
    assert done.counted.all()
    assert done.cost[-1] == pytest.approx(done.episode.outcome.wait_s.sum())
    assert np.allclose(done.cost[:-1], done.episode.queue_job_s)


def test_a_mix_is_the_weighted_sum() -> None:
    window = window_of(3)
    outcome = by_rule(window.instance, Rule.SJF)
    mixed = Reward.parse("wait:2,bounded_slowdown:300").cost(window, outcome)
    wait, slow = (Reward.parse(name).cost(window, outcome) for name in ("wait", "bounded_slowdown"))
    assert mixed == pytest.approx(2 * wait + 300 * slow)
    for text in ("waits", "wait:-1", "wait:x", "", "wait:nan"):
        with pytest.raises(UserError, match="expected NAME"):
            Reward.parse(text)


def test_what_is_carried_into_a_window() -> None:
    """Jobs that ran go on to the same end, jobs that waited keep their time of submission, under the same rule."""
    first, count, warm = 200, 50, 200
    window = cut(SOURCE, Rule.SJF, first, count, warm)
    assert window.new == count
    jobs = window.instance.jobs
    carried = len(jobs) - count
    before = by_rule(cut(SOURCE, Rule.SJF, 0, first).instance, Rule.SJF)
    at = window.begin_s
    assert carried == int((before.finish_s >= at).sum()) > 0
    after = by_rule(window.instance, Rule.SJF)
    ran = (before.start_s < at) & (before.finish_s >= at)
    assert np.allclose(np.sort(after.finish_s[: ran.sum()]), np.sort(before.finish_s[ran]))
    waiting = np.sort(SOURCE.jobs.submit_s[:first][before.start_s >= at] - SOURCE.jobs.submit_s[0])
    assert np.array_equal(np.sort(jobs.submit_s[carried - len(waiting) : carried]), waiting)


def test_an_action_without_a_job_starts_the_oldest_that_fits() -> None:
    env = QueueEnv(SOURCE, SMALL)
    env.reset(seed=2)
    oldest = env.world.fitting[0]
    info = env.step(np.int64(31))[4]
    assert info["invalid"]
    assert env.world.start_s[oldest] < np.inf


def test_gymnasium_accepts_it_and_equal_seeds_give_equal_episodes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = gymnasium.make("streamsched/Queue-v0")
        check_env(env.unwrapped, skip_render_check=True)

    def run(seed: int) -> list[float]:
        _, info = env.reset(seed=seed)
        rewards, over = [], False
        while not over:
            _, reward, over, _, info = env.step(np.int64(np.flatnonzero(info["action_mask"])[-1]))
            rewards.append(float(reward))
        return rewards

    assert run(5) == run(5) != run(6)


def test_rollouts_do_not_depend_on_threads() -> None:
    windows = [window_of(seed) for seed in range(6)]
    one, three = (rollouts(windows, network_of(2), range(6), threads=n) for n in (1, 3))
    assert all(a.cost.tolist() == b.cost.tolist() for a, b in zip(one, three, strict=True))


def test_inputs_are_those_of_networks() -> None:
    features = np.random.default_rng(0).uniform(0, 1e4, (7, len(FEATURES))).astype(np.float32)
    assert np.array_equal(scaled(features), Network.blank().inputs(features, slice(None)).astype(np.float32))


def test_a_window_without_decisions_is_said() -> None:
    one = Instance(cut(SOURCE, Rule.SJF, 0, 1).instance.jobs, [8])
    with pytest.raises(UserError, match="nothing is to be decided"):
        QueueEnv(one, Sampling(jobs=(1, 1), warm_jobs=0)).reset(seed=0)
