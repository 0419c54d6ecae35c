"""Photos for paper 1: drawn ones, written as JPEG files so that reading them is real; their preprocessing."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.data.fire_scenes import FireScenes
from paceline.data.options import vision

__all__ = ["Preprocessing", "write_photos"]

_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def write_photos(folder: Path, count: int, size: int) -> None:
    """Write so many drawn scenes, a folder for every class, a seventh larger than `size`."""
    pillow: Any = vision("PIL.Image")
    scenes = FireScenes(count, size=size * 8 // 7)
    for number in range(count):
        image, label = scenes[number]
        file = folder / scenes.classes[label] / f"{number:05}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        pillow.fromarray(image.permute(1, 2, 0).numpy()).save(file, quality=90)


class Preprocessing:
    """Paper 1's: crop and scale, flip at random, normalise, convert to a tensor.

    Args:
        size: pixels of a side.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._mean, self._deviation = (torch.tensor(v).view(3, 1, 1) for v in (_MEAN, _DEVIATION))

    def __call__(self, image: Tensor) -> Tensor:
        """A square of a photo (3 × height × width, uint8), as float32."""
        side = min(image.shape[1:])
        cut = max(self._size, side * 7 // 8) if side >= self._size else side
        top, left = (int(torch.randint(each - cut + 1, ())) for each in image.shape[1:])
        square = image[:, top : top + cut, left : left + cut].float().div_(255)
        if cut != self._size:
            square = torch.nn.functional.interpolate(
                square[None], size=(self._size, self._size), mode="bilinear", antialias=True
            )[0]
        if bool(torch.rand(()) < 0.5):
            square = square.flip(2)
        return square.sub_(self._mean).div_(self._deviation)
