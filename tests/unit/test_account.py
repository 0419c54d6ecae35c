"""Every lease and every sample of a worker is told with exactly one push."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.worker.account import Account


def test_a_step_without_a_push_is_covered_by_the_next_push() -> None:
    account = Account()
    account.used(1, 4)
    account.end_step(keep=True)
    account.used(2, 3)
    assert account.all_leases() == [1, 2]
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
    assert account.tally() == (0, False)
    account.used(8, 2)
    assert account.tally() == (2, True)
    account.end_step(keep=True)
    account.used(7, 2)  # borrowed once: another epoch's lease of that number is its own
    assert account.tally() == (2, True)


def test_a_refused_step_is_told_once_and_not_as_applied() -> None:
    account = Account()
    account.used(1, 4)
    account.refuse()
    account.used(2, 4)
    assert account.cover(this_step=True) == ([2], 4)
    assert account.take_refused() == [1] and account.take_refused() == []


@given(st.lists(st.sampled_from(["batch", "step", "push", "push with step", "refuse", "drop"]), max_size=60))
def test_each_lease_leaves_exactly_once(events: list[str]) -> None:
    account, gone, counted, samples = Account(), [], 0, 0
    for number, event in enumerate(events):
        if event == "batch":
            account.used(number, 1)
        elif event == "step":
            account.end_step(keep=True)
        elif event.startswith("push"):
            leases, count = account.cover(this_step=event != "push")
            gone, counted, samples = gone + leases, counted + len(leases), samples + count
        elif event == "refuse":
            account.refuse()
        else:
            gone += account.drop_step()
    leases, count = account.cover(this_step=True)
    gone += leases + account.take_refused()
    assert sorted(gone) == [n for n, event in enumerate(events) if event == "batch"]
    assert samples + count == counted + len(leases)
