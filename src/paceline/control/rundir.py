"""The run directory: everything a run leaves behind.

    RUN/
      run.json          what was asked for: id, job, plan, command, versions
      status.json       its status, about once a second, and the process that writes it
      control.json      what the next controller has to know, should this one die
      lock              held as long as anybody runs it
      events.jsonl      what happened, one JSON object per line
      logs/             controller.log, server-0.log, worker-1.log, …; worker-1.out and .err: its script's
                        output, worker-1.order: in which order it came (paceline.control.tail)
      checkpoints/      version-000000000050/, …
      pushes.csv        every applied push (server 0 writes it)
      raw/              spans, totals and resources while it runs; spans.parquet, … afterwards
      summary.json, report.html   at the end

Runs live in $PACELINE_RUNS or ~/.paceline/runs. A run with a directory of its own (--run-dir) that is not
there has a link there, so that it is listed too.

All of it is for its owner only, whatever the umask is (paceline.control.run_owner).
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, TypedDict

import psutil

from paceline.control.lock import RunLock
from paceline.control.run_owner import check_entries, make_parents, take_directory
from paceline.core.json_types import Json, JsonObject
from paceline.core.modes import DEFAULTS, as_first_stored
from paceline.core.run_decisions import RunState
from paceline.exceptions import PlanError, UsageError
from paceline.observe import ENDED, RunStatus
from paceline.observe.record.counting import resumed
from paceline.observe.record.ledger import Ledgers
from paceline.observe.record.run_files import AskedFor, EarlierStart, read_events, read_record, read_status
from paceline.plan import Job, Plan
from paceline.storage.atomic import write_text_atomically
from paceline.storage.names import check_name
from paceline.storage.plain_files import append_to, open_plain, reason_of
from paceline.storage.typed_json import checked

__all__ = ["DAMAGED", "LEAST_FREE_BYTES", "PRIVATE", "RunDirectory", "RunLook", "runs_root"]

LEAST_FREE_BYTES = 100_000_000
"""A run does not start with less than this on its disk."""

_LONGEST_TORN = 4 << 20
"""Bytes at the end of events.jsonl in which its last whole line is looked for."""

DAMAGED = "damaged"
"""State, for users, of a run whose status.json cannot be understood."""
PRIVATE = "private"
"""State, for users, of a run of another user who keeps it closed."""
_STATES = frozenset(state.value for state in RunState)

# psutil derives a process's start from the boot time, which may be corrected by a fraction.
_SAME_START_S = 2.0


class _StoredModes(TypedDict, total=False):
    """Settings of a stored job that name modes."""

    mode: str
    schedule: list[str]


class _ControllerProcess(TypedDict):
    """Identity of a process, in status.json."""

    pid: int
    started: float


@dataclass(frozen=True)
class RunLook:
    """What a run directory says at one moment; each file was read once."""

    record: AskedFor
    """run.json; empty if it cannot be understood."""
    status: RunStatus
    """An empty one if status.json cannot be understood."""
    state: str
    """For users: see `RunDirectory.state`."""
    alive: bool
    told: bool
    """Whether there is a status.json."""
    damage: str | None
    """What cannot be understood, for people."""


class RunDirectory:
    """One run's directory. Several processes may read it; the controller holds its lock.

    Only the controller writes status.json and events.jsonl. Its threads may do so at the same time.
    """

    def __init__(self, path: Path, run_id: str | None = None, *, owner: str | None = None) -> None:
        self.path = path
        self.owner = owner
        """Name of the user whose it is; None: this user's."""
        self.lock = RunLock(path)
        self._id = run_id
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @classmethod
    def create(cls, job: Job, *, plan: Plan | None = None, command: Sequence[str] = ()) -> Self:
        """Make the directory for a new run, owned by this process, with status `pending`.

        Raises:
            PlanError: it cannot be written, is another user's, or its disk is nearly full.
            UsageError: `job.run_dir` already holds a run.
        """
        root = runs_root()
        run_id = _new_id(job)
        path = Path(job.run_dir).absolute() if job.run_dir else root / run_id
        setting = f"--run-dir {job.run_dir}" if job.run_dir else "$PACELINE_RUNS"
        check_name("the run directory", str(path))
        check_name("the present directory", os.getcwd())
        if (path / "run.json").exists():
            raise UsageError(
                f"{path} already holds a run (--run-dir {job.run_dir}). To go on with it: paceline "
                f"resume {job.run_dir}. For a new run, name another directory or delete this one"
            )
        _check_space(path, setting)
        try:
            make_parents(root)
            root.mkdir(exist_ok=True, mode=0o700)
            made = take_directory(path, setting)
            run = cls(path, run_id)
            for directory in (run.logs_path, run.checkpoints_path):
                directory.mkdir(exist_ok=True, mode=0o700)
            run._write_record(
                {
                    "id": run_id,
                    "created": _now(),
                    "directory": os.getcwd(),
                    "made": made,
                    **_asked(job, plan, command),
                    "resumes": [],
                }
            )
            run.write_status(RunStatus(run_id=run_id, run_dir=str(path)).to_json())
            if path.parent.resolve() != root.resolve():
                (root / run_id).symlink_to(path)
        except OSError as error:
            raise PlanError(
                f"the run directory {path} cannot be written: {error.strerror or error}"
                f"{f' ({error.filename})' if error.filename else ''}. Set by {setting}; name a "
                "directory that you may write to with --run-dir"
            ) from error
        return run

    @property
    def id(self) -> str:
        """The run's id, as in `20261115-081502-digits-4f2a`."""
        if self._id is None:
            self._id = str(self.record()["id"])
        return self._id

    @property
    def logs_path(self) -> Path:
        """Directory of the log files."""
        return self.path / "logs"

    @property
    def checkpoints_path(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def started_in(self) -> Path:
        """The working directory the run was started in: relative paths in its job mean there."""
        return Path(self.record()["directory"])

    def log_path(self, role: str, rank: int | None = None) -> Path:
        """The log file of a role; `rank` is None for the controller."""
        return self.logs_path / (f"{role}.log" if rank is None else f"{role}-{rank}.log")

    def log_paths(self) -> dict[str, Path]:
        """The log files that exist, by the role's name: the controller, servers, workers."""
        found = {}
        for path in self.logs_path.glob("*.log"):
            if match := re.fullmatch(r"(controller|server|worker)(?:-([0-9]{1,9}))?", path.stem):
                role, rank = match.groups()
                found[(role, int(rank or 0))] = (role if rank is None else f"{role}:{rank}", path)
        return dict(found[key] for key in sorted(found))

    def record(self) -> AskedFor:
        """run.json.

        Raises:
            UsageError: it is not there or cannot be read.
        """
        try:
            return read_record(self.path)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{self.path} is not a run directory that can be read: run.json: {reason_of(error)}. "
                "`paceline runs` lists those that are"
            ) from error

    def read_job(self) -> Job:
        """The job as it was last asked for (resuming may have changed it).

        A run that is older than the present defaults of modes keeps the rule that its mode's text meant then.
        """
        record = self.record()
        job = dict(record["job"])
        try:
            if record.get("mode_defaults", 1) < DEFAULTS:
                stored = checked(_StoredModes, job)
                job["mode"] = as_first_stored(stored.get("mode", Job.mode))
                turns = [turn.partition("=") for turn in stored.get("schedule", ())]
                job["schedule"] = [f"{version}={as_first_stored(mode)}" for version, _, mode in turns]
            return Job.from_json(job)
        except (UsageError, TypeError, ValueError) as error:
            raise UsageError(f"the job in {self.path / 'run.json'} cannot be understood: {error}") from error

    def record_resume(self, job: Job, *, plan: Plan | None = None, command: Sequence[str] = ()) -> None:
        """Take the run over for this process with the job it now has; earlier ones stay on record.

        Raises:
            UsageError: the run is still going on.
        """
        if self.alive():
            raise self.refusal()
        self.own()
        record = self.record()
        before: EarlierStart = {
            "at": _now(),
            "job": record.get("job"),
            "command": record.get("command"),
            "versions": record.get("versions"),
        }
        record["resumes"] = [*record.get("resumes", []), before]
        self._write_record(record | _asked(job, plan, command))
        left = Ledgers(self.path / "raw")
        left.read()
        known = self.known_status()
        status = replace(resumed(known, left), run_id=self.id, first_losses=known.first_losses)
        self.write_status(status.to_json())
        left.remove()

    def known_status(self) -> RunStatus:
        """The status that was written last; an empty one if there is none that can be understood."""
        with contextlib.suppress(ValueError):
            return RunStatus.from_json({**self.read_status(), "run_dir": str(self.path)})
        return RunStatus(run_dir=str(self.path))

    def own(self) -> None:
        """Make this process the one that runs it, until `lock.give_back`.

        Raises:
            UsageError: another one does.
            PlanError: the directory cannot be written, or holds what leads elsewhere.
        """
        try:
            check_entries(self.path, str(self.path))
            mine = self.lock.take()
        except OSError as error:
            raise PlanError(
                f"the run directory {self.path} cannot be written: {error.strerror or error}"
            ) from error
        if not mine:
            raise self.refusal()

    def refusal(self) -> UsageError:
        """The error for a user who wants to run what another process runs."""
        state = str(self.read_status().get("state", "unknown"))
        pid = self.controller_pid()
        if pid is None or not psutil.pid_exists(pid):
            return UsageError(
                f"run {self.id} is still going on (state {state}): its controller (process {pid}) died, and "
                "another one is taking over. Try again in a moment"
            )
        return UsageError(
            f"run {self.id} is still going on (state {state}, controller: process {pid}). Stop it first, "
            f"with `paceline stop {self.id}` or Ctrl-C where it runs, and resume it then"
        )

    def controller_pid(self) -> int | None:
        """The process that runs it, or that did so last."""
        holder = self.lock.holder() if self.lock.held() else None
        if holder is not None:
            return holder
        controller = self.read_status().get("controller")
        pid = controller.get("pid") if isinstance(controller, dict) else None
        return pid if isinstance(pid, int) and 0 < pid < 1 << 31 else None

    def record_setting(self, **settings: Json) -> None:
        """The run was switched to another mode, or has more or fewer workers: a resume goes on so."""
        record = self.record()
        self._write_record(record | {"job": {**record["job"], **settings}})

    def record_task(self, task: Mapping[str, Json]) -> None:
        """What `paceline.fit` trains: settings and hyperparameters, as plain data."""
        self._write_record(self.record() | {"task": dict(task)})

    def write_status(self, status: Mapping[str, object]) -> None:
        """Replace status.json, adding the id of this process. Raises OSError (a full disk)."""
        me = {"pid": os.getpid(), "started": psutil.Process().create_time()}
        text = json.dumps({**status, "controller": me, "updated": _now()})
        write_text_atomically(self.path / "status.json", text + "\n", mode=0o600)

    def read_status(self) -> JsonObject:
        """status.json; empty if there is none that can be read."""
        with contextlib.suppress(OSError, ValueError):
            return read_status(self.path)
        return {}

    def append_event(self, event: Mapping[str, Json]) -> None:
        """Add a line to events.jsonl, whole, with the time. Raises OSError (a full disk)."""
        line = (json.dumps({"at": _now(), **event}) + "\n").encode()
        with self._lock:
            file = append_to(self.path / "events.jsonl")
            try:
                written = os.write(file, line)
                if written != len(line):  # half a line would become a part of the next one
                    os.ftruncate(file, os.fstat(file).st_size - written)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)

    def cut_torn_event(self) -> list[str]:
        """Cut events.jsonl after its last whole line, so that the next one is a line of its own. Returns what
        was cut, for people."""
        path = self.path / "events.jsonl"
        try:
            with self._lock, open(open_plain(path, os.O_RDWR), "r+b") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _LONGEST_TORN))
                data = file.read()
                torn = len(data) - (data.rfind(b"\n") + 1)
                if torn and (torn < len(data) or len(data) == size):
                    file.truncate(size - torn)
                    return [f"events.jsonl was torn: {torn:,} bytes after its last whole line are cut off"]
        except OSError:
            pass  # there is none, or nothing can be written, which is said when it is tried
        return []

    def read_events(self) -> list[JsonObject]:
        """Every event so far; a line cut short by a crash is left out."""
        return read_events(self.path)

    def alive(self) -> bool:
        """Whether the run has not ended and has a controller, or a process that will be its controller."""
        return self._alive(self.read_status())

    def _alive(self, status: Mapping[str, Json]) -> bool:
        state = status.get("state")
        if isinstance(state, str) and state in ENDED:
            return False
        return _is_there(status.get("controller")) or self.lock.held()

    def state(self) -> str:
        """The run's state for users: `crashed` if it has not ended and has no controller, `damaged` if
        status.json cannot be understood, `private` if this user may not read it."""
        return self.look().state

    def look(self) -> RunLook:
        """What the run says now. Nothing that its files hold is an error."""
        record: AskedFor = {}
        damage, told = None, RunStatus()
        try:
            record = read_record(self.path)
        except (OSError, ValueError) as error:
            damage = f"run.json cannot be understood: {reason_of(error)}"
        raw: JsonObject = {}
        state, has_status = "crashed", True
        try:
            raw = read_status(self.path)
            told = RunStatus.from_json(raw)
            if told.state not in _STATES:
                raise ValueError(f"state: {told.state!r:.40} is not one")
            state = told.state
        except FileNotFoundError:
            has_status = False  # its controller died at once
        except PermissionError:
            state = PRIVATE
        except (OSError, ValueError) as error:
            damage = damage or f"status.json cannot be understood: {reason_of(error)}"
            state, told = DAMAGED, RunStatus()
        alive = self._alive(raw)
        if not alive and state not in (*ENDED, DAMAGED, PRIVATE):
            state = "crashed"
        return RunLook(record, replace(told, run_dir=str(self.path)), state, alive, has_status, damage)

    def _write_record(self, record: AskedFor) -> None:
        text = json.dumps(record, indent=2)
        write_text_atomically(self.path / "run.json", text + "\n", mode=0o600)


