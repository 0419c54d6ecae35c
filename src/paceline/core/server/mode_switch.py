"""ModeSwitch: a change of mode that the controller requested, from its request until it takes effect."""

from paceline.core.dealing import dealing_refusal
from paceline.core.events import Switch
from paceline.core.modes import parse_mode
from paceline.core.server.lead_actions import OutgoingActions, Tell
from paceline.core.server.lead_reports import ModeEntered, SwitchRefused
from paceline.core.server.present import Present
from paceline.core.server.run_order import RunOrder
from paceline.core.server.start_gate import StartGate

__all__ = ["ModeSwitch"]


class ModeSwitch:
    """One owner: the leader, whose other parts it uses."""

    def __init__(self, order: RunOrder, gate: StartGate, present: Present, out: OutgoingActions) -> None:
        self._order, self._gate, self._present, self._out = order, gate, present, out
        self._request: str | None = None
        """The request whose switch is to take effect, at the end of a round."""

    def request(self, text: str, request: str) -> None:
        """The controller wants another mode, and has seen that the plan allows it.

        While the gate is closed there may be no model yet, so the switch waits.
        """
        mode, decider = parse_mode(text), self._order.decider
        if not self._gate.open:
            if (early := self._gate.early.switch) is not None:
                self._supersede(early[1], text)
            self._gate.early.switch = (text, request)
            return
        reason = decider.mode.switch_refusal(mode) or dealing_refusal(mode, decider.book)
        if self._present.optimizers > 1:
            reason = reason or mode.one_optimizer_reason()
        if reason is not None:
            self._out.put(Tell(SwitchRefused(request, reason)))
            return
        if self._request is not None:
            self._supersede(self._request, text)
        self._request = request
        ruling = self._order.happen(Switch(str(mode)))
        self._order.append(ruling.steps)
        if not ruling.steps and decider.mode == mode:
            self.took_effect()  # the run is in it already, and what was to come was taken back

    def gate_opened(self) -> None:
        """All workers are here, and have not joined yet: request the switch that has waited for them."""
        if (early := self._gate.early.switch) is not None:
            self._gate.early.switch = None
            self.request(*early)

    def _supersede(self, request: str, mode: str) -> None:
        self._out.put(Tell(SwitchRefused(request, f"a switch to {mode} came before it took effect")))

    def took_effect(self) -> None:
        """The run is in the mode that was requested last, if one was."""
        request, self._request = self._request, None
        self.tell(request)

    def tell(self, request: str | None = None) -> None:
        """Tell the controller which mode the run is in."""
        decider = self._order.decider
        self._out.put(Tell(ModeEntered(str(decider.mode), decider.version, request)))
