"""Keeps the best model: its parameters, the whole of it, and what is needed to go on."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
inputs = torch.randn(256, 10)
targets = (inputs.sum(1) > 0).long()

held_out = torch.randn(64, 10)
answers = (held_out.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=32, shuffle=True)
model, optimizer, loader, scheduler = paceline.prepare(model, optimizer, loader, scheduler)

best = float("inf")
for epoch in range(3):
    model.train()
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    model.eval()
    with torch.no_grad(), paceline.run_parameters():
        found = nn.functional.cross_entropy(model(held_out), answers).item()
        if found < best and paceline.is_main():
            best = found
            torch.save(model.state_dict(), "best.pt")
            torch.save(model, "whole.pt")
    if paceline.is_main():
        state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "epoch": epoch}
        torch.save(state, "last.pt")
        print(f"epoch {epoch}: lr {scheduler.get_last_lr()[0]:.6f}")

if paceline.is_main():
    alike = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    alike.load_state_dict(torch.load("best.pt", weights_only=True))
    whole = torch.load("whole.pt", weights_only=False).eval()
    print("the same:", torch.equal(alike.eval()(held_out), whole(held_out)))
    print(sorted(torch.load("last.pt", weights_only=False)))
