"""How much of each paper is repeated: `small` for two cores and twenty minutes, `full` as the papers say."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from paceline.exceptions import UsageError

__all__ = ["PAPER1", "PAPER4", "Paper1Amounts", "Paper4Amounts", "UseCase", "amounts_of"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class UseCase:
    """A network and a set of photos of paper 1."""

    name: str
    network: str
    photos: int
    size: int
    """Pixels of a side."""
    hidden: int
    """Width of the two hidden linear layers; 4096 is the networks' own."""
    batch_size: int
    epochs: int


@dataclass(frozen=True, kw_only=True)
class Paper1Amounts:
    """Of paper 1."""

    cases: tuple[UseCase, UseCase]
    rounds: int
    """How often each set-up is measured; the best counts."""


@dataclass(frozen=True, kw_only=True)
class Paper4Amounts:
    """Of paper 4. Batch sizes are of all workers together, as in the paper."""

    coarse: bool
    """Table II, figures 7 and 8: networks begin as for large images: all parameters, 1/7 of the computing."""
    profile_images: int
    """Table II: images in its one epoch."""
    accuracy_width: float
    """Figures 7 and 8: width of ResNet-18."""
    accuracy_images: int
    accuracy_epochs: int
    accuracy_seeds: int
    servers: tuple[int, ...]
    """Figure 9."""
    servers_images: int
    servers_epochs: int
    batch_width: float
    """Figures 9 and 10: width of the networks."""
    batch_sizes: tuple[int, ...]
    batch_images: int
    idle_rounds: int
    """Figure 11: steps of each worker."""


PAPER1: dict[str, Paper1Amounts] = {
    "tiny": Paper1Amounts(
        cases=(
            UseCase(
                name="ComplexSmall", network="vgg16", photos=36, size=32, hidden=16, batch_size=6, epochs=2
            ),
            UseCase(
                name="SimpleBig", network="alexnet", photos=36, size=64, hidden=16, batch_size=6, epochs=2
            ),
        ),
        rounds=1,
    ),
    "small": Paper1Amounts(
        cases=(
            UseCase(
                name="ComplexSmall",
                network="vgg16",
                photos=80,
                size=64,
                hidden=512,
                batch_size=16,
                epochs=2,
            ),
            UseCase(
                name="SimpleBig",
                network="alexnet",
                photos=300,
                size=128,
                hidden=512,
                batch_size=32,
                epochs=3,
            ),
        ),
        rounds=2,
    ),
    "full": Paper1Amounts(
        cases=(
            UseCase(
                name="ComplexSmall",
                network="vgg16",
                photos=791,
                size=224,
                hidden=4096,
                batch_size=32,
                epochs=3,
            ),
            UseCase(
                name="SimpleBig",
                network="alexnet",
                photos=6003,
                size=224,
                hidden=4096,
                batch_size=64,
                epochs=3,
            ),
        ),
        rounds=3,
    ),
}

PAPER4: dict[str, Paper4Amounts] = {
    "tiny": Paper4Amounts(
        coarse=True,
        profile_images=128,
        accuracy_width=0.0625,
        accuracy_images=256,
        accuracy_epochs=2,
        accuracy_seeds=1,
        servers=(1, 2),
        servers_images=128,
        servers_epochs=1,
        batch_width=0.0625,
        batch_sizes=(16, 512),
        batch_images=512,
        idle_rounds=5,
    ),
    "small": Paper4Amounts(
        coarse=True,
        profile_images=2048,
        accuracy_width=0.25,
        accuracy_images=2000,
        accuracy_epochs=13,
        accuracy_seeds=1,
        servers=(2, 4, 8),
        servers_images=2048,
        servers_epochs=2,
        batch_width=0.25,
        batch_sizes=(16, 32, 512),
        batch_images=1536,
        idle_rounds=14,
    ),
    "full": Paper4Amounts(
        coarse=False,
        profile_images=50_000,
        accuracy_width=1.0,
        accuracy_images=50_000,
        accuracy_epochs=15,
        accuracy_seeds=3,
        servers=(4, 8, 12),
        servers_images=50_000,
        servers_epochs=3,
        batch_width=1.0,
        batch_sizes=(16, 32, 64, 128, 256, 512),
        batch_images=50_000,
        idle_rounds=100,
    ),
}


def amounts_of(scales: Mapping[str, T], name: str) -> T:
    """The amounts of a scale."""
    if name not in scales:
        raise UsageError(
            f"--scale {name}: give small (two cores, twenty minutes) or full (as the paper says)"
        )
    return scales[name]
