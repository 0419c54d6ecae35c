"""What the lead server tells a worker about the run, and how the worker numbers its requests."""

from paceline.comm.worker_messages import (
    AdmitReply,
    AssignMessage,
    AttachedReply,
    LeadNews,
    OrderedMessage,
    PullMessage,
    PushMessage,
)
from paceline.core.modes import ModeSpec, parse_mode
from paceline.exceptions import FrameError

__all__ = ["RequestNumbers", "RunNews", "new_assign", "new_pull", "new_push"]


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
        self.last_admit: AdmitReply | None = None
        """The lead's last answer to a push; None before the first."""
        self.welcome = AttachedReply()
        """The lead's answer when this worker attached."""
        self.leave_due = False
        """Whether the run wants this worker to leave."""
        self.stop_due = False
        """Whether the run ends early, as the lead says."""
        self.cut_next = False
        """In allreduce: a checkpoint follows the next push, which is to bring this worker's parameters."""
        self._save_due = False

    def welcomed(self, welcome: AttachedReply) -> None:
        """The worker has attached to the lead. FrameError if it said nothing of the run."""
        if welcome.version is None or welcome.mode is None:
            raise FrameError("the lead admitted this worker without the run's version and mode")
        self.welcome = welcome
        self.cut_next = welcome.cut
        self.stop_due = welcome.stop
        self.version = welcome.version
        self.mode = parse_mode(welcome.mode)

    def admitted(self, reply: AdmitReply, *, fetched: bool) -> None:
        """The lead has answered a push or a pull.

        Args:
            fetched: the answer brought fresh parameters.
        """
        self.last_admit = reply
        if fetched or self.mode.payload == "none":  # in that mode the worker reads the newest anyway
            self.version = reply.version
        self.cut_next = reply.cut
        self._save_due = self._save_due or reply.save is not None
        self.hear_mode(reply)

    def hear_save(self, reply: LeadNews) -> None:
        """The lead may ask for this worker's part of a checkpoint."""
        self._save_due = self._save_due or reply.save is not None

    def hear_mode(self, reply: LeadNews) -> bool:
        """Whether the run was switched to another mode since the last reply. Also notes an end of the run."""
        self.leave_due = self.leave_due or reply.leave
        self.stop_due = self.stop_due or reply.stop
        if reply.mode is None:
            return False
        self.mode = parse_mode(reply.mode)
        return True

    def take_save(self) -> bool:
        """Whether the run wants this worker's part of a checkpoint; True once for each request."""
        due, self._save_due = self._save_due, False
        return due


UNNUMBERED = -1


def new_push() -> PushMessage:
    """A push that RequestNumbers will complete."""
    return PushMessage(n=UNNUMBERED, sequence=UNNUMBERED, read_version=UNNUMBERED)


def new_pull(without: tuple[int, ...] = ()) -> PullMessage:
    """A pull that RequestNumbers will complete.

    Args:
        without: servers that this worker cannot reach any more.
    """
    return PullMessage(n=UNNUMBERED, sequence=UNNUMBERED, read_version=UNNUMBERED, without=without)


def new_assign() -> AssignMessage:
    """An assign that RequestNumbers will complete."""
    return AssignMessage(n=UNNUMBERED, sequence=UNNUMBERED, read_version=UNNUMBERED)


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

    def complete(self, request: OrderedMessage, *, fetch: bool, version: int, ready: int = 0) -> None:
        """Number a request, and say what this worker has.

        Args:
            fetch: whether it wants fresh parameters.
            version: of the parameters that this worker has.
            ready: number of the announced placement that it is ready for.
        """
        self._requests += 1
        request.n, request.sequence = self._requests, self.sequence
        if request.read_version == UNNUMBERED:
            request.read_version = version
        request.ready, request.fetch = ready, fetch
        if self.loading:
            request.load = self.loads
        if not isinstance(request, PullMessage):
            self.sequence += 1
