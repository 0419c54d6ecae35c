"""What a worker's batches amount to until a push covers them: leases and samples."""

__all__ = ["Account"]


class Account:
    """Leases and samples of the step in the making, and of the steps before it that no push has covered."""

    def __init__(self) -> None:
        self.leases: list[int] = []
        """Of the step in the making."""
        self._samples = 0
        self._unsent_leases: list[int] = []
        self._unsent_samples = 0
        # In a group: of rows with fewer samples than members, some members compute what others account for.
        self._borrowed: set[int] = set()
        self._own_batches = self._borrowed_batches = 0
        self._refused: list[int] = []

    def borrow(self, lease: int) -> None:
        """Its samples here are also another member's, who accounts for them."""
        self._borrowed.add(lease)

    def used(self, lease: int | None, samples: int, *, counts: bool = True) -> None:
        """The script got a batch."""
        if lease is not None:
            self.leases.append(lease)
        if counts and lease not in self._borrowed:
            self._samples += samples
            self._own_batches += 1
        else:
            self._borrowed.discard(lease if lease is not None else -1)
            self._borrowed_batches += 1

    def end_step(self, *, keep: bool) -> None:
        """The step is made.

        Args:
            keep: for a later push; False where another member's pushes cover it.
        """
        if keep:
            self._unsent_leases += self.leases
            self._unsent_samples += self._samples
        self.leases, self._samples = [], 0
        self._own_batches = self._borrowed_batches = 0

    def drop_step(self) -> list[int]:
        """Forget the step in the making; returns its leases."""
        leases, self.leases, self._samples = self.leases, [], 0
        return leases

    def all_leases(self) -> list[int]:
        """Those that no push has covered."""
        return [*self._unsent_leases, *self.leases]

    def cover(self, *, this_step: bool) -> tuple[list[int], int]:
        """Leases and samples for a push, which are done with then.

        Args:
            this_step: with those of the step in the making.
        """
        leases, samples = self._unsent_leases, self._unsent_samples
        self._unsent_leases, self._unsent_samples = [], 0
        if this_step:
            leases, samples = leases + self.leases, samples + self._samples
            self.leases, self._samples = [], 0
        return leases, samples

    def take_refused(self) -> list[int]:
        """Leases of steps that a group did not make, to be told with a push."""
        refused, self._refused = self._refused, []
        return refused

    # --- in a group -------------------------------------------------------------------------------

    def tally(self) -> tuple[int, bool]:
        """Samples of this member's step, and whether it counts at all."""
        return self._samples, self._own_batches > 0 or not self._borrowed_batches

    def agreed(self, samples: int) -> None:
        """So many samples went into the group's step."""
        self._samples = samples

    def refuse(self) -> None:
        """The group's step was not finite, and is not made: its samples are told with the next push."""
        self._refused += self.drop_step()
