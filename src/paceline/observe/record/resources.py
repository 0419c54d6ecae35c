"""What roles and their host use: CPU, memory, threads, disk, network, GPU, about once a second.

A role is the leader of a session of its own, so its children (a DataLoader's workers) are the processes of
that session: one pass over all processes finds them for every role.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import numpy as np
import psutil

from paceline.observe.record.gpu import Gpus
from paceline.observe.record.own_memory import OwnMemory
from paceline.observe.record.tables import RESOURCES, ROLES, RawTable

__all__ = ["Sampler", "Usage"]

PACE = ((600.0, 1.0), (3600.0, 2.0), (float("inf"), 5.0))
"""(up to this age of the run, interval between samples), both in seconds: a long run's table stays small."""
_DUE_EARLY = 0.05
"""Tolerance, so that a caller that comes every second does not miss a sample."""


@dataclass(frozen=True)
class Usage:
    """What one role uses, with its own children."""

    cpu: float
    """Cores in use since the sample before; in the first, since it began."""
    memory: int
    """Bytes of its own, and its part of what it shares (`OwnMemory`)."""
    threads: int


@dataclass(frozen=True)
class _Seen:
    """One process at one moment: counts since it began."""

    cpu_s: float
    resident: int
    threads: int
    read: int
    written: int
    began: float


@dataclass
class _Account:
    """A role's disk bytes, which must not fall when one of its children ends."""

    read: int = 0
    written: int = 0


