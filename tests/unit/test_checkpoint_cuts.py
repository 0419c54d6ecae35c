"""When a checkpoint is cut, when it needs nobody any more, and when the controller is told of it."""

from pathlib import Path
from typing import Any

import pytest

from paceline.core.decider import Decider
from paceline.core.leases import LeaseBook
from paceline.core.modes import parse_mode
from paceline.core.placement import Placement
from paceline.core.sequencer import Sequencer
from paceline.core.server.checkpoint_cuts import HURRY_S, LAST_PARTS_S, CheckpointCuts
from paceline.core.server.lead_actions import (
    AbandonCheckpoint,
    Actions,
    CommitCheckpoint,
    OpenCheckpoint,
    OutgoingActions,
    Tell,
)
from paceline.core.server.lead_reports import SaveCut, SaveEnded, SnapshotEnded
from paceline.core.server.present import Present
from paceline.core.steps import CheckpointStep, Steps
from tests.leading import two_slices


class Run:
    """At version 2, with two workers that rest, and a checkpoint of that version in the making."""

    def __init__(self, mode: str = "bsp", servers: int = 1) -> None:
        self.decider = Decider(parse_mode(mode))
        self.decider.begin(LeaseBook(samples=8, batch_size=4, drop_last=False, by_round=True), 1, None)
        for worker in (0, 1):
            self.decider.join(worker, 0)
            self.decider.machine.rested(worker)
        state = self.decider.machine.state()
        self.decider.machine.load_state(state._replace(version=2))
        layout = two_slices()
        placement = Placement.over(layout, range(servers), servers - 1)
        self.present = Present(self.decider.mode, placement, placement, layout, 1, {0: 0, 1: 0})
        self.out = OutgoingActions()
        self.count = 0
        self.cuts = CheckpointCuts(
            every=2,
            decider=self.decider,
            sequencer=Sequencer(),
            present=self.present,
            out=self.out,
            directory_of=self.name,
        )
        (step,) = self.cuts.cut_if_due()
        assert isinstance(step, CheckpointStep)
        self.directory = step.directory

    def name(self, version: int) -> str:
        self.count += 1
        return f"version-{version}.{self.count}"

    def actions(self) -> Actions:
        """What is done, but for opening and logs."""
        kinds = (CommitCheckpoint, AbandonCheckpoint, Tell)
        return [action for action in self.out.take() if isinstance(action, kinds)]

    def answers(self, actions: Actions) -> list[SaveEnded]:
        """What the controller that waits is told."""
        reports = [each.report for each in actions if isinstance(each, Tell)]
        return [each for each in reports if isinstance(each, SaveEnded) and each.asked]

    def complete(self, steps: Steps | None = None) -> tuple[Steps, Actions]:
        """The server writes its part, the workers' parts are there or not needed, and it is committed."""
        for step in steps or ():
            assert isinstance(step, CheckpointStep)
            self.directory = step.directory
        self.cuts.part_written(self.directory, 0.0)
        for worker in (0, 1):
            self.cuts.worker_left(worker, 0.0, finished=True)
        assert CommitCheckpoint() in self.out.take()
        return self.cuts.saved(self.directory, 0.0), self.actions()


def test_it_is_committed_when_every_part_is_here() -> None:
    run = Run(servers=2)
    opened = next(each for each in run.out.take() if isinstance(each, OpenCheckpoint))
    assert (opened.version, opened.directory) == (2, run.directory) and opened.lead["machine"]["version"] == 2
    notes: dict[str, Any] = {}
    run.cuts.flag(0, notes)
    assert notes == {"save": 2}
    run.cuts.flag(0, notes := {})
    assert notes == {}, "it is asked once"
    for worker in (0, 1):
        assert run.cuts.awaits(worker)
        run.cuts.worker_saved(worker, 0)
        assert not run.cuts.awaits(worker)
    run.cuts.part_written(run.directory, 0.0)
    run.cuts.part_written("version-2.0", 0.0)
    assert run.actions() == [], "a server's part is not here"
    run.cuts.part_written(run.directory, 0.0)
    assert run.actions() == [CommitCheckpoint()]


def test_a_periodic_checkpoint_is_not_the_final_one_while_a_worker_can_still_be_heard() -> None:
    run = Run()
    run.cuts.unsaved = True  # parameters were assigned after its cut
    assert run.cuts.want_now(0.0, all_ended=True) == []
    steps, actions = run.complete()
    assert steps == [] and run.answers(actions) == []
    run.present.attached.clear()  # their links have ended
    final = run.cuts.worker_left(0, 0.0, finished=True)
    assert final == [CheckpointStep(2, "version-2.2")]
    steps, actions = run.complete(final)
    assert steps == []
    assert run.answers(actions) == [SaveEnded("version-2.2", 2, asked=True)]


