"""Groups in jobs and plans: how workers are dealt to them, and what is refused."""

import pytest

from paceline.exceptions import UsageError
from paceline.plan import Job, make_plan


@pytest.mark.parametrize(
    "workers, groups, expected",
    [
        (4, 2, [[0, 1], [2, 3]]),
        (7, 3, [[0, 1, 2], [3, 4], [5, 6]]),
        (3, 3, [[0], [1], [2]]),
        (5, None, [[0, 1, 2, 3, 4]]),  # one group a host
    ],
)
def test_workers_are_dealt_to_groups_of_consecutive_ranks(workers, groups, expected):
    plan = make_plan(Job(workers=workers, groups=groups, mode="hybrid:asp"))
    assert [list(group) for group in plan.groups] == expected
    assert plan.to_json()["groups"] == expected


def test_allreduce_is_one_group_and_other_modes_have_none():
    assert make_plan(Job(workers=3, mode="allreduce")).groups == ((0, 1, 2),)
    assert make_plan(Job(workers=3, mode="bsp")).groups == ()


@pytest.mark.parametrize(
    "mode, groups, workers, reason",
    [
        ("bsp", 2, 4, "groups=2: mode bsp has none; use mode hybrid:MODE"),
        ("allreduce", 2, 4, "groups=2: mode allreduce is one group of all workers"),
        ("hybrid:asp", 5, 4, "groups=5 for workers=4: every group needs at least one worker"),
        ("hybrid:backup:2", 2, 4, "runs backup:2 between groups=2"),
        ("hybrid:asp+quorum=3", 2, 4, "runs asp+quorum=3 between groups=2"),
        ("hybrid:easgd:2,1.5", 1, 4, "runs easgd:2,1.5 between groups=1"),
    ],
)
def test_groups_that_make_no_sense_are_refused_with_the_reason(mode, groups, workers, reason):
    with pytest.raises(UsageError, match="groups") as refused:
        make_plan(Job(workers=workers, groups=groups, mode=mode))
    assert reason in str(refused.value)


@pytest.mark.parametrize("groups", [0, -1, True, 1.5, "2"])
def test_groups_is_a_whole_number(groups):
    with pytest.raises(UsageError, match="groups="):
        Job(groups=groups, mode="hybrid:asp")


@pytest.mark.parametrize("inner", ["hybrid:asp", "allreduce", "hogwild", "dogwild", "sandblaster"])
def test_modes_that_cannot_run_between_groups_are_refused(inner):
    with pytest.raises(UsageError, match="cannot run between groups"):
        Job(mode=f"hybrid:{inner}")


def test_allreduce_warns_that_servers_are_not_used_and_starts_one():
    plan = make_plan(Job(workers=2, servers=2, mode="allreduce"))
    assert plan.warnings == (
        "mode allreduce does not use parameter servers: --servers 2 is ignored; one process keeps leases and "
        "checkpoints",
    )
    assert len(plan.servers) == 1
    assert make_plan(Job(workers=2, servers=1, mode="allreduce")).warnings == ()


@pytest.mark.parametrize("setting", [{"overlap": True}, {"prefetch": 1}, {"compress": "fp16"}])
def test_what_allreduce_does_not_send_cannot_be_hidden_or_compressed(setting):
    with pytest.raises(UsageError, match="allreduce"):
        make_plan(Job(workers=2, mode="allreduce", **setting))


def test_a_job_with_groups_reads_back():
    job = Job(workers=4, groups=2, mode="hybrid:ssp:2")
    assert Job.from_json(job.to_json()) == job
