"""Photos in one folder for every class."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.folders import existing_folder
from paceline.data.images import ENDINGS, image_size, read_image, readable
from paceline.exceptions import DataError

__all__ = ["ImageFolder", "image_folder"]

Transform = Callable[[Tensor], Tensor]


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images (3 × height × width, after `transform`) and the numbers of their classes.

    `transform` may be set or changed at any time. `skipped` has one line for every file that was left out.
    """

    def __init__(self, files: list[tuple[Path, int]], classes: tuple[str, ...], skipped: list[str]) -> None:
        self.files, self.classes, self.skipped = files, classes, skipped
        self.transform: Transform | None = None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, label = self.files[index]
        image = read_image(file)
        return (self.transform(image) if self.transform else image), label


def image_folder(
    data: str | Path, *, skip_broken: bool = False, test_share: float = 0.2
) -> tuple[ImageFolder, ImageFolder]:
    """The training and the test part of a directory with a folder for every class.

    Where the directory has `train` and `test` (or `val`), these hold the class folders. Otherwise
    `test_share` of every class is for testing, always the same files. Every file's header and end are read
    first, so that a half-downloaded photo is found before training begins.

    Args:
        data: the directory.
        skip_broken: leave broken files out. Then every file is decoded once, to find them all.
        test_share: of every class, where the directory has no `test` of its own.

    Raises:
        DataError: the directory or a class has too few files, or a file is broken.
    """
    root = existing_folder(data)
    test = next((root / name for name in ("test", "val") if (root / name).is_dir()), None)
    if (root / "train").is_dir() and test:
        learned, tested = _load(root / "train", 1, skip_broken), _load(test, 1, skip_broken)
        if learned.classes != tested.classes:
            raise DataError(
                f"{root / 'train'} has the classes {', '.join(learned.classes)}, "
                f"but {test} has {', '.join(tested.classes)}."
            )
        return learned, tested
    whole = _load(root, 2, skip_broken)
    learned, tested = (ImageFolder([], whole.classes, list(whole.skipped)) for _ in range(2))
    for label in range(len(whole.classes)):
        files = [each for each in whole.files if each[1] == label]
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(label)).tolist()
        cut = min(max(1, round(len(files) * test_share)), len(files) - 1)
        tested.files += [files[place] for place in order[:cut]]
        learned.files += [files[place] for place in order[cut:]]
    return learned, tested


def _load(root: Path, least: int, skip_broken: bool) -> ImageFolder:
    """All images below `root`; `least` is how many a class must have."""
    folders = sorted(
        folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith(".")
    )
    if len(folders) < 2:
        raise DataError(
            f"{root} has {len(folders)} folders. Put the photos of each class into a folder of its own, "
            "named after the class; there must be two classes or more."
        )
    found = ImageFolder([], tuple(folder.name for folder in folders), [])
    for label, folder in enumerate(folders):
        files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in ENDINGS)
        good, problems = readable(files, read_image if skip_broken else image_size, skip_broken=skip_broken)
        if len(good) < least:
            left = f" ({len(problems)} broken ones left out)" if problems else ""
            raise DataError(
                f"the class folder {folder} has {len(good)} readable image{'s' * (len(good) != 1)}{left}; "
                f"it needs {least} or more{', one to train on and one to test' * (least > 1)}. "
                f"Files that count end in {', '.join(ENDINGS)}."
            )
        found.files += [(file, label) for file in good]
        found.skipped += problems
    return found
