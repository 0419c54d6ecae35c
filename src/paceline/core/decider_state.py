"""The decider's state as JSON: what a follower that joins a run later begins with."""

from typing import NamedTuple

from paceline.core.ballot import Ballot
from paceline.core.collective_calls import CollectiveCalls
from paceline.core.leases import BookState
from paceline.core.modes.machine import MachineState, PushId
from paceline.core.pushes import PushesState
from paceline.core.readers import Readers
from paceline.core.roster import Roster
from paceline.core.sampler_orders import SamplerOrders
from paceline.core.state import StateCodec

__all__ = ["DeciderState", "decider_state_from_json", "decider_state_to_json"]


class DeciderState(NamedTuple):
    """All that a decider knows beyond the run's configuration, for a follower that begins here."""

    mode: str
    machine: MachineState
    book: BookState | None
    several_optimizers: bool
    ballot: Ballot
    collectives: CollectiveCalls
    pushes: PushesState
    roster: Roster
    readers: Readers
    orders: SamplerOrders
    assigns: dict[int, PushId]
    scheduled: int
    next_mode: str | None


_CODEC = StateCodec(DeciderState)

decider_state_to_json = _CODEC.encode
decider_state_from_json = _CODEC.decode
