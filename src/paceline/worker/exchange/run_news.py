"""What the lead server tells a worker about the run, and how the worker numbers its requests."""

from paceline.comm import Kind
from paceline.comm.frames import field
from paceline.core.modes import ModeSpec, parse_mode
from paceline.worker.exchange.server_links import Body

__all__ = ["RequestNumbers", "RunNews"]


class RunNews:
    """The run, as the lead server told it last.

    Args:
        mode: the mode that the run began with.
    """

    def __init__(self, mode: ModeSpec) -> None:
        self.mode = mode
        """The run's present mode."""
        self.version = 0
        """Version of the parameters that this worker has."""
        self.last_admit: Body = {}
        """The lead's last answer to a push: how far the run is (`version`, `samples`)."""
        self.welcome: Body = {}
        """The lead's answer when this worker attached."""
        self.leave_due = False
        """Whether the run wants this worker to leave."""
        self.stop_due = False
        """Whether the run ends early, as the lead says."""
        self.cut_next = False
        """In allreduce: a checkpoint follows the next push, which is to bring this worker's parameters."""
        self._save_due = False

    def welcomed(self, welcome: Body) -> None:
        """The worker has attached."""
        self.welcome = welcome
        self.cut_next = "cut" in welcome
        self.stop_due = "stop" in welcome
        self.version = field(welcome, "version", int)
        self.mode = parse_mode(field(welcome, "mode", str))

    def admitted(self, reply: Body, *, fetched: bool) -> None:
        """The lead has answered a push or a pull.

        Args:
            fetched: the answer brought fresh parameters.
        """
        self.last_admit = reply
        if fetched or self.mode.payload == "none":  # in that mode the worker reads the newest anyway
            self.version = field(reply, "version", int)
        self.cut_next = "cut" in reply
        self._save_due = self._save_due or "save" in reply
        self.hear_mode(reply)

    def hear_save(self, reply: Body) -> None:
        """The lead may ask for this worker's part of a checkpoint."""
        self._save_due = self._save_due or "save" in reply

    def hear_mode(self, reply: Body) -> bool:
        """Whether the run was switched to another mode since the last reply. Also notes an end of the run."""
        self.leave_due = self.leave_due or "leave" in reply
        self.stop_due = self.stop_due or "stop" in reply
        if "mode" not in reply:
            return False
        self.mode = parse_mode(field(reply, "mode", str))
        return True

    def take_save(self) -> bool:
        """Whether the run wants this worker's part of a checkpoint; True once for each request."""
        due, self._save_due = self._save_due, False
        return due


class RequestNumbers:
    """Numbers a worker's requests, so that servers recognize one that they have seen already."""

    def __init__(self) -> None:
        self.sequence = 0
        """Number of pushes and assigns."""
        self.questions = 0
        """Number of votes and calls."""
        self.takes = 0
        """Number of requests for leases."""
        self.loads = 0
        """Number of optimizer states that this worker gave to the servers."""
        self.loading = False
        """Whether the lead is asked to order the last of them; repeated if that lead dies meanwhile."""
        self._requests = 0

    def message(self, kind: Kind, body: Body, *, fetch: bool, version: int, ready: int = 0) -> Body:
        """The body of a PUSH, PULL or ASSIGN.

        Args:
            version: of the parameters that this worker has.
            ready: number of the announced placement that it is ready for.
        """
        self._requests += 1
        message = {"n": self._requests, "sequence": self.sequence, "read_version": version, **body}
        if ready:
            message["ready"] = ready
        if not fetch:
            message["fetch"] = False
        if self.loading:
            message["load"] = self.loads
        self.sequence += kind is not Kind.PULL
        return message
