"""Actions: what the leader's process does about the decisions of the LeadMachine, in this order."""

from typing import NamedTuple

from paceline.core.collective_calls import Values
from paceline.core.events import Event
from paceline.core.json_types import Json, JsonObject
from paceline.core.leases import Lease
from paceline.core.notes import AdmitNotes, GrantNotes, Notes, WelcomeNotes
from paceline.core.placement import Placement
from paceline.core.server.lead_reports import LeaderReport
from paceline.core.steps import Steps
from paceline.core.totals import Applied
from paceline.exceptions import PacelineError

__all__ = [
    "AbandonCheckpoint",
    "Action",
    "Actions",
    "AdmitNotes",
    "CommitCheckpoint",
    "EndFollower",
    "FailRun",
    "GrantNotes",
    "LeaveBehind",
    "Notes",
    "OpenCheckpoint",
    "Order",
    "OutgoingActions",
    "ReportProgress",
    "SendAnswer",
    "SendGrant",
    "SendVerdict",
    "TakeIn",
    "Tell",
    "TellUser",
    "Welcome",
    "WelcomeNotes",
    "WriteLog",
]


class Order(NamedTuple):
    """Send all of this to the followers, then execute the steps."""

    steps: Steps
    events: list[Event]
    """Events since the last Order; none without replicas."""
    held: Steps
    """Steps that are newly held: they wait for the second half of an update."""


class SendGrant(NamedTuple):
    """Answer a worker that asked for leases."""

    worker: int
    leases: tuple[Lease, ...]
    over: bool
    """Whether there are no more of its epoch."""
    notes: GrantNotes


class SendVerdict(NamedTuple):
    """Answer a worker that asked whether the run ends early; the notes say whether it does."""

    worker: int
    notes: Notes


class SendAnswer(NamedTuple):
    """Answer a worker that called a collective."""

    worker: int
    values: Values
    notes: Notes


class Welcome(NamedTuple):
    """Answer a worker that attached: it may begin."""

    worker: int
    notes: WelcomeNotes


class Tell(NamedTuple):
    """Tell the controller."""

    report: LeaderReport


class TellUser(NamedTuple):
    """Show the user this text, once. Training goes on."""

    text: str


class WriteLog(NamedTuple):
    """Write a line to the server's log, as a warning or an error."""

    text: str
    is_error: bool = False


class ReportProgress(NamedTuple):
    """Tell the controller how far the run is."""


class FailRun(NamedTuple):
    """The run cannot go on: tell the controller why."""

    error: PacelineError


class TakeIn(NamedTuple):
    """Let a new server follow from here on."""

    server: int
    position: int
    """Number of steps in the order before it."""
    answered: dict[int, int]
    """Number of each worker's last request that is answered before this position."""
    placement: Placement
    """The placement before the server's first one: it says which servers send it slices."""
    decider: Json
    """State of the decider as JSON; None without replicas."""
    records: tuple[Applied, ...] = ()
    """Records of applied pushes that are in this state, and that the leader has not written yet."""
    incarnations: dict[int, int] = {}  # noqa: RUF012
    """The processes of the workers whose requests are answered."""


class LeaveBehind(NamedTuple):
    """A server holds nothing any more: send it no further steps. It ends when the controller says so."""

    server: int


class EndFollower(NamedTuple):
    """Close the link to a follower that workers cannot reach."""

    server: int


class OpenCheckpoint(NamedTuple):
    """Make the directory of a checkpoint. Its step follows in the order."""

    version: int
    directory: str
    lead: JsonObject
    """The leader's state in the checkpoint, as JSON."""


class CommitCheckpoint(NamedTuple):
    """All parts of the checkpoint are here: commit it."""


class AbandonCheckpoint(NamedTuple):
    """Give up the checkpoint in the making, and remove its files."""


Action = (
    Order
    | SendGrant
    | SendVerdict
    | SendAnswer
    | Welcome
    | Tell
    | TellUser
    | WriteLog
    | ReportProgress
    | FailRun
    | TakeIn
    | LeaveBehind
    | EndFollower
    | OpenCheckpoint
    | CommitCheckpoint
    | AbandonCheckpoint
)
Actions = list[Action]


class OutgoingActions:
    """Actions that the parts of a machine have decided on, in order, until the machine returns them."""

    def __init__(self) -> None:
        self._actions: Actions = []

    def put(self, action: Action) -> None:
        """One more action."""
        self._actions.append(action)

    def take(self) -> Actions:
        """All actions since the last call."""
        actions, self._actions = self._actions, []
        return actions
