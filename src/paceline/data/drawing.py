"""Draws filled shapes into an array, for the synthetic data sets: no imaging library is needed."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Canvas", "soft_noise"]

Colour = ArrayLike
"""Red, green and blue, from 0 to 1."""


class Canvas:
    """An image of float32 colours from 0 to 1, painted from back to front.

    `owner` says for every pixel which object painted it last (0: none). The share of an object's pixels that
    it still owns in the end is its visible share.
    """

    def __init__(self, height: int, width: int, colour: Colour = (0, 0, 0)) -> None:
        self.pixels: NDArray[np.float32] = np.empty((height, width, 3), np.float32)
        self.pixels[:] = colour
        self.owner: NDArray[np.int32] = np.zeros((height, width), np.int32)
        self.painted: dict[int, int] = {}
        self.object = 0
        """Number of the object that is being painted; callers set it before they paint one."""

    def rectangle(self, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
        """Paint a rectangle with sides parallel to the image's."""
        rows, columns = self._window(left, top, right, bottom)
        self._paint(rows, columns, None, colour)

    def ellipse(self, x: float, y: float, radius_x: float, radius_y: float, colour: Colour) -> None:
        """Paint an ellipse around (x, y)."""
        rows, columns = self._window(x - radius_x, y - radius_y, x + radius_x, y + radius_y)
        down = (np.arange(rows.start, rows.stop)[:, None] + 0.5 - y) / max(radius_y, 0.5)
        across = (np.arange(columns.start, columns.stop)[None] + 0.5 - x) / max(radius_x, 0.5)
        self._paint(rows, columns, down * down + across * across <= 1, colour)

    def limb(self, start: Sequence[float], end: Sequence[float], radius: float, colour: Colour) -> None:
        """Paint a line of some thickness with round ends."""
        (x0, y0), (x1, y1) = start, end
        rows, columns = self._window(
            min(x0, x1) - radius, min(y0, y1) - radius, max(x0, x1) + radius, max(y0, y1) + radius
        )
        down = np.arange(rows.start, rows.stop)[:, None] + 0.5
        across = np.arange(columns.start, columns.stop)[None] + 0.5
        length = max((x1 - x0) ** 2 + (y1 - y0) ** 2, 1e-6)
        along = np.clip(((across - x0) * (x1 - x0) + (down - y0) * (y1 - y0)) / length, 0, 1)
        far = (across - x0 - along * (x1 - x0)) ** 2 + (down - y0 - along * (y1 - y0)) ** 2
        self._paint(rows, columns, far <= max(radius, 0.5) ** 2, colour)

    def visible_share(self, number: int) -> float:
        """Share of the pixels of object `number` that nothing has covered; 0 for one that was never seen."""
        painted = self.painted.get(number, 0)
        return float((self.owner == number).sum() / painted) if painted else 0.0

    def image(self, noise: float, random: np.random.Generator) -> NDArray[np.uint8]:
        """The picture as bytes, with a camera's noise."""
        grain = random.standard_normal(self.pixels.shape, np.float32) * noise
        picture: NDArray[np.uint8] = (np.clip(self.pixels + grain, 0, 1) * 255).astype(np.uint8)
        return picture

    def _window(self, left: float, top: float, right: float, bottom: float) -> tuple[slice, slice]:
        """Rows and columns of the image that a shape may touch."""
        height, width = self.owner.shape
        rows = slice(int(np.clip(top, 0, height)), int(np.clip(np.ceil(bottom), 0, height)))
        columns = slice(int(np.clip(left, 0, width)), int(np.clip(np.ceil(right), 0, width)))
        return rows, columns

    def _paint(self, rows: slice, columns: slice, mask: NDArray[np.bool_] | None, colour: Colour) -> None:
        owners = self.owner[rows, columns]
        where: NDArray[np.bool_] | slice = slice(None) if mask is None else mask
        if self.object:
            new = int((owners[where] != self.object).sum())
            self.painted[self.object] = self.painted.get(self.object, 0) + new
        owners[where] = self.object
        self.pixels[rows, columns][where] = colour


def soft_noise(height: int, width: int, cells: int, random: np.random.Generator) -> NDArray[np.float32]:
    """A smooth random field from 0 to 1, `cells` bumps across the larger side: clouds, foliage, smoke."""
    size = max(height, width)
    coarse = random.random((cells + 2, cells + 2), np.float32)
    places = np.linspace(0, cells, size, endpoint=False)
    whole = places.astype(int)
    part = (places - whole).astype(np.float32)
    part = part * part * (3 - 2 * part)
    rows = coarse[whole] * (1 - part)[:, None] + coarse[whole + 1] * part[:, None]
    field: NDArray[np.float32] = rows[:, whole] * (1 - part) + rows[:, whole + 1] * part
    return field[:height, :width]
