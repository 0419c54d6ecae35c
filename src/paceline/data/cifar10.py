"""CIFAR-10 in its binary and its Python version, and a drawn stand-in. Nothing is unpickled."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.data.folders import existing_folder, first_folder_with
from paceline.data.options import SYNTHETIC
from paceline.data.plain_pickle import read_plain_pickle
from paceline.exceptions import DataError

__all__ = ["CLASSES", "cifar10", "drawn_shapes"]

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of the training part, for every colour."""

_PARTS = {True: [f"data_batch_{n}" for n in range(1, 6)], False: ["test_batch"]}
_IMAGE_BYTES = 3 * 32 * 32
_DRAWN = {True: 5000, False: 1000}


def cifar10(data: str | Path, *, train: bool) -> TensorDataset:
    """The training or the test part of CIFAR-10.

    Args:
        data: the directory with `data_batch_1.bin`, … (the binary version) or `data_batch_1`, … (the Python
            version, which torchvision downloads), or the one above; or "synthetic", for 6,000 drawn shapes.
        train: the training part, else the test part.

    Returns:
        Images (3×32×32, float32, normalised by the mean and deviation of each colour) and labels (int64).

    Raises:
        DataError: a file is missing, incomplete or not in this format.
    """
    if data == SYNTHETIC:
        return drawn_shapes(_DRAWN[train], seed=int(train))
    root, names = existing_folder(data), _PARTS[train]
    folder = first_folder_with(
        root,
        (".", "cifar-10-batches-bin", "cifar-10-batches-py"),
        (f"{names[0]}.bin", names[0]),
        "download and unpack cifar-10-binary.tar.gz into it, or train with --data synthetic",
    )
    parts = [_read(folder, name) for name in names]
    images = np.concatenate([images for images, _ in parts]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([labels for _, labels in parts])
    return TensorDataset(_normalised(torch.from_numpy(images)), torch.from_numpy(labels).long())


def _read(folder: Path, name: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images and labels of one file, whichever version there is."""
    file = folder / f"{name}.bin"
    if file.is_file():
        size = file.stat().st_size
        if not size or size % (1 + _IMAGE_BYTES):
            raise DataError(
                f"{file} has {size:,} bytes, not a multiple of {1 + _IMAGE_BYTES:,} (a label and an image): "
                "it is incomplete. Unpack or download it again."
            )
        rows = np.fromfile(file, np.uint8).reshape(-1, 1 + _IMAGE_BYTES)
        labels, images = rows[:, 0].copy(), rows[:, 1:].copy()
    elif (file := folder / name).is_file():
        labels, images = _arrays(file)
    else:
        raise DataError(f"{folder} has no {name}.bin and no {name}. Unpack the archive again.")
    if labels.max() >= len(CLASSES):
        place = int((labels >= len(CLASSES)).argmax())
        raise DataError(f"{file}: label {place} is {labels[place]}; labels go from 0 to {len(CLASSES) - 1}.")
    return images, labels


def _arrays(file: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Labels and images of a file of the Python version."""
    found = read_plain_pickle(file)
    if not isinstance(found, dict) or not {"labels", "data"} <= found.keys():
        raise DataError(f"{file} is a pickle, but not of CIFAR-10: it has no 'labels' and 'data'.")
    labels, content = found["labels"], found["data"]
    valid = isinstance(labels, list) and all(isinstance(label, int) and 0 <= label < 256 for label in labels)
    if (
        not valid
        or not isinstance(content, bytes)
        or len(content) != len(labels) * _IMAGE_BYTES
        or not labels
    ):
        raise DataError(f"{file}: its images and labels do not belong together. Download it again.")
    images = np.frombuffer(bytearray(content), np.uint8).reshape(-1, _IMAGE_BYTES)
    return np.array(labels, np.uint8), images


def _normalised(images: Tensor) -> Tensor:
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, DEVIATION))
    return images.float().div_(255).sub_(mean).div_(deviation)


def drawn_shapes(count: int, *, seed: int) -> TensorDataset:
    """Ten shapes and patterns of random colour, size and place on a plain ground, in CIFAR-10's form."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=random)

    def draw(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=random) * (high - low) + low

    grid = torch.arange(32) + 0.5
    rows, columns = torch.meshgrid(grid, grid, indexing="ij")
    centre, size = draw(11, 21, 2, 1, 1), draw(6, 11, 1, 1)
    down, across = (rows - centre[:, 0]) / size, (columns - centre[:, 1]) / size
    far, square = (down.square() + across.square()).sqrt(), torch.maximum(down.abs(), across.abs())
    wave = draw(4.5, 6.5, 1, 1)
    masks = torch.stack(
        [
            far < 1,  # disc
            square < 0.9,  # square
            (down < 0.8) & (down > 2 * across.abs() - 1),  # triangle
            (torch.minimum(down.abs(), across.abs()) < 0.3) & (square < 1),  # cross
            (far < 1) & (far > 0.6),  # ring
            (square < 0.95) & (square > 0.6),  # frame
            (square < 1) & ((down * wave).sin() > 0),  # stripes across
            (square < 1) & ((across * wave).sin() > 0),  # stripes down
            (square < 1) & (((down + across) * wave).sin() > 0),  # slanted stripes
            (square < 1) & ((down * wave).sin() * (across * wave).sin() > 0),  # a chess board
        ],
        1,
    )
    mask = masks[torch.arange(count), labels].unsqueeze(1)
    shape, ground = draw(0, 1, 3, 1, 1), draw(0, 1, 3, 1, 1)
    # A shape of its ground's colour would be invisible.
    shape = torch.where((shape - ground).abs().amax(1, keepdim=True) < 0.4, 1 - ground.round(), shape)
    pictures = torch.where(mask, shape, ground) + 0.08 * torch.randn(count, 3, 32, 32, generator=random)
    return TensorDataset(_normalised(pictures.clamp_(0, 1).mul_(255)), labels)