def test_a_worker_that_cannot_be_heard_to_the_end_is_not_waited_for_for_ever() -> None:
    run = Run()
    run.cuts.unsaved = True
    assert run.cuts.want_now(0.0, all_ended=True) == []
    assert run.complete()[0] == []
    assert run.cuts.hurry_if_late(LAST_PARTS_S) == []
    final = run.cuts.hurry_if_late(LAST_PARTS_S + 1)
    assert len(final) == 1
    assert len(run.answers(run.complete(final)[1])) == 1


def test_a_periodic_checkpoint_with_all_that_there_is_is_the_final_one_too() -> None:
    run = Run()
    run.present.attached.clear()
    assert run.cuts.want_now(0.0, all_ended=True) == []
    steps, actions = run.complete()
    assert steps == [] and len(run.answers(actions)) == 1


def test_a_part_that_comes_later_than_a_checkpoints_own_is_for_the_next_one() -> None:
    """A worker sends its part when it is asked for it, and once more when it ends."""
    run = Run()
    run.cuts.worker_saved(0, 0)
    assert not run.cuts.unsaved
    run.cuts.worker_saved(0, 0)
    assert run.cuts.unsaved


def test_a_server_that_dies_while_a_checkpoint_is_committed_is_not_needed_for_it() -> None:
    run = Run()
    for worker in (0, 1):
        run.cuts.worker_saved(worker, 0)
    run.cuts.part_written(run.directory, 0.0)
    assert run.actions() == [CommitCheckpoint()]
    assert run.cuts.server_gone(1, 0.0) == []
    assert run.cuts.part_written(run.directory, 0.0, "no space left") == []
    assert run.actions() == []


def test_a_server_that_dies_before_its_part_is_here_ends_the_checkpoint_and_another_is_cut() -> None:
    run = Run(servers=2)
    run.cuts.part_written(run.directory, 0.0)
    run.present.ordered = Placement(1, frozenset({0}), ((0,), (0,)))
    again = run.cuts.server_gone(1, 0.0)
    assert again == [CheckpointStep(2, "version-2.2")]
    assert run.actions() == [AbandonCheckpoint()]
    assert run.cuts.part_written(run.directory, 0.0, "late") == [] and run.actions() == []
    steps, actions = run.complete(again)
    assert steps == [] and Tell(SaveEnded("version-2.2", 2)) in actions, "of the one server that is left"


def test_a_checkpoint_never_mixes_new_parameters_with_an_old_part_of_a_lost_worker() -> None:
    run = Run()
    run.cuts.worker_saved(0, 0)
    assert run.cuts.worker_left(1, 0.0, finished=False) == []
    reason = "worker:1 ended before it sent its part of checkpoint 2; the checkpoint before it is kept"
    assert run.actions() == [AbandonCheckpoint(), Tell(SaveEnded(None, reason=reason))]
    assert run.cuts.part_written(run.directory, 0.0) == [] and run.actions() == []


@pytest.mark.parametrize("saved", [False, True])
def test_a_worker_that_is_lost_after_it_sent_its_part_costs_no_checkpoint(saved: bool) -> None:
    run = Run()
    run.cuts.worker_saved(0, 0)
    if saved:
        run.cuts.worker_saved(1, 0)
    else:
        run.cuts.want_now(0.0, all_ended=False)  # of the one that the run ends with, what is there is kept
    run.cuts.worker_left(1, 0.0, finished=False)
    run.cuts.part_written(run.directory, 0.0)
    assert CommitCheckpoint() in run.actions()


def test_a_requested_checkpoint_waits_for_the_end_of_a_round_and_then_no_longer() -> None:
    run = Run()
    assert run.complete()[0] == []
    run.decider.machine.woke(0)
    run.cuts.unsaved = True
    assert run.cuts.want_now(0.0, all_ended=False) == []
    assert run.cuts.hurry_if_late(HURRY_S / 2) == []
    (step,) = run.cuts.hurry_if_late(2 * HURRY_S)
    assert isinstance(step, CheckpointStep)
    run.cuts.tell_cut()
    assert Tell(SaveCut(2)) in run.actions(), "hurried: the workers are not needed"
    run.cuts.part_written(step.directory, 0.0)
    assert run.actions() == [CommitCheckpoint()]