def _is_there(controller: Json) -> bool:
    """Whether this is a process that lives, and no other that has its number now."""
    try:
        found = checked(_ControllerProcess, controller)
        process = psutil.Process(found["pid"])
        same = abs(process.create_time() - found["started"]) < _SAME_START_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, OverflowError):
        return False


def runs_root() -> Path:
    """Where runs are kept: $PACELINE_RUNS, or ~/.paceline/runs."""
    chosen = os.environ.get("PACELINE_RUNS")
    return Path(chosen).absolute() if chosen else Path.home() / ".paceline" / "runs"


def _check_space(path: Path, setting: str) -> None:
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        free = shutil.disk_usage(there).free
    except OSError:
        return  # making the directory will say why
    if free < LEAST_FREE_BYTES:
        raise PlanError(
            f"the disk of the run directory {path} has {free:,} bytes free; a run needs at least "
            f"{LEAST_FREE_BYTES:,}. Set by {setting}; make room, or name a directory on another "
            "disk with --run-dir"
        )


def _asked(job: Job, plan: Plan | None, command: Sequence[str]) -> AskedFor:
    return {
        "job": job.to_json(),
        "mode_defaults": DEFAULTS,
        "plan": plan.to_json() if plan is not None else None,
        "command": list(command),
        "versions": {package: _version(package) for package in ("paceline", "torch")},
    }


def _new_id(job: Job) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")[:24].strip("-") or "run"
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}-{secrets.token_hex(2)}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _version(package: str) -> str | None:
    # Asking the installer's record: importing torch takes seconds.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
