"""RemoteAgent: the agent of another host, as the controller sees it."""

import contextlib
import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.causes import Cause
from paceline.comm import Connection
from paceline.engines.agent_messages import EndRole, RoleEnded, RoleRuns, RunOver, StartRole, StillThere
from paceline.engines.base import AgentEvent, Exited, HostInfo, RoleSpec, RoleUsage, Started
from paceline.engines.role_files import ReceivedFiles
from paceline.engines.streams import paths_of
from paceline.exceptions import FrameError, LinkError

__all__ = ["RemoteAgent"]


class _Lost(NamedTuple):
    """The link to the agent is gone for good."""

    reason: str


class RemoteAgent:
    """Starts and ends roles on another host, by messages. Its link is read by a thread of the engine, which
    hands over what the agent says (`said`); all else is for the controller's thread.

    Args:
        run_dir: the run directory on this host.
        program: directory of the program on this host; None: there is none.
        fileno: of what becomes readable when `wake` is called.
    """

    def __init__(
        self,
        host: HostInfo,
        connection: Connection,
        *,
        run_dir: Path,
        program: Path | None,
        files: ReceivedFiles,
        fileno: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        self.host = host
        self._connection = connection
        self._run_dir = run_dir
        self._program = program
        self._files = files
        self._fileno = fileno
        self._wake = wake
        self._said: queue.SimpleQueue[RoleRuns | RoleEnded | StillThere | _Lost] = queue.SimpleQueue()
        self._present: set[tuple[str, int, int]] = set()
        """Roles that were started and have not ended."""
        self._lost: str | None = None

    # --- the controller's thread ----------------------------------------------------------------------

    def start(self, spec: RoleSpec) -> None:
        """See Agent. On a host that was lost the role ends at once."""
        self._present.add((spec.role, spec.rank, spec.incarnation))
        program = None if self._program is None else str(self._program)
        sizes = self._files.sizes([*paths_of(Path(spec.log)).values()])
        self._tell(StartRole(spec.to_json(), str(self._run_dir), program, sizes))
        if self._lost is not None:
            self._wake()

    def end(self, role: str, rank: int) -> None:
        """See Agent."""
        self._tell(EndRole(role, rank))

    def poll(self) -> Sequence[AgentEvent]:
        """See Agent."""
        found: list[AgentEvent] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found += self._hear(self._said.get_nowait())
        if self._lost is not None and self._present:
            gone, self._present = sorted(self._present), set()
            how = f"was lost with its host {self.host.name} ({self._lost})"
            found += [Exited(*who, Cause.LOST_HOST, how) for who in gone]
        return found

    def fileno(self) -> int:
        """See Agent."""
        return self._fileno()

    def close(self) -> None:
        """See Agent."""
        self.release("the run has ended")

    def release(self, text: str) -> None:
        """Tell the agent that it is not needed any more; it ends its roles, and itself."""
        self._tell(RunOver(text))
        self._connection.close()

    def _hear(self, said: RoleRuns | RoleEnded | StillThere | _Lost) -> list[AgentEvent]:
        match said:
            case RoleRuns():
                return [Started(*said)] if said[:3] in self._present else []
            case RoleEnded(role, rank, incarnation, cause, how, hint, code):
                who = (role, rank, incarnation)
                if who not in self._present:
                    return []
                self._present.discard(who)
                return [Exited(*who, Cause(cause), how, hint, code)]
            case StillThere(usage):
                return [
                    RoleUsage(role, int(rank), cpu, memory)
                    for name, (cpu, memory) in usage.items()
                    for role, _, rank in (name.partition(":"),)
                    if rank.isdecimal()
                ]
            case _Lost(reason):
                self._lost = self._lost or reason
                return []

    def _tell(self, said: StartRole | EndRole | RunOver | StillThere) -> None:
        with contextlib.suppress(LinkError):  # the thread that reads sees that it broke
            self._connection.tell(said)

    # --- the engine's threads -------------------------------------------------------------------------

    def said(self, message: RoleRuns | RoleEnded | StillThere) -> None:
        """The agent reports. Raises FrameError for a cause that is none."""
        if isinstance(message, RoleEnded):
            try:
                Cause(message.cause)
            except ValueError:
                raise FrameError(f"an unknown cause {message.cause!r:.40}") from None
        self._said.put(message)
        self._wake()

    def lost(self, reason: str) -> None:
        """Its link is gone: the host is, as far as the run goes."""
        self._said.put(_Lost(reason))
        self._wake()
        self._connection.close()

    def still_there(self) -> None:
        """Tell the agent that the controller is there."""
        self._tell(StillThere({}))
