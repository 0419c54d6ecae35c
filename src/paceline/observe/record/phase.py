"""What a role can be doing, as a word."""

from typing import Final

__all__ = ["COMMUNICATION", "COMPUTATION", "PHASES", "Phase"]


class Phase:
    """What a thread of a role does at a moment. The numbers are on disk: they stay.

    Plain numbers: hashing a member of an enum takes longer than all else that a span costs.
    """

    OTHER: Final = 0
    """The script's own: the loss, metrics, evaluation, everything that is none of the rest."""
    LOAD: Final = 1
    """Waiting for the next batch of the loader."""
    FORWARD: Final = 2
    """In the model's forward."""
    BACKWARD: Final = 3
    """In loss.backward()."""
    COMPRESS: Final = 4
    """Encoding gradients."""
    PUSH: Final = 5
    """Collecting gradients and sending them. On a server: receiving them."""
    WAIT: Final = 6
    """Waiting for a server's answer, or (`other`) for a worker that the answer depends on."""
    PULL: Final = 7
    """Receiving parameters and putting them in place. On a server: sending them."""
    UPDATE: Final = 8
    """An optimizer's step, wherever it runs."""
    CHECKPOINT: Final = 9
    """Taking part in a checkpoint."""
    LEASE: Final = 10
    """Asking for work."""
    IDLE: Final = 11
    """Nothing to do. Not recorded: it is what is left."""


PHASES = (
    *("other", "load", "forward", "backward", "compress", "push"),
    *("wait", "pull", "update", "checkpoint", "lease", "idle"),
)
"""Their names, by number."""

COMPUTATION = frozenset({Phase.OTHER, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE})
COMMUNICATION = frozenset({Phase.COMPRESS, Phase.PUSH, Phase.WAIT, Phase.PULL, Phase.LEASE})
