"""AlexNet or VGG16 tell fire, smoke and neither apart in photos: paper 1's "SimpleBig" and "ComplexSmall".

python examples/fire.py --data ~/photos                          # alone; without --data on drawn landscapes
paceline run --workers 2 --mode bsp examples/fire.py --model vgg16 --size 64

The directory has a folder for every class (fire, no_fire, smoke).
"""

import argparse
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.data.accuracy import accuracy
from paceline.data.fire_scenes import FireScenes
from paceline.data.image_folder import ImageFolder, image_folder
from paceline.data.options import (
    SYNTHETIC,
    data_options,
    ends_with_message,
    left_out,
    marks_of,
    source_of,
    vision,
)
from paceline.data.pictures import save_predictions


def preprocessing(size: int, *, train: bool) -> Any:
    """The paper's: crop and scale, flip at random, normalise by ImageNet's mean and deviation."""
    v2 = vision("torchvision.transforms.v2")
    if train:
        cut = [v2.RandomResizedCrop(size, scale=(0.5, 1.0)), v2.RandomHorizontalFlip()]
    else:
        cut = [v2.Resize(size * 8 // 7), v2.CenterCrop(size)]
    normalise = v2.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    return v2.Compose([*cut, v2.ToDtype(torch.float32, scale=True), normalise])


@ends_with_message
def main() -> None:
    """Train and test."""
    parser = argparse.ArgumentParser(description="AlexNet or VGG16 on photos of fire and smoke")
    data_options(
        parser, epochs=5, batch_size=32, data="a directory with a folder for every class", skip_broken=True
    )
    parser.add_argument("--model", choices=("alexnet", "vgg16"), default="alexnet")
    parser.add_argument("--size", type=int, default=224, help="pixels of a side; 64 or more")
    parser.add_argument("--lr", type=float, default=0.001)
    args = parser.parse_args()
    train: ImageFolder | FireScenes
    test: ImageFolder | FireScenes
    if args.data == SYNTHETIC:
        train, test = (FireScenes(n, size=args.size * 8 // 7, seed=n) for n in (600, 150))
    else:
        train, test = image_folder(args.data, skip_broken=args.skip_broken)
    train.transform = preprocessing(args.size, train=True)
    test.transform = preprocessing(args.size, train=False)

    torch.manual_seed(0)
    model: nn.Module = getattr(vision("torchvision.models"), args.model)(num_classes=len(train.classes))
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
            score = accuracy(model, test, batch_size=args.batch_size)
            if args.picture:
                save_predictions(args.picture, model, test, train.classes)
        paceline.log(accuracy=score, **marks_of(args.data))
        print(
            f"fire, {args.model}, {source_of(args.data)}{left_out(train.skipped)}: test accuracy {score:.4f}"
        )


if __name__ == "__main__":
    main()
