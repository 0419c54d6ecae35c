"""A run at one moment, as data: the controller writes it, all displays show it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from paceline.observe.record.pace import TrainingPace, pace_of
from paceline.storage.typed_json import AnyFloat, checked

__all__ = ["ENDED", "HostStatus", "RunStatus", "ServerStatus", "WorkerStatus"]

ENDED = frozenset({"succeeded", "failed", "stopped"})
"""States that a run does not leave, except by `paceline resume`."""


@dataclass(kw_only=True)
class HostStatus:
    """One host of a run on several."""

    id: str
    name: str
    address: str = ""
    cores: int = 0
    memory: int = 0
    """Bytes."""
    lost: str = ""
    """Why it is gone; empty: it is there."""


@dataclass(kw_only=True)
class WorkerStatus:
    """One worker at one moment."""

    rank: int
    state: str = "starting"
    clock: int = 0
    """Number of finished steps of all processes that had this rank, in all starts of the run."""
    step_s: float = 0.0
    """Seconds spent computing since it started."""
    wait_s: float = 0.0
    """Seconds spent waiting for parameters since it started."""
    bytes_out: int = 0
    bytes_in: int = 0
    """Payload that its sockets carried; through shared memory none is."""
    moved_out: int = 0
    moved_in: int = 0
    """Logical bytes that its steps sent and received, over any carrier."""
    earlier: dict[str, int] = field(default_factory=dict)
    """The part of these counts that comes from earlier starts of the run, by `Ledger`'s names."""
    metrics: dict[str, AnyFloat] = field(default_factory=dict)
    """What the script reported last."""
    logged_at: dict[str, int] = field(default_factory=dict)
    """Where it was then: `step`, `version`, `samples`, `epoch`, `attempt` (docs/observing.md)."""
    restarts: int = 0
    """How often it was replaced."""
    pid: int | None = None
    """Its process, for debuggers."""
    host: str = ""
    """Id of its host, in a run on several."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds in each phase since it started, by `PHASES`' names; empty without spans."""
    cpu: float = 0.0
    """Cores in use lately."""
    memory: int = 0
    """Bytes: see `RunStatus.memory_kind`."""
    dropped: int = 0
    """Its pushes that were not applied: late in backup mode, or a repetition."""

    @property
    def name(self) -> str:
        """As in messages: `worker:1`."""
        return f"worker:{self.rank}"

    @property
    def idleness(self) -> float:
        """The part of its time in which it waited for parameters, 0 to 1."""
        waited = self.phases.get("wait", 0.0) + self.phases.get("pull", 0.0) if self.phases else self.wait_s
        return waited / self.accounted_s if self.accounted_s > 0 else 0.0

    @property
    def accounted_s(self) -> float:
        """The seconds that it told of."""
        return sum(self.phases.values()) if self.phases else self.step_s + self.wait_s

    def hear(self, told: dict[str, Any]) -> None:
        """What the worker tells of itself, now and then."""
        self.step_s = float(told.get("step_s", self.step_s))
        self.wait_s = float(told.get("wait_s", self.wait_s))
        for phase, seconds in told.get("phases", {}).items():
            self.phases[phase] = self.phases.get(phase, 0.0) + float(seconds)


@dataclass(kw_only=True)
class ServerStatus:
    """One server at one moment."""

    rank: int
    updates: int = 0
    update_s: float = 0.0
    """Seconds spent updating since it started."""
    pid: int | None = None
    host: str = ""
    """Id of its host, in a run on several."""
    cpu: float = 0.0
    memory: int = 0

    @property
    def name(self) -> str:
        """As in messages: `server:0`."""
        return f"server:{self.rank}"


