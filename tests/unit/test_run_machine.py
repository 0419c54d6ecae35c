"""The life of a run, event by event: control/machine.py without a process or a clock."""

import json
import random
import signal

import pytest

from paceline.causes import Cause, ending_of
from paceline.core.run_decisions import (
    Announce,
    DismissServer,
    End,
    GoBack,
    Introduce,
    Kill,
    Launch,
    LostServer,
    Note,
    RetireServer,
    RunState,
    Save,
    WaitForCause,
)
from paceline.core.run_machine import RunMachine


def started(servers: int = 1, workers: int = 2, max_restarts: int = 3) -> RunMachine:
    """A machine whose servers are ready."""
    machine = RunMachine(servers=servers, workers=workers, max_restarts=max_restarts)
    machine.begin()
    for rank in range(servers):
        machine.server_ready(rank)
    assert machine.state is RunState.RUNNING
    return machine


def killed(machine: RunMachine, rank: int, number: int = signal.SIGKILL) -> list:
    """The present incarnation of a worker dies of a signal."""
    return machine.exited("worker", rank, machine.incarnations[rank], ending_of(None, number))


def test_servers_start_before_workers_and_are_announced_when_the_last_listens():
    machine = RunMachine(servers=2, workers=2, max_restarts=0)
    assert machine.begin() == [
        Launch("server", 0, 0),
        Launch("server", 1, 0),
        Launch("worker", 0, 0),
        Launch("worker", 1, 0),
    ]
    assert machine.server_ready(1) == []
    assert machine.state is RunState.STARTING
    assert machine.server_ready(0) == [Announce()]
    assert machine.state is RunState.RUNNING


def test_a_run_succeeds_when_all_workers_finished_and_the_last_checkpoint_is_written():
    machine = started()
    assert machine.worker_finished(1) == []
    assert machine.worker_finished(0) == [Save()]
    assert machine.state is RunState.FINISHING
    assert machine.saved(None) == [End()]
    assert machine.state is RunState.SUCCEEDED
    assert machine.error is None


def test_a_last_checkpoint_that_cannot_be_written_fails_the_run():
    machine = started(workers=1)
    machine.worker_finished(0)
    assert machine.saved("the disk is full") == [End()]
    assert machine.state is RunState.FAILED
    assert machine.error == ("server:0", "the final checkpoint could not be written: the disk is full", "")


def test_a_killed_worker_is_replaced_by_its_next_incarnation_and_the_user_is_told():
    machine = started()
    note, launch = killed(machine, 1)
    assert launch == Launch("worker", 1, 1)
    assert isinstance(note, Note)
    assert "worker:1 was killed by SIGKILL; replaced (restart 1 of at most 3)" in note.text
    assert machine.state is RunState.RECOVERING
    machine.worker_back(1)
    assert machine.state is RunState.RUNNING
    assert machine.restarts == {0: 0, 1: 1}


def test_restarts_are_counted_over_all_workers():
    machine = started(max_restarts=2)
    assert killed(machine, 0)[-1] == Launch("worker", 0, 1)
    assert killed(machine, 1)[-1] == Launch("worker", 1, 1)
    assert killed(machine, 0) == [End()]
    role, message, _ = machine.error
    assert role == "worker:0"
    assert "was killed by SIGKILL after 2 restarts, and --max-restarts is 2" in message


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "SIGKILL, and --max-restarts is 0. The system kills like this when memory runs out"),
        (signal.SIGSEGV, "SIGSEGV, and --max-restarts is 0. Compiled code that the script uses crashed"),
        (signal.SIGTERM, "SIGTERM, and --max-restarts is 0. Somebody sent it that signal"),
        (40, "signal 40, and --max-restarts is 0"),
    ],
)
def test_without_restarts_the_message_says_what_such_a_death_usually_means(number, words):
    machine = started(max_restarts=0)
    assert killed(machine, 1, number) == [End()]
    assert machine.error[0] == "worker:1"
    assert words in machine.error[1]


def test_a_worker_that_dies_before_the_servers_listen_does_not_keep_the_run_from_starting():
    machine = RunMachine(servers=2, workers=2, max_restarts=3)
    machine.begin()
    machine.server_ready(0)
    assert killed(machine, 0)[-1] == Launch("worker", 0, 1)
    assert machine.state is RunState.STARTING
    machine.worker_back(0)
    assert machine.server_ready(1) == [Announce()]
    assert machine.state is RunState.RUNNING


