"""The processes of a run: starts, watches and kills them through the fleet."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypedDict

from paceline.comm import Address, Certificate, Secret
from paceline.comm.faults import Faults
from paceline.comm.store_link import StoreService
from paceline.control.attempts import Attempts
from paceline.control.configs import CommonConfig, reader_config, server_config, worker_config
from paceline.control.fleet import Fleet
from paceline.control.host_choice import HostChoice
from paceline.control.rendezvous import HOST, ReservedPort
from paceline.control.rundir import RunDirectory
from paceline.core.run_decisions import Launch
from paceline.engines import (
    LOCAL_HOST,
    Engine,
    EngineEvent,
    Exited,
    HostInfo,
    RoleSpec,
    RoleUsage,
    Succession,
)
from paceline.exceptions import CheckpointError
from paceline.plan import Plan
from paceline.plan.host_settings import host_silence_s
from paceline.plan.plan import threads_of_workers
from paceline.storage.checkpoint import Checkpoint, latest, load
from paceline.storage.checkpoint_meta import check_meta

__all__ = ["Credentials", "Origin", "RoleProcesses", "SavedOrigin", "Surroundings"]

_END_S = 5.0
"""How long killed processes may take to end."""
_ALONE_S = 30.0
"""How long roles continue without a controller, if one is to take over."""


class Credentials(NamedTuple):
    """What a role needs to be admitted to the run."""

    secret: bytes
    certificates: dict[str, Certificate]
    """By role; empty without TLS."""


class SavedOrigin(TypedDict):
    """An Origin as JSON."""

    checkpoint: str | None
    version: int
    samples: int
    clocks: dict[str, int]
    floor: int


class Origin(NamedTuple):
    """Where the run started from, or went back to: a checkpoint, or the very beginning."""

    checkpoint: Path | None = None
    version: int = 0
    samples: int = 0
    clocks: Mapping[str, int] = MappingProxyType({})
    """Steps that each worker had made there."""
    floor: int = 0
    """Steps that any other worker counts from."""

    @classmethod
    def at(cls, checkpoint: Path) -> "Origin":
        """This checkpoint. Raises CheckpointError if it cannot be read."""
        return cls._of(load(checkpoint))

    @classmethod
    def newest(cls, checkpoints: Path, say: Callable[[str], None]) -> "Origin":
        """The newest checkpoint of a directory that a run can go on from, or the beginning if it has none.

        Args:
            say: told of each checkpoint that is passed over, and why.
        """

        def refused(path: Path, error: CheckpointError) -> None:
            say(f"checkpoint {path.name} is refused, the one before it is used: {error}")

        found = latest(checkpoints, on_refused=refused, check=check_meta)
        return cls() if found is None else cls._of(found)

    @classmethod
    def _of(cls, checkpoint: Checkpoint) -> "Origin":
        check_meta(checkpoint)
        lead = checkpoint.meta["lead"]
        machine = lead["machine"]
        clocks, floor = machine.get("clocks", {}), machine.get("floor", 0)
        return cls(checkpoint.path, machine["version"], lead["samples"], clocks, floor)

    @classmethod
    def from_json(cls, data: SavedOrigin) -> "Origin":
        """The inverse of `to_json`. The checkpoint may have been removed since."""
        path = data["checkpoint"]
        checkpoint = None if path is None else Path(path)
        return cls(checkpoint, data["version"], data["samples"], data["clocks"], data["floor"])

    def to_json(self) -> SavedOrigin:
        """As plain JSON."""
        return {
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "version": self.version,
            "samples": self.samples,
            "clocks": dict(self.clocks),
            "floor": self.floor,
        }

    def steps_of(self, rank: int) -> int:
        """Steps that a worker had made there."""
        return int(self.clocks.get(str(rank), self.floor))


class Surroundings(NamedTuple):
    """The state of the run that a new process is told."""

    mode: str
    lead: int
    servers: int
    workers: int


class RoleProcesses:
    """Processes of one run.

    Args:
        heir: what takes over if this process dies, see `Succession.call`; None: nothing does.
        origin: what roles start from.
        refused: called, in another thread, with the reason of a connection to the store that was refused.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        run: RunDirectory,
        *,
        credentials: Credentials,
        controller: Address,
        clock_ns: int,
        heir: str | None,
        origin: Origin,
        meeting_port: int | None,
        refused: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._fleet = Fleet(engine)
        self._run = run
        self._credentials = credentials
        self._controller = controller
        self._clock_ns = clock_ns
        self._heir = heir if engine.guardian is not None else None
        self.origin = origin
        self._faults = Faults.from_environment()
        self._attempts = Attempts(run.path, len(run.record().get("resumes", ())))
        own = engine.hosts()[0]
        self._meeting_port = ReservedPort(own.address or HOST)
        self._choice = HostChoice(plan)
        self._store: StoreService | None = None
        if own.address is not None:
            secret = Secret(credentials.secret, credentials.certificates.get("controller"))
            patience_s = plan.job.deadline_s
            self._store = StoreService(
                run.path, secret, host=own.address, patience_s=patience_s, refused=refused
            )
        if meeting_port is not None:
            self._meeting_port.take_over(meeting_port)

    @property
    def meeting_port(self) -> int:
        """Port at which processes of the script's own torch.distributed meet."""
        return self._meeting_port.number

    @property
    def heir(self) -> str | None:
        """What takes over if this process dies; None: nothing does."""
        return self._heir

    def be_guarded(self, listener: int) -> None:
        """Have a successor started if this process dies.

        Args:
            listener: descriptor of the socket that roles dial.
        """
        lock = self._run.lock.descriptor
        guardian = self._engine.guardian
        if self._heir is None or lock is None or guardian is None:
            return
        certificates = {role: shown.to_json() for role, shown in self._credentials.certificates.items()}
        guardian.guard(
            Succession(
                call=self._heir,
                run=str(self._run.path),
                log=str(self._run.log_path("controller")),
                secret=self._credentials.secret.hex(),
                listener=listener,
                lock=lock,
                certificates=certificates,
            )
        )

    def start_from(self, origin: Origin) -> None:
        """All workers begin here: none of them replaces an earlier process."""
        self.origin = origin
        self._attempts.begin_anew()

    def start(self, launch: Launch, around: Surroundings) -> str:
        """Start a process; returns the id of its host before it runs."""
        role, rank, incarnation = launch.role, launch.rank, launch.incarnation
        common = CommonConfig(
            rank=rank,
            incarnation=incarnation,
            mode=around.mode,
            servers=around.servers,
            workers=around.workers,
            clock_ns=self._clock_ns,
            faults=str(self._faults.of(role, rank, incarnation)),
        )
        host = self._host_of(role, rank)
        if role == "server":
            store = None if self._store is None or host.id == LOCAL_HOST else self._store.address
            config = server_config(
                self._plan, self._run, common, around.lead, self.origin.checkpoint, host, store
            )
        else:
            attempt, steps = self._attempts.start(rank), self.origin.steps_of(rank)
            meeting_at = (self._meeting_port.host, self.meeting_port)
            place = self._choice.local_place(rank, around.workers)
            config = worker_config(self._plan, self._run, common, meeting_at, attempt, steps, place)
            if host.id != LOCAL_HOST:
                config["threads"] = threads_of_workers(
                    self._plan.job, host.cores, self._choice.num_workers(host.id)
                )
        shown = self._credentials.certificates.get(role)
        self._fleet.start(
            host.id,
            RoleSpec(
                role=role,
                rank=rank,
                incarnation=incarnation,
                log=str(self._run.log_path(role, rank)),
                secret=self._credentials.secret.hex(),
                controller=self._controller.to_json(),
                certificate=None if shown is None else shown.to_json(),
                patience_s=0.0 if self._heir is None else _ALONE_S,
                config=config,
                mps=self._plan.uses_mps,
            ),
        )
        return host.id

    def start_reader(self, every: int, attempt: int) -> None:
        """Start the process that evaluates; on this host, which has the run directory; returns before it
        runs."""
        config = reader_config(self._plan, self._run, every, attempt, self._clock_ns)
        self._fleet.start(
            LOCAL_HOST,
            RoleSpec(
                role="reader",
                rank=0,
                incarnation=attempt,
                log=str(self._run.log_path("reader", 0)),
                secret="",  # it talks to nobody
                controller=self._controller.to_json(),
                config=config,
            ),
        )

    def _host_of(self, role: str, rank: int) -> HostInfo:
        present = {host.id: host for host in self._engine.hosts()}
        return present[self._choice.choose(role, rank, [*present])]

    def hosts(self) -> Sequence[HostInfo]:
        """The hosts that are there."""
        return self._engine.hosts()

    def host_events(self) -> Sequence[EngineEvent]:
        """Hosts that came, were lost or were refused since the last call."""
        return self._fleet.host_events()

    def usage_elsewhere(self) -> dict[str, RoleUsage]:
        """What roles on other hosts use, by name."""
        return self._fleet.usage_elsewhere()

    def exits(self) -> list[Exited]:
        """Processes that ended since the last call."""
        return self._fleet.exits()

    def running(self) -> set[str]:
        """Names of the roles that run."""
        return self._fleet.running()

    @property
    def num_workers(self) -> int:
        """Number of workers that run."""
        return sum(name.startswith("worker:") for name in self._fleet.running())

    def local_pids(self) -> dict[str, int]:
        """Process ids of the roles that run on this host, by name."""
        return self._fleet.local_pids()

    def kill(self, role: str, rank: int) -> None:
        """Kill a role and its children; nothing if it does not run."""
        self._fleet.end(role, rank)

    def kill_workers(self) -> None:
        """Kill all workers that run."""
        for name in self._fleet.running():
            role, _, rank = name.partition(":")
            if role == "worker":
                self.kill(role, int(rank))

    def kill_all(self, *, starting: bool = False) -> None:
        """Kill all roles that run, and wait for their ends, which are not reported.

        Args:
            starting: kill those that were asked for and do not run yet, too.
        """
        job = self._plan.job
        until = time.monotonic() + _END_S + (host_silence_s(job.deadline_s) if job.hosts > 1 else 0.0)
        while self._fleet.end_all(starting=starting) and time.monotonic() < until:
            self._fleet.wait(0.1)
            self._fleet.exits()

    def close(self) -> None:
        """Kill what still runs and release everything."""
        self._fleet.close()
        self._meeting_port.close()
        if self._store is not None:
            self._store.close()
