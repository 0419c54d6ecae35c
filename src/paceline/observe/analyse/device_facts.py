"""What the GPUs of a run did: time by phase beside the CPU's, how busy they were, memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.observe.analyse.run_data import Columns
from paceline.observe.record.device_lane import DEVICE_LANE
from paceline.observe.record.phase import PHASES, Phase
from paceline.observe.record.tables import ROLES

__all__ = ["DeviceFacts", "WorkerDevice", "device_facts_of", "of_threads"]

_WORKER, _SERVER, _HOST = ROLES.index("worker"), ROLES.index("server"), ROLES.index("host")


@dataclass(frozen=True)
class WorkerDevice:
    """A worker's usual step: seconds by phase, medians over the steps that were marked."""

    steps: int
    """How many steps were marked and kept."""
    gpu: Mapping[str, float]
    cpu: Mapping[str, float]
    """Of the main thread, in the same steps."""

    @property
    def gpu_s(self) -> float:
        """Seconds of a step on the device."""
        return sum(self.gpu.values())


@dataclass(frozen=True)
class DeviceFacts:
    """Of a run; all empty where nothing was on a GPU."""

    workers: Mapping[int, WorkerDevice] = field(default_factory=dict)
    """By rank."""
    updates: Mapping[int, float] = field(default_factory=dict)
    """Median seconds that an update took the device, by the server's rank."""
    share: float | None = None
    """Of the time in which the host's GPUs computed, 0 to 1, mean over the run; None without a GPU."""
    memory: int = 0
    """The most bytes that were in use on them, by all processes of the host."""

    @property
    def marked(self) -> bool:
        """Whether a role's device was followed."""
        return bool(self.workers or self.updates)


def of_threads(table: Columns) -> Columns:
    """The rows of a table of spans or totals that are of threads, not of a device."""
    threads = table["lane"] != DEVICE_LANE
    return table if threads.all() else {name: column[threads] for name, column in table.items()}


def device_facts_of(spans: Columns, resources: Columns) -> DeviceFacts:
    """Compute them from a run's tables."""
    on_device = spans["lane"] == DEVICE_LANE
    workers = {
        int(rank): found
        for rank in np.unique(spans["rank"][on_device & (spans["role"] == _WORKER)])
        if (found := _worker(spans, int(rank))) is not None
    }
    updated = on_device & (spans["role"] == _SERVER) & (spans["phase"] == Phase.UPDATE)
    updates = {
        int(rank): float(np.median(spans["ns"][updated & (spans["rank"] == rank)])) / 1e9
        for rank in np.unique(spans["rank"][updated])
    }
    host = resources["role"] == _HOST
    shares = resources["gpu"][host].astype(float)
    shares = shares[np.isfinite(shares)]
    return DeviceFacts(
        workers,
        updates,
        float(shares.mean()) if len(shares) else None,
        int(resources["gpu_memory"][host].astype(np.int64).max(initial=0)),
    )


def _worker(spans: Columns, rank: int) -> WorkerDevice | None:
    mine = (spans["role"] == _WORKER) & (spans["rank"] == rank)
    device = mine & (spans["lane"] == DEVICE_LANE)
    steps = np.unique(spans["step"][device])
    # The first step warms up, the last is the script's end: see `facts.py`.
    steps = steps[1:-1] if len(steps) > 2 else steps
    if not len(steps):
        return None
    main = mine & (spans["lane"] == 0)
    return WorkerDevice(len(steps), _usual(spans, device, steps), _usual(spans, main, steps))


def _usual(spans: Columns, chosen: npt.NDArray[np.bool_], steps: npt.NDArray[np.generic]) -> dict[str, float]:
    """Median seconds of each phase in these steps."""
    chosen = chosen & np.isin(spans["step"], steps)
    spent = np.zeros((len(steps), len(PHASES)))
    at = np.searchsorted(steps, spans["step"][chosen])
    np.add.at(spent, (at, spans["phase"][chosen].astype(np.int64)), spans["ns"][chosen].astype(float))
    usual = np.median(spent, axis=0) / 1e9
    return {PHASES[p]: float(usual[p]) for p in range(len(PHASES)) if usual[p] > 0}
