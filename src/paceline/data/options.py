"""What the example scripts have in common: their options, and how they end when the data is unusable."""

import argparse
import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from paceline.exceptions import UsageError

__all__ = [
    "EMBEDDED",
    "SYNTHETIC",
    "data_options",
    "ends_with_message",
    "left_out",
    "marks_of",
    "source_of",
    "vision",
]

SYNTHETIC = "synthetic"
"""What `--data` takes instead of a directory, to train on generated data."""
EMBEDDED = "embedded"
"""What `--data` takes for the handwritten digits that come with scikit-learn."""


def data_options(
    parser: argparse.ArgumentParser,
    *,
    epochs: int,
    batch_size: int,
    data: str,
    default: str = SYNTHETIC,
    skip_broken: bool = False,
) -> None:
    """Add `--data`, `--epochs`, `--steps`, `--batch-size` and `--picture`.

    Args:
        parser: the script's own.
        epochs: default of `--epochs`.
        batch_size: default of `--batch-size`.
        data: what a directory must hold, for the help.
        default: of `--data`.
        skip_broken: add `--skip-broken` too, for data sets that are read file by file.
    """
    parser.add_argument(
        "--data",
        default=default,
        metavar="DIR|synthetic",
        help=f"{data}; or 'synthetic', generated data of the same shape (default: {default})",
    )
    parser.add_argument("--epochs", type=_positive, default=epochs, help="default: %(default)s")
    parser.add_argument("--steps", type=_positive, help="train for this many steps of each worker instead")
    parser.add_argument("--batch-size", type=_positive, default=batch_size, help="default: %(default)s")
    parser.add_argument(
        "--picture", metavar="FILE", help="draw what the trained model does, into this file, .png or .jpg"
    )
    if skip_broken:
        parser.add_argument(
            "--skip-broken", action="store_true", help="leave unreadable files out, and say how many"
        )


def source_of(data: str) -> str:
    """What an output says about where its data is from."""
    return {SYNTHETIC: "synthetic data", EMBEDDED: "scikit-learn's digits"}.get(data, data)


def left_out(skipped: Sequence[str]) -> str:
    """What an output says about files that `--skip-broken` left out; nothing if there are none."""
    return f", {len(skipped)} broken file{'s' * (len(skipped) != 1)} left out" if skipped else ""


def marks_of(data: str) -> dict[str, float]:
    """What a script logs beside its result: generated data shows in reports, comparisons and exports, too."""
    return {"synthetic_data": 1.0} if data == SYNTHETIC else {}


def ends_with_message(main: Callable[[], None]) -> Callable[[], None]:
    """Decorate `main`: invalid options and data end the script with their message and exit code 1."""

    @functools.wraps(main)
    def wrapped() -> None:
        try:
            main()
        except UsageError as error:
            raise SystemExit(f"error: {error}") from error

    return wrapped


def vision(module: str) -> Any:
    """Import a module of the extra `vision`: `vision("torchvision.models")`, `vision("PIL.Image")`."""
    try:
        found: ModuleType = importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise UsageError(f"this needs {name}: pip install 'paceline[vision]' ({error})") from error
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)
