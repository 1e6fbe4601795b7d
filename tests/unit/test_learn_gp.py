"""Genetic programming: trees and programs are one, selection by hand, and a search that repeats."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from streamsched.errors import UserError
from streamsched.learn import gp
from streamsched.learn.gp import GpConfig, crowding, evolve, expression_of, fronts, random_expressions, tree_of
from streamsched.policy.expression import is_sound, parse
from streamsched.sim.fast import Workload
from streamsched.sim.scored import MEASURES, Instance, measure


def instance(seed: int, jobs: int = 120) -> Instance:
    """16 GPUs, overloaded now and then; estimates are wrong by a factor of two or so."""
    draw = np.random.default_rng(seed)
    gpus = draw.choice([1, 1, 2, 4, 8], jobs)
    duration = np.exp(draw.normal(5.0, 1.5, jobs))
    submit = np.cumsum(draw.exponential((duration * gpus).mean() / 16, jobs))
    estimate = duration * np.exp(0.7 * draw.standard_normal(jobs))
    return Instance(Workload(submit - submit[0], duration, gpus, estimate), [8, 8], draw.uniform(0.5, 2.0, jobs))


INSTANCES = [instance(seed) for seed in range(3)]
SMALL = GpConfig(population=40, generations=5, instances=2, seed=7)


@pytest.mark.parametrize("text", [*gp.SEEDS, "if_less(load, 0.5, -2.0 * gpus, min(run_s, 1e-05)) - sqrt(wait_s)"])
def test_trees_and_programs_are_one(text: str) -> None:
    expression = parse(text)
    tree = tree_of(expression)
    assert expression_of(tree) == expression
    assert tree.height + 1 == expression.depth
    assert len(tree) == len(expression.codes)


def test_random_programs_are_distinct_sound_and_the_same_for_a_seed() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    found = random_expressions(200, GpConfig(seed=3))
    assert random.random() == expected, "the global generator is given back as it was"
    assert len(set(found)) == 200
    assert all(is_sound(one) for one in found)
    assert found == random_expressions(200, GpConfig(seed=3)) != random_expressions(200, GpConfig(seed=4))


def test_variation_keeps_to_the_limits() -> None:
    config = GpConfig(depth_max=4, length_max=9, population=60, generations=6, instances=1)
    seeds = [str(parse(text)) for text in config.seeds]
    for one in evolve(INSTANCES[:1], config).front:
        assert one.expression in seeds or (parse(one.expression).depth <= 4 and one.length <= 9)
    with gp._seeded(1):
        parents = gp._distinct(gp._random_trees(config), 50)
        children = [gp._child(parents, lambda: random.randrange(50), config) for _ in range(300)]
    assert all(len(child) <= 9 and child.height < 4 for child in children)
    assert len({expression_of(child) for child in children}) > 100


def test_fronts_and_distances_by_hand() -> None:
    points = np.array([[1.0, 4.0], [2.0, 2.0], [4.0, 1.0], [3.0, 3.0], [5.0, 5.0], [2.0, 2.0]])
    front = fronts(points)
    assert front.tolist() == [0, 0, 0, 1, 2, 0]
    distance = crowding(points, front)
    assert distance[[0, 2, 3, 4]].tolist() == [np.inf] * 4
    assert distance[[1, 5]].tolist() == pytest.approx([1 / 3 + 1 / 3, 2 / 3 + 2 / 3])


def test_fronts_against_their_definition() -> None:
    points = np.random.default_rng(0).integers(0, 4, (60, 3)).astype(np.float64)

    def dominated(one: int, others: list[int]) -> bool:
        return any((points[o] <= points[one]).all() and (points[o] < points[one]).any() for o in others)

    left, expected = list(range(60)), np.zeros(60, np.int64)
    for number in itertools.count():
        front = [one for one in left if not dominated(one, left)]
        expected[front] = number
        left = [one for one in left if one not in front]
        if not left:
            break
    assert fronts(points).tolist() == expected.tolist()


def test_objectives_are_ratios_to_the_base() -> None:
    measures = np.zeros((2, 3, len(MEASURES)))
    measures[0, :, 0], measures[1, :, 0] = [9.0, 19.0, 0.0], [99.0, 0.0, 49.0]
    measures[..., 1], measures[..., 2] = 4.0, 0.75
    base = np.zeros((2, len(MEASURES)))
    base[:, 0], base[:, 1] = [9.0, 99.0], [1.0, 4.0]
    found = gp.objectives_of(measures, base, [1, 2, 3])
    assert found[:, gp.WAIT].tolist() == pytest.approx([1.0, (2 + 0.01) / 2, (0.1 + 0.5) / 2])
    assert found[:, gp.WAIT_MAX].tolist() == pytest.approx([(2.5 + 1) / 2] * 3)
    assert found[:, gp.UNUSED].tolist() == [0.25] * 3
    assert found[:, gp.LENGTH].tolist() == [1, 2, 3]


def test_equal_seeds_give_equal_files_whatever_the_threads() -> None:
    one, other = evolve(INSTANCES, SMALL, threads=1), evolve(INSTANCES, SMALL, threads=3)
    assert one.to_json() == other.to_json()
    assert evolve(INSTANCES, GpConfig(40, 5, 2, seed=8)).to_json() != one.to_json()


def test_the_front_is_what_it_says_and_no_worse_than_the_seeds() -> None:
    told: list[int] = []
    found = evolve(INSTANCES, SMALL, on_generation=lambda number, objectives: told.append(len(objectives)))
    assert told == [40] * 5
    assert len(found.history) == 5
    # The base; a population; four times parents and children, each on two instances; the last on all three.
    assert found.schedules == 3 + 2 * 40 + 4 * 2 * 80 + 3 * 40
    measures = measure(INSTANCES, [parse(one.expression) for one in found.front])
    base = measure(INSTANCES, [parse(SMALL.base)])[:, 0]
    again = gp.objectives_of(measures, base, [one.length for one in found.front])
    assert again[:, gp.WAIT].tolist() == [one.wait for one in found.front]
    assert again[:, gp.WAIT_MAX].tolist() == [one.wait_max for one in found.front]
    assert (fronts(again) == 0).all()
    seeds = gp.objectives_of(measure(INSTANCES, [parse(text) for text in SMALL.seeds]), base, [1] * len(SMALL.seeds))
    assert found.front[0].wait < seeds[:, gp.WAIT].min()


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="at least one instance"):
        evolve([])
    with pytest.raises(UserError, match="no feature 'wait'"):
        evolve(INSTANCES, GpConfig(seeds=("wait",)))
