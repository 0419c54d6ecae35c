"""Early stopping: train until the validation loss has not improved for some epochs.

python examples/early_stopping.py                                  # alone
paceline run --workers 2 --max-time 10m examples/early_stopping.py # with servers, and at most ten minutes

Every worker finds another validation loss, since BatchNorm's buffers are its own. paceline.should_stop makes
one decision of that: here the run ends as soon as one worker has lost its patience.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.data.digits import digits


@torch.no_grad()
def validation_loss(model: nn.Module) -> float:
    """Cross-entropy on the test digits."""
    model.eval()
    images, labels = digits(train=False).tensors
    return float(nn.functional.cross_entropy(model(images), labels))


def main() -> None:
    """Train, and stop early."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--patience", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    loader = DataLoader(digits(train=True), batch_size=32, shuffle=True)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)

    state = paceline.state(best=float("inf"), worse=0)  # in every checkpoint: a resume goes on with these
    for epoch in paceline.epochs(args.epochs):
        model.train()
        batches = 0
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
        if batches:  # where workers do not wait for each other, others may have taken the whole epoch
            with paceline.run_parameters():
                found = validation_loss(model)
            state.worse = 0 if found < state.best else state.worse + 1
            state.best = min(found, state.best)
            paceline.log(validation_loss=found)
            if paceline.is_main():
                print(f"epoch {epoch + 1}: validation loss {found:.4f}")
        if paceline.should_stop(state.worse >= args.patience):
            break
    if paceline.is_main():
        print(f"best validation loss {state.best:.4f}")


if __name__ == "__main__":
    main()
