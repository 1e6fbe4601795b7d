"""What is taken from Kafka: acknowledged in order, never across a rebalance, never more than the memory holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from streamsched.bus.intake import BATCH_MAX, Bounds, Later, Line, Turns, after, size_of


@dataclass
class Message:
    topic: str
    partition: int
    offset: int
    generation_id: int = 1


@dataclass
class Event:
    message: Message
    acked: list[int] = field(default_factory=list)

    def ack(self) -> None:
        self.acked.append(self.message.offset)


def take(turns: Turns, event: Event, size: int = 0) -> Callable[[], None]:
    return turns.take((event.message.topic, event.message.partition), event, size)


def bounded(bounds: Bounds, said: list[str]) -> Turns:
    return Turns(bounds, lambda tp: said.append(f"pause {tp[1]}"), lambda tp: said.append(f"resume {tp[1]}"))


def events(acked: list[int], *offsets: int, partition: int = 0, generation: int = 1) -> list[Event]:
    return [Event(Message("t", partition, offset, generation), acked) for offset in offsets]


def test_an_open_one_holds_back_those_behind_it_in_its_partition_only() -> None:
    turns, acked, other = Turns(), [], []
    first, second, third = (take(turns, e) for e in events(acked, 7, 8, 9))
    [elsewhere] = [take(turns, e) for e in events(other, 1, partition=1)]
    third()
    second()
    elsewhere()
    assert (acked, other) == ([], [1])
    first()
    assert acked == [7, 8, 9]


def test_one_that_is_never_done_holds_back_the_rest_until_the_next_assignment() -> None:
    turns, acked = Turns(), []
    given_up, done = (take(turns, e) for e in events(acked, 7, 8))
    done()
    assert acked == []
    again = [take(turns, e) for e in events(acked, 7, 8, generation=2)]
    given_up()  # too late: it is another's now
    for finished in again:
        finished()
    assert acked[-2:] == [7, 8]


def test_a_partition_of_which_much_is_open_is_not_fetched_from_until_half_is_done() -> None:
    said: list[str] = []
    turns = bounded(Bounds(messages=4), said)
    done = [take(turns, e) for e in events([], 0, 1, 2, 3, 4)]
    for e in events([], 0, partition=1):
        take(turns, e)
    assert said == ["pause 0"]
    for finished in (done[1], done[2], done[3]):
        finished()
    assert said == ["pause 0"], "the first is still open, so nothing is acknowledged"
    done[0]()
    assert said == ["pause 0", "resume 0"]


def test_a_new_assignment_begins_with_no_partition_paused() -> None:
    said: list[str] = []
    turns = Turns(Bounds(messages=2), lambda tp: said.append("pause"), lambda tp: said.append("resume"))
    old = [take(turns, e) for e in events([], 0, 1)]
    turns.begin(2)
    assert said == ["pause", "resume"]
    acked: list[int] = []
    open_one, second = (take(turns, e) for e in events(acked, 0, 1, generation=2))
    turns.begin(2)
    old[0]()
    old[1]()
    second()
    assert acked == [], "what is open in this assignment is not forgotten by a second word of it"
    open_one()
    assert acked == [0, 1]


@pytest.mark.parametrize(("answer", "acknowledged"), [(True, [0, 1]), (None, [0, 1]), (False, [])])
def test_what_was_not_taken_after_all_is_not_acknowledged(answer: bool | None, acknowledged: list[int]) -> None:
    acked: list[int] = []
    turns = Turns()

    async def work() -> bool | None:
        return answer

    asyncio.run(after(work(), [take(turns, e) for e in events(acked, 0, 1)], pytest.fail))
    assert acked == acknowledged


def test_few_but_large_ones_count_by_their_bytes() -> None:
    said: list[str] = []
    turns = bounded(Bounds(size=100), said)
    done = [take(turns, e, 40) for e in events([], 0, 1)]
    assert said == []
    done += [take(turns, e, 40) for e in events([], 2, 3)]
    assert said == ["pause 0"]
    done[0]()
    done[1]()
    assert said == ["pause 0"], "80 of 100 are open"
    done[2]()
    assert said == ["pause 0", "resume 0"]


def test_beyond_the_total_those_with_more_than_their_share_are_held_and_others_go_on() -> None:
    said: list[str] = []
    turns = bounded(Bounds(size=100, size_all=120), said)
    still = [take(turns, e, 40) for partition in (0, 1) for e in events([], 0, 1, partition=partition)]
    assert said == ["pause 1"], "160 of 120 are open, 80 of them here: more than a half of 120"
    quick = [take(turns, e, 10) for e in events([], 0, 1, partition=2)]
    for finished in quick:
        finished()
    take(turns, events([], 2, partition=0)[0], 10)
    assert said == ["pause 1", "pause 0"]
    for finished in still[2:]:
        finished()
    assert said[2:] == ["resume 1"]
    assert turns._size == 90


def test_bytes_of_an_earlier_assignment_do_not_count_and_are_not_taken_off_twice() -> None:
    turns = Turns(Bounds(size=100))
    old = [take(turns, e, 30) for e in events([], 0, 1)]
    new = [take(turns, e, 30) for e in events([], 0, 1, generation=2)]
    for finished in (*old, new[0]):
        finished()
    assert turns._size == 30
    new[1]()
    assert (turns._size, turns._open) == (0, {})


@pytest.mark.parametrize("headers", [{"n": b"four"}, [("n", b"four")], [("void", None), ("n", b"")]])
def test_key_value_and_headers_count(headers: Any) -> None:
    class Message:
        key = b"key"
        value = None

    empty, full = Message(), Message()
    empty.headers, full.headers = None, headers  # type: ignore[attr-defined]
    full.value = bytes(1000)  # type: ignore[assignment]
    assert size_of(full) - size_of(empty) == 1005


# ── the line ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Bench:
    """A line over a handler that waits to be let on."""

    def __init__(self) -> None:
        self.generation = 1
        self.go_on = asyncio.Event()
        self.got: list[list[int]] = []
        self.acked: list[int] = []
        self.faults: list[BaseException] = []
        self.later: Mapping[int, Later | None] = {}
        self.turns = Turns()
        self.line = Line(self._handle, lambda e: e.message.generation_id == self.generation, self.faults.append)

    async def _handle(self, batch: list[Event]) -> Mapping[int, Later | None]:
        self.got.append([event.message.offset for event in batch])
        await self.go_on.wait()
        return self.later

    def put(self, *offsets: int, generation: int = 1) -> None:
        self.line.put([(e, take(self.turns, e)) for e in events(self.acked, *offsets, generation=generation)])


async def _turns_of_the_loop() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_what_comes_while_the_handler_is_busy_waits_in_order_and_nobody_waits_for_it() -> None:
    async def work() -> None:
        bench = Bench()
        for start in range(0, 3 * BATCH_MAX, 10):
            bench.put(*range(start, start + 10))
        await _turns_of_the_loop()
        assert len(bench.got) == 1
        bench.go_on.set()
        await _turns_of_the_loop()
        assert [len(batch) for batch in bench.got] == [BATCH_MAX] * 3
        assert bench.acked == list(range(3 * BATCH_MAX)) == [offset for batch in bench.got for offset in batch]

    asyncio.run(work())


def test_what_takes_longer_is_acknowledged_apart_and_holds_up_no_later_batch() -> None:
    async def work() -> None:
        bench = Bench()
        bench.go_on.set()
        slow: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        bench.later = {1: slow}
        bench.put(0, 1, 2)
        await _turns_of_the_loop()
        bench.later = {}
        bench.put(3)
        await _turns_of_the_loop()
        assert (bench.got, bench.acked) == ([[0, 1, 2], [3]], [0])
        slow.set_result(True)
        await _turns_of_the_loop()
        assert bench.acked == [0, 1, 2, 3]

    asyncio.run(work())


def test_what_waits_from_before_a_rebalance_is_not_handed_over_after_it() -> None:
    async def work() -> None:
        bench = Bench()
        bench.put(0)
        await _turns_of_the_loop()
        bench.put(1, 2)
        bench.generation = 2
        bench.line.forget_earlier()
        assert not bench.line._waiting, "also while the handler is busy"
        bench.put(3)  # what Faust had delivered already
        bench.put(0, 1, 2, generation=2)
        bench.go_on.set()
        await _turns_of_the_loop()
        assert bench.got == [[0], [0, 1, 2]]

    asyncio.run(work())


def test_a_busy_handler_is_let_be_for_a_moment_only() -> None:
    async def work() -> None:
        bench = Bench()
        await asyncio.wait_for(bench.line.pause(60.0), 1.0)
        bench.put(0)
        await asyncio.wait_for(bench.line.pause(0.01), 1.0)
        assert bench.acked == []
        asyncio.get_running_loop().call_later(0.01, bench.go_on.set)
        await asyncio.wait_for(bench.line.pause(60.0), 1.0)
        assert bench.acked == [0]

    asyncio.run(work())


@pytest.mark.parametrize("stray", [False, True])
def test_an_error_of_the_handler_and_a_stray_cancellation_are_faults(stray: bool) -> None:
    async def work() -> None:
        faults: list[BaseException] = []

        async def broken(batch: list[Any]) -> Mapping[int, Later | None]:
            raise asyncio.CancelledError if stray else ValueError("broken")

        line = Line(broken, lambda event: True, faults.append)
        [event] = events([], 0)
        line.put([(event, pytest.fail)])
        await _turns_of_the_loop()
        assert [type(fault) for fault in faults] == [RuntimeError if stray else ValueError]

    asyncio.run(work())


def test_a_line_that_is_stopped_leaves_everything_to_the_next_owner() -> None:
    async def work() -> None:
        bench = Bench()
        bench.put(0)
        await _turns_of_the_loop()
        bench.put(1)
        bench.line.stop()
        bench.go_on.set()
        await _turns_of_the_loop()
        assert (bench.got, bench.acked, bench.faults) == ([[0]], [], [])

    asyncio.run(work())
