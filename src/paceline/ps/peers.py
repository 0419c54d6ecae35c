"""A worker as a server sees it."""

from pathlib import Path

from torch import Tensor

from paceline.comm import Connection
from paceline.params import GroupSettings
from paceline.ps.carriers import Carrier
from paceline.ps.carriers.link_thread import MAX_STATE_BYTES

__all__ = ["MAX_STATE_BYTES", "WorkerPeer", "has_ended"]


class WorkerPeer:
    """One attached worker.

    Args:
        carrier: how its gradients come here, and how it gets parameters.
        needs_fates: whether it must be told which of its pushes were applied: its encoders have error
            feedback.
    """

    def __init__(
        self,
        connection: Connection,
        worker: int,
        incarnation: int,
        carrier: Carrier,
        *,
        needs_fates: bool = False,
    ) -> None:
        self.connection = connection
        self.worker = worker
        self.incarnation = incarnation
        self.carrier = carrier
        self.needs_fates = needs_fates
        self.settings: list[GroupSettings] | None = None
        """Settings of the parameter groups, as its last push that changed them said."""
        self.residual = 0.0
        """L2 norm of the gradient that its encoders hold back, as it said last."""
        self.backup: list[Tensor] | None = None
        """The parameters that it read last, where the damping needs them."""
        self.pid = 0
        """Of its process, where that is on this host."""
        self.broken_since: float | None = None
        """When its link broke: it may go on over another socket."""
        self.told = 0
        """The number of the placement that it knows of us."""

    @property
    def name(self) -> str:
        """As in messages."""
        return f"worker:{self.worker}"


def has_ended(pid: int) -> bool:
    """Whether a process of this host has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return Path("/proc/self").exists()
    return state in "ZX"
