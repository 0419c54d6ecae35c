"""Every lease and every sample of a worker is told exactly once: with a push, as skipped, or given back."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.worker.account import Account
from paceline.worker.exchange.sample_report import SampleReport


def play(account: Account, events: str) -> list[tuple[list[int], int]]:
    """R: read a batch (numbered from 0, a sample more each time); B: backward; Z: zero_grad; S: a step that
    is pushed; I: a new iteration; E: the end of an epoch. Returns what the pushes cover."""
    pushes, number = [], 0
    for event in events.replace(" ", ""):
        match event:
            case "R":
                account.used(number, number + 1)
                number += 1
            case "B":
                account.backward()
            case "Z":
                account.zeroed()
            case "S":
                pushes.append(account.cover(this_step=True))
                account.end_step(keep=True)
            case "I":
                account.begin_iteration()
            case "E":
                account.read_all()
    return pushes


def covered(events: str) -> tuple[list[list[int]], list[int]]:
    """Leases of each push, and those that are skipped when the script has ended."""
    account = Account()
    pushes = play(account, "I" + events)
    for leases, samples in pushes:
        assert samples == sum(lease + 1 for lease in leases), "weighs what is behind it"
    return [leases for leases, _ in pushes], [*account.take_skipped(ending=True).skipped]


def test_an_ordinary_loop_covers_each_batch_by_its_own_step() -> None:
    assert covered("RBSZ RBSZ RBSZ E") == ([[0], [1], [2]], [])
    assert covered("RZBS RZBS E") == ([[0], [1]], [])


def test_accumulation_covers_all_its_batches() -> None:
    assert covered("RBRBRBSZ RBRBS E") == ([[0, 1, 2], [3, 4]], [])


def test_accumulation_goes_on_into_the_next_epoch() -> None:
    assert covered("RBRBSZ RBE I RBSZ E") == ([[0, 1], [2, 3]], [])


def test_a_batch_without_backward_is_skipped() -> None:
    assert covered("RBSZ R RBSZ E") == ([[0], [2]], [1])


def test_batches_are_passed_over_from_the_next_one_until_the_run_is_told() -> None:
    account = Account()
    for events, expected in (("IRBS", 0), ("R", 0), ("RBS", 1), ("RBRB", 1), ("S E", 1), ("I R", 1)):
        play(account, events)
        assert account.passed_over() == expected, events
    account.take_skipped()
    assert account.passed_over() == 0


def test_an_overflow_skips_the_step_and_its_batches() -> None:
    """A gradient scaler leaves out the step; the script zeroes the gradients after it, or before backward."""
    assert covered("RBZ RBSZ E") == ([[1]], [0])
    assert covered("RZB RZBS E") == ([[1]], [0])
    assert covered("RBRBZ RBRBSZ E") == ([[2, 3]], [0, 1])


def test_two_backward_passes_over_one_batch_are_one_step() -> None:
    """Sharpness-aware minimization zeroes in between; a sum of losses does not."""
    assert covered("RBZBS RBZBS E") == ([[0], [1]], [])
    assert covered("RBBS RBBS E") == ([[0], [1]], [])


def test_the_second_of_two_optimizers_covers_nothing_new() -> None:
    assert covered("RBSBS RBSBS E") == ([[0], [], [1], []], [])
    assert covered("R RBSBS E") == ([[1], []], [0])


def test_a_script_that_reads_several_batches_and_then_trains_on_each() -> None:
    assert covered("RRR BBBSZ RR BBSZ E") == ([[0, 1, 2], [3, 4]], [])


def test_a_wrapper_that_reads_one_batch_ahead_covers_all() -> None:
    """As accelerate's and timm's loaders do."""
    pushes, skipped = covered("RR BSZ R BSZ R BSZ E BSZ")
    assert sorted(lease for leases in pushes for lease in leases) == [0, 1, 2, 3] and skipped == []


def test_a_gradient_without_backward_counts_for_the_batch_in_hand() -> None:
    """A script may compute its gradient by other means and put it into `.grad`."""
    assert covered("RS RS E") == ([[0], [1]], [])


def test_skipped_batches_are_told_as_soon_as_that_is_sure_and_only_once() -> None:
    account = Account()
    play(account, "I RBZ")
    assert not account.take_skipped(), "a second backward may come"
    account.used(7, 1)
    assert account.take_skipped().skipped == (0,) and not account.take_skipped()
    account.begin_iteration()
    account.used(8, 1)
    assert account.take_skipped().skipped == (7,), "its epoch is over"


def test_a_batch_without_a_lease_is_skipped_by_its_samples() -> None:
    account = Account()
    account.used(None, 5)
    account.backward()
    account.zeroed()
    account.used(None, 4)
    account.backward()
    assert account.cover(this_step=True) == ([], 4)
    assert account.take_skipped() == SampleReport((), 5)


def test_a_loop_that_is_left_gives_back_what_had_no_backward() -> None:
    account = Account()
    play(account, "I RBS RB R")
    assert account.drop_untrained() == [2]
    assert account.accumulating and account.all_leases() == [1]


def test_a_peek_leaves_what_was_accumulated_before_it() -> None:
    account = Account()
    play(account, "I RBE I")
    account.borrow(7)
    account.used(7, 2)
    account.used(8, 2)
    account.drop_iteration()
    assert account.all_leases() == [0]
    account.begin_iteration()
    account.used(7, 2)
    assert account.tally() == (1, True), "it is borrowed again"


def test_a_step_without_a_push_is_covered_by_the_next_push() -> None:
    account = Account()
    account.used(1, 4)
    account.end_step(keep=True)
    account.used(2, 3)
    assert account.all_leases() == [1, 2] and account.open_leases() == [2]
    assert account.cover(this_step=False) == ([1], 4)
    assert account.cover(this_step=True) == ([2], 3)
    assert account.cover(this_step=True) == ([], 0) and account.all_leases() == []


def test_a_member_that_is_not_the_root_keeps_nothing() -> None:
    account = Account()
    account.used(1, 4)
    account.end_step(keep=False)
    assert account.cover(this_step=True) == ([], 0)


def test_a_borrowed_batch_counts_for_nobody_here() -> None:
    account = Account()
    account.borrow(7)
    account.used(7, 2)
    account.backward()
    assert account.tally() == (0, False)
    account.used(8, 2)
    account.backward()
    assert account.tally() == (2, True)
    account.agreed(9)
    assert account.cover(this_step=True) == ([7, 8], 9)
    account.used(7, 2)  # borrowed once: another epoch's lease of that number is its own
    assert account.tally() == (2, True)


def test_a_refused_step_is_told_once_and_not_as_applied() -> None:
    account = Account()
    account.used(1, 4)
    account.refuse()
    account.used(2, 4)
    assert account.cover(this_step=True) == ([2], 4)
    assert account.take_refused() == [1] and account.take_refused() == []


EVENTS = [
    "batch",
    "backward",
    "zero",
    "step",
    "push",
    "push with step",
    "refuse",
    "drop",
    "left",
    "iteration",
]


@given(st.lists(st.sampled_from(EVENTS), max_size=80))
def test_each_lease_leaves_exactly_once(events: list[str]) -> None:
    account, gone, counted, samples = Account(), [], 0, 0
    for number, event in enumerate(events):
        if event == "batch":
            account.used(number, 1)
        elif event == "backward":
            account.backward()
        elif event == "zero":
            account.zeroed()
        elif event == "step":
            account.end_step(keep=True)
        elif event.startswith("push"):
            leases, count = account.cover(this_step=event != "push")
            gone, counted, samples = gone + leases, counted + len(leases), samples + count
        elif event == "refuse":
            account.refuse()
        elif event == "left":
            gone += account.drop_untrained()
        elif event == "iteration":
            account.begin_iteration()
            gone += account.take_skipped().skipped
        else:
            gone += account.drop_open()
    leases, count = account.cover(this_step=True)
    gone += leases + account.take_refused() + [*account.take_skipped(ending=True).skipped]
    assert sorted(gone) == [n for n, event in enumerate(events) if event == "batch"]
    assert samples + count == counted + len(leases)
