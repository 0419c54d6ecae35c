"""What users and the schedule want of a run that goes on: another mode, other numbers of roles."""

import contextlib
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.comm import Connection
from paceline.comm.messages import SwitchMode
from paceline.control.requests import Requests
from paceline.control.rundir import RunDirectory
from paceline.core.modes import ModeSpec, in_words, parse_mode
from paceline.core.run_decisions import Decision, RunState
from paceline.core.run_machine import RunMachine
from paceline.exceptions import LinkError, PlanError, UsageError
from paceline.observe import RunStatus, ServerStatus
from paceline.plan import Plan
from paceline.plan.capacity import Demand, HostLimits, check_capacity
from paceline.plan.host import read_limits
from paceline.plan.rules import check_switch

__all__ = ["GUARD", "Steering"]

GUARD = "guard"
"""Names the guard's own request to switch."""


class Steering:
    """The controller's part that answers requests."""

    plan: Plan
    status: RunStatus
    run_dir: RunDirectory
    _machine: RunMachine
    _links: dict[str, Connection]
    _requests: Requests
    _switching: dict[str, ModeSpec]
    """Requests for another mode that the lead has not answered."""
    _stopped_at: float | None
    """When the run was asked to stop."""

    @property
    def _lead(self) -> str:
        """The name of the server that leads."""
        return f"server:{self._machine.lead}"

    def _do(self, decisions: Sequence[Decision]) -> None:
        raise NotImplementedError

    def _note(self, text: str) -> None:
        raise NotImplementedError

    def _going_on_without_disk(self) -> contextlib.AbstractContextManager[None]:
        raise NotImplementedError

    def _on_request(self, name: str, body: dict[str, Any]) -> None:
        try:
            match body.get("kind"):
                case "switch":
                    self._switch(name, parse_mode(str(body.get("mode"))))
                case "scale":
                    self._scale(name, body.get("workers"), body.get("servers"))
                case "stop":
                    self._stop_as_asked(name, now=body.get("now") is True)
                case other:
                    raise UsageError(
                        f"a request of kind {other!r:.40} is unknown here; known: 'switch', 'scale', 'stop'"
                    )
        except UsageError as error:
            self._answer(name, {"refused": str(error)})

    def _stop_as_asked(self, request: str, *, now: bool) -> None:
        """Stop in order, as after SIGTERM; `now`: without a checkpoint, also if one is being written."""
        if self._stopped_at is None:
            self._stopped_at, self.status.stopped_by = time.monotonic(), signal.SIGTERM
        if now or self._machine.state is not RunState.STOPPING:  # else it was asked before
            self._do(self._machine.stop_requested(now=now))
        self._answer(request, {"state": self._machine.state.value})

    def _scale(self, request: str, workers: Any, servers: Any) -> None:
        """Have another number of workers, or servers. UsageError if this run cannot."""
        if workers is None and servers is None:
            raise UsageError("a scale request needs a number of workers or of servers")
        if servers is not None:
            self._check_servers_wanted(servers)
        workers = len(self._machine.working) if workers is None else workers
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
            raise UsageError(f"workers={workers!r:.40}: a run needs at least one worker")
        mode, data = parse_mode(self.status.mode), self.status.samples_per_epoch
        if workers != len(self._machine.working) and (mode.grouped or mode.by_epoch):
            raise UsageError(
                f"in mode {mode} the workers are agreed on when the run begins: stop it, and `paceline "
                f"resume` it with --workers {workers}"
            )
        if workers != len(self._machine.working) and self.status.stream:
            raise UsageError(
                "the run's data are a stream (IterableDataset). Every worker counts out its part of it for "
                f"{len(self._machine.working)} workers, from the first batch on; with another number, "
                f"batches would be lost or done twice. Stop it, and `paceline resume` it with --workers "
                f"{workers} (which begins its epoch again), or make the data a map-style data set"
            )
        mode.check(workers)
        if data is not None and data < workers:
            raise UsageError(f"{workers} workers but only {data} samples: every worker needs at least one")
        if self._machine.state is not RunState.RUNNING:
            raise UsageError(f"the run is {self._machine.state.value}: try again when it is running")
        self._check_room(workers, len(self._machine.serving) if servers is None else servers)
        before = set(self._machine.working)
        self._do(self._machine.scale(workers))
        after = set(self._machine.working)
        come = ", ".join(f"worker:{rank}" for rank in sorted(after - before))
        go = ", ".join(f"worker:{rank}" for rank in sorted(before - after))
        if come or go:
            what = " and ".join(
                ([f"{come} join{'s' * (len(after - before) == 1)}"] if come else [])
                + ([f"{go} leave{'s' * (len(before - after) == 1)}"] if go else [])
            )
            self._note(f"from {len(before)} to {len(after)} workers: {what}")
        self._set_mode(mode)
        if servers is not None:
            self._scale_servers(servers)
        present = {"workers": len(after), "servers": len(self._machine.serving)}
        with self._going_on_without_disk():
            self.run_dir.record_setting(**present)
        self._answer(request, {**present, "version": self.status.version})

    def _check_room(self, workers: int, servers: int) -> None:
        """UsageError if this host cannot carry the roles that would join."""
        joining_workers = max(0, workers - len(self._machine.working))
        joining_servers = max(0, servers - len(self._machine.serving))
        if not joining_workers and not joining_servers:
            return
        limits = read_limits()
        demand = Demand(
            workers=workers,
            servers=servers,
            worker_threads=1,
            server_threads=1,
            shares_memory=self.plan.shares_memory,
        )
        try:
            # Those that run have their files, which count for each process; of the rest they have their part.
            check_capacity(demand, HostLimits(open_files=limits.open_files))
            joining = replace(demand, workers=joining_workers, servers=joining_servers)
            check_capacity(joining, replace(limits, open_files=None))
        except PlanError as error:
            raise UsageError(f"of roles that would join, {error}") from None

    def _scale_servers(self, servers: int) -> None:
        before = self._machine.serving
        self._do(self._machine.scale_servers(servers))
        after = self._machine.serving
        for rank in sorted(after - before):
            self.status.servers[rank] = ServerStatus(rank=rank)
        if names := sorted(before ^ after):
            what = "join" if after > before else "leave"
            who = ", ".join(f"server:{rank}" for rank in names)
            self._note(f"from {len(before)} to {len(after)} servers: {who} {what}{'s' * (len(names) == 1)}")

    def _check_servers_wanted(self, servers: Any) -> None:
        """UsageError if the run cannot have so many servers."""
        mode, job = parse_mode(self.status.mode), self.plan.job
        if not isinstance(servers, int) or isinstance(servers, bool) or servers < 1:
            raise UsageError(f"servers={servers!r:.40}: a run needs at least one server")
        if servers <= job.replicas:
            raise UsageError(
                f"servers={servers}: with replicas={job.replicas} every parameter is on {job.replicas + 1} "
                f"servers, so at least {job.replicas + 1} must stay"
            )
        reason = None
        if mode.grouped or mode.by_epoch or mode.needs_memory:
            reason = f"in mode {mode} the servers are agreed on when the run begins"
        elif mode.remembers_reads:
            reason = f"in mode {mode} servers remember what every worker read last, which is not handed on"
        elif job.transfer.pipelined or job.compress_replies:
            reason = "with overlap, prefetch or compress_replies slices cannot change hands"
        if reason is not None:
            raise UsageError(f"{reason}: stop the run, and `paceline resume` it with --servers {servers}")
        if self._machine.state is not RunState.RUNNING:
            raise UsageError(f"the run is {self._machine.state.value}: try again when it is running")

    def _switch(self, request: str, mode: ModeSpec) -> None:
        """Have the lead server go on in another mode. UsageError if this run cannot."""
        present = parse_mode(self.status.mode)
        self._check_mode(mode)
        link = self._links.get(self._lead)
        if link is None or self._machine.state is not RunState.RUNNING:
            raise UsageError(f"the run is {self._machine.state.value}: try again when it is running")
        if mode == present and not self._switching:
            self._answer(request, {"mode": str(mode), "version": self.status.version})
            return
        self._switching[request] = mode
        with contextlib.suppress(LinkError):
            link.tell(SwitchMode(str(mode), request))

    def _check_mode(self, mode: ModeSpec) -> None:
        """UsageError if this run cannot go on in another mode."""
        present, job = parse_mode(self.status.mode), self.plan.job
        if reason := present.switch_refusal(mode):
            raise UsageError(reason)
        mode.check(len(self._machine.working))
        check_switch(job, mode)

    def _on_mode(self, text: str, version: int, request: str | None) -> None:
        """The lead server goes on in this mode; `request` was to take effect with it."""
        if text != self.status.mode:
            self._set_mode(parse_mode(text))
            self._note(f"from update {version} on in mode {text}")
            with self._going_on_without_disk():
                self.run_dir.record_setting(mode=text)
        if request is None or request not in self._switching:
            return
        if str(self._switching[request]) == text:
            self._answer(request, {"mode": text, "version": version})
        else:
            self._answer(request, {"refused": f"its schedule turned to {text} at update {version}"})

    def _set_mode(self, mode: ModeSpec) -> None:
        self.status.mode = str(mode)
        self.status.rule = in_words(mode, len(self.plan.groups) or len(self._machine.working))

    def _answer(self, request: str, body: dict[str, Any]) -> None:
        self._switching.pop(request, None)
        if request == GUARD:
            return
        with self._going_on_without_disk():
            self._requests.answer(request, body)
