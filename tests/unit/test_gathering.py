"""When the lead server tells the controller that the final checkpoint is there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paceline.comm import Kind
from paceline.ps.gathering import Gathering
from paceline.ps.lead import Steps


class Lead(Gathering):
    """At version 2, with one worker, and a checkpoint of that version in the making."""

    def __init__(self) -> None:
        self._begin_gathering()
        self._lead: Any = SimpleNamespace(version=2, machine=SimpleNamespace(active=set()))
        self._norms_due = 0
        self._peers: Any = {0: "worker:0"}
        self.shard: Any = "parameters"
        self.mode: Any = SimpleNamespace(serverless=False, by_round=True)
        self._controller: Any = self
        self._saver: Any = SimpleNamespace(version=2)
        self.ordered: Steps = []
        self.answers: list[Any] = []

    def send(self, kind: Kind, body: dict[str, Any]) -> None:
        if body.get("asked"):
            self.answers.append(body["checkpoint"])

    def _stats(self) -> dict[str, Any]:
        return {}

    def _begin_save(self) -> Steps:
        self._unsaved = False
        self._saver = SimpleNamespace(version=2)
        return [["checkpoint", 2, "again"]]

    def _order(self, steps: Steps) -> None:
        self.ordered += steps

    def ask(self) -> None:
        """The controller wants the final checkpoint: all workers' processes have ended."""
        self._asked = self._all_ended = True
        self._save_now()


def test_a_periodic_checkpoint_is_not_the_final_one_while_a_worker_can_still_be_heard() -> None:
    lead = Lead()
    lead._unsaved = True  # parameters were assigned after its cut
    lead.ask()
    lead._saved(Path("periodic"))
    assert lead.answers == [] and lead.ordered == []
    lead._peers.clear()  # its link has ended
    lead._save_now()
    assert lead.ordered == [["checkpoint", 2, "again"]]
    lead._saved(Path("final"))
    assert lead.answers == ["final"]


def test_a_worker_that_cannot_be_heard_to_the_end_is_not_waited_for_for_ever() -> None:
    lead = Lead()
    lead._unsaved = True
    lead.ask()
    lead._saved(Path("periodic"))
    assert lead._hurry_at is not None
    lead._hurry()
    assert lead.ordered == [["checkpoint", 2, "again"]]
    lead._saved(Path("final"))
    assert lead.answers == ["final"]


def test_a_periodic_checkpoint_with_all_that_there_is_is_the_final_one_too() -> None:
    lead = Lead()
    lead._peers.clear()
    lead.ask()
    lead._saved(Path("periodic"))
    assert lead.answers == ["periodic"] and lead.ordered == []
