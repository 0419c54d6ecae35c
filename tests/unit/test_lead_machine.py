"""What the leader decides: whom it answers, what it orders, whom it replaces, and how it takes over."""

from paceline.core.decider import Decider
from paceline.core.events import Call, Heard, Join, Push, Take, Vote
from paceline.core.modes import PushId, parse_mode
from paceline.core.placement import Placement
from paceline.core.sequencer import OrderLog
from paceline.core.server.follower_machine import FollowerMachine
from paceline.core.server.lead_actions import (
    EndFollower,
    FailRun,
    Order,
    SendAnswer,
    SendGrant,
    SendVerdict,
    TakeIn,
    Tell,
    Welcome,
)
from paceline.core.server.lead_machine import LeadMachine
from paceline.core.server.lead_reports import (
    FullyReplicated,
    ModeEntered,
    ReplaceWorker,
    RunEndsEarly,
    ServerEmptied,
    ServerUnreachable,
)
from paceline.core.server.lead_settings import LeadSettings
from paceline.core.server.present import Present
from paceline.core.server.standby import Standby, records_to_json
from paceline.core.server.worker_requests import (
    CallRequest,
    PullRequest,
    PushRequest,
    TakeRequest,
    VoteRequest,
)
from paceline.core.steps import AdmitStep, ApplyStep, CommitStep, PlaceStep, ReduceStep
from paceline.exceptions import DeadlineError, LinkError, UsageError
from tests.deciding import replay
from tests.leading import Led, two_slices
from tests.unit.test_lead import lead_of


def parked() -> Decider:
    """Worker 0 holds every lease, and worker 1 has asked the leader before for some."""
    lead = lead_of("asp", samples=4).decider
    replay(lead, ["take", 0, 0, 8, False, 1])
    leases, _ = replay(lead, ["take", 1, 0, 8, True, 5])
    assert leases is None and lead.parks
    return lead


def test_the_first_step_waits_for_all_workers() -> None:
    led = Led("bsp", workers=3, attached=2)
    assert [*led.of(Welcome)] == [] and not led.machine.gate.open
    led.do(led.machine.attach(2, 0, led.now))
    assert [each.worker for each in led.of(Welcome)] == [0, 1, 2]
    led.do(led.machine.left(2, 0, led.now, finished=False))
    led.do(led.machine.attach(2, 1, led.now))
    assert [each.worker for each in led.of(Welcome)] == [0, 1, 2, 2], "the gate stays open"


def test_followers_know_of_a_worker_before_it_begins() -> None:
    """Else a follower that leads next would not know it, and never answer it."""
    led = Led("asp", servers=2, replicas=1, attached=1)
    led.do(led.machine.attach(1, 0, led.now))
    heard = led.orders[-1]
    assert heard.events == [Join(0, 0), Join(1, 0)]
    assert led.all.index(heard) < led.all.index(next(led.of(Welcome)))


def test_a_push_is_ordered_executed_and_answered() -> None:
    led = Led("asp", workers=2)
    led.take(0, 1, limit=1)
    (grant,) = led.of(SendGrant)
    led.push(0, 0, grant.leases[0].id)
    apply, admit = led.steps
    assert isinstance(apply, ApplyStep) and admit == AdmitStep(0, 1)
    assert len(led.applied) == 1 and led.machine.waits.owed == set()


def test_a_worker_that_waits_for_leases_is_answered_when_another_worker_leaves() -> None:
    led = Led("asp", samples=4)
    led.take(0, 1)
    led.take(1, 5)
    assert [each.worker for each in led.of(SendGrant)] == [0]
    led.do(led.machine.left(0, 0, led.now, finished=False))
    last = [*led.of(SendGrant)][-1]
    assert last.worker == 1 and sum(lease.samples for lease in last.leases) == 4


def succeeded(decider: Decider, *, workers: int = 2, requests: tuple[object, ...] = ()) -> Led:
    """Server 1 led; server 0, which followed, leads now."""
    follower = FollowerMachine(Present(decider.mode), OrderLog(10))
    layout = two_slices()
    follower.adopt(layout, Placement.over(layout, [0, 1], 1), 1, Standby(decider), takes_part=True)
    follower.leader = 1
    for worker in range(workers):
        follower.attach(worker, 0)
    for request in requests:
        assert follower.request(request)  # type: ignore[arg-type]
    led = Led("asp", workers=workers)
    led.decider, led.now = decider, 100.0
    led.machine = LeadMachine.succeeding(
        follower,
        LeadSettings(rank=0, workers=workers, servers=2, replicas=1, deadline_s=60.0),
        queued=[],
        reduced=None,
        applied=led.applied,
        directory_of=str,
    )
    led.all.clear()
    led.steps.clear()
    led.do(led.machine.succeed(follower, led.now))
    for unheard in follower.unheard([]):
        led.do(led.machine.request(unheard, led.now))
    return led


