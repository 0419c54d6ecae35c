"""A small CNN on handwritten digits, with an ordinary training loop.

python examples/digits.py                                   # alone
paceline run --workers 2 --servers 2 examples/digits.py     # with servers and workers
paceline run --mode sandblaster examples/digits.py          # or in any other mode
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.data.digits import digits


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


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Share of the test digits that the model gets right."""
    model.eval()
    images, labels = digits(train=False).tensors
    return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    """Train and test."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, help="default: 10; in sandblaster, where each is one step, 60")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--sgd", action="store_true", help="SGD with momentum, as in eamsgd; else Adam")
    parser.add_argument("--lr", type=float, help="default: 0.003; with SGD 0.02")
    args = parser.parse_args()
    epochs = args.epochs or (60 if paceline.mode().startswith("sandblaster") else 10)

    torch.manual_seed(0)
    model = DigitsNet()
    optimizer: torch.optim.Optimizer
    if args.sgd or "eamsgd" in paceline.mode():
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr or 0.02, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr or 0.003)
    loader = DataLoader(digits(train=True), batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)

    for epoch in paceline.epochs(epochs):  # after a resume: those that are left
        model.train()
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            paceline.log(loss=loss.item())
        if paceline.is_main():
            with paceline.run_parameters():
                score = accuracy(model)
            paceline.log(accuracy=score)
            print(f"epoch {epoch + 1}: test accuracy {score:.4f}")


if __name__ == "__main__":
    main()
