"""One clock for all roles of a run, on whichever host they are.

On one host all processes share the monotonic clock. A role elsewhere asks the controller for the time, a few
times over: the quickest answer is the least wrong, by half its round trip at most.
"""

from time import perf_counter_ns

from paceline.comm.connection import Connection, Frame
from paceline.comm.frames import Kind
from paceline.comm.messages import CLOCK_ANSWER, TimeAsked, TimeTold
from paceline.exceptions import FrameError

__all__ = ["answer_clock", "ask_clock"]

ROUNDS = 8


def ask_clock(connection: Connection) -> int:
    """What to add to this host's monotonic clock to get the other side's Unix time, in ns."""
    found = []
    for _ in range(ROUNDS):
        before = perf_counter_ns()
        connection.tell(TimeAsked())
        reply = connection.receive()
        after = perf_counter_ns()
        told = CLOCK_ANSWER.read(reply.kind, reply.body)
        found.append((after - before, told.ns - (before + after) // 2))
    return min(found)[1]


def answer_clock(connection: Connection, offset_ns: int) -> Frame:
    """Answer such questions until another frame comes, and return that."""
    for _ in range(2 * ROUNDS):
        frame = connection.receive()
        if frame.kind is not Kind.CLOCK:
            return frame
        connection.tell(TimeTold(perf_counter_ns() + offset_ns))
    raise FrameError("asks for the time and says nothing")
