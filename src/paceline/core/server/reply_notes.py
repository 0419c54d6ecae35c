"""ReplyNotes: what replies tell workers beside their answers.

A worker hears of a new mode or placement, of the checkpoint that wants its part, of the run's progress and
of its end with the next reply that it gets anyway.
"""

from collections.abc import Iterable

from paceline.core.decider import Decider
from paceline.core.json_types import JsonObject
from paceline.core.placement_changes import PlacementChanges
from paceline.core.server.checkpoint_cuts import CheckpointCuts
from paceline.core.server.lead_actions import AdmitNotes, Notes, WelcomeNotes
from paceline.core.server.lead_settings import LeadSettings
from paceline.core.server.present import Present

__all__ = ["ReplyNotes"]


class ReplyNotes:
    """One owner: the leader, whose other parts it reads."""

    def __init__(
        self,
        settings: LeadSettings,
        decider: Decider,
        present: Present,
        cuts: CheckpointCuts,
        changes: PlacementChanges,
    ) -> None:
        self._began_alone = settings.workers == 1
        self._decider, self._present, self._cuts, self._changes = decider, present, cuts, changes
        self._leaving: set[int] = set()
        """Workers that are to be told to leave."""
        self._mode_unknown: set[int] = set()
        """Workers that have not been told of the present mode."""
        self._need_fates: set[int] = set()
        """Workers that must be told which of their pushes were applied."""
        self._listens: dict[int, JsonObject] = {}
        """Where the roots of groups listen for their members."""

    def attached(self, worker: int, *, needs_fates: bool, listens: JsonObject | None) -> None:
        """A worker attached; see `LeadMachine.attach`."""
        (self._need_fates.add if needs_fates else self._need_fates.discard)(worker)
        if listens is not None:
            self._listens[worker] = listens

    def left(self, worker: int) -> None:
        """A worker is gone."""
        self._leaving.discard(worker)

    def leave(self, worker: int) -> None:
        """A worker is to be told to leave."""
        self._leaving.add(worker)

    def mode_changed(self, workers: Iterable[int]) -> None:
        """The run goes on in another mode, which these workers do not know yet."""
        self._mode_unknown = set(workers)

    def welcome(self, worker: int) -> WelcomeNotes:
        """For a worker that has attached."""
        decider, present = self._decider, self._present
        notes: WelcomeNotes = {"version": decider.version, "mode": str(present.mode)}
        self._add_progress(notes)
        if decider.groups:
            notes["group"] = self._listens.get(decider.groups.root_of(worker))
        self._cuts.announce(worker, notes)
        if (following := self._changes.attached(worker)) is not None:
            notes["next"] = following
        elif present.ordered.number > present.placement.number:
            # Its pushes come behind this placement in the order: its new servers need them, too.
            notes["next"] = [present.ordered.to_json(), {}]
        if decider.ballot.reason is not None:
            notes["stop"] = True
        notes["placement"] = present.placement.to_json()
        return notes

    def admit(self, worker: int, version: int) -> AdmitNotes:
        """For a worker whose request the order answers."""
        notes: AdmitNotes = {"version": version}
        self._add_progress(notes)
        self.add(worker, notes)
        self._cuts.announce(worker, notes)
        if worker in self._need_fates:
            fates = self._decider.pushes.fates
            notes["settled"] = fates.settled(worker)
            if unapplied := fates.unapplied.get(worker):
                notes["unapplied"] = tuple(unapplied)
        return notes

    def add(self, worker: int, notes: Notes) -> None:
        """With any reply."""
        if worker in self._leaving:
            notes["leave"] = True
        if self._decider.ballot.reason is not None:
            notes["stop"] = True
        if worker in self._mode_unknown:
            self._mode_unknown.discard(worker)
            notes["mode"] = str(self._present.mode)
        self._changes.inform(worker, self._present.placement, notes)
        self._cuts.flag(worker, notes)

    def _add_progress(self, notes: AdmitNotes | WelcomeNotes) -> None:
        """How far the run is, for the script and its schedulers."""
        decider = self._decider
        notes["samples"] = decider.totals.samples
        if decider.book is not None:
            notes["done"] = decider.book.settled
        if self._began_alone and len(decider.machine.members) > 1:
            notes["others"] = True  # a worker that began alone does not know of them