class Sampler:
    """Samples, and appends what it finds to `raw/controller.resources`.

    A process that is gone is left out; what the system does not report is 0. Never raises. A sample of the
    controller, a server and two workers takes 0.9 ms of CPU time, one of 64 workers 6 ms: 0.1 % and 0.6 % of
    a core.

    Args:
        directory: the run's `raw/`.
        clock_ns: from this host's monotonic clock to Unix time.
        gpus: source of the GPU figures; for tests.
        own_memory: source of the memory figures; for tests.
        clock: the monotonic clock, in ns; for tests.
    """

    def __init__(
        self,
        directory: Path,
        clock_ns: int,
        *,
        gpus: Gpus | None = None,
        own_memory: OwnMemory | None = None,
        clock: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self._table = RawTable(directory, "controller", RESOURCES)
        self._clock_ns = clock_ns
        self._clock = clock
        self._gpus = gpus if gpus is not None else Gpus()
        self._began: float | None = None
        self._next = 0.0
        self._sampled_ns: int | None = None
        self._processes: dict[int, psutil.Process] = {}
        self._seen: dict[int, _Seen] = {}
        self._accounts: dict[str, _Account] = {}
        self._own_memory = own_memory if own_memory is not None else OwnMemory()
        self._host_s: tuple[float, float] | None = None

    def due(self, now: float) -> bool:
        """Whether it is time for a sample. If so it is taken as made: the next is due an interval later.

        Args:
            now: seconds of any monotonic clock.
        """
        if self._began is None:
            self._began = now
        elif now < self._next - _DUE_EARLY:
            return False
        self._next = now + next(every for until, every in PACE if now - self._began < until)
        return True

    def sample(self, pids: Mapping[str, int]) -> dict[str, Usage]:
        """What roles use now.

        Args:
            pids: their processes, by name: `server:0`, `worker:1`, `controller`.
        """
        now_ns = self._clock()
        passed = None if self._sampled_ns is None else max(1e-3, (now_ns - self._sampled_ns) / 1e9)
        self._sampled_ns = now_ns
        records: list[tuple[float, ...]] = []
        found: dict[str, Usage] = {}
        seen: dict[int, _Seen] = {}
        families: dict[str, dict[int, _Seen]] = {}
        for name, members in _families(pids).items():
            there = {pid: each for pid in members if (each := self._look(pid)) is not None}
            if name.partition(":")[0] in ROLES and pids[name] in there:
                families[name] = there
                seen |= there
        own = self._own_memory.of({pid: each.resident for pid, each in seen.items()})
        for name, there in families.items():
            role, _, rank = name.partition(":")
            cores = sum(self._cores(pid, each, passed) for pid, each in there.items())
            memory = sum(own[pid] for pid in there)
            threads = sum(each.threads for each in there.values())
            account = self._charge(name, there)
            found[name] = Usage(cores, memory, threads)
            number = int(rank) if rank.isdecimal() else 0
            disk = (account.read, account.written)
            records.append(
                (0, ROLES.index(role), number, cores, memory, threads, *disk, 0, 0, 0.0, np.nan, 0)
            )
        self._seen = seen
        self._processes = {pid: self._processes[pid] for pid in seen}
        records.append(self._host(passed))
        table = np.array(records, RESOURCES.record)
        table["time"] = now_ns + self._clock_ns
        self._table.append(table)
        return found

    @property
    def memory_kind(self) -> str:
        """What `Usage.memory` is: `pss`, or `rss` (what is shared counts in each) where that is not told."""
        return "rss" if self._own_memory.unknown else "pss"

    @property
    def broken(self) -> OSError | None:
        """Why nothing is written any more, if so."""
        return self._table.broken

    def close(self) -> None:
        """Write no more."""
        self._table.close()
        self._gpus.close()

    def _look(self, pid: int) -> _Seen | None:
        try:
            process = self._processes.get(pid)
            if process is None:
                process = self._processes[pid] = psutil.Process(pid)
            with process.oneshot():
                if process.status() == psutil.STATUS_ZOMBIE:
                    return None
                times = process.cpu_times()
                resident, threads = process.memory_info().rss, process.num_threads()
            read = written = 0
            with contextlib.suppress(psutil.Error, OSError):
                disk = process.io_counters()
                read, written = disk.read_bytes, disk.write_bytes
            return _Seen(times.user + times.system, resident, threads, read, written, process.create_time())
        except (psutil.Error, OSError):
            return None

    def _cores(self, pid: int, now: _Seen, passed: float | None) -> float:
        before = self._seen.get(pid)
        if before is not None and passed is not None and now.cpu_s >= before.cpu_s:
            return (now.cpu_s - before.cpu_s) / passed
        # New since the last sample, or the first one: as far back as it goes.
        unix = (self._sampled_ns or 0) / 1e9 + self._clock_ns / 1e9
        age = max(0.1, unix - now.began)
        return now.cpu_s / max(age, passed or 0.0)

    def _charge(self, name: str, there: Mapping[int, _Seen]) -> _Account:
        account = self._accounts.setdefault(name, _Account())
        for pid, now in there.items():
            before = self._seen.get(pid)
            account.read += max(0, now.read - (before.read if before else 0))
            account.written += max(0, now.written - (before.written if before else 0))
        return account

    def _host(self, passed: float | None) -> tuple[float, ...]:
        cores = iowait = 0.0
        memory = threads = read = written = sent = received = 0
        with contextlib.suppress(psutil.Error, OSError):
            times = psutil.cpu_times()
            waited = getattr(times, "iowait", 0.0)
            # Guests' time is part of user's.
            busy = (
                times.user
                + times.nice
                + times.system
                + sum(getattr(times, each, 0.0) for each in ("irq", "softirq"))
            )
            if self._host_s is not None and passed is not None:
                cores = max(0.0, busy - self._host_s[0]) / passed
                iowait = max(0.0, waited - self._host_s[1]) / passed
            self._host_s = busy, waited
        with contextlib.suppress(psutil.Error, OSError):
            have = psutil.virtual_memory()
            memory = have.total - have.available
        with contextlib.suppress(psutil.Error, OSError, RuntimeError):
            if (disks := psutil.disk_io_counters()) is not None:
                read, written = disks.read_bytes, disks.write_bytes
        with contextlib.suppress(psutil.Error, OSError):
            cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"]
            sent = sum(card.bytes_sent for card in cards)
            received = sum(card.bytes_recv for card in cards)
        gpu = self._gpus.usage()
        share, gpu_memory = (gpu.share, gpu.memory) if gpu is not None else (np.nan, 0)
        host = (0, ROLES.index("host"), 0, cores, memory, threads, read, written)
        return (*host, sent, received, iowait, share, gpu_memory)


def _families(pids: Mapping[str, int]) -> dict[str, list[int]]:
    """The processes of each role: of its session if it leads one, else its own alone."""
    leaders: dict[int, list[int]] = {}
    families = {}
    for name, pid in pids.items():
        members = families[name] = [pid]
        with contextlib.suppress(OSError):
            if name != "controller" and os.getsid(pid) == pid:
                leaders[pid] = members
    if leaders:
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                session = os.getsid(pid)
                if session != pid and session in leaders:
                    leaders[session].append(pid)
    return families
