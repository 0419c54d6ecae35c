"""What this host has left for a run: read from the kernel, with the limits of its control groups.

A limit that cannot be read is left out, and not checked.
"""

import os
import resource
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.plan.capacity import HostLimits, Limit

__all__ = ["count_gpus", "mps_program", "mps_runs", "read_limits"]

_NO_LIMIT = 1 << 60
"""Control groups of version 1 write a number like this for "no limit"."""


def read_limits(root: Path = Path("/")) -> HostLimits:
    """The limits that hold for new processes of this user.

    Args:
        root: where `proc` and `sys` are; another one in tests.
    """
    groups = [*_control_groups(root)]
    return HostLimits(
        tasks=_least([*_tasks_of_groups(groups), *_tasks_of_kernel(root), *_tasks_of_user(root)]),
        open_files=_open_files(),
        memory=_least([*_memory_of_groups(groups), *_memory_of_host(root)]),
    )


def count_gpus() -> int:
    """NVIDIA GPUs of this host that this process may use."""
    from paceline.observe.record.gpu import Gpus  # which loads the driver's library

    gpus = Gpus()
    count = gpus.count
    gpus.close()
    return count


def mps_program() -> str | None:
    """The program that starts NVIDIA's Multi-Process Service; None: this host does not have it."""
    return shutil.which("nvidia-cuda-mps-control")


def mps_runs() -> bool:
    """Whether this host has that service running already, for this user's programs."""
    return bool(os.environ.get("CUDA_MPS_PIPE_DIRECTORY")) or Path("/tmp/nvidia-mps/control").exists()


def _least(limits: Iterable[Limit]) -> Limit | None:
    return min(limits, key=lambda limit: limit.left, default=None)


# --- processes and threads --------------------------------------------------------------------------


def _tasks_of_groups(groups: Iterable[Path]) -> Iterator[Limit]:
    for group in groups:
        most, now = _number(group / "pids.max"), _number(group / "pids.current")
        if most is not None and now is not None:
            yield Limit(
                left=most - now,
                source=f"{group / 'pids.max'} is {most:,}, {now:,} are in use",
                remedy="Raise the limit of the container or control group (docker run --pids-limit, "
                "systemd TasksMax=)",
            )


def _tasks_of_kernel(root: Path) -> Iterator[Limit]:
    try:
        now = int((root / "proc/loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, ValueError, IndexError):
        return
    for name in ("pid_max", "threads-max"):
        most = _number(root / "proc/sys/kernel" / name)
        if most is not None:
            yield Limit(
                left=most - now,
                source=f"kernel.{name} is {most:,}, {now:,} are in use",
                remedy=f"Raise it with sysctl kernel.{name}=N",
            )


def _tasks_of_user(root: Path) -> Iterator[Limit]:
    if os.geteuid() == 0:  # the limit does not hold for root
        return
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if most == resource.RLIM_INFINITY:
        return
    now = _tasks_now(root, os.getuid())
    yield Limit(
        left=most - now,
        source=f"ulimit -u is {most:,}, {now:,} are in use",
        remedy="Raise it with ulimit -u N, or in /etc/security/limits.conf",
    )


def _tasks_now(root: Path, user: int) -> int:
    """Processes and threads of a user."""
    count = 0
    for status in (root / "proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            if int(lines["Uid"].split()[0]) == user:
                count += int(lines["Threads"])
        except (OSError, ValueError, KeyError):  # it has ended meanwhile
            continue
    return count


# --- open files -------------------------------------------------------------------------------------


def _open_files() -> Limit | None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    most = "" if hard == resource.RLIM_INFINITY else f" (up to {hard:,})"
    return Limit(left=soft, source=f"ulimit -n is {soft:,}", remedy=f"Raise it with ulimit -n N{most}")


# --- memory -----------------------------------------------------------------------------------------


def _memory_of_host(root: Path) -> Iterator[Limit]:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                left = int(line.split()[1]) * 1024
                yield Limit(
                    left=left,
                    source="MemAvailable in /proc/meminfo",
                    remedy="End other programs, or use a host with more memory",
                )
    except (OSError, ValueError, IndexError):
        return


def _memory_of_groups(groups: Iterable[Path]) -> Iterator[Limit]:
    for group in groups:
        for most_name, now_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            most, now = _number(group / most_name), _number(group / now_name)
            if most is None or now is None or most >= _NO_LIMIT:
                continue
            yield Limit(
                left=most - max(0, now - _reclaimable(group)),
                source=f"{group / most_name} is {most / 1e9:,.1f} GB",
                remedy="Raise the limit of the container or control group (docker run --memory, systemd "
                "MemoryMax=)",
            )


def _reclaimable(group: Path) -> int:
    """Cached files, which the kernel gives up when memory is wanted."""
    try:
        found = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(found.get("total_inactive_file", found.get("inactive_file", "0")))
    except (OSError, ValueError):
        return 0


# --- control groups ---------------------------------------------------------------------------------


def _control_groups(root: Path) -> Iterator[Path]:
    """Directories of the control groups that this process is in, and of those around them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    top = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids", "memory"):
            continue
        mount = top / controllers
        group = mount / path.lstrip("/")
        # In a container the path may be the host's, of which only the top is mounted here.
        while group != mount:
            yield group
            group = group.parent
        yield mount


def _number(path: Path) -> int | None:
    """What the file says; None if it is not there, or says that there is no limit ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
