"""MNIST and data sets in its format (IDX files, gzipped or not), and a drawn stand-in."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.data.folders import existing_folder, first_folder_with
from paceline.data.options import SYNTHETIC
from paceline.exceptions import DataError

__all__ = ["drawn_digits", "mnist", "read_idx"]

_NAMES = {True: "train", False: "t10k"}
_MOST_BYTES = 2**31
_DRAWN = {True: 6000, False: 1000}


def mnist(data: str | Path, *, train: bool) -> TensorDataset:
    """The training or the test part of MNIST, or of a data set with the same files (Fashion-MNIST, KMNIST).

    Args:
        data: the directory with `train-images-idx3-ubyte`, `t10k-labels-idx1-ubyte`, … as downloaded, with or
            without `.gz`, or one where torchvision put them (`MNIST/raw`); or "synthetic", for 7,000
            drawn digits.
        train: the training part, else the test part.

    Returns:
        Images (1×28×28, float32 from 0 to 1) and labels (int64, 0 to 9).

    Raises:
        DataError: a file is missing, incomplete or not in this format.
    """
    if data == SYNTHETIC:
        return drawn_digits(_DRAWN[train], seed=int(train))
    root, part = existing_folder(data), _NAMES[train]
    images_name, labels_name = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    folder = first_folder_with(
        root,
        (".", "raw", "MNIST/raw"),
        (images_name, f"{images_name}.gz"),
        "download the four files of MNIST into it, or train with --data synthetic",
    )
    images_file, labels_file = _find(folder, images_name), _find(folder, labels_name)
    images, labels = read_idx(images_file, dimensions=3), read_idx(labels_file, dimensions=1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_file} has {len(images)} images, but {labels_file} has {len(labels)} labels. "
            "They are not of one data set; download them again."
        )
    if len(labels) and labels.max() > 9:
        place = int((labels > 9).argmax())
        raise DataError(f"{labels_file}: label {place} is {labels[place]}; labels go from 0 to 9.")
    return TensorDataset(
        torch.from_numpy(images).unsqueeze(1).float().div_(255), torch.from_numpy(labels).long()
    )


def read_idx(file: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """The bytes of an IDX file (gzipped if its name ends so), in the shape that its header says."""
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rb") as stream:
            header = stream.read(4 + 4 * dimensions)
            if len(header) < 4 + 4 * dimensions or header[:3] != b"\0\0\x08" or header[3] != dimensions:
                raise DataError(
                    f"{file} is not an IDX file of bytes in {dimensions} dimensions: it begins with "
                    f"{header[:4].hex(' ') or 'nothing'}, expected 00 00 08 0{dimensions}. Download it again."
                )
            shape = [int.from_bytes(header[at : at + 4], "big") for at in range(4, len(header), 4)]
            size = math.prod(shape)
            if size > _MOST_BYTES:
                raise DataError(f"{file}: its header says {size:,} bytes, more than a data set has.")
            content = stream.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{file} is incomplete or broken ({error}). Download it again.") from error
    if len(content) != size:
        found = "more" if len(content) > size else f"{len(content):,}"
        raise DataError(
            f"{file}: its header says {' × '.join(map(str, shape))} = {size:,} bytes, but it has {found}. "
            "Download it again."
        )
    return np.frombuffer(bytearray(content), np.uint8).reshape(shape)


def _find(folder: Path, name: str) -> Path:
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            return file
    raise DataError(f"{folder} has no {name} and no {name}.gz. Download the missing file.")


# Strokes of each digit in a square from (0, 0), top left, to (1, 1).
_STROKES: dict[int, list[tuple[float, float]]] = {
    0: [(0.5, 0), (0.15, 0.2), (0.1, 0.7), (0.5, 1), (0.9, 0.7), (0.85, 0.2), (0.5, 0)],
    1: [(0.25, 0.25), (0.55, 0), (0.55, 1)],
    2: [(0.1, 0.25), (0.4, 0), (0.85, 0.15), (0.8, 0.45), (0.1, 1), (0.95, 1)],
    3: [(0.1, 0.05), (0.8, 0.05), (0.45, 0.4), (0.9, 0.65), (0.6, 1), (0.1, 0.9)],
    4: [(0.7, 1), (0.7, 0), (0.1, 0.65), (0.95, 0.65)],
    5: [(0.85, 0), (0.25, 0), (0.2, 0.45), (0.75, 0.45), (0.85, 0.8), (0.45, 1), (0.1, 0.9)],
    6: [(0.75, 0), (0.3, 0.4), (0.15, 0.75), (0.5, 1), (0.85, 0.75), (0.55, 0.5), (0.2, 0.65)],
    7: [(0.1, 0), (0.9, 0), (0.4, 1)],
    8: [
        (0.5, 0.45),
        (0.15, 0.2),
        (0.5, 0),
        (0.85, 0.2),
        (0.5, 0.45),
        (0.1, 0.75),
        (0.5, 1),
        (0.9, 0.75),
        (0.5, 0.45),
    ],
    9: [(0.8, 0.35), (0.45, 0.5), (0.15, 0.25), (0.5, 0), (0.8, 0.25), (0.8, 0.35), (0.6, 1)],
}


def drawn_digits(count: int, *, seed: int, size: int = 28) -> TensorDataset:
    """Digits drawn with a pen of random width, slant, size, place and unsteadiness; `size` pixels a side."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=random)
    most = max(map(len, _STROKES.values()))
    points = torch.tensor([[*s, *[s[-1]] * (most - len(s))] for s in _STROKES.values()])[labels] - 0.5

    def draw(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=random) * (high - low) + low

    points = points + draw(-0.06, 0.06, most, 2)
    angle, slant = draw(-0.25, 0.25), draw(-0.35, 0.35)
    turn = torch.stack([angle.cos(), -angle.sin() + slant, angle.sin(), angle.cos()], 1).view(-1, 2, 2)
    points = points @ turn.transpose(1, 2) * draw(0.4, 0.65, 1, 2) * size
    points = points + size / 2 + draw(-0.08, 0.08, 1, 2) * size
    pen = draw(0.03, 0.06, 1, 1) * size

    grid = torch.arange(size) + 0.5
    pixels = torch.stack(torch.meshgrid(grid, grid, indexing="xy"), -1).view(1, -1, 2)
    nearest = torch.full((count, size * size), float("inf"))
    for start, end in zip(points[:, :-1].unbind(1), points[:, 1:].unbind(1), strict=True):
        line = (end - start).unsqueeze(1)
        offset = pixels - start.unsqueeze(1)
        along = (
            (offset * line).sum(2, keepdim=True) / line.square().sum(2, keepdim=True).clamp(min=1e-6)
        ).clamp(0, 1)
        nearest = torch.minimum(nearest, (offset - along * line).norm(dim=2))
    ink = ((pen.squeeze(2) - nearest) + 0.5).clamp(0, 1)
    ink = (ink * draw(0.7, 1.0, 1) + 0.04 * torch.randn(ink.shape, generator=random)).clamp(0, 1)
    return TensorDataset(ink.view(count, 1, size, size), labels)
