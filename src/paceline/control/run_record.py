"""The run as users see it: its status, messages for the user, and events.

What is written here is for reading only: a full disk costs some of it, and never the training.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import assert_never

from paceline.control.rundir import RunDirectory
from paceline.core.json_types import Json
from paceline.engines import EngineEvent, HostInfo, HostJoined, HostLost, JoinRefused
from paceline.exceptions import CheckpointError
from paceline.observe import RunStatus, ServerStatus
from paceline.observe.record.status import HostStatus
from paceline.observe.record.tables import to_parquet
from paceline.observe.record.values import values_left_out
from paceline.storage.checkpoint import clean_temporary, committed

__all__ = ["RunRecord", "checkpoint_names"]

_MAX_STRANGERS = 1_000


class RunRecord:
    """Status and events of one run."""

    def __init__(self, directory: RunDirectory, status: RunStatus) -> None:
        self.directory = directory
        self.status = status
        self._strangers = 0
        self._broken: set[str] = set()

    def note(self, text: str) -> None:
        """Tell the user something."""
        self.status.messages.append(text)
        self.event("note", text=text)

    def note_once(self, text: str) -> None:
        """Tell the user something that was not told before."""
        if text not in self.status.messages:
            self.note(text)

    def event(self, kind: str, **fields: Json) -> None:
        """Append to the run's events."""
        with self.tolerating_full_disk():
            self.directory.append_event({"kind": kind, **fields})

    def stranger(self, reason: str) -> None:
        """A connection was refused. The first thousand are recorded."""
        self._strangers += 1
        if self._strangers <= _MAX_STRANGERS:
            self.event("stranger", reason=reason)

    def show_hosts(self, hosts: Sequence[HostInfo]) -> None:
        """The hosts of a run on several."""
        if len(hosts) > 1:
            self.status.hosts = [_host_status(host) for host in hosts]

    def host_event(self, event: EngineEvent) -> None:
        """A host came, was lost, or was refused."""
        match event:
            case HostJoined(host):
                if any(known.id == host.id for known in self.status.hosts):
                    return  # it was there when the run began
                self.status.hosts.append(_host_status(host))
                self.note(f"host {host.name} ({host.address}) joined")
            case HostLost(host, reason):
                for known in self.status.hosts:
                    if known.id == host.id:
                        known.lost = reason
                self.note(f"host {host.name} ({host.address}) is lost: {reason}. Its roles go on elsewhere")
            case JoinRefused(reason):
                self.stranger(reason)
            case _:
                assert_never(event)

    def role_on_host(self, role: str, rank: int, host: str) -> None:
        """A role starts on a host."""
        if role == "worker":
            self.status.workers[rank].host = host
        else:
            self.status.servers.setdefault(rank, ServerStatus(rank=rank)).host = host

    def spans_broken(self, problem: str | None) -> None:
        """A role cannot write its spans. The user is told once."""
        if problem is not None and "spans" not in self._broken:
            self._broken.add("spans")
            self.note(
                f"spans cannot be written to {self.directory.path}: {problem}. Training goes on, "
                "but the report will lack what follows: make room there, or use --no-spans."
            )

    def values_broken(self, problem: str | None) -> None:
        """A worker cannot write logged values. The user is told once."""
        if problem is not None and "values" not in self._broken:
            self._broken.add("values")
            self.note(
                f"logged values cannot be written to {self.directory.path}: {problem}. Training "
                "goes on, and each worker keeps its last 20,000 until there is room: make some there."
            )

    def list_checkpoints(self) -> None:
        """Bring the status's list of checkpoints up to date."""
        self.status.checkpoints = checkpoint_names(self.directory)

    @property
    def saved_versions(self) -> list[int]:
        """Versions of the checkpoints."""
        return [int(name.rpartition("-")[2]) for name in self.status.checkpoints]

    def record_setting(self, **settings: Json) -> None:
        """Write a setting that changed during the run, for `paceline resume`."""
        with self.tolerating_full_disk():
            self.directory.record_setting(**settings)

    def count_left_out(self, records_mb: int) -> None:
        """Tell the user how many logged values are not in the records.

        Args:
            records_mb: budget of the records.
        """
        if left_out := values_left_out(self.directory.path):
            self.status.left_out["metrics"] = left_out
            self.note(
                f"{left_out:,} logged values are not in the records: these have a budget (--records-mb "
                f"{records_mb}), of which a quarter is for values, or the disk was full."
            )

    def write_tables(self, records_mb: int) -> None:
        """Write the tables of all that was recorded."""
        with self.tolerating_full_disk():
            to_parquet(self.directory.path, self.note)
            self.count_left_out(records_mb)

    def remove_unfinished_checkpoints(self) -> None:
        """Only while no server of this run writes."""
        with contextlib.suppress(CheckpointError):
            clean_temporary(self.directory.checkpoints_path)

    @contextlib.contextmanager
    def tolerating_full_disk(self) -> Iterator[None]:
        """Context manager that turns an OSError into a message for the user."""
        try:
            yield
        except OSError as error:
            text = (
                f"the run directory {self.directory.path} cannot be written: {error.strerror or error}. "
                "Training goes on, but its status and events are not kept: make room there."
            )
            if text not in self.status.messages:
                self.status.messages.append(text)


def _host_status(host: HostInfo) -> HostStatus:
    return HostStatus(
        id=host.id, name=host.name, address=host.address or "", cores=host.cores, memory=host.memory
    )


def checkpoint_names(run: RunDirectory) -> list[str]:
    """Names of the complete checkpoints, oldest first."""
    with contextlib.suppress(CheckpointError):  # said when one is wanted
        return [path.name for path in reversed(committed(run.checkpoints_path)) if not path.suffix]
    return []
