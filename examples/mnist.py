"""LeNet-5 on MNIST.

python examples/mnist.py --data ~/mnist                          # alone; without --data on drawn digits
paceline run --workers 2 --mode asp examples/mnist.py            # with servers and workers
"""

import argparse
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.data.accuracy import accuracy
from paceline.data.mnist import mnist
from paceline.data.options import data_options, ends_with_message, marks_of, source_of
from paceline.data.pictures import save_predictions


def lenet() -> nn.Module:
    """LeCun's network of 1998, with ReLU and max pooling: 61,706 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


@ends_with_message
def main() -> None:
    """Train and test."""
    parser = argparse.ArgumentParser(description="LeNet-5 on MNIST")
    data_options(parser, epochs=3, batch_size=64, data="a directory with MNIST's four IDX files")
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    train, test = mnist(args.data, train=True), mnist(args.data, train=False)

    torch.manual_seed(0)
    model = lenet()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)

    for _ in paceline.epochs(1 if args.steps else args.epochs):
        for images, labels in islice(loader, args.steps):
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            paceline.log(loss=loss.item())
    if paceline.is_main():
        with paceline.run_parameters():
            score = accuracy(model, test)
            if args.picture:
                save_predictions(args.picture, model, test)
        paceline.log(accuracy=score, **marks_of(args.data))
        print(f"mnist, {source_of(args.data)}: test accuracy {score:.4f}")


if __name__ == "__main__":
    main()
