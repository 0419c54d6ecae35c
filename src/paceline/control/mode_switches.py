"""Switches of a running run to another mode: requests of users, of the guard, and of the run's schedule."""

from collections.abc import Callable, Iterable
from dataclasses import asdict

from paceline.comm.messages import ModeEntered, SwitchMode
from paceline.control.requests import Requests
from paceline.control.run_record import RunRecord
from paceline.control.run_requests import Refused, RunAnswer, Switched
from paceline.core.modes import ModeSpec, in_words, parse_mode
from paceline.exceptions import UsageError
from paceline.plan import Plan
from paceline.plan.rules import check_switch

__all__ = ["GUARD", "ModeSwitches"]

GUARD = "guard"
"""Names the guard's own switch request, which gets no answer."""


class ModeSwitches:
    """The mode of the run, and the switch requests that the lead server has not answered.

    Args:
        num_workers: returns the number of workers that the run is to have.
    """

    def __init__(
        self, plan: Plan, record: RunRecord, requests: Requests, *, num_workers: Callable[[], int]
    ) -> None:
        self._plan = plan
        self._record = record
        self._requests = requests
        self._num_workers = num_workers
        self._pending: dict[str, ModeSpec] = {}

    @property
    def mode(self) -> ModeSpec:
        """The mode that the run is in."""
        return parse_mode(self._record.status.mode)

    @property
    def pending(self) -> list[str]:
        """Requests that the lead has not answered."""
        return sorted(self._pending)

    def show(self, mode: ModeSpec) -> None:
        """Enter the mode, and what it means for this number of workers, into the status."""
        status = self._record.status
        status.mode = str(mode)
        status.rule = in_words(mode, len(self._plan.groups) or self._num_workers())

    def check(self, mode: ModeSpec) -> None:
        """UsageError if this run cannot continue in this mode."""
        if reason := self.mode.switch_refusal(mode):
            raise UsageError(reason)
        mode.check(self._num_workers())
        check_switch(self._plan.job, mode)

    def ask(self, request: str, mode: ModeSpec) -> SwitchMode | None:
        """A switch that was checked. Returns what to ask the lead; None: the run is in that mode already,
        which answers the request."""
        if mode == self.mode and not self._pending:
            self.answer(request, Switched(str(mode), self._record.status.version))
            return None
        self._pending[request] = mode
        return SwitchMode(str(mode), request)

    def entered(self, said: ModeEntered) -> None:
        """The lead continues in this mode."""
        if said.mode != self._record.status.mode:
            self.show(parse_mode(said.mode))
            self._record.note(f"from update {said.version} on in mode {said.mode}")
            self._record.record_setting(mode=said.mode)
        if said.request is None or said.request not in self._pending:
            return
        if str(self._pending[said.request]) == said.mode:
            self.answer(said.request, Switched(said.mode, said.version))
        else:
            turned = f"its schedule turned to {said.mode} at update {said.version}"
            self.answer(said.request, Refused(turned))

    def force(self, mode: ModeSpec) -> None:
        """The run starts again from a checkpoint in this mode."""
        if str(mode) != self._record.status.mode:
            self.show(mode)
            self._record.record_setting(mode=str(mode))

    def refuse_all(self, reason: str) -> None:
        """Refuse the requests that the lead has not answered."""
        self.refuse(self.pending, reason)

    def refuse(self, requests: Iterable[str], reason: str) -> None:
        """Refuse these requests."""
        for request in requests:
            self.answer(request, Refused(reason))

    def answer(self, request: str, answer: RunAnswer) -> None:
        """Answer a request of any kind."""
        self._pending.pop(request, None)
        if request == GUARD:
            return
        with self._record.tolerating_full_disk():
            self._requests.answer(request, asdict(answer))