def test_news_of_a_replaced_incarnation_is_ignored():
    machine = started()
    killed(machine, 1)
    assert machine.exited("worker", 1, 0, ending_of(None, signal.SIGKILL)) == []
    assert machine.exited("worker", 1, 0, ending_of(1, None)) == []
    assert machine.restarts[1] == 1


@pytest.mark.parametrize(("code", "number"), [(0, None), (None, signal.SIGKILL)])
def test_a_finished_worker_may_end_as_it_likes(code, number):
    machine = started()
    machine.worker_finished(1)
    assert machine.exited("worker", 1, 0, ending_of(code, number)) == []
    assert machine.patience_over() == []
    assert machine.state is RunState.RUNNING


def test_an_exit_noticed_before_its_goodbye_was_read_is_no_error():
    machine = started()
    assert machine.exited("worker", 1, 0, ending_of(0, None)) == [WaitForCause()]
    assert machine.worker_finished(1) == []
    assert machine.patience_over() == []
    assert machine.state is RunState.RUNNING
    assert machine.worker_finished(0) == [Save()]


def test_an_exit_noticed_before_its_report_was_read_shows_the_report():
    machine = started()
    assert machine.exited("worker", 1, 0, ending_of(1, None)) == [WaitForCause()]
    assert machine.failed("worker:1", "ValueError: no", "line 3", cause=Cause.USER_ERROR) == [End()]
    assert machine.error == ("worker:1", "ValueError: no", "line 3")


def test_a_worker_that_exits_without_a_word_fails_the_run_after_a_moment():
    machine = started()
    assert machine.exited("worker", 1, 0, ending_of(3, None)) == [WaitForCause()]
    assert machine.patience_over() == [End()]
    assert machine.error == ("worker:1", "exited with code 3 without saying why; look at its log.", "")


def test_a_lost_link_waits_for_the_error_that_caused_it():
    machine = started(servers=2)
    assert machine.failed("worker:0", "LinkError: broken pipe", "", cause=Cause.LOST_LINK) == [WaitForCause()]
    assert machine.failed("server:0", "LinkError: lost it", "", cause=Cause.LOST_LINK) == [WaitForCause()]
    assert machine.exited("server", 1, 0, ending_of(None, signal.SIGKILL))[0] == GoBack(
        "server:1 was killed by SIGKILL (restart 1 of at most 3)"
    )
    assert machine.patience_over() == []
    assert machine.state is RunState.RECOVERING and machine.error is None


def test_a_killed_server_sends_all_back_to_the_checkpoint():
    machine = started(servers=2)
    machine.worker_finished(0)
    assert machine.exited("server", 0, 0, ending_of(None, signal.SIGKILL)) == [
        GoBack("server:0 was killed by SIGKILL (restart 1 of at most 3)"),
        *(Launch("server", rank, 1) for rank in range(2)),
        *(Launch("worker", rank, 1) for rank in range(2)),
    ]
    # What is still heard of those before is of no interest.
    assert machine.exited("server", 1, 0, ending_of(None, signal.SIGKILL)) == []
    assert machine.exited("worker", 0, 0, ending_of(None, signal.SIGKILL)) == []
    assert machine.worker_back(0) == [] and machine.state is RunState.RECOVERING
    machine.server_ready(0)
    assert machine.server_ready(1) == [Announce()]
    assert machine.state is RunState.RUNNING and machine.finished == set()


def test_going_back_counts_as_a_restart():
    machine = started(max_restarts=2)
    killed(machine, 0)
    assert machine.exited("server", 0, 0, ending_of(None, signal.SIGKILL))[0] == GoBack(
        "server:0 was killed by SIGKILL (restart 2 of at most 2)"
    )
    assert machine.exited("server", 0, 1, ending_of(None, signal.SIGKILL)) == [End()]
    assert machine.error is not None and "after 2 restarts, and --max-restarts is 2" in machine.error[1]
    assert "paceline resume" in machine.error[1]


