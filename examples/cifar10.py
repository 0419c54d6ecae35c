"""ResNet-18 or Inception-v1 on CIFAR-10, as in paper 4.

python examples/cifar10.py --data ~/cifar-10-batches-bin         # alone; without --data on drawn shapes
paceline run --workers 2 --mode ssp:2 examples/cifar10.py --model inception-v1
"""

import argparse
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.data.accuracy import accuracy
from paceline.data.cifar10 import CLASSES, cifar10
from paceline.data.options import data_options, ends_with_message, marks_of, source_of, vision
from paceline.data.pictures import save_predictions


def make_model(name: str) -> nn.Module:
    """torchvision's model, with a first layer for images of 32×32 pixels instead of 224×224."""
    models = vision("torchvision.models")
    first = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    if name == "resnet18":
        model = models.resnet18(num_classes=10)
        model.conv1, model.maxpool = first, nn.Identity()
    else:
        model = models.googlenet(num_classes=10, aux_logits=False, init_weights=False)
        model.conv1.conv, model.maxpool1 = first, nn.Identity()
    made: nn.Module = model
    return made


@ends_with_message
def main() -> None:
    """Train and test."""
    parser = argparse.ArgumentParser(description="ResNet-18 or Inception-v1 on CIFAR-10")
    data_options(parser, epochs=1, batch_size=32, data="a directory with CIFAR-10, binary or Python version")
    parser.add_argument("--model", choices=("resnet18", "inception-v1"), default="resnet18")
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    train, test = cifar10(args.data, train=True), cifar10(args.data, train=False)

    torch.manual_seed(0)
    model = make_model(args.model)
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
                save_predictions(args.picture, model, test, CLASSES)
        paceline.log(accuracy=score, **marks_of(args.data))
        print(f"cifar10, {args.model}, {source_of(args.data)}: test accuracy {score:.4f}")


if __name__ == "__main__":
    main()
