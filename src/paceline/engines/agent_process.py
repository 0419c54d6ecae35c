"""HostAgent: what `paceline agent` runs. It joins a run, and then runs roles of this host until the run ends.

It is the supervisor of the fork server and the roles: they end with it. If it hears nothing of the controller
for a while, or its link breaks, it ends them: what cannot be reached must not train on.
"""

import contextlib
import os
import select
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import assert_never

from paceline.comm import Connection
from paceline.engines.agent_messages import (
    CHUNK_BYTES,
    TO_AGENT,
    EndRole,
    FileChunk,
    HostAdmitted,
    RoleEnded,
    RoleRuns,
    RunOver,
    StartRole,
    StillThere,
    ToAgent,
)
from paceline.engines.base import Agent, Exited, RoleSpec, RoleUsage, Started
from paceline.engines.local_agent import LocalAgent
from paceline.engines.moved_paths import moved
from paceline.engines.program_files import checked_path
from paceline.engines.role_files import OutgoingFiles
from paceline.exceptions import LinkError
from paceline.observe.record.resources import Sampler
from paceline.storage.typed_json import checked

__all__ = ["HostAgent", "working_directory"]

_TURN_S = 0.1
_BEATS = 10
"""Signs of life within the time after which the controller gives this host up."""


@contextlib.contextmanager
def working_directory(parent: Path | None) -> Iterator[Path]:
    """Context manager: a directory for what roles read and write here, removed at the end. Raises OSError."""
    path = Path(tempfile.mkdtemp(prefix="paceline-agent-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class HostAgent:
    """One host's part of one run.

    Args:
        connection: to the controller, which has welcomed this host.
        directory: what roles read and write is kept below it.
        tell: called with what happens, for people.
        agent: what starts and ends roles; None: a LocalAgent.
    """

    def __init__(
        self,
        connection: Connection,
        welcome: HostAdmitted,
        directory: Path,
        tell: Callable[[str], None],
        *,
        agent: Agent | None = None,
    ) -> None:
        self._connection = connection
        self._silence_s = welcome.silence_s
        self._tell_people = tell
        self._run, self.program = directory / "run", directory / "program"
        for path in (self._run, self.program, self._run / "checkpoints"):
            path.mkdir(mode=0o700)
        self._files = OutgoingFiles(self._run, self._send_file)
        self._sampler = Sampler(directory / "own", 0)
        self._agent: Agent = LocalAgent() if agent is None else agent
        self._pids: dict[str, int] = {}
        self._heard_at = self._beat_at = time.monotonic()
        self._over: str | None = None
        connection.sock.settimeout(welcome.silence_s)

    def run(self) -> str:
        """Run roles until the run ends. Returns why, in words.

        Raises:
            LinkError: the controller is gone, or silent; the roles of this host have ended.
        """
        try:
            while self._over is None:
                self._turn()
            return self._over
        except LinkError as error:
            raise LinkError(
                f"{error}. The roles of this host have ended. If the run goes on, `paceline agent` joins it "
                "again; if the controller's host is lost, `paceline resume` there goes on from the last "
                "checkpoint"
            ) from None
        finally:
            self._agent.close()
            self._sampler.close()
            self._connection.close()

    def _turn(self) -> None:
        """Wait for something to happen, at most for a moment, and see to it."""
        if not self._connection.waiting:
            select.select([self._connection.fileno(), self._agent.fileno()], [], [], _TURN_S)
        while self._over is None and self._connection.wait(0):
            self._hear()
        for event in self._agent.poll():
            match event:
                case Started(role, rank, _, pid):
                    self._pids[f"{role}:{rank}"] = pid
                    self._connection.tell(RoleRuns(*event))
                case Exited(role, rank, incarnation, cause, how, hint, code):
                    self._pids.pop(f"{role}:{rank}", None)
                    self._files.send_new(all_of_it=True)
                    ended = RoleEnded(role, rank, incarnation, cause.value, how, hint, code)
                    self._connection.tell(ended)
                case RoleUsage():
                    pass  # the sampler below tells it
                case _:
                    assert_never(event)
        self._files.send_new()
        self._give_signs_of_life()

    def _give_signs_of_life(self) -> None:
        now = time.monotonic()
        if now - self._heard_at > self._silence_s:
            raise LinkError(f"the controller has said nothing for {self._silence_s:g} s")
        if now - self._beat_at > self._silence_s / _BEATS or self._sampler.due(now):
            self._beat_at = now
            used = self._sampler.sample(self._pids)
            self._connection.tell(StillThere({name: (each.cpu, each.memory) for name, each in used.items()}))

    def _hear(self) -> None:
        frame = self._connection.receive()
        self._heard_at = time.monotonic()
        said: ToAgent = TO_AGENT.read(frame.kind, frame.body)
        match said:
            case FileChunk(path, at):
                self._take_file(path, at, self._connection.read_blob(frame, CHUNK_BYTES))
            case StartRole():
                self._start(said)
            case EndRole(role, rank):
                self._agent.end(role, rank)
            case RunOver(text):
                self._over = text
            case StillThere():
                pass
            case HostAdmitted():
                raise LinkError("welcomed twice")
            case _:
                assert_never(said)

    def _take_file(self, path: str, at: int, data: bytes) -> None:
        """A part of the program."""
        target = self.program / checked_path(path)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.seek(at)
            file.write(data)

    def _start(self, asked: StartRole) -> None:
        program = None if asked.program is None else (Path(asked.program), self.program)
        try:
            spec = moved(checked(RoleSpec, asked.spec), run=(Path(asked.run_dir), self._run), program=program)
        except ValueError as error:
            raise LinkError(f"a role that cannot be started here: {error}") from error
        self._files.begin_at(asked.sizes)
        self._tell_people(f"starts {spec.name}")
        self._agent.start(spec)

    def _send_file(self, path: str, at: int, data: bytes) -> None:
        self._connection.tell(FileChunk(path, at), [memoryview(data)])
