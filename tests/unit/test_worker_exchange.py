"""The parts of a worker's exchange, without servers: links, placements, numbers, replies, leases ahead."""

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.comm import Address, Connection, Kind
from paceline.comm.handshake import Keys
from paceline.comm.message_codec import body_of
from paceline.comm.transfer import Transfer
from paceline.comm.worker_messages import AdmitReply, VerdictReply
from paceline.core.modes import parse_mode
from paceline.exceptions import DeadlineError, LinkError
from paceline.params import Layout, Placement, TensorInfo
from paceline.worker.exchange import server_links
from paceline.worker.exchange.early_slices import EarlySlices
from paceline.worker.exchange.exchange_memory import ExchangeMemory
from paceline.worker.exchange.grants import LeasesAhead
from paceline.worker.exchange.inline_link import InlineLink
from paceline.worker.exchange.pipeline import ReplyBook
from paceline.worker.exchange.placements import Placements
from paceline.worker.exchange.run_news import RequestNumbers, RunNews, new_pull, new_push
from paceline.worker.exchange.sample_report import NOTHING_TO_REPORT, SampleReport
from paceline.worker.exchange.server_links import LinkSettings, ServerLinks

WHERE = Address.from_json({"host": "127.0.0.1", "port": 1, "unix": None})


class Servers:
    """The other ends of a worker's links."""

    def __init__(self) -> None:
        self.ends: dict[str, Connection] = {}
        self.reconnects: list[str] = []

    def connect(self, address: Address, *, peer: str, **_: Any) -> Connection:
        ours, theirs = socket.socketpair()
        if peer in self.ends:
            self.ends[peer].close()
            self.reconnects.append(peer)
        self.ends[peer] = Connection(theirs, Keys(b"o" * 32, b"k" * 32))
        connection = Connection(ours, Keys(b"k" * 32, b"o" * 32))
        connection.peer = peer
        return connection

    def hears(self, rank: int) -> tuple[Kind, dict[str, Any]]:
        frame = self.ends[f"server:{rank}"].receive()
        return frame.kind, frame.body


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    found = Servers()
    monkeypatch.setattr(server_links, "connect", found.connect)
    yield found
    for connection in found.ends.values():
        connection.close()


@pytest.fixture
def links(servers: Servers) -> Iterator[ServerLinks]:
    settings = LinkSettings(rank=3, incarnation=1, secret=b"", deadline_s=0.2, patience_s=0.3)
    made = ServerLinks(settings, parse_mode("bsp"), lead=0, address=WHERE)
    yield made
    made.close()


def layout_of(tensors: int) -> Layout:
    infos = [
        TensorInfo(name=f"t{i}", shape=(4,), stride=(1,), dtype="float32", group=i) for i in range(tensors)
    ]
    return Layout.build(infos, servers=tensors)


# --- links ------------------------------------------------------------------------------------------


def test_a_link_begins_with_who_the_worker_is(servers, links):
    assert servers.hears(0) == (Kind.HELLO, {"role": "worker", "rank": 3, "incarnation": 1})


def test_a_server_that_does_not_answer_is_named_with_the_deadline(servers, links):
    links.reach(1, WHERE)
    with pytest.raises(DeadlineError, match=r"worker:3 got no answer from server:0 for 0.3 s"):
        links.receive(links.lead, Kind.ADMIT)
    with pytest.raises(DeadlineError, match=r"from server:1 for 0.2 s \(--deadline 0.2\)"):
        links.receive(links.each[1], Kind.ADMIT)


def test_the_lead_is_first_among_the_links(links):
    other = links.reach(1, WHERE)
    links.follow(other)
    assert [link.server for link in links.each] == [1, 0]
    assert links.lead is other


def test_the_loss_of_a_server_is_an_error_unless_others_have_its_slices(links):
    other = links.reach(1, WHERE)
    with pytest.raises(LinkError), links.tolerate_loss(other):
        raise LinkError("gone")
    links.replicated = True
    with links.tolerate_loss(other):
        raise LinkError("gone")
    assert links.lost == [other]
    with pytest.raises(LinkError), links.tolerate_loss(links.lead):
        raise LinkError("the last one")


def test_bytes_of_closed_links_still_count(links):
    other = links.reach(1, WHERE)
    other.connection.payload_sent, links.lead.connection.payload_sent = 5, 7
    links.drop([other])
    assert links.bytes_sent == 12
    assert [link.server for link in links.each] == [0]


