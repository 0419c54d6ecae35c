"""The papers' own figures, as their tables and texts have them.

Curves of figures are not in the texts that we have: of the figures there is what the text says about them.
"""

from typing import NamedTuple

__all__ = [
    "ACCURACY_LOST",
    "BATCH_ACCURACY",
    "FASTER_AT_32",
    "IDLENESS_BY_LATENCY",
    "SPEEDUPS",
    "STALENESS",
    "TABLE_II",
    "Profile",
]

SPEEDUPS: dict[str, tuple[float, float]] = {
    "CPU single-process": (4.0, 6.15),
    "CPU multi-process": (5.76, 15.57),
    "GPU single-process": (1.57, 1.25),
    "model": (6.74, 8.01),
    "data and model": (2.84, 3.85),
    "MPI, CPU": (12.11, 26.62),
    "MPI, GPU": (4.13, 11.79),
    "Spark, CPU": (1.14, 0.53),
}
"""Paper 1, tables 1 to 3: speed-up over sequential training, ComplexSmall and SimpleBig."""


class Profile(NamedTuple):
    """A column of paper 4's table II."""

    cpu_percent: float
    memory_percent: float
    reads: int
    writes: int
    updates: int
    update_ms: float
    pull_ms: float
    push_ms: float


TABLE_II: dict[tuple[str, str], Profile] = {
    ("bsp", "inception-v1"): Profile(95, 65, 4, 3500, 931, 6.327, 42, 1114),
    ("bsp", "resnet18"): Profile(96, 98, 80, 1600, 4067, 5.659, 53, 2534),
    ("asp", "inception-v1"): Profile(96, 65, 3, 1500, 7448, 10.117, 52, 86),
    ("asp", "resnet18"): Profile(98, 96, 50, 2000, 32536, 9.279, 63, 104),
}
"""Paper 4, table II: by synchronous or asynchronous SGD, and network. 4 servers, 8 workers, batch 128."""

ACCURACY_LOST: dict[str, float] = {"asp": 0.35, "bsp": 0.08}
"""Paper 4, figure 7: final top-1 accuracy lost by going from 4 to 12 workers ("around 0.35", "0.08")."""

STALENESS: dict[int, float] = {4: 1, 8: 2, 12: 4}
"""Paper 4, figure 8: highest staleness by the number of workers."""

BATCH_ACCURACY: dict[tuple[str, int], float] = {
    ("bsp", 16): 0.79,
    ("asp", 16): 0.74,
    ("bsp", 512): 0.52,
    ("asp", 512): 0.44,
}
"""Paper 4, figure 10: top-1 accuracy of Inception-v1 after three epochs, by the batch size."""

FASTER_AT_32: dict[str, float] = {"bsp": 51.0, "asp": 54.0}
"""Paper 4, figure 10: percent of the training time saved by going from batch 16 to 32."""

IDLENESS_BY_LATENCY: dict[int, float] = {10: 10.0, 200: 72.0}
"""Paper 4, figure 11 (c): percent, by the network's latency in ms."""
