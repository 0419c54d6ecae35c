"""What a controller decides first, in a new run and after a takeover."""

import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from paceline.control.beginning import Predecessor
from paceline.control.mode_switches import ModeSwitches
from paceline.control.processes import RoleProcesses
from paceline.control.role_links import RoleLinks
from paceline.control.run_record import RunRecord
from paceline.core.run_decisions import Decision, GoBack, Retire, RunState, Save
from paceline.core.run_machine import RunMachine

__all__ = ["Takeover"]


class Takeover:
    """Takes over from a controller that died; of a new run there is nothing to take over.

    Args:
        predecessor: the controller that died; None: this is the first one.
    """

    def __init__(
        self,
        predecessor: Predecessor | None,
        *,
        record: RunRecord,
        machine: RunMachine,
        links: RoleLinks,
        processes: RoleProcesses,
        switches: ModeSwitches,
    ) -> None:
        self._predecessor = predecessor
        self._record = record
        self._machine = machine
        self._links = links
        self._processes = processes
        self._switches = switches
        self.rebuilding = predecessor is not None
        """Not all servers have told their addresses yet."""

    def announce(self) -> None:
        """Tell the user that the controller was replaced, and refuse requests that died with it."""
        if (predecessor := self._predecessor) is None:
            return
        died, now, before = predecessor.handover.died, time.time(), predecessor.pid
        at = f"{datetime.fromtimestamp(died, UTC):%H:%M:%S} UTC"
        self._record.status.takeovers += 1
        pids = {"from": before, "to": os.getpid()}
        self._record.event("takeover", died=died, took_over=now, **pids)
        self._record.note(
            f"the controller (process {before}) died at {at}; process {os.getpid()} took over "
            f"after {now - died:.1f} s, in the background. Training did not wait for it."
        )
        self._switches.refuse(
            predecessor.unanswered,
            "the run's controller died meanwhile: see its mode (paceline top) and ask again",
        )

    def decisions_left(self) -> Sequence[Decision]:
        """What the dead controller has decided and may not have carried out."""
        assert self._predecessor is not None
        decisions: list[Decision] = []
        if self._predecessor.going_back is not None:
            decisions += [GoBack(self._predecessor.going_back), *self._machine.wanted]
        else:
            decisions += self._machine.taken_over()
            present = {(left.role, left.rank): left for left in self._predecessor.handover.roles}
            for launch in self._machine.wanted:
                there = present.get((launch.role, launch.rank))
                if there is None or there.incarnation != launch.incarnation:
                    self._processes.kill(launch.role, launch.rank)
                    decisions.append(launch)
        self._links.expect_reports(self._machine.server_incarnations)
        if self._machine.state in (RunState.FINISHING, RunState.STOPPING):
            decisions.append(Save())
        return decisions

    def decisions_if_rebuilt(self) -> Sequence[Decision]:
        """Once all servers have told their addresses: what the lead may not have been told."""
        if not self.rebuilding or not self._links.located >= self._machine.serving:
            return []
        self.rebuilding = False
        running = self._processes.running()
        retired = [rank for rank in self._machine.retired if f"worker:{rank}" in running]
        closing = self._machine.state in (RunState.FINISHING, RunState.STOPPING)
        return [*map(Retire, retired), *([Save()] if closing else [])]
