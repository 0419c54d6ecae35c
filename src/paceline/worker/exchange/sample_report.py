"""SampleReport: samples that no push accounts for. The worker's next message to the lead tells of them."""

from dataclasses import dataclass

from paceline.comm.worker_messages import DetachMessage, PushMessage, TakeMessage

__all__ = ["NOTHING_TO_REPORT", "SampleReport"]


@dataclass(frozen=True)
class SampleReport:
    """What a worker has done with samples beside pushing their gradients."""

    skipped: tuple[int, ...] = ()
    """Leases of batches that the script read and made no step with."""
    skipped_samples: int = 0
    """Samples of such batches without a lease (streams)."""
    logged: int = 0
    """Samples that a script without a loader has counted."""

    def __bool__(self) -> bool:
        return bool(self.skipped or self.skipped_samples or self.logged)

    def __add__(self, other: "SampleReport") -> "SampleReport":
        return SampleReport(
            self.skipped + other.skipped,
            self.skipped_samples + other.skipped_samples,
            self.logged + other.logged,
        )

    def complete(self, message: PushMessage | TakeMessage | DetachMessage) -> None:
        """Enter it into a message."""
        if self.skipped or self.skipped_samples:
            message.skipped, message.skipped_samples = self.skipped, self.skipped_samples
        message.logged = self.logged


NOTHING_TO_REPORT = SampleReport()
