"""The networks of papers 1 and 4, as torchvision builds them, with a width to choose.

Not torchvision's own, because small scales need narrower ones, and the command then needs no torchvision.
`tests/unit/test_papers.py` compares the numbers of parameters with torchvision's.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["NETWORKS", "alexnet", "inception_v1", "resnet18", "vgg16"]

_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Channels of each convolution; 0 is a pooling layer."""


def alexnet(classes: int, *, hidden: int = 4096) -> nn.Sequential:
    """AlexNet, for images of 64×64 pixels or more; `hidden`: width of its two hidden linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.AdaptiveAvgPool2d(6)),
        *(nn.Flatten(), nn.Dropout(), nn.Linear(256 * 36, hidden), nn.ReLU()),
        *(nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes)),
    )


def vgg16(classes: int, *, hidden: int = 4096) -> nn.Sequential:
    """VGG16, for images of 32×32 pixels or more; `hidden`: width of its two hidden linear layers."""
    layers: list[nn.Module] = []
    channels = 3
    for wanted in _VGG16:
        if wanted:
            layers += [nn.Conv2d(channels, wanted, 3, padding=1), nn.ReLU()]
            channels = wanted
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers,
        *(nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(512 * 49, hidden), nn.ReLU(), nn.Dropout()),
        *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, classes)),
    )


class _Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()),
            *(nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, images: Tensor) -> Tensor:
        """Images in, images out."""
        return torch.relu(self.body(images) + self.shortcut(images))


def resnet18(classes: int, *, width: float = 1.0, coarse: bool = False) -> nn.Sequential:
    """ResNet-18 for images of 32×32 pixels.

    Args:
        width: of every layer, in ResNet-18's own.
        coarse: begin as for large images, with 1/16 of the pixels: as many parameters, less computing.
    """
    first, *others = (round(width * channels) for channels in (64, 64, 128, 256, 512))
    layers: list[nn.Module] = _first_layers(first, coarse)
    for number, channels in enumerate(others):
        layers += [
            _Residual(first, channels, 2 if number else 1),
            _Residual(channels, channels, 1),
        ]
        first = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(first, classes))


class _Inception(nn.Module):
    """Four ways beside each other."""

    def __init__(self, before: int, ways: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        (one,), (two_in, two), (three_in, three), (four,) = ways
        self.ways = nn.ModuleList(
            [
                nn.Sequential(*_convolution(before, one, 1)),
                nn.Sequential(*_convolution(before, two_in, 1), *_convolution(two_in, two, 3)),
                nn.Sequential(*_convolution(before, three_in, 1), *_convolution(three_in, three, 3)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), *_convolution(before, four, 1)),
            ]
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images in, images with the channels of all ways out."""
        return torch.cat([way(images) for way in self.ways], 1)


_INCEPTIONS: tuple[tuple[tuple[int, ...], ...] | None, ...] = (
    ((64,), (96, 128), (16, 32), (32,)),
    ((128,), (128, 192), (32, 96), (64,)),
    None,
    ((192,), (96, 208), (16, 48), (64,)),
    ((160,), (112, 224), (24, 64), (64,)),
    ((128,), (128, 256), (24, 64), (64,)),
    ((112,), (144, 288), (32, 64), (64,)),
    ((256,), (160, 320), (32, 128), (128,)),
    None,
    ((256,), (160, 320), (32, 128), (128,)),
    ((384,), (192, 384), (48, 128), (128,)),
)
"""Channels of the ways of each module; None is a pooling layer."""


def inception_v1(classes: int, *, width: float = 1.0, coarse: bool = False) -> nn.Sequential:
    """Inception-v1 (GoogLeNet) for images of 32×32 pixels, with batch normalisation, as torchvision's.

    Args:
        width: of every layer, in Inception-v1's own.
        coarse: begin as for large images, with 1/16 of the pixels: as many parameters, less computing.
    """
    first, third = round(width * 64), round(width * 192)
    layers = [
        *_first_layers(first, coarse),
        *(*_convolution(first, first, 1), *_convolution(first, third, 3), nn.MaxPool2d(3, 2, ceil_mode=True)),
    ]
    channels = third
    for ways in _INCEPTIONS:
        if ways is None:
            layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
            continue
        scaled = tuple(tuple(max(1, round(width * each)) for each in way) for way in ways)
        layers.append(_Inception(channels, scaled))
        channels = sum(way[-1] for way in scaled)
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(channels, classes)
    )


def _first_layers(channels: int, coarse: bool) -> list[nn.Module]:
    if not coarse:
        return _convolution(3, channels, 3)
    return [
        *(nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
        nn.MaxPool2d(3, 2, 1),
    ]


def _convolution(before: int, after: int, size: int) -> list[nn.Module]:
    return [
        nn.Conv2d(before, after, size, padding=size // 2, bias=False),
        nn.BatchNorm2d(after, eps=1e-3),
        nn.ReLU(),
    ]


NETWORKS: dict[str, Callable[..., nn.Sequential]] = {
    "alexnet": alexnet,
    "vgg16": vgg16,
    "resnet18": resnet18,
    "inception-v1": inception_v1,
}
"""By the name that scripts take."""