def test_a_server_that_exits_by_itself_would_exit_again_and_is_named_before_who_lost_it():
    machine = started()
    machine.failed("worker:0", "LinkError: lost server:0", "", cause=Cause.LOST_LINK)
    assert machine.exited("server", 0, 0, ending_of(1, None)) == [WaitForCause()]
    assert machine.patience_over() == [End()]
    assert machine.error == ("server:0", "exited with code 1 without saying why; look at its log.", "")


def out_of_memory(machine: RunMachine, role: str, error: str = "MemoryError") -> list:
    """A role reports that it has no memory left."""
    return machine.failed(role, f"{error}: no memory", "line 3", cause=Cause.OUT_OF_MEMORY, error=error)


def test_a_worker_that_fails_of_what_may_pass_is_replaced_and_its_exit_is_of_no_interest():
    machine = started()
    note, launch = out_of_memory(machine, "worker:1")
    assert launch == Launch("worker", 1, 1)
    assert note == Note(
        "worker:1 failed: MemoryError: no memory; replaced (restart 1 of at most 3). "
        "Its unfinished leases went back to the pool."
    )
    assert machine.exited("worker", 1, 0, ending_of(1, None)) == []
    assert machine.patience_over() == [] and machine.error is None


def test_a_report_that_comes_after_the_exit_was_noticed_counts_as_well():
    machine = started()
    assert machine.exited("worker", 1, 0, ending_of(1, None)) == [WaitForCause()]
    assert out_of_memory(machine, "worker:1")[-1] == Launch("worker", 1, 1)
    assert machine.patience_over() == [] and machine.error is None


def test_the_same_error_of_a_worker_again_before_a_step_fails_the_run_with_its_traceback():
    machine = started()
    out_of_memory(machine, "worker:1")
    machine.stepped(1, 9)  # not enough to say that it has passed
    assert out_of_memory(machine, "worker:1") == [End()]
    role, message, traceback = machine.error
    assert (role, traceback) == ("worker:1", "line 3")
    assert message == (
        "MemoryError: no memory (it was replaced, and failed like this again before 10 steps were made)"
    )


def test_the_same_error_again_after_steps_is_another_restart_up_to_their_number():
    machine = started(max_restarts=2)
    for incarnation in (1, 2):
        assert out_of_memory(machine, "worker:1")[-1] == Launch("worker", 1, incarnation)
        machine.stepped(1, 10)
    assert out_of_memory(machine, "worker:1") == [End()]
    assert "after 2 restarts, and --max-restarts is 2" in machine.error[1]
    assert machine.error[2] == "line 3"


def test_the_same_error_of_every_worker_fails_the_run_and_another_error_does_not():
    machine = started(workers=3, max_restarts=9)
    out_of_memory(machine, "worker:0")
    out_of_memory(machine, "worker:1")
    assert out_of_memory(machine, "worker:2", "OSError")[-1] == Launch("worker", 2, 1)
    machine.stepped(0, 10)  # it has passed there
    assert out_of_memory(machine, "worker:2")[-1] == Launch("worker", 2, 2)
    assert out_of_memory(machine, "worker:0") == [End()]
    assert machine.error[1] == "MemoryError: no memory (every worker failed like this)"


def test_a_user_error_fails_the_run_at_once():
    machine = started()
    assert machine.failed("worker:1", "NameError: x", "line 3", cause=Cause.USER_ERROR) == [End()]
    assert machine.error == ("worker:1", "NameError: x", "line 3") and machine.restarts[1] == 0


def test_a_server_that_fails_of_what_may_pass_goes_as_one_that_crashed():
    machine = started(servers=2)
    assert isinstance(out_of_memory(machine, "server:1")[0], GoBack)
    for rank in range(2):
        machine.server_ready(rank)
    assert out_of_memory(machine, "server:1") == [End()], "again, and no step was made"
    machine = RunMachine(servers=2, workers=1, max_restarts=3, replicas=1)
    machine.begin()
    for rank in range(2):
        machine.server_ready(rank)
    machine.whole({0, 1})
    note, lost, launch = out_of_memory(machine, "server:0")
    assert note.text.startswith("server:0 failed: MemoryError: no memory; others hold copies of all it held")
    assert lost == LostServer(0, 1) and launch == Launch("server", 0, 1)
    assert machine.exited("server", 0, 0, ending_of(1, None)) == []
    machine.stepped(0, 10)
    machine.server_ready(0)
    machine.whole({0, 1})
    assert out_of_memory(machine, "server:0")[1] == LostServer(0, 1), "steps were made: it may pass again"


