"""Requests of users to a running run: another mode, other numbers of roles, an end."""

import signal
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, assert_never

from paceline.control.mode_switches import ModeSwitches
from paceline.control.requests import Requests
from paceline.control.role_links import RoleLinks
from paceline.control.run_record import RunRecord
from paceline.control.run_requests import (
    BadRequest,
    Refused,
    RunRequest,
    Scaled,
    ScaleRequest,
    Stopping,
    StopRequest,
    SwitchRequest,
    read_request,
)
from paceline.control.scaling import check_scale, told_change
from paceline.core.modes import ModeSpec, parse_mode
from paceline.core.run_decisions import Decision, RunState
from paceline.core.run_machine import RunMachine
from paceline.exceptions import UsageError
from paceline.observe import ServerStatus
from paceline.plan import Plan

__all__ = ["RequestDesk", "UserRequest"]

_LOOK_S = 0.2
_SAME_REQUEST_S = 3.0
"""Signals other than Ctrl-C that follow one another sooner are one request: a whole group was sent it."""


class UserRequest(NamedTuple):
    """A command's request, and its name in the run directory."""

    name: str
    request: RunRequest | BadRequest


class RequestDesk:
    """Checks requests, asks the machine what follows from them, and answers them."""

    def __init__(
        self,
        plan: Plan,
        record: RunRecord,
        machine: RunMachine,
        links: RoleLinks,
        switches: ModeSwitches,
        requests: Requests,
    ) -> None:
        self._plan = plan
        self._record = record
        self._machine = machine
        self._links = links
        self._switches = switches
        self._requests = requests
        self._looked = 0.0
        self._stopped_at: float | None = None
        """When the run was asked to stop."""

    def new(self, now: float) -> Iterator[UserRequest]:
        """Requests that have come since the last call. Looks a few times a second."""
        if now - self._looked > _LOOK_S:
            self._looked = now
            for name, body in self._requests.pending().items():
                yield UserRequest(name, read_request(body))

    def decide(self, asked: UserRequest) -> Sequence[Decision]:
        """What follows from a request."""
        name, request = asked
        try:
            match request:
                case SwitchRequest(mode):
                    self.switch(name, parse_mode(mode))
                    return []
                case ScaleRequest(workers, servers):
                    return self._scale(name, workers, servers)
                case StopRequest(now):
                    return self._stop(name, now=now)
                case BadRequest(reason):
                    raise UsageError(reason)
                case _:
                    assert_never(request)
        except UsageError as error:
            self._switches.answer(name, Refused(str(error)))
            return []

    def switch(self, request: str, mode: ModeSpec) -> None:
        """Ask the lead server to continue in another mode. UsageError if this run cannot."""
        self._switches.check(mode)
        lead = f"server:{self._machine.lead}"
        if self._links.get(lead) is None or self._machine.state is not RunState.RUNNING:
            raise UsageError(f"the run is {self._machine.state.value}: try again when it is running")
        if (order := self._switches.ask(request, mode)) is not None:
            self._links.tell(lead, order)

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self._stopped_at is not None

    def may_stop(self, number: int) -> bool:
        """A signal asks the run to stop. False: it is the same request as the signal before it."""
        now = time.monotonic()
        if self._stopped_at is None:
            self._stopped_at, self._record.status.stopped_by = now, number
            return True
        return number == signal.SIGINT or now - self._stopped_at >= _SAME_REQUEST_S

    def _stop(self, request: str, *, now: bool) -> Sequence[Decision]:
        """Stop in order, as after SIGTERM; `now`: without waiting for a checkpoint."""
        if self._stopped_at is None:
            self._stopped_at, self._record.status.stopped_by = time.monotonic(), signal.SIGTERM
        decisions: Sequence[Decision] = []
        if now or self._machine.state is not RunState.STOPPING:  # else it was asked before
            decisions = self._machine.stop_requested(now=now)
        self._switches.answer(request, Stopping(self._machine.state.value))
        return decisions

    def _scale(self, request: str, workers: int | None, servers: int | None) -> Sequence[Decision]:
        """Change the number of workers or of servers. UsageError if this run cannot."""
        machine, status, mode = self._machine, self._record.status, self._switches.mode
        wanted = check_scale(self._plan, machine, status, mode, workers, servers)
        working, serving = set(machine.working), set(machine.serving)
        decisions = machine.scale(wanted.workers)
        if text := told_change("worker", working, set(machine.working)):
            self._record.note(text)
        self._switches.show(mode)  # its rule names the number of workers
        if wanted.servers is not None:
            decisions += machine.scale_servers(wanted.servers)
            for rank in sorted(machine.serving - serving):
                status.servers[rank] = ServerStatus(rank=rank)
            if text := told_change("server", serving, set(machine.serving)):
                self._record.note(text)
        present = Scaled(len(machine.working), len(machine.serving), status.version)
        self._record.record_setting(workers=present.workers, servers=present.servers)
        self._switches.answer(request, present)
        return decisions
