"""Drawn landscapes with fire, with smoke, and without: a stand-in for photos where there are none.

Colour alone does not tell the classes apart: a landscape without fire may have a red evening sky or fog.
"""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.drawing import Canvas, soft_noise
from paceline.data.image_folder import Transform

__all__ = ["FireScenes"]


class FireScenes(Dataset[tuple[Tensor, int]]):
    """`count` scenes, each drawn from the seed and its number when it is read: always the same scene.

    An item is an image (3 × size × size, uint8, after `transform`) and the number of its class.
    """

    classes = ("fire", "no_fire", "smoke")

    def __init__(self, count: int, *, size: int = 256, seed: int = 0) -> None:
        self.count, self.size, self.seed = count, size, seed
        self.skipped: list[str] = []
        self.transform: Transform | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        random = np.random.default_rng([self.seed, index])
        label = index % len(self.classes)
        canvas = Canvas(self.size, self.size)
        ground = _draw_landscape(canvas, random)
        if self.classes[label] == "fire":
            _draw_fire(canvas, ground, random)
        if self.classes[label] == "smoke" or (self.classes[label] == "fire" and random.random() < 0.5):
            _draw_smoke(canvas, ground, random)
        image = torch.from_numpy(canvas.image(0.03, random)).permute(2, 0, 1)
        return (self.transform(image) if self.transform else image), label


def _draw_landscape(canvas: Canvas, random: np.random.Generator) -> float:
    """Sky, hills, trees. Returns the row of the horizon."""
    size = canvas.owner.shape[0]
    horizon = float(size * random.uniform(0.4, 0.65))
    clouds = soft_noise(size, size, 4, random)[..., None]
    evening = random.random() < 0.3
    sky = np.array((0.95, 0.55, 0.3) if evening else (0.45, 0.65, 0.95))
    canvas.pixels[:] = (1 - clouds) * sky + clouds * np.float32(random.uniform(0.6, 0.95))
    grass = np.array((0.25, 0.4, 0.15)) * random.uniform(0.5, 1.6, 3)
    canvas.rectangle(0, horizon, size, size, grass)
    canvas.ellipse(
        random.uniform(0, size), horizon, size * 0.5, size * random.uniform(0.05, 0.2), grass * 0.8
    )
    for _ in range(random.integers(4, 12)):
        x, foot = random.uniform(0, size), horizon + random.uniform(0, 0.25) * size
        tall = size * random.uniform(0.06, 0.2)
        leaf = np.array((0.12, 0.3, 0.1)) * random.uniform(0.5, 1.8, 3)
        canvas.limb((x, foot - tall * 0.5), (x, foot), tall * 0.06, (0.25, 0.18, 0.1))
        canvas.ellipse(x, foot - tall * 0.7, tall * 0.25, tall * 0.4, leaf)
    canvas.pixels *= 0.8 + 0.4 * soft_noise(size, size, 48, random)[..., None]
    return horizon


def _draw_fire(canvas: Canvas, ground: float, random: np.random.Generator) -> None:
    """Tongues of flame, red outside and nearly white inside."""
    size = canvas.owner.shape[0]
    x, wide = random.uniform(0.2, 0.8) * size, size * random.uniform(0.06, 0.2)
    foot = ground + random.uniform(0, 0.25) * size
    for colour, share in (((0.85, 0.2, 0.05), 1.0), ((1.0, 0.55, 0.1), 0.7), ((1.0, 0.92, 0.55), 0.4)):
        for _ in range(10):
            across = random.normal(0, wide * 0.4 * share)
            tall = wide * share * random.uniform(0.8, 2.2)
            canvas.limb(
                (x + across, foot),
                (x + across + random.normal(0, wide * 0.15), foot - tall),
                wide * 0.12,
                colour,
            )
            canvas.ellipse(x + across, foot - tall * 0.3, wide * 0.2 * share, tall * 0.4, colour)


def _draw_smoke(canvas: Canvas, ground: float, random: np.random.Generator) -> None:
    """A plume that rises, drifts and widens, and lets what is behind it through."""
    size = canvas.owner.shape[0]
    x, drift = random.uniform(0.2, 0.8) * size, random.uniform(-0.6, 0.6)
    foot = ground + random.uniform(0, 0.15) * size
    wide = size * random.uniform(0.03, 0.07)
    rows = np.arange(size, dtype=np.float32)[:, None] + 0.5
    columns = np.arange(size, dtype=np.float32)[None] + 0.5
    rise = np.clip(foot - rows, 0, None)
    spread = wide + 0.28 * rise
    sway = size * 0.02 * np.sin(rise / size * random.uniform(10, 25))
    plume = np.exp(-(((columns - x - drift * rise - sway) / spread) ** 2)) * (rise > 0)
    curls = soft_noise(size, size, 14, random)
    veil = np.clip(plume * (0.45 + 0.9 * curls), 0, 0.92)[..., None] * random.uniform(0.75, 1)
    tone = random.uniform(0.3, 0.85) * (0.8 + 0.4 * curls[..., None])
    canvas.pixels[:] = canvas.pixels * (1 - veil) + veil * tone
