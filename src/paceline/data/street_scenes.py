"""Drawn street scenes with pedestrians: a stand-in for KITTI where its images are absent.

Scenes are not easy on purpose: houses, trees and parked cars as clutter, nearer objects that hide a part of a
pedestrian, and hard negatives, objects that are as tall and narrow as a person (posts, signs with a round
plate where a head would be, bollards).
"""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.drawing import Canvas, soft_noise

__all__ = ["StreetScenes"]

MOST_HIDDEN = 0.4
"""A pedestrian with a smaller visible share than this is ignored, as KITTI's "largely occluded" ones are."""

_HEIGHT_OF = {"pedestrian": 1.0, "post": 1.2, "sign": 1.1, "bollard": 0.6, "tree": 2.0, "car": 0.7}
"""Height of an object at the same distance, in pedestrians."""
_CLUTTER = ("post", "sign", "bollard", "tree", "car")


class StreetScenes(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """`count` scenes, each drawn from the seed and its number when it is read: always the same scene.

    An item is an image (3 × height × width, float32 from 0 to 1) and a target for torchvision's detectors:
    `boxes` (left, top, right, bottom), `labels` (1: pedestrian), and `ignored`, boxes of pedestrians that are
    too hidden to be counted for or against a detector.
    """

    def __init__(self, count: int, *, height: int = 96, width: int = 192, seed: int = 0) -> None:
        self.count, self.height, self.width, self.seed = count, height, width, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        random = np.random.default_rng([self.seed, index])
        canvas = Canvas(self.height, self.width)
        horizon = _draw_street(canvas, random)
        boxes = _draw_objects(canvas, horizon, random)
        image = torch.from_numpy(canvas.image(0.03, random)).permute(2, 0, 1).float().div_(255)
        seen = {number: canvas.visible_share(number) for number in boxes}
        kept = [boxes[number] for number, share in seen.items() if share >= MOST_HIDDEN]
        hidden = [boxes[number] for number, share in seen.items() if 0 < share < MOST_HIDDEN]
        return image, {
            "boxes": torch.tensor(kept, dtype=torch.float32).reshape(-1, 4),
            "labels": torch.ones(len(kept), dtype=torch.int64),
            "ignored": torch.tensor(hidden, dtype=torch.float32).reshape(-1, 4),
        }


def _draw_street(canvas: Canvas, random: np.random.Generator) -> float:
    """Sky, houses with windows, pavement, road. Returns the row of the horizon."""
    height, width = canvas.owner.shape
    horizon = float(height * random.uniform(0.32, 0.42))
    light = random.uniform(0.55, 1.0)
    clouds = soft_noise(height, width, 5, random)[..., None]
    canvas.pixels[:] = light * ((1 - clouds) * np.array((0.5, 0.7, 0.95)) + clouds * np.float32(0.9))
    left = -random.uniform(0, width / 6)
    while left < width:
        wide, tall = random.uniform(0.12, 0.3) * width, random.uniform(0.5, 1.1) * horizon
        wall = light * random.uniform(0.3, 0.8) * random.uniform(0.75, 1.1, 3)
        canvas.rectangle(left, horizon - tall, left + wide, horizon + height * 0.08, wall)
        pane = wall * random.uniform(0.3, 0.7)
        step = height * random.uniform(0.08, 0.14)
        for x in np.arange(left + step / 2, left + wide - step / 2, step):
            for y in np.arange(horizon - tall + step / 2, horizon, step * 1.4):
                canvas.rectangle(x, y, x + step * 0.45, y + step * 0.7, pane)
        left += wide
    grey = light * random.uniform(0.25, 0.5)
    canvas.rectangle(0, horizon + height * 0.06, width, height, (grey * 1.25, grey * 1.2, grey * 1.15))
    canvas.rectangle(0, horizon + height * 0.2, width, height, (grey, grey, grey * 1.05))
    for x in np.arange(random.uniform(0, 0.2) * width, width, 0.2 * width):
        canvas.rectangle(x, height * 0.86, x + 0.1 * width, height * 0.885, (0.8 * light,) * 3)
    grain = soft_noise(height, width, 40, random)[..., None]
    canvas.pixels *= 0.85 + 0.3 * grain
    return horizon


def _draw_objects(
    canvas: Canvas, horizon: float, random: np.random.Generator
) -> dict[int, tuple[float, float, float, float]]:
    """Pedestrians and clutter, the far ones first. Returns each pedestrian's box by its number."""
    height, width = canvas.owner.shape
    kinds = ["pedestrian"] * int(random.choice((0, 1, 2, 3), p=(0.1, 0.4, 0.3, 0.2)))
    kinds += list(random.choice(_CLUTTER, size=random.integers(2, 6)))
    depths = random.uniform(0.22, 1.0, len(kinds))
    boxes = {}
    taken: list[float] = []
    for number, place in enumerate(np.argsort(depths), start=1):
        kind, depth = kinds[place], depths[place]
        foot = horizon + depth * (height * 0.98 - horizon)
        tall = (foot - horizon) * random.uniform(0.95, 1.15) * _HEIGHT_OF[kind]
        x = random.uniform(0.04, 0.96) * width
        if kind == "pedestrian":
            # Two people on one spot make one blob with two boxes, which no detector could tell apart.
            for _ in range(10):
                if all(abs(x - other) > 0.3 * tall for other in taken):
                    break
                x = random.uniform(0.04, 0.96) * width
            taken.append(x)
        canvas.object = number
        box = _DRAW[kind](canvas, x, foot, tall, random)
        if kind == "pedestrian":
            left, top, right, bottom = box
            box = max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height))
            if box[2] - box[0] > 2 and box[3] - box[1] > 4:
                boxes[number] = box
    canvas.object = 0
    return boxes


