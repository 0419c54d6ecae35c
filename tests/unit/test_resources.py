"""What roles and the host use: measured on real processes, paced, and harmless when they vanish."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from paceline.observe.record.gpu import Gpus, GpuUsage
from paceline.observe.record.resources import Sampler, _families
from paceline.observe.record.tables import RESOURCES, ROLES, read_raw

SESSION = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"],
                         stdin=subprocess.PIPE)
sys.stdin.read()
child.stdin.close()
child.wait()
"""


class NoGpu:
    """A library that is not there."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Nvml:
    """What NVML answers, for two GPUs; the second fails if it is told to."""

    def __init__(self, *, fails: bool = False, count: int = 2) -> None:
        self.fails, self.count, self.closed = fails, count, False

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        self.closed = True
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = self.count  # noqa: SLF001
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        device._obj.value = index.value + 1  # noqa: SLF001
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: ctypes.c_void_p, rates: Any) -> int:
        rates._obj.gpu = 40 * (device.value or 0)  # noqa: SLF001
        return 15 if self.fails and device.value == 2 else 0

    def nvmlDeviceGetMemoryInfo(self, device: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.used = 10**10  # noqa: SLF001
        return 0


class Clock:
    ns = 10**12

    def __call__(self) -> int:
        return self.ns


def sampler(directory: Path, clock: Clock | None = None) -> Sampler:
    return Sampler(directory / "raw", 0, gpus=Gpus(NoGpu()), clock=clock or Clock())


def rows(directory: Path) -> np.ndarray[Any, Any]:
    (part,) = read_raw(directory / "raw", RESOURCES)
    assert (part.role, part.rank) == ("controller", 0)
    return part.records


@pytest.fixture
def role() -> Iterator[subprocess.Popen[str]]:
    """A session leader with a child, as a worker with a DataLoader's is."""
    process = subprocess.Popen(
        [sys.executable, "-c", SESSION],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.stdin.close()
    process.wait()
    process.stdout.close()


def test_children_belong_to_their_role(role: subprocess.Popen[str], tmp_path: Path) -> None:
    (child,) = psutil.Process(role.pid).children()
    assert _families({"worker:1": role.pid, "controller": os.getpid()}) == {
        "worker:1": [role.pid, child.pid],
        "controller": [os.getpid()],
    }
    found = sampler(tmp_path).sample({"worker:1": role.pid})["worker:1"]
    assert found.threads == 2
    alone = sampler(tmp_path).sample({"controller": role.pid})["controller"]
    assert found.memory > 1.2 * alone.memory, "with its child"


def test_cpu_since_the_last_sample(tmp_path: Path) -> None:
    clock = Clock()
    taken = sampler(tmp_path, clock)
    taken.sample({"controller": os.getpid()})
    before = psutil.Process().cpu_times()
    while sum(psutil.Process().cpu_times()[:2]) - sum(before[:2]) < 0.1:
        sum(range(10_000))
    clock.ns += 200_000_000
    cpu = taken.sample({"controller": os.getpid()})["controller"].cpu
    assert 0.5 <= cpu < 1.5, "0.1 s of computing in what the clock calls 0.2 s"
    clock.ns += 10**12
    assert taken.sample({"controller": os.getpid()})["controller"].cpu < 0.01


def test_records(tmp_path: Path) -> None:
    clock = Clock()
    taken = Sampler(tmp_path / "raw", 5, gpus=Gpus(Nvml()), clock=clock)
    taken.sample({"controller": os.getpid(), "server:3": os.getpid()})
    clock.ns += 10**9
    taken.sample({"controller": os.getpid()})
    taken.close()
    found = rows(tmp_path)
    assert [ROLES[role] for role in found["role"]] == ["controller", "server", "host", "controller", "host"]
    assert found["rank"].tolist() == [0, 3, 0, 0, 0]
    assert found["time"].tolist() == [10**12 + 5] * 3 + [10**12 + 10**9 + 5] * 2
    host = found[-1]
    assert host["memory"] > found["memory"][0] > 1_000_000
    assert host["cpu"] >= 0
    assert host["gpu"] == pytest.approx(0.6)
    assert host["gpu_memory"] == 2 * 10**10
    assert np.isnan(found["gpu"][0])


def test_who_is_gone_is_left_out(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    pids = {"worker:0": process.pid, "controller": os.getpid(), "stranger": os.getpid()}
    assert list(sampler(tmp_path).sample(pids)) == ["controller"]


def test_a_zombie_is_gone(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert sampler(tmp_path).sample({"worker:0": process.pid}) == {}
    finally:
        process.wait()


def test_nobody_to_sample(tmp_path: Path) -> None:
    assert sampler(tmp_path).sample({}) == {}
    assert [ROLES[role] for role in rows(tmp_path)["role"]] == ["host"]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    taken = Sampler(tmp_path / "file" / "raw", 0, gpus=Gpus(NoGpu()))
    assert "controller" in taken.sample({"controller": os.getpid()})
    assert taken.broken is not None


def test_pace_slows_down(tmp_path: Path) -> None:
    taken = sampler(tmp_path)
    times = [second / 10 for second in range(2 * 36_000) if taken.due(second / 10)]
    assert times[:3] == [0.0, 1.0, 2.0]
    gaps = {t: round(later - t, 1) for t, later in pairwise(times)}
    assert {gap for t, gap in gaps.items() if t < 600} == {1.0}
    assert {gap for t, gap in gaps.items() if 600 <= t < 3600} == {2.0}
    assert {gap for t, gap in gaps.items() if t >= 3600} == {5.0}


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    library = Nvml()
    gpus = Gpus(library)
    assert gpus.usage() == GpuUsage(pytest.approx(0.6), 2 * 10**10)
    gpus.close()
    assert library.closed
    assert gpus.usage() is None
    assert Gpus(Nvml(fails=True)).usage() == GpuUsage(pytest.approx(0.4), 2 * 10**10)


def test_no_gpu() -> None:
    assert Gpus(NoGpu()).usage() is None
    assert Gpus(Nvml(count=0)).usage() is None


@pytest.mark.parametrize(
    ("visible", "count"), [("0", 1), ("1,0", 2), ("", 0), ("0,7,1", 1), ("GPU-8932f937", 2), ("-1", 0)]
)
def test_only_gpus_that_may_be_used(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Gpus(Nvml()).count == count
