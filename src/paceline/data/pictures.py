"""Small pictures of what a trained model does: images with captions, images with boxes, text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.data.options import vision
from paceline.exceptions import DataError

__all__ = ["save_boxes", "save_images", "save_predictions", "save_text"]

_CAPTION, _GAP, _PAPER = 14, 4, "white"
_RIGHT, _WRONG, _INK = (0, 120, 60), (200, 30, 30), (27, 33, 38)
_LINE = 15


@torch.no_grad()
def save_predictions(
    file: str, model: nn.Module, test: Dataset[Any], classes: Sequence[str] | None = None, *, count: int = 24
) -> None:
    """A classifier's answers for some test images: green where right, red with the true class where wrong."""
    places = torch.linspace(0, len(test) - 1, min(count, len(test))).long().tolist()  # type: ignore[arg-type]
    samples = [test[place] for place in places]
    images, labels = torch.stack([image for image, _ in samples]), [int(label) for _, label in samples]
    was_training = model.training
    model.eval()
    answers = model(images).argmax(1).tolist()
    model.train(was_training)
    names = [str(number) for number in range(max(*answers, *labels) + 1)] if classes is None else classes
    captions = [
        names[answer] if answer == label else f"{names[answer]} ({names[label]})"
        for answer, label in zip(answers, labels, strict=True)
    ]
    right = [answer == label for answer, label in zip(answers, labels, strict=True)]
    save_images(file, images, captions, right, side=72 if classes is None else 104)


def save_images(
    file: str,
    images: Tensor,
    captions: Sequence[str],
    right: Sequence[bool],
    *,
    side: int = 72,
    columns: int = 8,
) -> None:
    """A sheet of images (n × channels × height × width, of any range), green captions where `right`.

    Raises:
        UsageError: Pillow is missing.
        DataError: the file cannot be written.
    """
    rows = -(-len(images) // columns)
    wide, tall = side + _GAP, side + _CAPTION + _GAP
    sheet, draw = _paper(columns * wide + _GAP, rows * tall + _GAP)
    for number, (image, caption, good) in enumerate(zip(images, captions, right, strict=True)):
        left, top = _GAP + number % columns * wide, _GAP + number // columns * tall
        sheet.paste(_drawn(_stretched(image)).resize((side, side)), (left, top))
        draw.text((left, top + side), caption, fill=_RIGHT if good else _WRONG)
    _save(sheet, file)


def save_boxes(
    file: str, images: Sequence[Tensor], found: Sequence[Tensor], true: Sequence[Tensor], *, scale: int = 2
) -> None:
    """Images (3 × height × width, 0 to 1) below each other: boxes that were found green, true ones white."""
    height, width = (scale * each for each in images[0].shape[1:])
    sheet, draw = _paper(2 * (width + _GAP) + _GAP, -(-len(images) // 2) * (height + _GAP) + _GAP)
    for number, (image, ours, theirs) in enumerate(zip(images, found, true, strict=True)):
        left, top = _GAP + number % 2 * (width + _GAP), _GAP + number // 2 * (height + _GAP)
        sheet.paste(_drawn(image).resize((width, height)), (left, top))
        for boxes, colour, thick in ((theirs, (255, 255, 255), 1), (ours, (0, 255, 120), 2)):
            for box in boxes.tolist():
                corners = [scale * value + shift for value, shift in zip(box, (left, top) * 2, strict=True)]
                draw.rectangle(corners, outline=colour, width=thick)
    _save(sheet, file)


def save_text(file: str, lines: Sequence[str], *, width: int = 640) -> None:
    """Lines of text."""
    sheet, draw = _paper(width, _LINE * len(lines) + 2 * _GAP)
    for number, line in enumerate(lines):
        draw.text((_GAP, _GAP + number * _LINE), line, fill=_INK)
    _save(sheet, file)


def _paper(width: int, height: int) -> tuple[Any, Any]:
    sheet = vision("PIL.Image").new("RGB", (width, height), _PAPER)
    return sheet, vision("PIL.ImageDraw").Draw(sheet)


def _stretched(image: Tensor) -> Tensor:
    low, high = image.min(), image.max()
    return (image - low) / (high - low).clamp(min=1e-6)


def _drawn(image: Tensor) -> Any:
    """An image (channels × height × width, 0 to 1) for Pillow."""
    colours = image.expand(3, -1, -1) if len(image) == 1 else image
    pixels = (colours.clamp(0, 1) * 255).to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    return vision("PIL.Image").fromarray(pixels)


def _save(sheet: Any, file: str) -> None:
    try:
        sheet.save(Path(file).expanduser(), optimize=True, quality=85)
    except ValueError as error:
        raise DataError(f"--picture {file}: give a name that ends in .png or .jpg.") from error
    except OSError as error:
        raise DataError(f"--picture {file} cannot be written: {error.strerror or error}.") from error
