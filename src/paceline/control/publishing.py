"""Keeps the status up to date and shows it: to status.json, to the caller's display, and to the sampler."""

import os
import time
from collections.abc import Callable, Mapping, Sequence

from paceline.control.run_record import RunRecord
from paceline.control.tail import Outputs
from paceline.core.run_decisions import RunState
from paceline.engines import RoleUsage
from paceline.observe import RunStatus, ServerStatus, WorkerStatus
from paceline.observe.analyse.watch import Watch
from paceline.observe.record.counting import enter_ledgers
from paceline.observe.record.ledger import Ledgers
from paceline.observe.record.output import OutputPiece
from paceline.observe.record.resources import Sampler

__all__ = ["StatusPublisher", "WatchCall"]

WatchCall = Callable[[RunStatus, list[OutputPiece]], None]
_SHOW_S = 0.1
_WRITE_S = 1.0
_LEDGERS_S = 0.5


class StatusPublisher:
    """Publishes one run's status.

    Args:
        started: start of the run on the monotonic clock.
        clock_ns: from that clock to Unix time.
        watch: called with the status about ten times a second, and with new output of scripts.
        shown: rank of the worker whose output that is; None: all.
        samples: whether to sample what roles use.
    """

    def __init__(
        self,
        record: RunRecord,
        *,
        started: float,
        clock_ns: int,
        watch: WatchCall | None,
        shown: int | None,
        samples: bool,
    ) -> None:
        self._record = record
        self._started = started
        self._started_ns = round(started * 1e9) + clock_ns
        self._watch = watch
        self._output = Outputs(record.directory.logs_path, shown)
        raw = record.directory.path / "raw"
        self._sampler = Sampler(raw, clock_ns) if samples else None
        self._ledgers = Ledgers(raw)
        self._warnings = Watch()
        self._shown_at = self._written_at = self._ledgers_read_at = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._started

    def hear_ledger(self, rank: int, ledger: Sequence[int]) -> None:
        """A worker's counts, as its report has them."""
        self._ledgers.hear(rank, ledger)

    def sample(self, pids: Mapping[str, int], elsewhere: Mapping[str, RoleUsage], now: float) -> None:
        """Measure what the roles and this process use, if it is time.

        Args:
            elsewhere: what roles on other hosts use.
        """
        if self._sampler is None or not self._sampler.due(now):
            return
        status = self._record.status
        used = self._sampler.sample({**pids, "controller": os.getpid()})
        status.memory_kind = self._sampler.memory_kind
        roles: list[WorkerStatus | ServerStatus] = [*status.workers.values(), *status.servers.values()]
        for role in roles:
            usage = used.get(role.name) or elsewhere.get(role.name)
            role.cpu, role.memory = (usage.cpu, usage.memory) if usage is not None else (0.0, role.memory)

    def publish(self, state: RunState, *, final: bool = False) -> None:
        """Show and write the status, if it is time or the state has changed.

        Args:
            final: the run is over, and all roles have told their last figures.
        """
        status, now = self._record.status, time.monotonic()
        changed = status.state != state.value
        status.state = state.value
        status.elapsed_s = now - self._started
        if final or now - self._ledgers_read_at > _LEDGERS_S:
            self._ledgers_read_at = now
            self._ledgers.read()
            enter_ledgers(status, self._ledgers, self._started_ns)
        if changed or final or now - self._written_at > _WRITE_S:
            self._written_at = now
            for warning in self._warnings.see(status):
                self._record.note(warning)
            with self._record.tolerating_full_disk():
                self._record.directory.write_status(status.to_json())
        if self._watch is not None and (changed or final or now - self._shown_at >= _SHOW_S):
            self._shown_at = now
            self._watch(status, self._output.new(status.workers, final=final))

    def remove_ledgers(self) -> None:
        """Remove the workers' counts if the final status, which has them, is written."""
        status = self._record.status
        if self._record.directory.read_status().get("state") == status.state:  # else the disk is full
            self._ledgers.remove()

    def close(self) -> None:
        """Stop sampling. May be called twice."""
        if self._sampler is not None:
            self._sampler.close()