def test_a_broken_link_is_resumed_from_the_last_frame_that_came(servers, links):
    servers.hears(0)
    link = links.lead
    link.connection.keep()
    link.connection.sock.close()

    def answer() -> None:
        while not servers.reconnects:
            threading.Event().wait(0.01)
        frame = servers.ends["server:0"].receive()
        token = link.connection.token
        assert frame.body == {"role": "worker", "rank": 3, "incarnation": 1, "resume": 0, "token": token}
        servers.ends["server:0"].send(Kind.RESUMED, {"received": 1})

    thread = threading.Thread(target=answer)
    thread.start()
    links.resume(link, LinkError("broke"))
    thread.join()
    assert servers.reconnects == ["server:0"]


# --- placements -------------------------------------------------------------------------------------


def placed(links: ServerLinks, placement: Placement, layout: Layout) -> Placements:
    memory = ExchangeMemory(layout, None, may_share=False)
    links.carry_with(lambda link: InlineLink(link.connection, link.server, memory, Transfer(), None))
    return Placements(links, layout, placement)


def test_each_link_carries_what_its_server_holds_and_brings_what_it_owns(links):
    layout = layout_of(4)
    links.reach(1, WHERE)
    placed(links, Placement.over(layout, [0, 1], replicas=1), layout)
    for link in links.each:
        assert [piece.index for piece in link.slices] == [0, 1, 2, 3]
        assert len(link.carrier.out) == 4
        assert len(link.carrier.into) == 2


def test_a_worker_gets_ready_for_the_announced_placement_and_says_so_once_it_is(links):
    layout = layout_of(4)
    placements = placed(links, Placement.over(layout, [0], replicas=0), layout)
    assert placements.announced is None and placements.ready == 0
    after = Placement.over(layout, [0, 1], replicas=0, number=7)
    placements.hear(links.lead, VerdictReply(next=[after.to_json(), {"1": WHERE.to_json()}]))
    assert placements.announced is not None and placements.ready == 0
    assert [*placements.missing_links()] == [1]
    new = links.reach(1, WHERE)
    assert not placements.answers(new)
    placements.become_ready()
    assert placements.ready == 7 and not placements.missing_links()
    assert {piece.index for piece in new.slices} == {*after.held(1)} and not new.carrier.into
    placements.hear(links.lead, VerdictReply(placement=after.to_json()))
    assert placements.announced is None and placements.ready == 0
    assert placements.answers(new) and len(new.carrier.into) == len(after.owned(1))


def test_servers_that_left_the_placement_are_dropped_and_its_teller_leads(links):
    layout = layout_of(4)
    other = links.reach(1, WHERE)
    placements = placed(links, Placement.over(layout, [0, 1], replicas=1), layout)
    links.replicated, links.lost = True, [links.lead]
    assert placements.lose() == [0]
    assert links.each == [other] and not links.lost
    after = Placement.over(layout, [1], replicas=0, number=1)
    placements.hear(other, VerdictReply(placement=after.to_json()))
    assert links.lead is other
    assert placements.lose() == []


# --- what the lead says -----------------------------------------------------------------------------


def test_a_wish_for_a_checkpoint_is_heard_once():
    news = RunNews(parse_mode("bsp"))
    news.admitted(AdmitReply(version=4, save=1), fetched=True)
    assert news.take_save() and not news.take_save()
    assert news.version == 4 and news.last_admit is not None and news.last_admit.version == 4


def test_a_push_that_fetches_nothing_leaves_the_version_but_where_memory_is_shared():
    news = RunNews(parse_mode("asp"))
    news.admitted(AdmitReply(version=4), fetched=False)
    assert news.version == 0
    news = RunNews(parse_mode("hogwild"))
    news.admitted(AdmitReply(version=4), fetched=False)
    assert news.version == 4


def test_a_switch_and_an_early_end_are_heard():
    news = RunNews(parse_mode("bsp"))
    assert not news.hear_mode(VerdictReply(stop=True))
    assert news.hear_mode(VerdictReply(mode="asp", leave=True))
    assert str(news.mode) == "asp" and news.stop_due and news.leave_due