def test_a_worker_that_asked_the_leader_before_is_answered_when_it_asks_again() -> None:
    """It does not read answers to what it has not asked this server."""
    led = succeeded(parked())
    led.do(led.machine.left(0, 0, led.now, finished=False))
    assert [*led.of(SendGrant)] == []
    number, leases, _ = led.decider.roster.grants[1]
    assert number == 5 and sum(lease.samples for lease in leases) == 4
    led.take(1, 5)
    (grant,) = led.of(SendGrant)
    assert grant.leases == leases


def test_a_promoted_server_places_the_slices_of_the_one_that_is_gone() -> None:
    led = succeeded(parked())
    (place,) = (step for step in led.steps if isinstance(step, PlaceStep))
    assert place.placement.servers == {0} and led.machine.present.placement == place.placement


def test_a_promoted_server_answers_requests_that_the_leader_before_told_nobody_of() -> None:
    decider = lead_of("asp").decider
    push = PushRequest(0, 1, Push(PushId(0, 0, 0), 0, 4, (), False))
    led = succeeded(decider, requests=(push, TakeRequest(Take(1, 0, 1, True, 1))))
    assert AdmitStep(0, 1) in led.steps
    assert [each.worker for each in led.of(SendGrant)] == [1]


def test_a_worker_that_waits_through_a_failover_has_a_deadline() -> None:
    """The leader before had heard of its push, and of no push of worker 1."""
    decider = lead_of("bsp").decider
    push = Push(PushId(0, 0, 0), 0, 4, (), False)
    replay(decider, ["heard", 0, 1])
    decider.decide(push)
    led = succeeded(decider, requests=(PushRequest(0, 1, push),))
    led.do(led.machine.tick(led.now + 61, set()))
    (told,) = led.of(Tell)
    assert isinstance(told.report, ReplaceWorker) and told.report.replace == 1


def test_a_worker_whose_request_for_leases_the_leader_before_has_heard_has_a_deadline() -> None:
    led = succeeded(parked())
    led.take(1, 5)
    assert [*led.of(SendGrant)] == []
    led.do(led.machine.tick(led.now + 61, set()))
    (told,) = led.of(Tell)
    assert isinstance(told.report, ReplaceWorker) and told.report.replace == 0


def test_workers_that_are_waited_for_too_long_are_replaced_once() -> None:
    led = Led("bsp", deadline_s=5.0)
    led.push(0, 0)
    led.do(led.machine.tick(4.0, set()))
    assert [*led.of(Tell)][1:] == []
    led.do(led.machine.tick(6.0, set()))
    led.do(led.machine.tick(7.0, set()))
    reports = [each.report for each in led.of(Tell) if isinstance(each.report, ReplaceWorker)]
    assert [(each.replace, each.incarnation) for each in reports] == [(1, 0)]
    assert "worker:0 has waited 6 s at version 0 for worker:1" in reports[0].reason


def test_a_worker_that_waits_for_a_server_too_long_ends_the_run() -> None:
    led = Led("bsp", servers=2, clip_norm=1.0, deadline_s=5.0)
    led.push(0, 0)
    led.push(1, 0)
    assert isinstance(led.steps[-1], ReduceStep) and led.machine.order.sequencer.waiting
    led.do(led.machine.tick(6.0, set()))
    (failed,) = led.of(FailRun)
    assert isinstance(failed.error, DeadlineError) and "for a server" in str(failed.error)


def test_a_collective_that_one_worker_never_calls_is_an_error_of_the_script() -> None:
    led = Led("asp", deadline_s=5.0)
    led.do(led.machine.request(CallRequest(Call(0, 1, "gather at a.py:3", "1")), 0.0))
    led.now = 3.0
    led.push(1, 0)
    led.do(led.machine.tick(6.0, set()))
    (failed,) = led.of(FailRun)
    assert isinstance(failed.error, UsageError) and "which went on training meanwhile" in str(failed.error)


def test_answers_to_votes_and_calls_reach_those_who_asked() -> None:
    led = Led("bsp")
    for worker in (0, 1):
        led.do(led.machine.request(VoteRequest(Vote(worker, 1, "any", worker == 1)), 0.0))
    first, second = led.of(SendVerdict)
    assert first == SendVerdict(0, {"stop": True, "on": 1, "held": 0.0})
    assert second == SendVerdict(1, {"stop": True})
    assert [each.report for each in led.of(Tell) if isinstance(each.report, RunEndsEarly)] != []
    for worker in (0, 1):
        led.do(led.machine.request(CallRequest(Call(worker, 2, "here", str(worker))), 0.0))
    assert [each.values for each in led.of(SendAnswer)] == [["0", "1"]] * 2


