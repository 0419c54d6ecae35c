"""Consistency modes: who waits for whom, as pure state machines.

spec.py     ModeSpec, the knobs of a mode, and parse_mode, which reads "ssp:3"
machine.py  Machine: events in (joined, left, pushed, rested, woke), instructions out
            (Apply, Admit, Drop); Rounds is bsp and backup, Clocks is ssp and asp

No torch, sockets, threads or time in here: the live servers, the property tests and the simulator
run this very code.
"""

from paceline.modes.machine import (
    Admit,
    Apply,
    Clocks,
    Drop,
    Instruction,
    Machine,
    PushId,
    Rounds,
)
from paceline.modes.spec import ModeSpec, parse_mode

__all__ = [
    "Admit",
    "Apply",
    "Clocks",
    "Drop",
    "Instruction",
    "Machine",
    "ModeSpec",
    "PushId",
    "Rounds",
    "parse_mode",
]
