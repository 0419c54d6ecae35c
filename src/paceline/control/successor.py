"""The controller that takes over when one dies.

Training does not wait for it: servers and workers go on, and dial the socket that it inherits. What was
decided is in the journal, who was started (and how they ended) the fork server knows, and where everybody is
they say themselves.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.comm import Certificate, Connection, Frame, Kind, Listener
from paceline.comm.faults import Faults
from paceline.comm.messages import LetWorkerGo
from paceline.control.controller import Controller, checkpoint_names
from paceline.control.rundir import RunDirectory
from paceline.core.modes import Divergence, parse_mode
from paceline.core.run_decisions import Decision, GoBack, RunState, Save
from paceline.engines import Engine, Handover
from paceline.exceptions import LinkError
from paceline.observe import RunStatus, WorkerStatus
from paceline.observe.output import Piece
from paceline.plan import Plan

__all__ = ["Successor"]

_LAST_WORDS_S = 2.0


class Successor(Controller):
    """Goes on with a run that another controller began.

    Args:
        engine: has the roles that run.
        run: its lock is held.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        run: RunDirectory,
        handover: Handover,
        *,
        listener: Listener,
        watch: Callable[[RunStatus, list[Piece]], None] | None = None,
        finish: Callable[[RunStatus], None] | None = None,
    ) -> None:
        super().__init__(
            plan,
            engine,
            run,
            watch=watch,
            finish=finish,
            heir=handover.succession.call,
            secret=bytes.fromhex(handover.succession.secret),
            listener=listener,
            certificates={
                role: Certificate.from_json(shown) for role, shown in handover.succession.certificates.items()
            },
        )
        self._handover = handover
        self._rebuilding = True
        """Not all servers have said yet where they are."""
        self._recall(self._journal.read())

    def _recall(self, known: dict[str, Any]) -> None:
        """Know what the controller before knew."""
        before = self.run_dir.read_status()
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            self.status = RunStatus.from_json(before)
        for name, value in known["status"].items():
            setattr(self.status, name, value)
        self._machine.restore(known["machine"])
        self._led_by = self._machine.lead
        for left in self._handover.roles:
            self._machine.seen(left.role, left.rank, left.incarnation)
        for rank in self._machine.incarnations:
            self.status.workers.setdefault(rank, WorkerStatus(rank=rank))
        self._predecessor = int(known["pid"])
        self._started = float(known["started"])
        self._clock_ns = int(known["clock_ns"])
        self._resume = None if known["resume"] is None else Path(known["resume"])
        self._version_before = int(known["version_before"])
        self._going_back, self._bad_after = known["going_back"], known.get("bad_after")
        self._divergence = Divergence(self.status.first_losses, self._version_before)
        self._meeting_port.take_over(int(known["meeting_port"]))
        self._set_mode(parse_mode(self.status.mode))
        self.status.checkpoints = checkpoint_names(self.run_dir)
        self._own_faults = Faults()
        for request in known["switching"]:
            self._answer(
                request,
                {"refused": "the run's controller died meanwhile: see its mode (paceline top) and ask again"},
            )

    def _begin(self) -> None:
        self._say_so()
        if self._machine.state is RunState.PENDING:
            super()._begin()
            return
        if self._machine.state.over:
            return
        present = {(left.role, left.rank): left for left in self._handover.roles}
        decisions: list[Decision] = []
        if self._going_back is not None:
            decisions += [GoBack(self._going_back), *self._machine.wanted]
        else:
            decisions += self._machine.taken_over()
            for launch in self._machine.wanted:
                there = present.get((launch.role, launch.rank))
                if there is None or there.incarnation != launch.incarnation:
                    self._engine.kill(launch.role, launch.rank, signal.SIGKILL)
                    decisions.append(launch)
        now = time.monotonic()
        # Who does not come to say where it is hangs, or will not save.
        self._heard = dict.fromkeys(self._machine.server_incarnations, now)
        if self._machine.state in (RunState.FINISHING, RunState.STOPPING):
            decisions.append(Save())
        self._do(decisions)

    def _say_so(self) -> None:
        """Tell people, and the record, that and when the controller was replaced."""
        died, now = self._handover.died, time.time()
        at = f"{datetime.fromtimestamp(died, UTC):%H:%M:%S} UTC"
        self.status.takeovers += 1
        self._record(
            {"kind": "takeover", "died": died, "took_over": now, "from": self._predecessor, "to": os.getpid()}
        )
        self._note(
            f"the controller (process {self._predecessor}) died at {at}; process {os.getpid()} took over "
            f"after {now - died:.1f} s, in the background. Training did not wait for it."
        )

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """As any controller; and once all servers are back the run is as it was."""
        super().on_frame(connection, frame)
        if self._rebuilding and frame.kind is Kind.READY and self._addresses.keys() >= self._machine.serving:
            self._rebuilding = False
            running = self._engine.pids()
            for rank in self._machine.retired:
                if f"worker:{rank}" in running:
                    with contextlib.suppress(LinkError, KeyError):
                        self._links[self._lead].tell(LetWorkerGo(rank))
            if self._machine.state in (RunState.FINISHING, RunState.STOPPING):
                self._do([Save()])

    def _awaited(self) -> tuple[set[str], float]:
        if not self._rebuilding:
            return super()._awaited()
        # They are on their way here.
        return {name for name in self._engine.pids() if name.startswith("worker:")}, _LAST_WORDS_S

    def _save(self) -> None:
        if self._rebuilding:  # it is asked for when the servers are back, which is to be soon
            self._wait_on_for_save()
        else:
            super()._save()

    def _look_at_requests(self, now: float) -> None:
        if not self._rebuilding:
            super()._look_at_requests(now)
