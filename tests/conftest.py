"""The leak check: no test leaves a process, a thread or a file in /dev/shm behind.

It runs around every test, and around the whole session for what wider fixtures start. Under xdist
each worker process looks after its own descendants, so tests running beside it are not blamed.
"""

import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import sys
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from paceline.testing import KeptEngine

# Property tests try the same cases every time, however slow or busy the machine is.
settings.register_profile(
    "paceline", derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("paceline")

# torch 2.15's oneDNN dies of an illegal instruction, or creates no primitive, where a processor has AMX and a
# bfloat16 matrix is small: plain PyTorch does too. torch reads this when it is first loaded.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# Where nothing may write bytecode, as in many containers, every interpreter that the tests start compiles the
# whole package again, and pytest all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

PATIENCE_S = 5.0
"""How long what is already ending may take to end after its test."""

KTHREADD = 2
"""Parent of the kernel's own processes."""

# Inherited by whatever this process starts, so that a descendant is known for ours even after its
# parent died and it hangs from init. Each xdist worker draws its own.
MARK = "PACELINE_TEST_PROCESS"
os.environ[MARK] = uuid.uuid4().hex


@dataclass(frozen=True)
class Snapshot:
    """What exists at one moment: take one before, and ask it afterwards what was left behind."""

    pids: frozenset[int]
    threads: frozenset[threading.Thread]
    files: frozenset[str]
    shm: Path

    @classmethod
    def take(cls, shm: Path = Path("/dev/shm")) -> "Snapshot":
        """What exists now."""
        return cls(
            pids=frozenset(psutil.pids()),
            threads=frozenset(threading.enumerate()),
            files=_names(shm),
            shm=shm,
        )

    def leaks(self, patience_s: float = PATIENCE_S) -> list[str]:
        """What was left behind since, in words; waits for it to end, then ends the processes."""
        deadline = time.monotonic() + patience_s
        _, alive = psutil.wait_procs(self._new_processes(), timeout=patience_s)
        found = [f"process {_describe(process)}" for process in alive]
        for process in alive:
            _kill(process)
        psutil.wait_procs(alive, timeout=patience_s)
        for thread in set(threading.enumerate()) - self.threads:
            if not thread.daemon:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    found.append(f"thread {thread.name}")
        if _names(self.shm) - self.files:
            gc.collect()  # A multiprocessing semaphore keeps its name until it is collected.
        # Another process that makes a semaphore has a file of another name here for a moment: look again.
        while (left := self._new_files()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return found + [f"file {self.shm / name}" for name in left]

    def _new_files(self) -> list[str]:
        return [name for name in sorted(_names(self.shm) - self.files) if self._is_ours(name)]

    def _new_processes(self) -> list[psutil.Process]:
        """Our descendants that were not there before, less Python's own helpers."""
        new = set(psutil.pids()) - self.pids - _helpers()
        if not new:  # After most tests: whose child each process is need not be read.
            return []
        found = {child.pid: child for child in psutil.Process().children(recursive=True)}
        for pid in new - found.keys():
            try:
                process = psutil.Process(pid)
                if _environment(process).get(MARK) == os.environ[MARK]:
                    found[pid] = process
            except psutil.Error:
                continue  # Already gone, or another user's.
        return [process for pid, process in found.items() if pid in new]

    def _is_ours(self, name: str) -> bool:
        """Whether a new file is ours: it still exists and no stranger has it open or mapped."""
        path = self.shm / name
        try:
            if path.stat().st_uid != os.getuid():
                return False
        except FileNotFoundError:
            return False
        me = psutil.Process()
        family = {me.pid, *(child.pid for child in me.children(recursive=True))}
        return not any(_holds(pid, str(path)) for pid in psutil.pids() if pid not in family)


def _environment(process: psutil.Process) -> dict[str, str]:
    """In the middle of its exec a process has none yet. (The kernel's own never have one.)"""
    deadline = time.monotonic() + 1
    while not (found := process.environ()) and process.ppid() != KTHREADD and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


def _names(directory: Path) -> frozenset[str]:
    return frozenset(os.listdir(directory)) if directory.is_dir() else frozenset()


def _helpers() -> set[int]:
    """Python starts these once per process, on first use, and they end with it."""
    tracker = multiprocessing.resource_tracker._resource_tracker
    forkserver = multiprocessing.forkserver._forkserver
    pids = (getattr(tracker, "_pid", None), getattr(forkserver, "_forkserver_pid", None))
    return {pid for pid in pids if pid is not None}


def _holds(pid: int, path: str) -> bool:
    try:
        # The list of mappings as it is: psutil's has their sizes, for which the kernel walks all pages.
        return path in Path(f"/proc/{pid}/maps").read_text(errors="replace") or any(
            file.path == path for file in psutil.Process(pid).open_files()
        )
    except (psutil.Error, OSError):
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.status()}): {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what the tests' imports leave for good, half a million objects, out of garbage collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter end as usual: some libraries complain of objects that are still there."""
    gc.unfreeze()


def _check(before: Snapshot, whose: str) -> None:
    if left := before.leaks():
        pytest.fail(f"{whose} left behind: " + "; ".join(left), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def no_leaks_of_session() -> Iterator[None]:
    """Nothing that session, package, module or class fixtures started outlives them."""
    before = Snapshot.take()
    yield
    _check(before, "the session's fixtures")


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, no_leaks_of_session: None) -> Iterator[None]:
    """Nothing that this test or its own fixtures started outlives it."""
    before = Snapshot.take()
    yield
    _check(before, request.node.nodeid)


@pytest.fixture(scope="session")
def engine() -> Iterator["KeptEngine"]:
    """One fork server for all real runs of a process: a fork server takes 5 s of CPU to load torch."""
    from paceline.testing import KeptEngine

    kept = KeptEngine()
    yield kept
    kept.shut_down()


@pytest.fixture
def snapshot() -> type[Snapshot]:
    """The leak check's own class, for the tests of the leak check."""
    return Snapshot