def test_a_role_that_hangs_is_ended_and_its_end_is_as_any_other():
    machine = started()
    note, kill = machine.hung("worker", 1, 0, "it hangs")
    assert note == Note("it hangs. worker:1 is ended and replaced.") and kill == Kill("worker", 1)
    assert killed(machine, 1)[1] == Launch("worker", 1, 1)
    assert machine.hung("worker", 1, 0, "it hangs") == []  # the one before
    assert machine.hung("worker", 0, None, "it hangs") == []  # while another is being replaced
    machine.worker_back(1)
    assert machine.hung("server", 0, 0, "it hangs")[1] == Kill("server", 0)
    machine.worker_finished(0)
    assert machine.hung("worker", 0, 0, "it hangs") == []  # only its goodbye to the servers was lost
    assert isinstance(machine.exited("server", 0, 0, ending_of(None, signal.SIGKILL))[0], GoBack)


def test_without_restarts_left_a_role_that_hangs_ends_the_run_with_the_reason():
    machine = started(max_restarts=0)
    assert machine.hung("worker", 1, 0, "DeadlineError: it hangs") == [End()]
    assert machine.error == ("server:0", "DeadlineError: it hangs", "")


def test_a_lost_link_without_a_cause_is_shown_itself_and_the_first_one_wins():
    machine = started(servers=2)
    machine.failed("worker:0", "LinkError: first", "", cause=Cause.LOST_LINK)
    machine.failed("server:0", "LinkError: second", "", cause=Cause.LOST_LINK)
    assert machine.patience_over() == [End()]
    assert machine.error == ("worker:0", "LinkError: first", "")


def test_what_a_role_says_counts_more_than_its_exit_code_but_not_more_than_an_earlier_error():
    machine = started(max_restarts=0)
    machine.exited("worker", 1, 0, ending_of(1, None))
    machine.failed("worker:0", "LinkError: consequence", "", cause=Cause.LOST_LINK)
    machine.failed("worker:1", "LinkError: cause", "", cause=Cause.LOST_LINK)
    machine.patience_over()
    assert machine.error == ("worker:1", "LinkError: cause", "")


def test_one_workers_goodbye_does_not_hide_anothers_silent_exit():
    machine = started()
    machine.exited("worker", 0, 0, ending_of(0, None))
    machine.exited("worker", 1, 0, ending_of(7, None))
    machine.worker_finished(0)
    assert machine.patience_over() == [End()]
    assert machine.error[0] == "worker:1"


def test_a_worker_whose_link_broke_without_a_cause_is_replaced():
    machine = started()
    machine.failed("worker:1", "LinkError: refused", "", cause=Cause.LOST_LINK)
    machine.exited("worker", 1, 0, ending_of(1, None))
    note, launch = machine.patience_over()
    assert launch == Launch("worker", 1, 1) and "lost its link (LinkError: refused)" in note.text
    assert machine.state is RunState.RECOVERING and machine.patience_over() == []


def test_only_the_first_error_is_kept():
    machine = started()
    machine.failed("worker:1", "ValueError: first", "", cause=Cause.USER_ERROR)
    assert machine.failed("worker:0", "ValueError: second", "", cause=Cause.USER_ERROR) == []
    assert machine.exited("server", 0, 0, ending_of(None, signal.SIGKILL)) == []
    assert machine.error == ("worker:1", "ValueError: first", "")


def test_a_stop_saves_first_and_a_second_one_does_not_wait():
    machine = started()
    note, save = machine.stop_requested()
    assert isinstance(note, Note) and save == Save()
    assert machine.state is RunState.STOPPING
    assert killed(machine, 0) == []
    assert machine.stop_requested()[-1] == End()
    assert machine.state is RunState.STOPPED
    assert machine.saved(None) == []
    assert machine.error is None