@dataclass(kw_only=True)
class RunStatus:
    """A run at one moment."""

    state: str = "pending"
    run_dir: str = ""
    """Absolute path; its last part, or the name of the link to it, is the run's id."""
    run_id: str = ""
    elapsed_s: float = 0.0
    """Since this start of the run; a resumed run begins again at 0."""
    startup_s: float = 0.0
    """The part of it before the first step began: it is no part of the throughput."""
    ended_s: float = 0.0
    """When the last step ended, on the clock of `elapsed_s`."""
    first_step_s: float = 0.0
    """How much longer a worker's first step took than the mean of its others, at most: compiling, caches."""
    progressed_s: float = 0.0
    """When the servers last reported more `samples`."""
    told_all: bool = False
    """Whether `samples` and `version` are final: the servers reported them when they ended."""
    earlier_s: float = 0.0
    """How long earlier starts of the run trained."""
    mode: str = ""
    """The current mode: a run can be switched."""
    rule: str = ""
    """What that mode means, in words."""
    version: int = 0
    """Updates applied."""
    epoch: int = 0
    """Counted from 0."""
    samples: int = 0
    """Samples applied, in all epochs."""
    samples_before: int = 0
    """Those of `samples` that were applied before this start of the run (resume)."""
    samples_per_epoch: int | None = None
    loader: bool = True
    """Whether the script has a prepared loader; without one, samples are those that it logs."""
    stream: bool = False
    """Whether that loader's data are a stream (IterableDataset)."""
    steps_before: int = 0
    """Steps of all workers before this start of the run (resume)."""
    parameters: int = 0
    workers: dict[int, WorkerStatus] = field(default_factory=dict)
    servers: dict[int, ServerStatus] = field(default_factory=dict)
    hosts: list[HostStatus] = field(default_factory=list)
    """Those of a run on several, in the order in which they joined; empty for a run on one."""
    staleness: dict[int, int] = field(default_factory=dict)
    """How many pushes were applied at each staleness."""
    refused: int = 0
    """Pushes refused because they held NaN or Inf."""
    skipped: int = 0
    """Samples that scripts read and made no step with, in all epochs."""
    dropped: int = 0
    """Pushes not applied: late in backup mode, second of two in sandblaster, or a repetition."""
    lost: int = 0
    """Pushes lost with the worker or server that held them."""
    lost_updates: int = 0
    """Updates that were lost when a server died and the run went back to a checkpoint."""
    restarts: int = 0
    """Workers replaced."""
    takeovers: int = 0
    """Controllers that died and were replaced."""
    checkpoints: list[str] = field(default_factory=list)
    """Names of those that are kept, oldest first."""
    saving: tuple[int, int] | None = None
    """While the run ends: bytes written of its last checkpoint, and bytes to write."""
    exit_code: int = 0
    """What the worker that ended the run in error exited with; 0: none did."""
    stopped_by: int = 0
    """The signal that stopped the run; 0: none did."""
    leases: list[dict[str, int]] = field(default_factory=list)
    """`LeaseBook.accounts()`: what became of the samples of each of the last epochs."""
    earlier_epochs: dict[str, int] = field(default_factory=dict)
    """`LeaseBook.earlier()`: how many epochs there were before those, and the sums of their accounts."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Pushes and metrics that are not in the run directory's records, which have a budget (--records-mb)."""
    memory_kind: str = ""
    """What roles' memory is: `pss`, their own pages and their part of shared ones; `rss` where the system
    does not tell that: what roles share counts in each. Empty: not measured, or by an older version (rss)."""
    update_s: float = 0.0
    """Seconds the lead server spent updating parameters."""
    messages: list[str] = field(default_factory=list)
    """Messages for people, oldest first; entries are only added."""
    ended_early: str | None = None
    """Why it ended before its scripts would have: the workers' votes, or a limit. It is no failure."""
    evaluation: dict[str, AnyFloat] = field(default_factory=dict)
    """What the last evaluation measured."""
    evaluated_at: int = 0
    """The version that it measured."""
    first_losses: dict[str, AnyFloat] = field(default_factory=dict)
    """How large losses were when the run began: what later ones are compared with."""
    diverged: str | None = None
    """That the training diverges, why that is likely, and what to change. A run may end like this: its state
    is what its scripts made of it, and this says what that is worth."""
    error: str | None = None
    """Why it failed: the role, the error and the traceback."""

    def hear(self, told: dict[str, Any]) -> None:
        """What the lead server tells of the run, now and then."""
        before = self.version, self.samples
        for name in ("version", "epoch", "samples", "parameters", "refused", "dropped", "lost"):
            setattr(self, name, int(told[name]))
        self.skipped = int(told.get("skipped", 0))
        self.update_s = float(told["update_s"])
        self.staleness = {int(k): int(v) for k, v in told["staleness"].items()}
        self.leases = told["leases"]
        self.earlier_epochs = told["earlier_epochs"]
        data = told.get("data") or {}
        self.samples_per_epoch = data.get("samples")
        self.loader = bool(data) or not self.parameters  # not known before there is a model
        self.stream = bool(data.get("stream"))
        self.told_all = bool(told.get("last")) or (self.told_all and before == (self.version, self.samples))
        for rank, dropped in told.get("dropped_of", {}).items():
            if (known := self.workers.get(int(rank))) is not None:
                known.dropped = int(dropped)

    @property
    def ended(self) -> bool:
        """Whether it is over, well or badly."""
        return self.state in ENDED

    @property
    def pace(self) -> TrainingPace:
        """How fast this start of the run trains, or has trained."""
        return pace_of(self)

    @property
    def samples_per_s(self) -> float:
        """See `pace`."""
        return self.pace.samples_per_s

    @property
    def steps(self) -> int:
        """Steps of all workers together."""
        return sum(worker.clock for worker in self.workers.values())

    @property
    def steps_per_s(self) -> float:
        """See `pace`: of all workers together."""
        return self.pace.steps_per_s

    @property
    def epoch_share(self) -> float | None:
        """How much of the current epoch is done, 0 to 1; None if its length is unknown."""
        if self.leases:
            account = self.leases[-1]
            done = sum(int(account.get(what, 0)) for what in ("applied", "refused", "skipped", "unused"))
            return min(1.0, done / max(1, int(account.get("samples", 0))))
        if not self.samples_per_epoch:
            return None
        done = self.samples - self.epoch * self.samples_per_epoch
        return min(1.0, max(0.0, done / self.samples_per_epoch))

    @property
    def staleness_mean(self) -> float:
        """Mean over the applied pushes; 0 before the first."""
        pushes = sum(self.staleness.values())
        return sum(each * n for each, n in self.staleness.items()) / pushes if pushes else 0.0

    @property
    def staleness_max(self) -> int:
        """The largest that occurred."""
        return max((each for each, n in self.staleness.items() if n), default=0)

    @property
    def idleness(self) -> float:
        """The part of all workers' time in which they waited for parameters, 0 to 1."""
        total = sum(worker.accounted_s for worker in self.workers.values())
        waited = sum(worker.idleness * worker.accounted_s for worker in self.workers.values())
        return waited / total if total > 0 else 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """Each reported metric's mean over the workers that reported it, `loss` first; then the last
        evaluation's values."""
        found: dict[str, list[float]] = {}
        for _, worker in sorted(self.workers.items()):
            for name, value in worker.metrics.items():
                found.setdefault(name, []).append(value)
        names = sorted(found, key=lambda name: name != "loss")
        means = {name: sum(found[name]) / len(found[name]) for name in names}
        return {**means, **self.evaluation}

    def to_json(self) -> dict[str, object]:
        """As plain data; keys that are numbers become strings, as JSON has it."""
        data = dataclasses.asdict(self)
        for roles in ("workers", "servers"):
            data[roles] = {str(rank): role for rank, role in data[roles].items()}
        data["staleness"] = {str(each): n for each, n in data["staleness"].items()}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read back what `to_json` made; what this version does not know is left out.

        Raises:
            ValueError: a value is not of its field's type; with its place.
        """
        return checked(cls, data)
