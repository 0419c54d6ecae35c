"""The prepared loader's side of the run: leases, epochs, and what becomes of the script's batches."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.collective import Group, part_of
from paceline.exceptions import UsageError
from paceline.observe.record.phase import Phase
from paceline.worker.account import Account
from paceline.worker.exchange.grants import Grant
from paceline.worker.joined_run import JoinedRun
from paceline.worker.schedules import Schedules
from paceline.worker.script_state import KeptState
from paceline.worker.telemetry import Telemetry
from paceline.worker.training_view import TrainingView

__all__ = ["LeasedData"]


class LeasedData:
    """Gives a prepared loader its leases, and hears what the script does with its batches: see `LeaseSource`.

    Args:
        joined: the run that this worker is part of; raises UsageError if it has not joined.
        send_kept: sends the script's state to the servers, for workers that join later.
    """

    def __init__(
        self,
        rank: int,
        joined: Callable[[], JoinedRun],
        view: TrainingView,
        account: Account,
        schedules: Schedules,
        kept: KeptState,
        telemetry: Telemetry,
        *,
        send_kept: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._joined = joined
        self._view = view
        self._account = account
        self._schedules = schedules
        self._kept = kept
        self._lane = telemetry.lane
        self._ledger = telemetry.ledger
        self._traffic = telemetry.traffic
        self._send_kept = send_kept
        self._read_before = 0
        """Batches that the script had read before the present epoch."""

    @property
    def steps(self) -> int:
        """Number of steps that the script has made."""
        return self._view.clock

    # --- leases -----------------------------------------------------------------------------------

    def take(
        self,
        epoch: int,
        limit: int,
        *,
        wait: bool,
        give_back: Sequence[int],
        order: tuple[str, str] | None = None,
    ) -> Grant:
        """Leases from the lead server."""
        run, account = self._joined(), self._account
        client, mode = run.client, run.memory.mode
        self._view.begun = True
        self._ledger.draws()
        run.end.enter(epoch)
        self.back()  # from here on it is the loader's time
        if wait and mode.local:
            # Nothing waits for a push of the next epoch: a worker that dies would take its samples with it,
            # and a round does not wait for a worker that rests.
            run.exchange.flush()
        if run.memory.mode.by_epoch:
            give_back = [*give_back, *self._without_step(run, epoch, wait=wait)]
        version = client.version
        with run.exchange.lock:
            report = account.take_skipped()
            # The end of its epoch: batches that got no step yet (accumulation) must not hold it up.
            carry = account.all_leases() if wait else ()
            grant = client.take(
                epoch, limit, wait=wait, give_back=give_back, carry=carry, report=report, order=order
            )
        run.memory.follow_switch(run.sides)
        if client.version != version:
            self._catch_up(run)
        if grant.save or client.save_due():
            run.saver.relay()
            run.save()
        if client.news.leave_due and not account.accumulating:
            raise SystemExit(0)
        if grant.over and not grant.leases:
            self._ledger.drew_nothing()
            self._lane.enter(Phase.OTHER)  # the script's loop ends here
        return grant if run.group is None else self._my_part(grant, run.group)

    def _catch_up(self, run: JoinedRun) -> None:
        """Fresh parameters came with the leases."""
        mode = run.memory.mode
        self._traffic.fetched(mode)
        run.memory.from_host()
        for side in run.sides if mode.local else ():
            side.version = run.client.version
            side.stepper.caught_up()

    def _without_step(self, run: JoinedRun, epoch: int, *, wait: bool) -> list[int]:
        """Sandblaster: leases of a loop that was left early, whose last batch got no step."""
        if epoch > self._view.epoch:
            return self._account.drop_open()
        if wait and (leases := self._account.open_leases()):
            raise UsageError(
                f"worker:{self._rank} read {len(leases)} batches at the end of epoch {epoch + 1} and "
                f"made no optimizer.step() for them. In mode {run.memory.mode} a step adds a batch to the "
                "gradient of the whole data set, and that needs every batch: step after each one. "
                "Accumulating several gains nothing here."
            )
        return []

    def _my_part(self, grant: Grant, group: Group) -> Grant:
        """This member's part of every row that the group was granted."""
        leases = []
        for lease, ranges in grant.leases:
            part = part_of(ranges, group.size, group.place)
            if not part.counts:
                self._account.borrow(lease)
            leases.append((lease, part.ranges))
        return replace(grant, leases=leases)

    # --- the script's loop ------------------------------------------------------------------------

    def entering(self, epoch: int) -> None:
        """After a resume from between two epochs: all is put back before the epoch is begun."""
        self._account.begin_iteration()
        self._read_before = self._schedules.read
        run = self._joined()
        if run.resumption.is_between_epochs(epoch):
            self._go_on(run, epoch)

    def entered(self, epoch: int) -> None:
        """After a resume: from this batch on everything is as it was at the checkpoint."""
        run = self._joined()
        self._go_on(run, epoch)
        run.resumption.enter(epoch, self._kept)
        if self._kept.changed:  # usually by what the script found at the end of the epoch before
            self._send_kept()
        self._view.epoch = epoch

    def _go_on(self, run: JoinedRun, epoch: int) -> None:
        optimizers = [side.optimizer for side in run.sides]
        run.resumption.go_on(epoch, self._schedules, optimizers, self._kept.found_paces, self._view.generator)

    def used(self, lease: int | None, samples: int, *, counts: bool = True) -> None:
        """The script got a batch."""
        self._lane.enter(Phase.OTHER)
        self._ledger.got_batch()
        self._account.used(lease, samples, counts=counts)
        self._schedules.used()

    def back(self) -> None:
        """The script is between two batches."""
        self._lane.enter(Phase.LOAD)
        self._joined().save_if_due()

    def ended(self, epoch: int) -> None:
        """The script has read its last batch of this epoch."""
        self._account.read_all()
        self._schedules.in_loop = False
        if (stepper := self._joined().group_stepper) is not None:
            stepper.end_epoch(epoch)

    def left(self, epoch: int, *, peek: bool) -> list[int]:
        """The script stopped reading before the epoch's end."""
        self._schedules.in_loop = False
        if not peek:
            self._view.left_early = True
            return self._account.drop_untrained()
        self._schedules.read = self._read_before
        self._account.drop_iteration()
        self._ledger.peeked()
        self._view.peeked(epoch)
        return []

    def ends_early(self) -> bool:
        """Whether the loop ends here because the run ends early."""
        told = self._joined().end.told
        if told:
            self._lane.enter(Phase.OTHER)
        return told
