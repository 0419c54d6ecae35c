"""Reads image files with Pillow, and finds the broken ones before training begins."""

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.data.options import vision
from paceline.exceptions import DataError

__all__ = ["ENDINGS", "image_size", "read_image", "readable"]

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm")
_END_OF_FILE = {".jpg": b"\xff\xd9", ".jpeg": b"\xff\xd9", ".png": b"IEND\xae\x42\x60\x82"}
"""What a complete file of a format has near its end."""
_TAIL_BYTES = 4096
"""Cameras write some bytes behind the end of an image."""


def read_image(file: Path) -> Tensor:
    """The colours of an image file: 3 × height × width, uint8.

    Raises:
        DataError: the file is broken; the message names it.
    """
    pillow = vision("PIL.Image")
    try:
        with warnings.catch_warnings(action="ignore"), pillow.open(file) as image:
            pixels = np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise DataError(_broken(file, error)) from error
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def image_size(file: Path) -> tuple[int, int]:
    """Width and height, from the file's header; also checks that the file has its end.

    Raises:
        DataError: the file is not an image, or it was not copied or downloaded completely.
    """
    pillow = vision("PIL.Image")
    try:
        with warnings.catch_warnings(action="ignore"), pillow.open(file) as image:
            width, height = image.size
        with file.open("rb") as stream:
            stream.seek(-min(_TAIL_BYTES, file.stat().st_size), 2)
            tail = stream.read()
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise DataError(_broken(file, error)) from error
    if _END_OF_FILE.get(file.suffix.lower(), b"") not in tail and image.format in ("JPEG", "PNG"):
        raise DataError(_broken(file, "its end is missing"))
    return width, height


def readable(
    files: Sequence[Path], check: Callable[[Path], object], *, skip_broken: bool
) -> tuple[list[Path], list[str]]:
    """Check all files, in order, with a few threads.

    Args:
        files: what to check.
        check: raises DataError for a broken file.
        skip_broken: leave broken files out instead of raising the first one's error.

    Returns:
        The good files, and for every broken one what is wrong with it.
    """

    def problem(file: Path) -> str | None:
        try:
            check(file)
        except DataError as error:
            if not skip_broken:
                raise
            return str(error)
        return None

    with ThreadPoolExecutor(4) as pool:
        problems = list(pool.map(problem, files))
    good = [file for file, found in zip(files, problems, strict=True) if found is None]
    return good, [found for found in problems if found is not None]


def _broken(file: Path, reason: object) -> str:
    return f"{file} is broken ({reason}). Replace or remove it, or leave such files out with --skip-broken."