def test_a_stop_while_the_run_ends_anyway_is_answered_and_changes_nothing():
    machine = started()
    for rank in (0, 1):
        machine.worker_finished(rank)
    assert machine.state is RunState.FINISHING
    assert "the run ends already" in machine.stop_requested()[0].text
    assert machine.saved(None) == [End()] and machine.state is RunState.SUCCEEDED


def test_scripts_that_exit_before_they_train_leave_nothing_to_save():
    machine = started()
    assert machine.worker_finished(0, trained=False) == []
    restored = started()
    restored.restore(machine.snapshot())
    note, end = restored.worker_finished(1, trained=False)
    assert "nothing was trained" in note.text and end == End()
    assert restored.state is RunState.SUCCEEDED
    assert machine.worker_finished(1) == [Save()], "one has trained"


def test_a_stop_that_is_to_be_now_saves_nothing_but_lets_a_run_that_is_about_to_end_do_so():
    for before in ([], ["stop_requested"]):
        machine = started()
        for event in before:
            getattr(machine, event)()
        note, end = machine.stop_requested(now=True)
        assert (note, end) == (Note("stopped without waiting for the checkpoint"), End())
        assert machine.state is RunState.STOPPED
    machine = started()
    for rank in machine.working:
        machine.worker_finished(rank)
    assert machine.state is RunState.FINISHING
    assert "the run ends already" in machine.stop_requested(now=True)[0].text
    assert machine.state is RunState.FINISHING


@pytest.mark.parametrize("problem", [None, "not written within 2.5 s"])
def test_a_stop_ends_when_the_checkpoint_is_written_or_cannot_be(problem):
    machine = started()
    machine.stop_requested()
    decisions = machine.saved(problem)
    assert decisions[-1] == End()
    assert [d.text for d in decisions[:-1]] == ([] if problem is None else [f"no checkpoint: {problem}"])
    assert machine.state is RunState.STOPPED


def test_a_stop_before_there_is_anything_to_save_ends_at_once():
    machine = RunMachine(servers=1, workers=1, max_restarts=0)
    machine.begin()
    assert machine.stop_requested() == [End()]
    assert machine.state is RunState.STOPPED


def test_a_stop_while_the_run_goes_back_ends_at_once_with_the_checkpoint_it_went_back_to():
    machine = started()
    machine.exited("server", 0, 0, ending_of(None, signal.SIGKILL))
    other = RunMachine(servers=1, workers=2, max_restarts=3)
    other.restore(machine.snapshot())  # the controller may die meanwhile
    for each in (machine, other):
        note, end = each.stop_requested()
        assert isinstance(note, Note) and "paceline resume" in note.text and end == End()
        assert each.state is RunState.STOPPED and each.error is None and each.wanted == []
        assert each.server_ready(0) == [] and each.saved(None) == []


def test_a_stop_after_the_run_went_back_saves_again():
    machine = started()
    machine.exited("server", 0, 0, ending_of(None, signal.SIGKILL))
    machine.server_ready(0)
    assert machine.stop_requested()[-1] == Save()
    # The only server is lost before it has saved: what was written before is what there is.
    note, end = machine.exited("server", 0, 1, ending_of(None, signal.SIGKILL))
    assert "no checkpoint: server:0" in note.text and end == End()
    assert machine.state is RunState.STOPPED


def test_whatever_happens_a_run_that_is_over_stays_over_and_restarts_stay_within_their_number():
    """Random events in random order: no exception, no launch too many, one end, no way back."""
    for seed in range(500):
        _check_random_life(random.Random(seed))


