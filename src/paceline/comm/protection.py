"""A switch that leaves checks out, for the benchmark of what they cost. Never set it in a real run.

With `PACELINE_PROTECTION_BLOCKS=n` in its environment a role checks for NaN and Inf in n steps, not in the
next n, and so on: within one run, because two runs differ by more than checks cost. The plan warns of
it. Tags of frames, fencing and the count of every sample have no switch.
"""

import os

__all__ = ["BLOCKS", "Protection", "protection"]

BLOCKS = "PACELINE_PROTECTION_BLOCKS"


class Protection:
    """What this process checks now."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        """Steps with checks, and as many without; 0: always with."""
        self.resting = False
        """Whether checks are left out now."""

    def begin_step(self, step: int) -> None:
        """What follows belongs to this step."""
        self.resting = self.blocks > 0 and step // self.blocks % 2 == 1


protection = Protection(int(os.environ.get(BLOCKS, "0")))
"""This process's."""