def test_requests_are_numbered_and_pulls_are_no_part_of_the_sequence():
    numbers = RequestNumbers()
    first, second, third, fourth = new_push(), new_pull(), new_pull(), new_pull()
    first.samples = 4
    numbers.complete(first, fetch=True, version=2)
    assert body_of(first) == (Kind.PUSH, {"n": 1, "sequence": 0, "read_version": 2, "samples": 4})
    numbers.complete(second, fetch=False, version=2)
    assert second.fetch is False
    numbers.complete(third, fetch=True, version=3, ready=5)
    assert (third.n, third.sequence, third.ready) == (3, 1, 5)
    numbers.loads, numbers.loading = 2, True
    numbers.complete(fourth, fetch=True, version=3)
    assert fourth.load == 2


# --- replies under way ------------------------------------------------------------------------------


def test_parameters_are_taken_over_when_all_servers_have_answered():
    book = ReplyBook(2)
    book.ask(fetch=True)
    book.ask(fetch=False)
    assert book.begin_reply(0) is True
    book.end_reply(0, 5, brought=True)
    assert book.take_over() is None, "the other server has not answered"
    assert book.begin_reply(1) is True
    book.end_reply(1, 5, brought=True)
    assert book.all_answered == 1 and book.take_over() == 5 and book.take_over() is None
    assert book.begin_reply(0) is False
    assert (book.asked, book.begun, book.taken) == (2, 2, 1)


def test_slices_leave_when_all_their_tensors_have_gradients_and_pause_after_a_change():
    layout = layout_of(3)
    sent: list[int] = []

    def send(index: int) -> bool:
        sent.append(index)
        return index != 2

    early = EarlySlices(layout, send)
    for tensor in (2, 0, 0):
        early.got(tensor)
    assert sent == [2, 0]
    assert early.begin_anew() == {0}
    early.judge(all_right=False)
    early.got(1)
    assert sent == [2, 0], "it waits for some steps after a slice had changed"


class AheadExchange:
    """Answers requests for leases in turn."""

    def __init__(self, *grants: tuple[list[int], bool]) -> None:
        self.grants = [
            {"leases": [[i, [[0, 1]]] for i in ids], "over": over, "version": 0} for ids, over in grants
        ]
        self.sent: list[Any] = []

    def receive(self, link: Any, kind: Kind) -> Any:
        return SimpleNamespace(kind=kind, body=self.grants.pop(0))

    def send(self, link: Any, message: Any) -> None:
        self.sent.append(message)


def test_leases_are_asked_for_ahead_and_those_of_an_epoch_that_was_left_go_back():
    exchange = AheadExchange(([1, 2], False), ([3], False))
    ahead = LeasesAhead(exchange, SimpleNamespace(lead=None), prefetch=3)  # type: ignore[arg-type]
    assert ahead.collect(0, wait=True, report=SampleReport((9,))) == (None, [])
    assert ahead.take_unsaid() == SampleReport((9,))
    granted = SimpleNamespace(leases=[(0, [(0, 1)]), (7, [(1, 2)])], over=False)
    ahead.ask(0, 8, granted)  # type: ignore[arg-type]
    assert [message.epoch for message in exchange.sent] == [0, 0], "4 steps need 2 grants of 2 leases"
    grant, unused = ahead.collect(0, wait=False, report=NOTHING_TO_REPORT)
    assert grant is not None and [lease for lease, _ in grant.leases] == [1, 2] and not unused
    assert ahead.collect(1, wait=True, report=NOTHING_TO_REPORT) == (None, [3])


def test_skipped_batches_of_several_messages_add_up():
    ahead = LeasesAhead(AheadExchange(), SimpleNamespace(lead=None), prefetch=1)  # type: ignore[arg-type]
    ahead.collect(0, wait=False, report=SampleReport((1,), 2))
    assert ahead.take_unsaid(SampleReport((5,), 3, 4)) == SampleReport((1, 5), 5, 4)
    assert ahead.take_unsaid() == NOTHING_TO_REPORT


def test_parameters_are_the_workers_copy_unless_it_reads_in_place():
    layout = layout_of(2)
    memory = ExchangeMemory(layout, None, may_share=True)
    assert not memory.in_place(parse_mode("bsp"))
    assert memory.parameters(parse_mode("bsp")) is memory.copy
    torch.testing.assert_close(memory.gradients, torch.zeros(layout.nbytes, dtype=torch.uint8))
