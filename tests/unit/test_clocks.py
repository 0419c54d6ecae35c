"""One clock for roles on several hosts."""

import threading
from time import perf_counter_ns

import pytest

from paceline.comm import Kind
from paceline.comm.clocks import ROUNDS, answer_clock, ask_clock
from paceline.exceptions import FrameError, LinkError
from tests.links import linked


@pytest.fixture
def pair():
    with linked("tcp") as ends:
        yield ends


def answering(connection, offset_ns):
    heard = []

    def answer():
        try:
            heard.append(answer_clock(connection, offset_ns))
        except LinkError as error:
            heard.append(error)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread, heard


def test_the_offset_is_found_within_a_round_trip(pair):
    mine, theirs = pair
    thread, heard = answering(theirs, 123_456_789_000)
    before = perf_counter_ns()
    offset = ask_clock(mine)
    took = perf_counter_ns() - before
    assert abs(offset - 123_456_789_000) <= took  # both clocks are this host's: the rest is the way
    mine.send(Kind.HELLO, {"role": "worker", "rank": 0})
    thread.join()
    assert heard[0].kind is Kind.HELLO


def test_who_does_not_ask_is_not_held_up(pair):
    mine, theirs = pair
    mine.send(Kind.HELLO, {"role": "worker", "rank": 0})
    assert answer_clock(theirs, 0).kind is Kind.HELLO


def test_who_only_asks_is_turned_away(pair):
    mine, theirs = pair
    thread, heard = answering(theirs, 0)
    for _ in range(2 * ROUNDS):
        mine.send(Kind.CLOCK)
    thread.join()
    assert isinstance(heard[0], FrameError)


def test_another_answer_is_an_error(pair):
    mine, theirs = pair
    theirs.send(Kind.HELLO, {"role": "worker", "rank": 0})
    with pytest.raises(FrameError, match="HELLO is no message to a role that asks for the time"):
        ask_clock(mine)
