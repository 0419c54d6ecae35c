"""Faults on purpose: what their text means, and who suffers them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.faults import FAULTS
from paceline.exceptions import UsageError
from paceline.testing import faulty, random_faults
from paceline.testing.injected_faults import KINDS, Fault
from paceline.testing.injected_faults import InjectedFaults as Faults


def test_text_and_faults_are_the_same():
    text = "kill worker:1@5; stop worker:0@3:2s; slow worker:2@1-20:0.05s; nan worker:1@4; kill server:0@12"
    assert str(Faults.parse(text)) == text
    assert str(Faults.parse(" slow  worker:2@1-20:50ms ;; ")) == "slow worker:2@1-20:0.05s"
    assert Faults.parse("") == Faults()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill", "is not a fault. As in kill worker:1@5"),
        ("kill worker:1", "is not a fault"),
        ("kill controller:0@1", "is not a fault"),
        ("stop controller@1:1s", "it can only be killed"),
        ("crush worker:1@2", "there is no such kind. Valid: kill, stop"),
        ("nan server:0@3", "is a worker's, got server:0"),
        ("kill worker:0@0", "counted from 1"),
        ("kill worker:0@5-3", "counted from 1, upwards"),
        ("slow worker:0@5", "needs how much longer"),
        ("slowdisk server:0@5", "as in slowdisk server:0@2:50ms"),
        ("full worker:0@1", "is a server's, got worker:0"),
    ],
)
def test_what_is_no_fault_is_refused_with_what_one_looks_like(text, said):
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        Faults.parse(text)


def test_a_fault_hits_one_role_and_not_who_replaces_it():
    faults = Faults.parse("nan worker:1@2-3; huge worker:1@3; nan worker:0@3")
    assert faults.of("worker", 1, 1).all == faults.of("server", 1, 0).all == ()
    mine = faults.of("worker", 1, 0)
    assert [mine.at(step) for step in range(1, 5)] == [[], ["nan"], ["nan", "huge"], []]


def test_a_block_sets_them_and_puts_back_what_was_there(monkeypatch):
    import os

    monkeypatch.delenv(FAULTS, raising=False)
    with faulty("kill worker:1@5"):
        assert Faults.from_environment().all == (Fault("kill", "worker", 1, 5, 5),)
        with faulty(Faults()):
            assert Faults.from_environment().all == ()
        assert os.environ[FAULTS] == "kill worker:1@5"
    assert FAULTS not in os.environ


@given(st.integers(), st.integers(1, 5), st.integers(1, 50), st.lists(st.sampled_from(KINDS), min_size=1))
def test_a_seed_is_always_the_same_faults_and_they_can_be_written_down(seed, workers, steps, kinds):
    made = [
        random_faults(seed=seed, workers=workers, steps=steps, kinds=kinds, count=3, servers=2) for _ in "ab"
    ]
    assert made[0] == made[1] == Faults.parse(str(made[0]))
    assert all(1 <= fault.first <= steps for fault in made[0].all)


def test_a_disk_is_full_or_slow_at_its_checkpoint_only():
    faults = Faults.parse("full server:0@2; slowdisk server:0@3:1ms; kill server:0@9")
    assert faults.at_checkpoint(1) is None
    assert faults.at(2) == faults.at(3) == []  # updates are others' business
    full, slow = faults.at_checkpoint(2), faults.at_checkpoint(3)
    assert full is not None and slow is not None
    with pytest.raises(OSError, match="No space left"):
        full()
    slow()
