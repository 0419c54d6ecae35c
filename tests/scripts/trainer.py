"""A trainer as a class, with its history in a file and a checkpoint that it can go on from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


@dataclass
class Settings:
    epochs: int = 3
    lr: float = 0.05
    batch_size: int = 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 16), nn.LayerNorm(16), nn.ReLU())
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@dataclass
class Trainer:
    settings: Settings
    history: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        inputs = torch.randn(256, 10)
        data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
        self.model = Model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.settings.lr)
        self.loader = DataLoader(data, batch_size=self.settings.batch_size, shuffle=True)
        self.model, self.optimizer, self.loader = paceline.prepare(self.model, self.optimizer, self.loader)

    def fit(self) -> None:
        for epoch in range(self.settings.epochs):
            losses = [self.step(x, y) for x, y in self.loader]
            self.history.append({"epoch": epoch, "loss": sum(losses) / max(len(losses), 1)})
            print(f"epoch {epoch}: loss {self.history[-1]['loss']:.6f}")

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def save(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        (directory / "history.json").write_text(json.dumps(self.history))
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "settings": asdict(self.settings)}, directory / "checkpoint.pt")


if __name__ == "__main__":
    trainer = Trainer(Settings())
    trainer.fit()
    if paceline.is_main():
        trainer.save(Path("trained"))
        found = torch.load("trained/checkpoint.pt", weights_only=False)
        print(found["settings"], len(found["optimizer"]["state"]))