def _check_random_life(rng: random.Random) -> None:
    servers, workers, limit = rng.randint(1, 3), rng.randint(1, 4), rng.randint(0, 3)
    machine = RunMachine(servers=servers, workers=workers, max_restarts=limit)
    machine.begin()
    launches = announced = ends = 0
    for _ in range(60):
        rank, server = rng.randrange(workers), rng.randrange(servers)
        over = machine.state if machine.state.over else None
        events = {
            "ready": lambda s=server: machine.server_ready(s),
            "back": lambda r=rank: machine.worker_back(r),
            "finished": lambda r=rank: machine.worker_finished(r),
            "killed": lambda r=rank: killed(machine, r),
            "exited": lambda r=rank: machine.exited("worker", r, machine.incarnations[r], ending_of(1, None)),
            "server": lambda s=server: machine.exited("server", s, 0, ending_of(1, None)),
            "late": lambda r=rank: machine.exited("worker", r, -1, ending_of(None, signal.SIGKILL)),
            "lost": lambda r=rank: machine.failed(f"worker:{r}", "lost", "", cause=Cause.LOST_LINK),
            "error": lambda r=rank: machine.failed(f"worker:{r}", "error", "", cause=Cause.USER_ERROR),
            "memory": lambda r=rank: out_of_memory(machine, f"worker:{r}"),
            "stepped": lambda r=rank: machine.stepped(r, 10) or [],
            "patience": machine.patience_over,
            "stop": machine.stop_requested,
            "saved": lambda: machine.saved(rng.choice([None, "no"])),
        }
        weights = [8, 6, 2, 3, 1, 0.1, 2, 1, 0.2, 2, 4, 0.5, 0.2, 2]
        decisions = events[rng.choices(list(events), weights)[0]]()
        launches += sum(isinstance(d, Launch) for d in decisions)
        announced += decisions.count(Announce())
        ends += decisions.count(End())
        if over is not None:
            assert machine.state is over
            assert not any(isinstance(d, Launch | Announce | Save) for d in decisions)
    assert launches <= limit
    assert announced <= 1
    assert ends == machine.state.over
    assert (machine.error is not None) == (machine.state is RunState.FAILED)


def test_a_machine_restored_from_a_snapshot_decides_as_the_one_it_is_of():
    """Also from JSON, and at any moment of any life."""
    for seed in range(300):
        rng = random.Random(seed)
        servers = rng.randint(1, 3)
        settings = {"servers": servers, "workers": rng.randint(1, 4), "max_restarts": 3}
        settings["replicas"] = rng.randrange(servers)
        machine, other = RunMachine(**settings), RunMachine(**settings)
        for step in range(40):
            kinds = [
                "ready",
                "killed",
                "exited",
                "finished",
                "lost",
                "memory",
                "stepped",
                "server",
                "scale",
                "servers",
                "whole",
                "rest",
            ]
            kind = rng.choice(kinds)
            rank, server = (
                rng.choice(list(machine.incarnations)),
                rng.choice(list(machine.server_incarnations)),
            )
            if step == 0:
                kind = "begin"
            elif rng.random() < 0.2:
                other = RunMachine(**settings)
                other.restore(json.loads(json.dumps(machine.snapshot())))
            said = [_happen(each, kind, rank, server, random.Random(step)) for each in (machine, other)]
            assert said[0] == said[1]
            assert machine.snapshot() == other.snapshot()


def _happen(machine: RunMachine, kind: str, rank: int, server: int, rng: random.Random) -> list:
    match kind:
        case "begin":
            return machine.begin()
        case "ready":
            return machine.server_ready(server)
        case "killed":
            return killed(machine, rank)
        case "exited":
            return machine.exited("worker", rank, machine.incarnations[rank], ending_of(1, None))
        case "finished":
            return machine.worker_finished(rank)
        case "memory":
            return out_of_memory(machine, rng.choice([f"worker:{rank}", f"server:{server}"]))
        case "stepped":
            machine.stepped(rank, 10)
            return []
        case "lost":
            return machine.failed(f"worker:{rank}", "lost", "", cause=Cause.LOST_LINK)
        case "server":
            code, sign = rng.choice([(0, None), (None, signal.SIGKILL)])
            return machine.exited(
                "server", server, machine.server_incarnations[server], ending_of(code, sign)
            )
        case "servers":
            return machine.scale_servers(rng.randint(1, 4)) if machine.state is RunState.RUNNING else []
        case "whole":
            return [*machine.whole(machine.serving), *machine.departed(server)]
        case "scale":
            return machine.scale(rng.randint(1, 5)) if machine.state is RunState.RUNNING else []
    return rng.choice(
        [machine.patience_over, machine.stop_requested, lambda: machine.saved(None), machine.taken_over]
    )()


