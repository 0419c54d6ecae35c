"""Finds a data set's files below the directory that the user named, and says what is missing."""

from collections.abc import Sequence
from pathlib import Path

from paceline.exceptions import DataError

__all__ = ["existing_folder", "first_folder_with"]


def existing_folder(data: str | Path) -> Path:
    """The directory `data`, which must exist and have something in it."""
    folder = Path(data).expanduser()
    if not folder.exists():
        raise DataError(
            f"the data directory {folder} does not exist. Name another one, or use --data synthetic."
        )
    if not folder.is_dir():
        raise DataError(f"{folder} is a file; --data takes the directory that holds the data set.")
    if not any(folder.iterdir()):
        raise DataError(
            f"the data directory {folder} is empty. Unpack the data set into it, or use --data synthetic."
        )
    return folder


def first_folder_with(root: Path, places: Sequence[str], names: Sequence[str], advice: str) -> Path:
    """The first of `places` below `root` that has one of the files or folders `names`."""
    for place in places:
        if any((root / place / name).exists() for name in names):
            return root / place
    looked = ", ".join(str(root / place) for place in places)
    raise DataError(f"no {' or '.join(names)} in {looked}: {advice}.")
