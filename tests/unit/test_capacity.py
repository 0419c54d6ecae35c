"""What a host can carry: invented hosts, and invented files of a kernel."""

from pathlib import Path

import pytest

from paceline.exceptions import PlanError
from paceline.plan import Job, make_plan
from paceline.plan.capacity import Demand, HostLimits, Limit, check_capacity, model_bytes
from paceline.plan.host import read_limits


def demand_of(workers: int = 4, servers: int = 1, *, shares_memory: bool = True, threads: int = 1) -> Demand:
    return Demand(
        workers=workers,
        servers=servers,
        worker_threads=threads,
        server_threads=2,
        shares_memory=shares_memory,
    )


def limit(left: int) -> Limit:
    return Limit(left=left, source="a test says so", remedy="Raise it in the test")


def refusal(demand: Demand, host: HostLimits) -> str:
    with pytest.raises(PlanError) as caught:
        check_capacity(demand, host)
    return str(caught.value)


def test_a_host_whose_limits_are_not_known_carries_everything() -> None:
    check_capacity(demand_of(10**9), HostLimits())


def test_everything_that_is_short_is_named_with_what_is_needed_and_what_is_there() -> None:
    host = HostLimits(tasks=limit(3_000), open_files=limit(1_024), memory=limit(24_000_000_000))
    said = refusal(demand_of(100_000), host)
    assert "this host cannot carry 100,001 roles (workers=100,000, servers=1)" in said
    assert "100,006 are needed, 3,000 are left (a test says so). Raise it in the test" in said
    assert "open files: a server needs 200,049, 1,024 are allowed" in said
    assert "memory: 2,000.4 GB are needed" in said and "24.0 GB are left" in said
    assert "at most workers=487 fit" in said
    check_capacity(demand_of(487), host)
    assert "open files" in refusal(demand_of(488), host)


@pytest.mark.parametrize(
    ("host", "fits", "over"),
    [
        (HostLimits(tasks=limit(100)), 94, 95),
        (HostLimits(open_files=limit(1_024)), 487, 488),
        (HostLimits(memory=limit(1_000_000_000)), 29, 30),
    ],
)
def test_each_limit_holds_by_itself(host: HostLimits, fits: int, over: int) -> None:
    check_capacity(demand_of(fits), host)
    assert f"at most workers={fits} fit" in refusal(demand_of(over), host)


def test_threads_count_as_processes_do() -> None:
    host = HostLimits(tasks=limit(100))
    check_capacity(demand_of(8, threads=8), host)
    assert "processes and threads" in refusal(demand_of(16, threads=8), host)
    # Over TCP a server has a thread for each worker, too.
    check_capacity(demand_of(60), host)
    assert "processes and threads" in refusal(demand_of(60, shares_memory=False), host)


def test_where_not_even_one_worker_fits_none_is_offered() -> None:
    said = refusal(demand_of(4, 50), HostLimits(memory=limit(500_000_000)))
    assert "at most" not in said and "Use fewer workers and servers" in said


def test_what_a_model_takes() -> None:
    assert model_bytes(100, workers=3, in_place=True, shares_memory=True) == 400
    assert model_bytes(100, workers=3, in_place=False, shares_memory=True) == 700
    assert model_bytes(100, workers=3, in_place=False, shares_memory=False) == 1300


def test_a_plan_is_refused_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    job = Job(script=str(script), workers=3)
    assert make_plan(job, limits=HostLimits(tasks=limit(1_000))).workers
    with pytest.raises(PlanError, match="this host cannot carry 4 roles"):
        make_plan(job, limits=HostLimits(tasks=limit(5)))
    with pytest.raises(PlanError, match="this host cannot carry 10,000,001 roles"):
        make_plan(Job(script=str(script), workers=10_000_000))  # on this host, whichever it is


def kernel(root: Path, **files: object) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".").replace("_DASH_", "-")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def test_limits_of_control_groups_and_of_those_around_them(tmp_path: Path) -> None:
    group = "sys__fs__cgroup__slice__job"
    root = kernel(
        tmp_path,
        proc__self__cgroup="0::/slice/job",
        **{
            f"{group}__pids_DOT_max": "max",
            f"{group}__memory_DOT_max": 3_000_000_000,
            f"{group}__memory_DOT_current": 2_500_000_000,
            f"{group}__memory_DOT_stat": "anon 5\ninactive_file 2000000000",
            "sys__fs__cgroup__slice__pids_DOT_max": 200,
            "sys__fs__cgroup__slice__pids_DOT_current": 150,
        },
        proc__loadavg="0.1 0.2 0.3 5/1000 77",
        proc__sys__kernel__pid_max=32_768,
        proc__meminfo="MemTotal: 9 kB\nMemAvailable:   8000000 kB",
    )
    limits = read_limits(root)
    assert limits.tasks is not None and limits.memory is not None
    assert limits.tasks.left == 50
    assert "slice/pids.max is 200, 150 are in use" in limits.tasks.source
    assert limits.memory.left == 2_500_000_000, "cached files do not count"
    assert "memory.max is 3.0 GB" in limits.memory.source


def test_limits_of_control_groups_of_version_1(tmp_path: Path) -> None:
    root = kernel(
        tmp_path,
        proc__self__cgroup="8:pids:/docker/abc\n4:memory:/docker/abc\n1:cpu:/docker/abc",
        sys__fs__cgroup__pids__pids_DOT_max=64,
        sys__fs__cgroup__pids__pids_DOT_current=4,
        sys__fs__cgroup__memory__memory_DOT_limit_in_bytes=1 << 62,
        sys__fs__cgroup__memory__memory_DOT_usage_in_bytes=5,
    )
    limits = read_limits(root)
    assert limits.tasks is not None and limits.tasks.left == 60
    assert limits.memory is None, "a number like that means that there is no limit"


def test_a_host_without_such_files_has_no_such_limits(tmp_path: Path) -> None:
    limits = read_limits(tmp_path)
    assert limits.memory is None
    found = read_limits()
    assert found.memory is not None and found.memory.left > 0