def test_who_takes_over_wants_those_who_compute_and_hears_the_servers_again():
    machine = started(workers=3)
    killed(machine, 1)
    machine.worker_finished(2)
    other = RunMachine(servers=1, workers=3, max_restarts=3)
    other.restore(machine.snapshot())
    assert other.taken_over() == []
    assert other.wanted == [Launch("server", 0, 0), Launch("worker", 0, 0), Launch("worker", 1, 1)]
    assert other.server_ready(0) == [Announce()]
    assert other.state is RunState.RUNNING


def test_who_takes_over_waits_again_for_a_cause_that_has_not_shown_up():
    machine = started()
    machine.exited("worker", 1, 0, ending_of(1, None))
    assert machine.taken_over() == [WaitForCause()]
    machine.patience_over()
    assert machine.taken_over() == [] and machine.wanted == []


def test_who_was_started_although_no_snapshot_says_so_counts():
    machine = started()
    machine.seen("worker", 1, 2)
    machine.seen("server", 0, 0)
    assert machine.wanted == [Launch("server", 0, 0), Launch("worker", 0, 0), Launch("worker", 1, 2)]


def test_who_was_replaced_is_outdated():
    machine = started()
    killed(machine, 1)
    assert machine.outdated("worker", 1, 0) and not machine.outdated("worker", 1, 1)
    machine.exited("server", 0, 0, ending_of(None, signal.SIGKILL))
    assert machine.outdated("server", 0, 0) and machine.outdated("worker", 0, 0)
    assert not machine.outdated("server", 0, 1)


def test_a_server_killed_while_the_final_checkpoint_is_written_sends_the_run_back():
    machine = started(workers=1)
    machine.worker_finished(0)
    assert machine.state is RunState.FINISHING
    back, *launched = machine.exited("server", 0, 0, ending_of(None, signal.SIGKILL))
    assert isinstance(back, GoBack) and "while the final checkpoint was written" in back.reason
    assert launched == [Launch("server", 0, 1), Launch("worker", 0, 1)]
    assert machine.state is RunState.RECOVERING


@pytest.mark.parametrize("how", ["exits", "reports an error"])
def test_a_server_lost_while_the_final_checkpoint_is_written_fails_the_run_at_once(how: str) -> None:
    machine = RunMachine(servers=1, workers=1, max_restarts=0)
    machine.begin()
    machine.server_ready(0)
    machine.worker_back(0)
    machine.worker_finished(0)
    assert machine.state is RunState.FINISHING
    if how == "exits":
        decisions = machine.exited("server", 0, 0, ending_of(None, 9))
    else:
        decisions = machine.failed("server:0", "TypeError: no", "traceback", cause=Cause.USER_ERROR)
    assert decisions == [End()]
    assert machine.state is RunState.FAILED
    assert machine.error is not None and "final checkpoint" in machine.error[1]


# --- replicas ---------------------------------------------------------------------------------------


def replicated(servers: int = 3, replicas: int = 1) -> RunMachine:
    machine = RunMachine(servers=servers, workers=2, max_restarts=5, replicas=replicas)
    machine.begin()
    for rank in range(servers):
        machine.server_ready(rank)
    machine.whole(set(range(servers)))
    return machine


def kill_server(machine: RunMachine, rank: int) -> list:
    return machine.exited("server", rank, machine.server_incarnations[rank], ending_of(None, signal.SIGKILL))


def test_others_go_on_without_a_server_whose_copies_they_hold():
    machine = replicated()
    note, lost, launch = kill_server(machine, 2)
    assert lost == LostServer(2, 0) and launch == Launch("server", 2, 1)
    assert "others hold copies" in note.text and machine.state is RunState.RUNNING
    assert machine.server_ready(2) == [Introduce(2)]
    assert [each.text for each in machine.whole({0, 1, 2})] == [
        "server:2 holds copies again, as the one before it did"
    ]


def test_the_lowest_rank_that_is_left_leads_and_one_that_comes_back_follows():
    machine = replicated()
    assert LostServer(0, 1) in kill_server(machine, 0)
    machine.server_ready(0)
    machine.whole({0, 1, 2})
    assert machine.lead == 1
    assert LostServer(1, 0) in kill_server(machine, 1)


