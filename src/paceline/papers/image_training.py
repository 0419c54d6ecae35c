"""Paper 4's training task, as a script: `python -m paceline.papers.image_training --folder OUT …`.

With `--emulated-ms` computing is emulated: a step makes a gradient of the right size without looking at the
images, and takes this long for each image, ± 10 %. Parameters, gradients, servers and links are real.
"""

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.data.cifar10 import cifar10, drawn_shapes
from paceline.data.options import SYNTHETIC, ends_with_message
from paceline.papers.networks import NETWORKS
from paceline.papers.scoring import calibrated_accuracy
from paceline.papers.step_times import Stopwatch

__all__ = ["TEST_IMAGES", "images_of"]

TEST_IMAGES = 1000
_JITTER = 0.1


def images_of(data: str, count: int) -> tuple[TensorDataset, TensorDataset]:
    """`count` images to train on and 1,000 to test, of CIFAR-10 or drawn."""
    if data == SYNTHETIC:
        return drawn_shapes(count, seed=1), drawn_shapes(TEST_IMAGES, seed=0)
    train, test = cifar10(data, train=True), cifar10(data, train=False)
    return _first(train, count), _first(test, TEST_IMAGES)


def _first(data: TensorDataset, count: int) -> TensorDataset:
    return TensorDataset(*(tensor[:count] for tensor in data.tensors))


@ends_with_message
def main() -> None:
    """Train, note when each step ended, and measure the model's accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data", default=SYNTHETIC)
    parser.add_argument("--images", type=int, required=True)
    parser.add_argument("--network", choices=("resnet18", "inception-v1"), required=True)
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--coarse", action="store_true")
    parser.add_argument("--batch-size", type=int, required=True, help="of this worker")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--emulated-ms", type=float, default=0.0, help="of computing, for each image")
    parser.add_argument("--tested", action="store_true", help="measure accuracy at the end")
    args = parser.parse_args()
    emulated = args.emulated_ms > 0
    train, test = images_of(args.data, args.images) if not emulated else (_numbers(args.images), None)

    torch.manual_seed(0)
    model: nn.Module = NETWORKS[args.network](10, width=args.width, coarse=args.coarse)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)

    chance = random.Random(paceline.rank())
    watch = Stopwatch(args.folder, paceline.rank())
    for _ in paceline.epochs(args.epochs):
        for images, labels in loader:
            if emulated:
                seconds = len(images) * args.emulated_ms / 1e3 * chance.uniform(1 - _JITTER, 1 + _JITTER)
                _emulate(model, seconds)
            else:
                nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step_ended(len(images))
    score = None
    if args.tested and test is not None and paceline.is_main():
        with paceline.run_parameters():
            score = calibrated_accuracy(model, train.tensors[0], test)
    watch.write(score)


def _numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.zeros(count, 1), torch.zeros(count, dtype=torch.int64))


def _emulate(model: nn.Module, seconds: float) -> None:
    """Leave a small gradient in every parameter, after so many seconds."""
    end = time.perf_counter() + seconds
    torch.stack(list(_parts(model))).sum().backward()
    time.sleep(max(0.0, end - time.perf_counter()))


def _parts(model: nn.Module) -> Iterator[Tensor]:
    return (1e-9 * parameter.sum() for parameter in model.parameters())


if __name__ == "__main__":
    main()