def test_one_that_fails_is_told_and_the_next_may_be_cut() -> None:
    run = Run()
    run.cuts.want_now(0.0, all_ended=False)
    assert run.cuts.part_written(run.directory, 0.0, "no space left") == []
    assert run.answers(run.actions()) == [SaveEnded(None, reason="no space left", asked=True)]
    assert len(run.cuts.cut_if_due()) == 1


def test_the_last_one_of_the_same_version_is_kept() -> None:
    run = Run()
    assert run.complete()[0] == []
    assert run.cuts.want_now(0.0, all_ended=False) == []
    assert run.answers(run.actions()) == [SaveEnded("kept", 2, asked=True)]


def test_without_a_model_there_is_nothing_to_save() -> None:
    run = Run()
    run.present.layout = None
    assert run.cuts.want_now(0.0, all_ended=False) == []
    assert run.answers(run.actions())[0].reason == "there is no model yet"


def test_the_names_of_directories_are_paths_of_their_own(tmp_path: Path) -> None:
    from paceline.storage.checkpoint import new_directory

    assert new_directory(tmp_path, 3) != new_directory(tmp_path, 3)


def wanted(run: Run) -> CheckpointStep:
    """Commit the first checkpoint; then want a snapshot and cut it."""
    run.complete()
    run.cuts.want_snapshot(2, 1)
    machine = run.decider.machine
    machine.load_state(machine.state()._replace(version=3))
    (step,) = run.cuts.cut_if_due()
    assert isinstance(step, CheckpointStep)
    return step


def test_a_snapshot_has_parameters_only_and_waits_for_no_worker() -> None:
    run = Run()
    step = wanted(run)
    assert step.parameters_only and step.version == 3
    opened = next(each for each in run.out.take() if isinstance(each, OpenCheckpoint))
    assert opened.parameters_only and opened.lead == {"mode": "bsp", "samples": 0}
    assert not run.cuts.awaits(0) and not run.cuts.awaits(1)
    run.cuts.part_written(step.directory, 0.0)
    assert run.actions() == [CommitCheckpoint()]
    assert run.cuts.saved("there", 0.0) == []
    assert run.actions() == [Tell(SnapshotEnded("there", 3))]
    assert run.cuts.last_saved == 2, "no run can go on from a snapshot"
    assert run.cuts.cut_if_due() == [], "one serves all that wanted it"


def test_a_snapshot_is_of_a_multiple() -> None:
    run = Run()
    run.complete()
    run.cuts.want_snapshot(4, 5)
    machine = run.decider.machine
    cut = []
    for version in (3, 5, 7):
        machine.load_state(machine.state()._replace(version=version))
        cut += [each.version for each in run.cuts.cut_if_due() if isinstance(each, CheckpointStep)]
    assert cut == [5]


def test_a_checkpoint_of_that_version_serves_as_well() -> None:
    run = Run()
    run.complete()
    run.cuts.want_snapshot(4, 2)
    machine = run.decider.machine
    machine.load_state(machine.state()._replace(version=4))
    steps = run.cuts.cut_if_due()
    assert [each.parameters_only for each in steps if isinstance(each, CheckpointStep)] == [False]
    assert run.complete(steps)[1][:1] == [Tell(SnapshotEnded(run.directory, 4))]


def test_a_checkpoint_waits_for_the_snapshot_before_it() -> None:
    run = Run()
    step = wanted(run)
    assert run.cuts.want_now(0.0, all_ended=False) == []
    assert run.cuts.hurry_if_late(60.0) == []
    run.cuts.tell_cut()
    run.cuts.part_written(step.directory, 0.0)
    assert not run.answers(run.actions())
    (checkpoint,) = run.cuts.saved("there", 0.0)
    assert isinstance(checkpoint, CheckpointStep) and not checkpoint.parameters_only
    _, actions = run.complete([checkpoint])
    assert run.answers(actions) == [SaveEnded(run.directory, 3, asked=True)]


def test_a_snapshot_that_fails_costs_no_checkpoint() -> None:
    run = Run(servers=2)
    step = wanted_of_two(run)
    assert run.cuts.server_gone(1, 0.0) == []
    kinds = run.actions()
    assert kinds == [AbandonCheckpoint(), Tell(SnapshotEnded(None, 3, "server:1 is gone"))]
    assert run.cuts.part_written(step.directory, 0.0) == []


def wanted_of_two(run: Run) -> CheckpointStep:
    run.cuts.part_written(run.directory, 0.0)
    return wanted(run)