def test_a_lost_worker_whose_process_says_nothing_is_replaced() -> None:
    led = Led("asp", deadline_s=5.0)
    led.machine.link_lost(1, 0, 0.0)
    led.do(led.machine.left(1, 0, 0.0, finished=False))
    led.do(led.machine.tick(6.0, set()))
    report = [*led.of(Tell)][-1].report
    assert isinstance(report, ReplaceWorker) and (report.replace, report.incarnation) == (1, 0)


def test_what_follows_from_an_event_is_sent_to_followers_before_a_worker_hears_of_it() -> None:
    led = Led("asp", servers=2, replicas=1)
    actions = led.machine.request(TakeRequest(Take(0, 0, 1, True, 1)), 0.0)
    order, grant = actions
    assert isinstance(order, Order) and order.events == [Take(0, 0, 1, True, 1)]
    assert isinstance(grant, SendGrant)


def test_a_second_half_is_ordered_when_all_norms_are_known() -> None:
    led = Led("bsp", servers=2, clip_norm=1.0)
    led.push(0, 0)
    led.push(1, 0)
    led.do(led.machine.reduced(0, [(0, 4.0)]))
    assert isinstance(led.steps[-1], ReduceStep)
    led.do(led.machine.reduced(0, [(1, 12.0)]))
    commit, *admits = led.steps[-3:]
    assert isinstance(commit, CommitStep) and admits == [AdmitStep(0, 1), AdmitStep(1, 1)]


def test_a_server_that_workers_do_not_reach_is_given_up() -> None:
    led = Led("asp", servers=2, replicas=1)
    led.do(led.machine.request(PullRequest(0, 1, without=frozenset({1})), 0.0))
    led.do(led.machine.tick(1.0, set()))
    assert [*led.of(EndFollower)] == [] and AdmitStep(0, 0) not in led.steps
    led.do(led.machine.tick(3.0, set()))
    assert [*led.of(EndFollower)] == [EndFollower(1)]
    assert Tell(ServerUnreachable(1)) in led.all
    led.do(led.machine.server_gone(1, "its link was closed", 3.0))
    assert AdmitStep(0, 0) in led.steps, "the placement does without it"


def test_without_replicas_a_lost_server_ends_the_run() -> None:
    led = Led("asp", servers=2)
    led.do(led.machine.server_gone(1, "killed", 0.0))
    (failed,) = led.of(FailRun)
    assert isinstance(failed.error, LinkError) and "lost server:1: killed" in str(failed.error)


def test_slices_have_no_copies_if_a_server_is_gone_before_the_first_step() -> None:
    """The controller would go on without that server, and the leader cannot: it says that the run is lost."""
    led = Led("bsp", servers=2, replicas=1, attached=1)
    led.do(led.machine.server_gone(1, "killed", 0.0))
    assert [*led.of(FailRun)]
    led.do(led.machine.attach(1, 0, led.now))
    assert not any(isinstance(each.report, FullyReplicated) for each in led.of(Tell))


def test_a_new_server_knows_which_requests_were_answered_without_it() -> None:
    """Worker 0 waits for an answer that the new server will give, too; worker 1 has got all of its own."""
    led = Led("bsp", servers=2, replicas=1)
    led.push(1, 0)
    led.push(0, 0)
    led.machine.newcomer_came(2, {"port": 2})
    led.do(led.machine.server_adopted(2))
    number = led.machine.present.ordered.number + 1
    pull = PullRequest(1, 2, ready=number)
    led.do(led.machine.request(pull, 0.0))
    assert [*led.of(TakeIn)] == [], "worker 0 is not ready"
    push = PushRequest(0, 2, Push(PushId(0, 0, 1), 1, 4, (), False), ready=number)
    led.do(led.machine.request(push, 0.0))
    (taken,) = led.of(TakeIn)
    assert taken.answered == {0: 1, 1: 2} and taken.decider is not None
    assert led.machine.present.ordered.servers == {0, 1, 2}


def test_followers_hear_of_a_push_together_with_its_number() -> None:
    """A push also makes its worker ready for a placement, which is ordered first. If followers knew the
    push's number and not the push, and one of them led next, nobody would answer the worker."""
    led = Led("asp", servers=2, replicas=1)
    led.do(led.machine.let_server_go(1))
    led.do(led.machine.request(PullRequest(1, 1, ready=1), 0.0))
    push = Push(PushId(0, 0, 0), 0, 4, (), False)
    led.do(led.machine.request(PushRequest(0, 1, push, ready=1), 0.0))
    (order,) = (each for each in led.orders if Heard(0, 1) in each.events)
    assert push in order.events
    assert led.machine.present.ordered.servers == {0}


