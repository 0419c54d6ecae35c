"""KITTI's object detection data set: images and label files, for detecting one kind of object."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.folders import existing_folder, first_folder_with
from paceline.data.images import image_size, read_image, readable
from paceline.exceptions import DataError

__all__ = ["Kitti", "KittiObject", "kitti", "read_labels"]

_COLUMNS = 15
_EDGE = 1.0
"""A box may reach this many pixels over the image's edge; it is cut there."""
# KITTI's own rule for "moderate", its main figure: what is harder is neither right nor wrong.
_LEAST_HEIGHT, _MOST_OCCLUDED, _MOST_TRUNCATED = 25, 1, 0.3
_SIMILAR = {"Pedestrian": {"Person_sitting"}, "Car": {"Van"}}


class KittiObject(NamedTuple):
    """One line of a label file."""

    kind: str
    truncated: float
    occluded: int
    box: tuple[float, float, float, float]
    """Left, top, right, bottom in pixels."""


class Kitti(Dataset[tuple[Tensor, dict[str, Tensor]]]):
    """Images (3 × height × width, float32 from 0 to 1) with targets for torchvision's detectors.

    `boxes` and `labels` (all 1) are the objects of one kind; `ignored` are those that KITTI's "moderate" does
    not count, DontCare regions and similar kinds. `skipped` has a line for every image that was left out.
    """

    def __init__(self, images: list[Path], labels: Path, kind: str, skipped: list[str]) -> None:
        self.images, self.labels, self.kind, self.skipped = images, labels, kind, skipped

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        file = self.images[index]
        image = read_image(file).float().div_(255)
        objects = read_labels(self.labels / f"{file.stem}.txt", (image.shape[2], image.shape[1]))
        boxes = [each.box for each in objects if self._counts(each)]
        ignored = [
            each.box
            for each in objects
            if each.kind in {self.kind, "DontCare"} | _SIMILAR.get(self.kind, set())
            and not self._counts(each)
        ]
        return image, {
            "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            "labels": torch.ones(len(boxes), dtype=torch.int64),
            "ignored": torch.tensor(ignored, dtype=torch.float32).reshape(-1, 4),
        }

    def _counts(self, each: KittiObject) -> bool:
        return (
            each.kind == self.kind
            and each.occluded <= _MOST_OCCLUDED
            and each.truncated <= _MOST_TRUNCATED
            and each.box[3] - each.box[1] >= _LEAST_HEIGHT
        )


def kitti(
    data: str | Path, *, kind: str = "Pedestrian", skip_broken: bool = False, test_share: float = 0.2
) -> tuple[Kitti, Kitti]:
    """The training and the test part of KITTI's labelled images (`training`; `testing` has no labels).

    Args:
        data: the directory with `training/image_2` and `training/label_2`, or the one where torchvision put
            them (`Kitti/raw/training`).
        kind: as in the label files: Pedestrian, Car, Cyclist, …
        skip_broken: leave images out that are broken or whose labels are; every image is decoded once.
        test_share: for testing; always the same images.

    Raises:
        DataError: a folder, an image or a label file is missing or broken; names the file and the line.
    """
    root = existing_folder(data)
    folder = first_folder_with(
        root,
        ("training", "raw/training", "Kitti/raw/training", "."),
        ("image_2",),
        "unpack data_object_image_2.zip and data_object_label_2.zip into it, or train with --data synthetic",
    )
    labels = folder / "label_2"
    if not labels.is_dir():
        raise DataError(f"{folder} has image_2, but no label_2. Unpack data_object_label_2.zip, too.")
    files = sorted((folder / "image_2").glob("*.png")) + sorted((folder / "image_2").glob("*.jpg"))
    if len(files) < 2:
        raise DataError(
            f"{folder / 'image_2'} has {len(files)} images; one to train on and one to test are needed."
        )

    def check(file: Path) -> None:
        size = image_size(file)
        read_labels(labels / f"{file.stem}.txt", size)
        if skip_broken:
            read_image(file)

    good, problems = readable(files, check, skip_broken=skip_broken)
    if len(good) < 2:
        raise DataError(
            f"{folder / 'image_2'}: only {len(good)} of {len(files)} images are usable. {problems[0]}"
        )
    order = torch.randperm(len(good), generator=torch.Generator().manual_seed(0)).tolist()
    cut = min(max(1, round(len(good) * test_share)), len(good) - 1)
    tested, learned = [good[place] for place in order[:cut]], [good[place] for place in order[cut:]]
    return Kitti(learned, labels, kind, problems), Kitti(tested, labels, kind, list(problems))


def read_labels(file: Path, size: tuple[int, int]) -> list[KittiObject]:
    """The objects of a label file for an image of this width and height.

    Raises:
        DataError: names the file and the line.
    """
    try:
        lines = file.read_text("ascii").splitlines()
    except FileNotFoundError as error:
        raise DataError(f"the label file {file} is missing; its image is there.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not a label file ({error}).") from error
    return [
        _parse(line, f"{file}, line {number}", size) for number, line in enumerate(lines, 1) if line.strip()
    ]


def _parse(line: str, where: str, size: tuple[int, int]) -> KittiObject:
    words = line.split()
    if len(words) < _COLUMNS:
        raise DataError(f"{where}: {len(words)} columns, expected {_COLUMNS}: {line.strip()[:80]!r}.")
    try:
        truncated, occluded = float(words[1]), int(words[2])
        left, top, right, bottom = map(float, words[4:8])
    except ValueError as error:
        raise DataError(f"{where}: {error}.") from error
    width, height = size
    box = f"the box from ({left:g}, {top:g}) to ({right:g}, {bottom:g})"
    if not (left < right and top < bottom):
        raise DataError(f"{where}: {box} has no area.")
    if left < -_EDGE or top < -_EDGE or right > width + _EDGE or bottom > height + _EDGE:
        raise DataError(f"{where}: {box} lies outside the image, which has {width} × {height} pixels.")
    cut = max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height))
    return KittiObject(words[0], truncated, occluded, cut)
