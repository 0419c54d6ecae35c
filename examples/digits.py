"""A small CNN on handwritten digits, with an ordinary training loop.

python examples/digits.py                                   # alone
paceline run --workers 2 --servers 2 examples/digits.py     # with servers and workers
paceline run --mode sandblaster examples/digits.py          # or in any other mode
"""

import argparse
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.data.accuracy import accuracy
from paceline.data.digits import digits
from paceline.data.options import EMBEDDED, data_options, ends_with_message, marks_of, source_of
from paceline.data.pictures import save_predictions


class DigitsNet(nn.Module):
    """Two convolutions and two linear layers: 62,340 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 110),
            nn.ReLU(),
            nn.Linear(110, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of the ten digits."""
        return self.body(images)  # type: ignore[no-any-return]


@ends_with_message
def main() -> None:
    """Train and test."""
    parser = argparse.ArgumentParser()
    # In sandblaster an epoch is a single step.
    epochs = 60 if paceline.mode().startswith("sandblaster") else 10
    data_options(parser, epochs=epochs, batch_size=32, data="not for this example", default=EMBEDDED)
    parser.add_argument("--sgd", action="store_true", help="SGD with momentum, as in eamsgd; else Adam")
    parser.add_argument("--lr", type=float, help="default: 0.003; with SGD 0.02")
    args = parser.parse_args()
    train, test = digits(train=True, data=args.data), digits(train=False, data=args.data)

    torch.manual_seed(0)
    model = DigitsNet()
    optimizer: torch.optim.Optimizer
    if args.sgd or "eamsgd" in paceline.mode():
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr or 0.02, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr or 0.003)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)

    # After a resume: the epochs that are left.
    for epoch in paceline.epochs(1 if args.steps else args.epochs):
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
            print(f"epoch {epoch + 1}, {source_of(args.data)}: test accuracy {score:.4f}")


if __name__ == "__main__":
    main()