Box = tuple[float, float, float, float]


def _pedestrian(canvas: Canvas, x: float, foot: float, tall: float, random: np.random.Generator) -> Box:
    skin = np.array((0.9, 0.72, 0.6)) * random.uniform(0.4, 1.0)
    shirt, trousers = random.uniform(0.05, 0.95, 3), random.uniform(0.05, 0.7, 3)
    head, stride = tall * 0.075, tall * random.uniform(0.02, 0.14)
    hip, shoulder, arm = foot - tall * 0.47, foot - tall * 0.82, tall * random.uniform(0.1, 0.17)
    thick = tall * 0.055
    for side in (-1, 1):
        canvas.limb((x + side * thick * 0.6, hip), (x + side * stride, foot - thick), thick, trousers)
        canvas.limb((x + side * thick * 1.4, shoulder), (x + side * arm, hip), thick * 0.65, shirt * 0.85)
    canvas.limb((x, shoulder + thick), (x, hip), thick * 1.6, shirt)
    canvas.ellipse(x, foot - tall + head, head * 0.85, head, skin)
    canvas.ellipse(x, foot - tall + head * 0.55, head * 0.85, head * 0.55, random.uniform(0.02, 0.5, 3))
    reach = max(stride + thick, arm + thick * 0.65, thick * 1.6)
    return x - reach, foot - tall, x + reach, foot


def _post(canvas: Canvas, x: float, foot: float, tall: float, random: np.random.Generator) -> Box:
    wide = tall * random.uniform(0.025, 0.06)
    canvas.rectangle(
        x - wide, foot - tall, x + wide, foot, random.uniform(0.1, 0.7) * random.uniform(0.8, 1, 3)
    )
    return x - wide, foot - tall, x + wide, foot


def _sign(canvas: Canvas, x: float, foot: float, tall: float, random: np.random.Generator) -> Box:
    _post(canvas, x, foot, tall * 0.95, random)
    plate = tall * random.uniform(0.1, 0.14)
    colour = random.uniform(0.2, 1.0, 3)
    if random.random() < 0.5:
        canvas.ellipse(x, foot - tall + plate, plate, plate, colour)
        canvas.ellipse(x, foot - tall + plate, plate * 0.7, plate * 0.7, 1 - 0.5 * colour)
    else:
        canvas.rectangle(x - plate, foot - tall, x + plate, foot - tall + plate * 1.6, colour)
    return x - plate, foot - tall, x + plate, foot


def _bollard(canvas: Canvas, x: float, foot: float, tall: float, random: np.random.Generator) -> Box:
    colour, wide = random.uniform(0.1, 0.9, 3), tall * 0.16
    canvas.limb((x, foot - tall + wide), (x, foot - wide * 0.3), wide, colour)
    canvas.rectangle(x - wide, foot - tall * 0.7, x + wide, foot - tall * 0.55, 1 - colour)
    return x - wide, foot - tall, x + wide, foot


def _tree(canvas: Canvas, x: float, foot: float, tall: float, random: np.random.Generator) -> Box:
    bark, leaf = random.uniform(0.1, 0.35), np.array((0.15, 0.4, 0.12)) * random.uniform(0.6, 1.5)
    canvas.limb((x, foot - tall * 0.6), (x, foot), tall * 0.04, (bark * 1.2, bark, bark * 0.7))
    for _ in range(7):
        radius = tall * random.uniform(0.08, 0.16)
        across, up = random.normal(0, tall * 0.1), tall * random.uniform(0.55, 0.95)
        canvas.ellipse(x + across, foot - up, radius, radius, leaf * random.uniform(0.7, 1.2))
    return x - tall * 0.2, foot - tall, x + tall * 0.2, foot


def _car(canvas: Canvas, x: float, foot: float, tall: float, random: np.random.Generator) -> Box:
    long, colour = tall * random.uniform(1.3, 1.8), random.uniform(0.05, 0.95, 3)
    wheel = tall * 0.17
    canvas.limb(
        (x - long * 0.45, foot - tall * 0.7), (x + long * 0.45, foot - tall * 0.7), tall * 0.3, colour
    )
    canvas.rectangle(x - long * 0.75, foot - tall * 0.62, x + long * 0.75, foot - wheel, colour)
    canvas.limb(
        (x - long * 0.38, foot - tall * 0.75),
        (x + long * 0.38, foot - tall * 0.75),
        tall * 0.17,
        (0.15, 0.2, 0.25),
    )
    for side in (-1, 1):
        canvas.ellipse(x + side * long * 0.45, foot - wheel, wheel, wheel, (0.05, 0.05, 0.06))
    return x - long * 0.75, foot - tall, x + long * 0.75, foot


_DRAW = {
    "pedestrian": _pedestrian,
    "post": _post,
    "sign": _sign,
    "bollard": _bollard,
    "tree": _tree,
    "car": _car,
}
