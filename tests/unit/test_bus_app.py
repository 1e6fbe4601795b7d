"""Acknowledging in order, whatever order the work gets done in, and never across a rebalance."""

from __future__ import annotations

from dataclasses import dataclass, field

from streamsched.bus.app import _Turns


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
