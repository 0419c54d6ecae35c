"""Messages between the controller and the agent of another host: one class and one kind of frame for each."""

from typing import Final, NamedTuple

from paceline.comm.frames import Kind
from paceline.comm.message_codec import Catalogue, message
from paceline.core.json_types import JsonObject

__all__ = [
    "CHUNK_BYTES",
    "FIRST_WORD",
    "FROM_AGENT",
    "PROTOCOL",
    "TO_AGENT",
    "EndRole",
    "FileChunk",
    "FromAgent",
    "HostAdmitted",
    "HostHello",
    "RoleEnded",
    "RoleRuns",
    "RunOver",
    "StartRole",
    "StillThere",
    "ToAgent",
]

PROTOCOL = 1
"""Number of this set of messages. The first frame of an agent, a HELLO, names it and Paceline's version."""
CHUNK_BYTES = 256 << 10
"""Most bytes of a file in one frame."""


@message(Kind.HOST)
class HostHello(NamedTuple):
    """The host that wants to join, after a HELLO."""

    name: str
    identity: str
    """Another one for each host: see `host_identity`."""
    address: str
    """Where it believes that others reach it."""
    port: int
    """It accepts a connection there, for the controller to see that it can be reached."""
    cores: int
    memory: int
    unix_s: float
    """Its clock."""


@message(Kind.WELCOME)
class HostAdmitted(NamedTuple):
    """The host belongs to the run."""

    run: str
    host: str
    """Its id in the run."""
    silence_s: float
    """How long either side may say nothing before the other one gives it up."""


@message(Kind.ROLE_START)
class StartRole(NamedTuple):
    """Start a role."""

    spec: JsonObject
    """A RoleSpec with the paths of the controller's host."""
    run_dir: str
    program: str | None
    """Those of the run directory and of the program there."""
    sizes: dict[str, int]
    """Bytes of its log files so far: it may have run on another host."""


@message(Kind.ROLE_END)
class EndRole(NamedTuple):
    """Kill a role, now or as soon as it runs."""

    role: str
    rank: int


@message(Kind.RUN_OVER)
class RunOver(NamedTuple):
    """The run has ended, or goes on without this host."""

    text: str


@message(Kind.FILE)
class FileChunk(NamedTuple):
    """Bytes of a file, as the payload: of the program (to an agent), of what a role wrote (to the
    controller).
    """

    path: str
    """Relative, with `/`."""
    at: int
    """Position of the first byte."""


@message(Kind.ALIVE)
class StillThere(NamedTuple):
    """Nothing has happened; the sender is still there."""

    usage: dict[str, tuple[float, int]]
    """By role of the agent's host: cores in use, and bytes of memory. Empty from the controller."""


@message(Kind.ROLE_STARTED)
class RoleRuns(NamedTuple):
    """A role's process runs."""

    role: str
    rank: int
    incarnation: int
    pid: int


@message(Kind.ROLE_EXITED)
class RoleEnded(NamedTuple):
    """A role's process ended. All that it wrote was sent before."""

    role: str
    rank: int
    incarnation: int
    cause: str
    """Value of a `Cause`."""
    how: str
    hint: str
    code: int | None


ToAgent = HostAdmitted | StartRole | EndRole | RunOver | FileChunk | StillThere
FromAgent = RoleRuns | RoleEnded | FileChunk | StillThere

TO_AGENT: Final[Catalogue[ToAgent]] = Catalogue(ToAgent, "an agent")
FROM_AGENT: Final[Catalogue[FromAgent]] = Catalogue(FromAgent, "the controller, from an agent")
FIRST_WORD: Final[Catalogue[HostHello]] = Catalogue(HostHello, "the controller, from a new agent")
