"""The smallest run there is, over every link and mode."""

import pytest

SOURCE = """
torch.manual_seed(RANK)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 2)
loader = DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
seen = 0
for epoch in range(2):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += len(x)
result(seen)
"""


@pytest.mark.parametrize("link", ["shm", "tcp"])
@pytest.mark.parametrize("mode", ["bsp", "backup:1", "ssp:1", "asp"])
def test_every_sample_is_applied_once_in_every_mode_and_over_every_link(run, mode, link):
    ran = run(SOURCE, workers=2, servers=2, mode=mode, link=link)
    assert ran.error is None
    assert ran.status.state == "succeeded"
    assert ran.status.samples == 96
    assert [a["applied"] for a in ran.status.leases[:2]] == [48, 48]
    if mode != "backup:1":  # there a dropped push's samples are drawn again
        assert sum(ran.results().values()) == 96
    assert set(ran.model) == {"weight", "bias"}
