"""Paper 1's training task, as a script: `python -m paceline.papers.photo_training --folder OUT …`."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.data.image_folder import image_folder
from paceline.data.options import ends_with_message
from paceline.papers.networks import NETWORKS
from paceline.papers.photos import Preprocessing
from paceline.papers.step_times import Stopwatch


@ends_with_message
def main() -> None:
    """Train on all photos, and note when each step ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--network", choices=("alexnet", "vgg16"), required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    args = parser.parse_args()
    photos, _ = image_folder(args.data, test_share=0.0)
    photos.transform = Preprocessing(args.size)

    torch.manual_seed(0)
    model: nn.Module = NETWORKS[args.network](len(photos.classes), hidden=args.hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    loader = DataLoader(photos, batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)

    watch = Stopwatch(args.folder, paceline.rank())
    for _ in paceline.epochs(args.epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step_ended(len(images))
            paceline.log(loss=loss.item())
    watch.write()


if __name__ == "__main__":
    main()
