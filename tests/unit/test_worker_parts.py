"""The parts of a worker's session, each by itself: counts of the run, resumption, when parts are saved."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.comm.worker_messages import AdmitReply, AttachedReply
from paceline.core.modes import parse_mode
from paceline.observe.record.spans import NO_SPANS
from paceline.worker.exchange.run_news import RunNews
from paceline.worker.part_saver import PartSaver
from paceline.worker.resumption import Resumption
from paceline.worker.run_counts import RunCounts
from paceline.worker.run_settings import RunSettings
from paceline.worker.script_state import KeptState
from paceline.worker.training_view import TrainingView


def news_of(mode: str = "bsp", **welcome: Any) -> RunNews:
    news = RunNews(parse_mode(mode))
    news.welcomed(AttachedReply(**{"version": 0, "mode": mode, **welcome}))
    return news


ROOT, MEMBER = SimpleNamespace(is_root=True), SimpleNamespace(is_root=False)


# --- how far the run is -----------------------------------------------------------------------------


def test_a_worker_knows_what_the_lead_told_it_last():
    news = news_of(samples=40, done=20)
    counts = RunCounts(news, None, counts_samples=True)
    assert counts.reached() == (0, 40) and counts.done() == 20
    news.admitted(AdmitReply(version=3, samples=64, done=44), fetched=True)
    assert counts.reached() == (3, 64) and counts.samples() == 64 and counts.done() == 44


def test_members_of_a_serverless_group_count_their_own_updates():
    news = news_of("allreduce", version=5, samples=40, done=40)
    counts = RunCounts(news, MEMBER, counts_samples=True)  # type: ignore[arg-type]
    counts.updated_together(8)
    counts.updated_together(8)
    assert counts.reached() == (7, 56) and counts.done() == 56


def test_batches_of_a_sampler_of_the_scripts_own_are_not_counted_as_samples():
    counts = RunCounts(news_of("allreduce", done=4), ROOT, counts_samples=False)  # type: ignore[arg-type]
    counts.updated_together(8)
    assert counts.done() == 4


def test_a_member_is_where_its_root_is_also_if_it_has_heard_more():
    news = news_of("hybrid:asp", samples=0, done=0)
    counts = RunCounts(news, MEMBER, counts_samples=True)  # type: ignore[arg-type]
    counts.told_by_root(4, 32, 32)
    news.last_admit = AdmitReply(version=9, done=99)
    assert (news.version, counts.samples(), counts.done()) == (4, 32, 32)


def test_the_mode_stays_what_it_was_when_a_worker_leaves_to_prepare_more():
    settings = RunSettings(rank=0, world_size=2, servers=1, mode="bsp", seed=0)
    view = TrainingView(settings, KeptState())
    assert view.run_progress() is None and view.progress() == {"version": 0, "clock": 0}
    news = news_of("asp")
    view.join(news, RunCounts(news, None, counts_samples=True), resumption(resumed=False))
    assert str(view.mode) == "asp" and view.follows() and view.ahead() == 2
    assert view.run_progress() is not None
    view.leave()
    assert str(view.mode) == "asp" and view.run_progress() is None


# --- a script that was started again ----------------------------------------------------------------


def resumption(*, resumed: bool = True, replaced: bool = False, epoch: int = 2) -> Resumption:
    tensors = {"rng:epoch": torch.tensor(epoch), "user:scheduler:0": torch.zeros(1)}
    return Resumption(tensors, epoch, resumed=resumed, replaced=replaced)


class NoSchedules:
    """A script without schedulers."""

    def __init__(self) -> None:
        self.put_back_with: list[Any] = []

    def each(self) -> list[Any]:
        return []

    def put_back(self, paces: list[Any]) -> None:
        self.put_back_with.append(paces)


def test_state_is_put_back_when_the_script_comes_to_the_epoch_that_the_run_is_in():
    going, schedules = resumption(), NoSchedules()
    for epoch in (0, 1):
        going.go_on(epoch, schedules, [], [], None)  # type: ignore[arg-type]
        assert going.skipping and going.puts_back(0) and not going.puts_back(None)
    going.go_on(2, schedules, [], [{"made": 3}], None)  # type: ignore[arg-type]
    assert not going.skipping and not going.puts_back(0)
    assert schedules.put_back_with == [[{"made": 3}]]


def test_a_script_that_only_looked_at_a_batch_is_put_back_again():
    going, schedules = resumption(), NoSchedules()
    going.go_on(2, schedules, [], [], None)  # type: ignore[arg-type]
    going.peeked()
    assert going.skipping
    going.go_on(2, schedules, [], [], None)  # type: ignore[arg-type]
    going.step()
    going.peeked()
    assert not going.skipping, "after a step there is no way back"


@pytest.mark.parametrize(("resumed", "replaced"), [(True, False), (False, True), (False, False)])
def test_what_a_script_loads_counts_from_its_first_step_on(resumed, replaced):
    going = resumption(resumed=resumed, replaced=replaced)
    assert going.replaying is (resumed or replaced)
    going.step()
    assert not going.replaying


# --- parts of checkpoints ---------------------------------------------------------------------------


class Sends:
    """A client that notes what is saved."""

    def __init__(self) -> None:
        self.due = False
        self.saved: list[tuple[dict[str, Any], int, bool]] = []

    def save_due(self) -> bool:
        due, self.due = self.due, False
        return due

    def settle(self) -> None:
        self.saved.append(({"settled": 1}, 0, False))

    def save(self, tensors: dict[str, Any], cut: int = 0, *, buffers: bool = False) -> None:
        self.saved.append((tensors, cut, buffers))


def saver_of(client: Sends, *, is_root: bool = True) -> PartSaver:
    return PartSaver(client, threading.RLock(), NO_SPANS.main, is_root=is_root)  # type: ignore[arg-type]


def test_a_part_is_due_when_the_run_asks_and_is_sent_once_replies_are_here():
    client = Sends()
    saver = saver_of(client)
    assert not saver.due
    client.due = True
    assert saver.due
    saver.save(lambda: {"part": 1})
    assert client.saved == [({"settled": 1}, 0, False), ({"part": 1}, 0, False)]
    assert not saver.due


def test_a_root_tells_its_group_once_and_owes_its_own_part():
    client = Sends()
    saver = saver_of(client)
    client.due = True
    assert saver.asked() and not saver.asked()
    assert saver.due
    saver.relay()
    assert saver.asked()


def test_members_owe_what_their_root_says_and_the_root_only_a_cut():
    root, member = saver_of(Sends()), saver_of(Sends(), is_root=False)
    root.owe()
    member.owe()
    assert not root.due and member.due
    client = Sends()
    root = saver_of(client)
    root.owe(cut=6)
    root.save(dict)
    root.save(dict)
    assert [cut for _, cut, _ in client.saved] == [0, 6, 0, 0], "the cut is of one checkpoint only"
