"""Acknowledging in order, whatever order the work gets done in, and never across a rebalance."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from streamsched.bus.app import GroupTimes, Handlers, _after, _Turns, build_app
from streamsched.bus.connection import KafkaConnection
from streamsched.bus.topics import TopicNames


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


def events(acked: list[int], *offsets: int, partition: int = 0, generation: int = 1) -> list[Event]:
    return [Event(Message("t", partition, offset, generation), acked) for offset in offsets]


def test_an_open_one_holds_back_those_behind_it_in_its_partition_only() -> None:
    turns, acked, other = _Turns(), [], []
    first, second, third = (turns.take(e) for e in events(acked, 7, 8, 9))
    [elsewhere] = [turns.take(e) for e in events(other, 1, partition=1)]
    third()
    second()
    elsewhere()
    assert (acked, other) == ([], [1])
    first()
    assert acked == [7, 8, 9]


def test_one_that_is_never_done_holds_back_the_rest_until_the_next_assignment() -> None:
    turns, acked = _Turns(), []
    given_up, done = (turns.take(e) for e in events(acked, 7, 8))
    done()
    assert acked == []
    again = [turns.take(e) for e in events(acked, 7, 8, generation=2)]
    given_up()  # too late: it is another's now
    for finished in again:
        finished()
    assert acked[-2:] == [7, 8]


def test_a_partition_of_which_much_is_open_is_not_fetched_from_until_half_is_done() -> None:
    said: list[str] = []
    turns = _Turns(4, lambda tp: said.append(f"pause {tp.partition}"), lambda tp: said.append(f"resume {tp.partition}"))
    done = [turns.take(e) for e in events([], 0, 1, 2, 3, 4)]
    for e in events([], 0, partition=1):
        turns.take(e)
    assert said == ["pause 0"]
    for finished in (done[1], done[2], done[3]):
        finished()
    assert said == ["pause 0"], "the first is still open, so nothing is acknowledged"
    done[0]()
    assert said == ["pause 0", "resume 0"]


def test_a_new_assignment_begins_with_no_partition_paused() -> None:
    said: list[str] = []
    turns = _Turns(2, lambda tp: said.append("pause"), lambda tp: said.append("resume"))
    old = [turns.take(e) for e in events([], 0, 1)]
    turns.begin(2)
    assert said == ["pause", "resume"]
    acked: list[int] = []
    open_one, second = (turns.take(e) for e in events(acked, 0, 1, generation=2))
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
    turns = _Turns()

    async def work() -> bool | None:
        return answer

    asyncio.run(_after(work(), [turns.take(e) for e in events(acked, 0, 1)], pytest.fail))
    assert acked == acknowledged


def test_no_folder_is_made_where_the_worker_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory may be read-only, as in a container."""
    monkeypatch.chdir(tmp_path)
    unused: Any = None
    handlers = Handlers(unused, unused, unused, unused, unused, unused)
    app = build_app("group", KafkaConnection(), TopicNames(), handlers, GroupTimes())
    app._create_directories()
    assert list(tmp_path.iterdir()) == []
