"""The memory that a role has of its own: asked rarely, followed in between, resident where it is unknown."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.observe.record.own_memory import ALLOWANCE_S, SHARE, OwnMemory, read_pss


class System:
    """Answers, and lets time pass meanwhile."""

    def __init__(self, cost_s: float = 0.0) -> None:
        self.now, self.cost_s = 100.0, cost_s
        self.pss: dict[int, int] = {}
        self.asked: list[int] = []

    def read(self, pid: int) -> int:
        self.asked.append(pid)
        self.now += self.cost_s
        if pid not in self.pss:
            raise ProcessLookupError
        return self.pss[pid]

    def memory(self) -> OwnMemory:
        return OwnMemory(self.read, lambda: self.now)


def test_shared_pages_do_not_count_in_each() -> None:
    system = System()
    system.pss = {1: 20, 2: 30}
    assert system.memory().of({1: 600, 2: 610}) == {1: 20, 2: 30}


def test_in_between_it_grows_as_the_resident_size_does() -> None:
    system = System(cost_s=2 * ALLOWANCE_S)
    system.pss = {1: 20}
    memory = system.memory()
    assert memory.of({1: 600}) == {1: 20}
    system.now += 1
    assert memory.of({1: 650}) == {1: 70} and memory.of({1: 570}) == {1: 0}
    assert system.asked == [1], "nobody has time to ask again"
    system.now += 1.1 * ALLOWANCE_S / SHARE
    system.pss = {1: 90}
    assert memory.of({1: 655}) == {1: 90}


def test_asking_takes_a_small_part_of_the_time() -> None:
    system = System(cost_s=0.05)
    system.pss = dict.fromkeys(range(64), 10)
    memory = system.memory()
    for second in range(600):
        system.now = 100.0 + max(second, system.now - 100.0)
        found = memory.of(dict.fromkeys(range(64), 100))
        assert set(found.values()) == {10}, "who was not asked is like the others"
    asked = len(system.asked)
    assert asked >= 50 and 0.05 * asked <= ALLOWANCE_S + 0.05 + SHARE * 600
    assert len(set(system.asked)) == min(64, asked), "those that were never asked come first"


def test_processes_that_end() -> None:
    system = System()
    system.pss = {1: 20}
    memory = system.memory()
    assert memory.of({1: 600, 2: 600}) == {1: 20, 2: 20}
    assert memory.of({}) == {} and not memory.unknown


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError])
def test_where_the_system_does_not_tell(error: type[OSError]) -> None:
    def refuse(pid: int) -> int:
        raise error

    memory = OwnMemory(refuse)
    assert memory.of({1: 600, 2: 610}) == {1: 600, 2: 610} and memory.unknown


FORKS = """
import mmap, os, sys
memory = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(memory), mmap.PAGESIZE):
    memory[at] = 1
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
if child:
    os.wait()
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells it")
def test_what_a_process_shares_with_its_fork_is_halved() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        child = int(process.stdout.readline())
        resident = int(Path(f"/proc/{child}/statm").read_text().split()[1]) * mmap.PAGESIZE
        assert resident > 64 << 20
        assert read_pss(child) < 48 << 20 and read_pss(process.pid) < 48 << 20
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()
    assert not os.path.exists(f"/proc/{child}/stat")