def test_a_worker_that_joins_while_slices_change_hands_is_told_of_their_new_servers() -> None:
    """It pushes to the servers that it knows. One that it does not know would apply an update without its
    push."""
    led = Led("asp", servers=2, replicas=1)
    machine = led.machine
    machine.present.ordered = Placement(1, frozenset({0, 1, 2}), ((0, 2), (1, 0)))
    led.do(machine.left(1, 0, 0.0, finished=False))
    led.do(machine.attach(1, 1, 0.0))
    welcome = [*led.of(Welcome)][-1]
    assert welcome.notes["next"] == [machine.present.ordered.to_json(), {}]


def test_a_new_server_that_dies_before_it_has_its_slices_costs_nothing() -> None:
    """All others have all of theirs: the placement does without it, as before it came."""
    led = Led("asp", servers=2, replicas=1)
    led.do(led.machine.server_gone(1, "killed", 0.0))
    led.machine.newcomer_came(1, {"port": 2})
    led.do(led.machine.server_adopted(1))
    number = led.machine.present.ordered.number + 1
    for worker in (0, 1):
        led.do(led.machine.request(PullRequest(worker, 1, ready=number), 0.0))
    assert led.machine.present.ordered.servers == {0, 1}
    led.do(led.machine.server_gone(1, "killed again", 0.0))
    assert [*led.of(FailRun)] == [] and led.machine.present.ordered.servers == {0}


def test_a_new_server_gets_the_records_that_the_state_it_gets_knows_of() -> None:
    """The push that makes the last worker ready is applied behind that state: an event brings it."""
    led = Led("asp", servers=2, replicas=1)
    led.push(1, 0)
    led.machine.newcomer_came(2, {"port": 2})
    led.do(led.machine.server_adopted(2))
    number = led.machine.present.ordered.number + 1
    led.do(led.machine.request(PullRequest(1, 2, ready=number), 0.0))
    push = Push(PushId(0, 0, 0), 1, 4, (), False)
    led.do(led.machine.request(PushRequest(0, 1, push, ready=number), 0.0))
    (taken,) = led.of(TakeIn)
    assert [record.push.id for record in taken.records] == [PushId(1, 0, 0)]
    newcomer = Standby(Decider(parse_mode("asp")))
    newcomer.begin_here(taken.decider, records_to_json(taken.records))
    assert newcomer.decider.totals.pushes == len(newcomer.records) == 1
    assert [record.push.id for record in led.applied] == [PushId(1, 0, 0), PushId(0, 0, 0)]


def test_a_switch_is_told_when_it_takes_effect() -> None:
    led = Led("bsp")
    led.push(0, 0)
    led.do(led.machine.switch("asp", "request"))
    assert ModeEntered("asp", 1, "request") not in [each.report for each in led.of(Tell)]
    led.push(1, 0)
    assert [each.report for each in led.of(Tell)][-1] == ModeEntered("asp", 1, "request")
    led.do(led.machine.switch("asp", "again"))
    assert [each.report for each in led.of(Tell)][-1] == ModeEntered("asp", 1, "again")
    assert led.machine.present.mode == parse_mode("asp")


def test_an_early_end_waits_until_the_gate_is_open() -> None:
    led = Led("bsp", attached=1)
    led.do(led.machine.end_early("enough"))
    assert Tell(RunEndsEarly("enough")) not in led.all
    led.do(led.machine.attach(1, 0, led.now))
    assert Tell(RunEndsEarly("enough")) in led.all
    assert all("stop" in each.notes for each in led.of(Welcome))


def test_a_server_that_is_to_leave_waits_until_the_gate_is_open() -> None:
    led = Led("asp", servers=2, attached=1)
    led.do(led.machine.let_server_go(1))
    assert not any(isinstance(step, PlaceStep) for step in led.steps)
    led.do(led.machine.attach(1, 0, led.now))
    for worker in (0, 1):
        assert led.machine.present.ordered.servers == {0, 1}, "not before every worker is ready"
        led.do(led.machine.request(PullRequest(worker, 1, ready=1), 0.0))
    assert led.machine.present.ordered.servers == {0}


def test_a_server_that_is_to_leave_and_holds_nothing_may_end() -> None:
    """A new leader is told again which servers are to leave. The one before may have got that far."""
    led = Led("asp", servers=2)
    led.do(led.machine.let_server_go(5))
    led.do(led.machine.tick(1.0, set()))
    assert Tell(ServerEmptied(5)) in led.all
