"""Consistency modes: who waits for whom, as pure state machines.

presets.py   the table of modes: what each name means in knobs, and what is peculiar to it
mode_spec.py ModeSpec: the knobs of a mode, and what follows from them
parsing.py   parse_mode, which reads "ssp:3"
refusals.py  what is refused of a mode's text or its knobs, and why
damping.py   how a stale update gets less momentum and a shorter step (damping=momentum)
stored.py    as_first_stored: modes in run directories that are older than today's defaults
descriptions.py  in_words: what a mode means, for people
machine.py   Machine: events in (joined, left, pushed, rested, woke, switch), instructions out
             (Apply, Hold, Admit, Drop); Rounds is bsp and backup, Clocks is ssp and asp, WholeEpochs is
             sandblaster
schedule.py  Schedule: the modes a run goes through by itself, read by parse_schedule
divergence.py  Divergence: sees a run diverge, from its first losses and gradient norms on
guard.py     Guard: decides on a tighter mode if staleness is to blame for a run that gets worse
lbfgs.py     sandblaster's coordinator: L-BFGS by scalars only

No torch, sockets, threads or time in here: the live servers, the property tests and the simulator
run this very code.
"""

from paceline.core.modes.damping import damped_rates
from paceline.core.modes.descriptions import in_words
from paceline.core.modes.divergence import Divergence, explained, is_loss
from paceline.core.modes.guard import Decision, Guard
from paceline.core.modes.machine import (
    Admit,
    Apply,
    Clocks,
    Drop,
    Hold,
    Instruction,
    Machine,
    MachineState,
    PushId,
    Rounds,
    WholeEpochs,
)
from paceline.core.modes.mode_spec import ModeSpec
from paceline.core.modes.parsing import parse_mode
from paceline.core.modes.schedule import Schedule, parse_schedule
from paceline.core.modes.stored import DEFAULTS, as_first_stored

__all__ = [
    "DEFAULTS",
    "Admit",
    "Apply",
    "Clocks",
    "Decision",
    "Divergence",
    "Drop",
    "Guard",
    "Hold",
    "Instruction",
    "Machine",
    "MachineState",
    "ModeSpec",
    "PushId",
    "Rounds",
    "Schedule",
    "WholeEpochs",
    "as_first_stored",
    "damped_rates",
    "explained",
    "in_words",
    "is_loss",
    "parse_mode",
    "parse_schedule",
]
