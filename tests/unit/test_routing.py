"""Which pool a job goes to, by what the pools' summaries tell; and that a summary tells enough and stays small."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streamsched.core import events as ev
from streamsched.core.capability import Capabilities, Capability
from streamsched.core.cluster import ClusterState
from streamsched.core.model import JobSpec, NodeSpec
from streamsched.routing.least_loaded import NodeKind, PoolSummary, choose, node_kinds
from streamsched.service.summary import Summaries


def spec(gpus: int = 1, **fields: Any) -> JobSpec:
    return JobSpec(job_id="j", submitted_at=1.0, gpus_per_worker=gpus, **fields)


def pool(*nodes: tuple[str, int, int], free: int | None = None, queued: dict[str, int] | None = None) -> PoolSummary:
    """Nodes as (type, GPUs, how many)."""
    gpus: dict[str, int] = {}
    for gpu_type, size, count in nodes:
        gpus[gpu_type] = gpus.get(gpu_type, 0) + size * count
    return PoolSummary(
        gpus=gpus,
        free_gpus=gpus if free is None else {nodes[0][0]: free},
        queued_gpu_milli=queued or {},
        kinds=tuple(NodeKind(gpu_type, size, 0, 0, count) for gpu_type, size, count in nodes),
    )


def test_a_pool_whose_nodes_are_too_small_is_not_chosen_however_many_it_has() -> None:
    pools = {"many-small": pool(("A", 4, 100)), "busy-large": pool(("A", 8, 2), free=0)}
    assert choose(spec(8), pools) == "busy-large"
    assert choose(spec(4), pools) == "many-small"


def test_a_gang_needs_room_for_all_its_workers_at_one_time() -> None:
    pools = {"odd": pool(("A", 7, 10)), "even": pool(("A", 8, 8), free=8)}
    assert choose(spec(4, workers=12), pools) == "even", "70 GPUs, but ten workers of 4"


def test_cpu_and_memory_count() -> None:
    poor = PoolSummary(gpus={"A": 80}, free_gpus={"A": 80}, kinds=(NodeKind("A", 8, 1000, 1000, 10),))
    rich = PoolSummary(gpus={"A": 8}, free_gpus={}, kinds=(NodeKind("A", 8, 0, 0, 1),))
    assert choose(spec(1, memory_mib=5000), {"poor": poor, "rich": rich}) == "rich"
    assert choose(spec(1, cpu_milli=5000), {"poor": poor, "rich": rich}) == "rich"


def test_of_those_that_can_the_least_loaded_by_gpus_not_by_jobs() -> None:
    few_large = pool(("A", 8, 4), queued={"A": 64_000})
    many_small = msgspec.structs.replace(pool(("A", 8, 4), queued={"A": 10_000}), queued=100)
    assert choose(spec(1), {"few-large": few_large, "many-small": many_small}) == "many-small"


def test_held_gpus_and_queued_thousandths_are_in_one_unit() -> None:
    held = pool(("A", 8, 1), free=4)
    shares = pool(("A", 8, 1), queued={"": 3_500})
    assert choose(spec(1), {"held": held, "shares": shares}) == "shares"


def test_work_on_other_types_is_no_load() -> None:
    pools = {
        "p": pool(("A", 8, 1), ("B", 8, 1), queued={"A": 800_000}),
        "q": pool(("A", 8, 1), ("B", 8, 1), queued={"B": 1_000}),
    }
    assert choose(spec(1, gpu_types=("B",)), pools) == "p"


def test_if_none_can_the_largest_tells_why() -> None:
    pools = {"a": pool(("A", 4, 1)), "b": pool(("A", 4, 3)), "c": PoolSummary()}
    assert choose(spec(8), pools) == "b"
    assert choose(spec(1, gpu_types=("Z",)), pools) == "a"


def test_choices_are_load_until_the_next_look() -> None:
    pools = {"p": pool(("A", 8, 2)), "q": pool(("A", 8, 2))}
    chosen = []
    for _ in range(8):
        name = choose(spec(2), pools)
        pools[name] = pools[name].with_queued(spec(2))
        chosen.append(name)
    assert chosen == ["p", "q"] * 4


# ── the summary ──────────────────────────────────────────────────────────────────────────────────────────────────────


def state_of(nodes: list[NodeSpec]) -> ClusterState:
    state = ClusterState("p")
    for node in nodes:
        state.handle(ev.NodeJoined(spec=node), 1.0)
    return state


def read(summaries: Summaries, state: ClusterState, now: float) -> PoolSummary:
    return msgspec.json.decode(summaries.of(state, now), type=PoolSummary)


def test_a_summary_says_what_the_pool_says_of_a_job() -> None:
    state = state_of(
        [
            NodeSpec(node_id="a", gpu_type="A", gpus=8, memory_mib=1000),
            NodeSpec(node_id="b", gpu_type="A", gpus=4),
            NodeSpec(node_id="c", gpu_type="B", gpus=2, cpu_milli=2000),
        ]
    )
    summary = read(Summaries(), state, 1.0)
    for asked in (
        spec(8),
        spec(9),
        spec(8, memory_mib=1001),
        spec(4, workers=3),
        spec(4, workers=4),
        spec(1, gpu_milli=250, workers=8, gpu_types=("B",)),
        spec(1, cpu_milli=3000, gpu_types=("B",)),
        spec(4, workers=2, remainder_gpus=2),
        spec(1, gpu_types=("C",)),
    ):
        assert summary.could_hold(asked) is (state.inventory.never_fits(asked) is None), asked


def test_the_queue_is_told_in_gpus_and_summed_up_once_a_second() -> None:
    state = state_of([NodeSpec(node_id="a", gpu_type="A", gpus=8)])
    summaries = Summaries()
    assert read(summaries, state, 10.0).queued_gpu_milli == {}
    for number, asked in enumerate((spec(2), spec(8, gpu_types=("A",)), spec(1, gpu_milli=300))):
        state.handle(ev.JobArrived(spec=msgspec.structs.replace(asked, job_id=f"j{number}")), 10.0)
    assert read(summaries, state, 10.5).queued_gpu_milli == {}
    assert read(summaries, state, 11.0).queued_gpu_milli == {"": 2_300, "A": 8_000}
    assert read(summaries, state, 11.0).queued == 3


@pytest.mark.parametrize("types", [1, 50, 300])
def test_a_summary_of_a_motley_pool_is_bounded_and_promises_no_less(types: int) -> None:
    nodes = Capabilities()
    for n in range(1, 1000):
        nodes.total[Capability(f"T{n % types}", 1 + n % 8, 100 * n, 7 * n)] = 1 + n % 3
    kinds = node_kinds(nodes.total)
    assert len(kinds) <= 64
    summary = PoolSummary(kinds=kinds)
    told = {kind.gpu_type for kind in kinds}
    for asked in (spec(8), spec(4, workers=40), spec(1, memory_mib=5000), spec(1, cpu_milli=90_000, workers=9)):
        for gpu_type in sorted(told):
            one = msgspec.structs.replace(asked, gpu_types=(gpu_type,))
            if nodes.why_never(one) is None:
                assert summary.could_hold(one)
