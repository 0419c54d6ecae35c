"""Which cores a worker keeps to itself."""

from collections import Counter

import pytest

from paceline.worker.pinning import cores_of


def test_workers_have_cores_of_their_own() -> None:
    assert [cores_of(rank, 2, {0, 1, 4, 5}) for rank in range(2)] == [{0, 1}, {4, 5}]


@pytest.mark.parametrize(("workers", "threads", "cores"), [(5, 1, 2), (3, 2, 4), (4, 3, 8), (2, 4, 3)])
def test_cores_are_shared_evenly_when_there_are_too_few(workers: int, threads: int, cores: int) -> None:
    used = Counter(core for rank in range(workers) for core in cores_of(rank, threads, range(cores)))
    assert all(cores_of(rank, threads, range(cores)) for rank in range(workers))
    assert max(used.values()) - min(used.values()) <= 1