def test_after_a_takeover_servers_are_told_who_leads_without_waiting_for_one_that_died():
    machine = replicated()
    machine.taken_over()
    assert machine.server_ready(2) == []
    machine.exited("server", 0, 0, ending_of(None, signal.SIGKILL))  # the lead died with the controller
    assert machine.lead == 1
    assert machine.server_ready(1) == [Announce()]
    assert machine.server_ready(0) == [Introduce(0)]


def test_more_deaths_than_replicas_send_the_run_back_and_so_does_one_before_all_copies_are_there():
    machine = replicated()
    kill_server(machine, 2)
    assert isinstance(kill_server(machine, 0)[0], GoBack)
    assert machine.lead == 0 and machine.server_incarnations == {0: 2, 1: 2, 2: 2}
    assert isinstance(kill_server(machine, 1)[0], GoBack)


def test_a_server_that_dies_while_the_last_checkpoint_is_written_has_it_written_by_the_others():
    machine = replicated()
    machine.worker_finished(0)
    assert machine.worker_finished(1) == [Save()]
    assert kill_server(machine, 0)[1:] == [LostServer(0, 1), Save()]


def test_servers_join_and_leave():
    machine = replicated()
    assert machine.scale_servers(4) == [Launch("server", 3, 0)]
    assert machine.server_ready(3) == [Introduce(3)]
    machine.whole({0, 1, 2, 3})
    assert machine.scale_servers(2) == [RetireServer(3), RetireServer(2)]
    assert machine.departed(3) == [DismissServer(3)] and machine.departed(1) == []
    assert machine.exited("server", 3, 0, ending_of(0, None)) == []
    assert machine.serving == {0, 1}
    assert machine.scale_servers(3) == [Launch("server", 3, 1)]


def test_a_server_that_dies_before_it_held_anything_comes_again():
    machine = replicated()
    machine.scale_servers(4)
    assert kill_server(machine, 3)[1:] == [Launch("server", 3, 1)]


def test_the_lead_stays_when_servers_leave():
    machine = replicated()
    kill_server(machine, 0)
    machine.server_ready(0)
    machine.whole({0, 1, 2})
    assert machine.scale_servers(2) == [RetireServer(2)]
    assert machine.scale_servers(1) == [RetireServer(0)]
    assert machine.serving == {1}


def test_a_role_that_we_end_is_not_said_to_be_killed_for_memory():
    """It was ended for NaN, and the run's message is about that."""
    machine = started(max_restarts=1)
    why = "worker:1 pushed NaN or Inf 5 times in a row while other workers did not"
    note, _ = machine.hung("worker", 1, 0, why)
    assert why in note.text
    note, _ = machine.exited("worker", 1, 0, ending_of(None, signal.SIGKILL))
    assert note.text.startswith("worker:1 was ended; replaced (restart 1 of at most 1)")
    machine.worker_back(1)
    # One that is killed by somebody else is said so.
    assert "was killed by SIGKILL after 1 restart" in _error(killed(machine, 0), machine)


def test_one_that_we_end_when_no_restart_is_left():
    machine = started(max_restarts=1)
    machine.hung("worker", 1, 0, "it pushed NaN")
    restored = RunMachine(servers=1, workers=2, max_restarts=1)
    restored.restore(machine.snapshot())  # the controller dies in between
    machine.restarts[0] = restored.restarts[0] = 1  # another one was replaced meanwhile
    for each in (machine, restored):
        message = _error(each.exited("worker", 1, 0, ending_of(None, signal.SIGKILL)), each)
        assert "was ended after 1 restart, and --max-restarts is 1. it pushed NaN." in message
        assert "SIGKILL" not in message and "memory" not in message


def test_a_run_that_diverges_begins_again_and_that_is_no_restart():
    machine = started(max_restarts=0)
    machine.worker_finished(0)
    back, *launched = machine.diverged("the loss rose")
    assert back == GoBack("the loss rose") and len(launched) == 3
    assert machine.state is RunState.RECOVERING and machine.server_restarts == 0 and not machine.finished
    assert {each.incarnation for each in launched} == {1}
    assert machine.give_up("The run diverged.") == [End()]
    assert machine.error == ("run", "The run diverged.", "")
    assert machine.diverged("again") == machine.give_up("again") == []


def _error(decisions: list, machine: RunMachine) -> str:
    assert decisions == [End()] and machine.error is not None
    return machine.error[1]
