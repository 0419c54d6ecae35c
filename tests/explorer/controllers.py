"""The controller of a world: the core's RunMachine, and what `control/controller.py` does about its
decisions."""

from typing import assert_never

from paceline.causes import Cause, ProcessEnd
from paceline.core.run_decisions import (
    Announce,
    Decision,
    DismissServer,
    End,
    GoBack,
    Introduce,
    Kill,
    Launch,
    LostServer,
    Note,
    Retire,
    RetireServer,
    RunState,
    Save,
    WaitForCause,
)
from paceline.core.run_machine import RunMachine
from tests.explorer.model import Broken, Message, Output, Pid, World, message, server, worker

__all__ = ["ControllerModel"]

_RESTARTS = 20


class ControllerModel:
    """One controller, which does not die here.

    The start of the servers is not looked at: they have the model when the world begins.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.machine = RunMachine(
            servers=world.servers,
            workers=world.workers,
            max_restarts=_RESTARTS,
            groups=world.groups,
            replicas=world.replicas,
        )
        self.led_by = 0
        self.connected: set[Pid] = set()
        self.joined: set[Pid] = set()
        """Workers that have connected."""
        self.waits_for_cause = False
        self.outputs: list[Output] = []

    def begin(self) -> list[Output]:
        """The run begins."""
        self.outputs = []
        self._start(self.machine.begin())
        if self.world.shrinks:
            self._carry_out(self.machine.scale_servers(self.world.servers - 1))
        return self.outputs

    def _start(self, launches: list[Decision]) -> None:
        """All processes start; the servers get the model, and the workers will hear of them."""
        self.led_by = self.machine.lead
        self._carry_out(launches)
        for rank in self.machine.server_incarnations:
            self.connected.add(self._server(rank))
            self._carry_out(self.machine.server_ready(rank))

    @property
    def state(self) -> RunState:
        return self.machine.state

    def _server(self, rank: int) -> Pid:
        return server(rank, self.machine.server_incarnations[rank])

    def _tell(self, to: Pid, kind: str, **body: object) -> None:
        self.outputs.append(Output(to, message(kind, **body)))

    def handle(self, source: Pid | None, received: Message) -> list[Output]:
        """A message of a role, or the end of its process; without a source, a lost link has had no other
        cause."""
        self.outputs = []
        if source is None:
            self.waits_for_cause = False
            self._carry_out(self.machine.patience_over())
            return self.outputs
        machine, body = self.machine, received.body
        role = "server" if source.role == "s" else "worker"
        match received.kind:
            case "END":
                self.connected.discard(source)
                self.joined.discard(source)
                ending = ProcessEnd(Cause.CRASHED, "was killed")
                self._carry_out(machine.exited(role, source.rank, source.incarnation, ending))
            case "EXITED":
                self.connected.discard(source)
                ending = ProcessEnd(Cause.EXITED, "ended")
                self._carry_out(machine.exited(role, source.rank, source.incarnation, ending))
            case "READY":
                self.connected.add(source)
                self._carry_out(machine.server_ready(source.rank))
            case "JOINED":
                self.joined.add(source)
                self._carry_out(machine.worker_back(source.rank))
                if machine.state is not RunState.STARTING:
                    self._introduce(source)
            case "FINISHED":
                self._carry_out(machine.worker_finished(source.rank))
            case "ERROR" | "FAILED":
                cause = Cause(body["cause"])
                said = f"{body['error']}: {body['message']}"
                name = f"{role}:{source.rank}"
                self._carry_out(machine.failed(name, said, "", cause=cause, error=body["error"]))
            case "FullyReplicated":
                self._carry_out(machine.whole(set(body["servers"])))
            case "SaveEnded":
                if body["asked"]:
                    self._carry_out(machine.saved(body["reason"]))
            case "ReplaceWorker":
                rank, incarnation = body["replace"], body["incarnation"]
                self._carry_out(machine.hung("worker", rank, incarnation, body["reason"]))
            case "ServerEmptied":
                self._carry_out(machine.departed(body["server"]))
            case "ServerUnreachable":
                self._kill(self._server(body["server"]))
            case _:
                raise Broken(f"{source} sent {received.kind} to the controller")
        return self.outputs

    def _introduce(self, pid: Pid) -> None:
        self._tell(pid, "START", lead=list(self._server(self.machine.lead)))

    def _kill(self, pid: Pid) -> None:
        self.outputs.append(Output(pid, message("KILL"), do="kill"))

    def _carry_out(self, decisions: list[Decision]) -> None:
        machine = self.machine
        for at, decision in enumerate(decisions):
            match decision:
                case Launch(role, rank, incarnation):
                    pid = server(rank, incarnation) if role == "server" else worker(rank, incarnation)
                    fresh = role == "server" and machine.state is not RunState.STARTING
                    body = message("FRESH" if fresh and not self._going_back else "FIRST")
                    self.outputs.append(Output(pid, body, do="spawn"))
                case Kill(role, rank):
                    incarnations = machine.incarnations if role == "worker" else machine.server_incarnations
                    self._kill(Pid(role[0], rank, incarnations[rank]))
                case Retire(rank):
                    self._tell(self._server(machine.lead), "LEAVE", worker=rank)
                case RetireServer(rank):
                    self._tell(self._server(machine.lead), "RETIRE", server=rank)
                case DismissServer(rank):
                    self.outputs.append(Output(self._server(rank), message("STOP"), do="kill"))
                case Announce():
                    for pid in sorted(self.joined):
                        self._introduce(pid)
                case Save():
                    ended = machine.state is RunState.FINISHING
                    self._tell(self._server(machine.lead), "SAVE", all_ended=ended)
                case GoBack():
                    self.outputs.append(Output(None, message("RESTART"), do="restart"))
                    self.connected.clear()
                    self.joined.clear()
                    self.waits_for_cause = False
                    self._going_back = True
                    self._start(decisions[at + 1 :])
                    self._going_back = False
                    return
                case LostServer(rank, lead):
                    self._go_on_without(rank, lead)
                case Introduce(rank):
                    self._introduce(self._server(rank))
                case WaitForCause():
                    self.waits_for_cause = True
                case End():
                    self.outputs.append(Output(None, message("OVER"), do="over"))
                case Note():
                    pass
                case _:
                    assert_never(decision)

    _going_back = False

    def _go_on_without(self, rank: int, lead: int) -> None:
        if self.led_by == lead:
            return
        self.led_by = lead
        for pid in sorted(self.connected):
            if pid.rank != rank:
                self._introduce(pid)
        for leaving in self.machine.leaving:
            self._tell(self._server(lead), "RETIRE", server=leaving)
