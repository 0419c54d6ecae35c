"""Models on a GPU: the same promises, through host memory."""

import pytest
import torch

from paceline.observe.analyse.facts import facts_of
from paceline.observe.analyse.run_data import RunData
from paceline.observe.record.device_lane import DEVICE_LANE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SOURCE = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2)).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(64, 8, generator=g), torch.randint(0, 2, (64,), generator=g))
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
for epoch in range(3):
    for x, y in loader:
        nn.functional.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE)).backward()
        optimizer.step()
        optimizer.zero_grad()
sums = {name: p.sum().item() for name, p in model.named_parameters()}
result({"device": str(next(model.parameters()).device), "sums": sums})
"""


@pytest.mark.parametrize("mode", ["bsp", "asp"])
@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_a_model_on_the_gpu_trains_like_one_on_the_cpu(run, mode, link):
    workers = 2 if mode == "bsp" else 1
    gpu = run("DEVICE = 'cuda'" + SOURCE, workers=workers, servers=2, mode=mode, link=link)
    cpu = run("DEVICE = 'cpu'" + SOURCE, workers=workers, servers=2, mode=mode, link=link)
    assert gpu.error is None and cpu.error is None
    assert gpu.results()[0]["device"].startswith("cuda")
    for name, value in cpu.model.items():
        torch.testing.assert_close(gpu.model[name], value, rtol=1e-4, atol=1e-5)
    # What the worker sees is what the servers hold.
    for name, seen in gpu.results()[0]["sums"].items():
        assert gpu.model[name].sum().item() == pytest.approx(seen, rel=1e-4, abs=1e-4)


def test_lbfgs_on_the_servers_serves_a_model_on_the_gpu(run):
    gpu = run("DEVICE = 'cuda'" + SOURCE, workers=2, servers=2, mode="sandblaster")
    cpu = run("DEVICE = 'cpu'" + SOURCE, workers=2, servers=2, mode="sandblaster")
    assert gpu.error is None and cpu.error is None
    assert gpu.status.version == cpu.status.version
    for name, value in cpu.model.items():
        torch.testing.assert_close(gpu.model[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["bsp", "allreduce", "easgd:2"])
def test_the_runs_parameters_can_be_looked_at_on_the_gpu(run, mode):
    """Between two epochs, as an evaluation does: training goes on as if nobody had looked."""
    look = "    with paceline.run_parameters(): model(torch.zeros(1, 8, device=DEVICE))"
    looked = SOURCE.replace("for epoch in range(3):\n", f"for epoch in range(3):\n{look}\n")
    assert looked != SOURCE
    one, two = (run("DEVICE = 'cuda'" + s, workers=1, mode=mode) for s in (SOURCE, looked))
    assert one.error is None and two.error is None
    assert one.results() == two.results()


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_a_workers_phases_are_seen_on_the_gpu_too(run, link):
    ran = run("DEVICE = 'cuda'" + SOURCE, workers=2, servers=1, mode="asp", link=link)
    assert ran.error is None
    data = RunData(ran.run.path)
    mine = data.spans[(data.spans.role == "worker") & (data.spans.lane == 0)]
    seen = {"load", "forward", "backward", "push", "wait"}
    # On a device the server writes the worker's copy, and the worker's thread pulls nothing.
    assert set(mine.phase) - {"other", "checkpoint", "lease"} == (seen | {"pull"} if link == "tcp" else seen)
    for _, one in mine.groupby("rank"):
        starts, ends = one.start.to_numpy(), (one.start + one.ns).to_numpy()
        # One after the other, without a gap, from prepare() on (which pulls parameters over TCP).
        assert (starts[2:] == ends[1:-1]).all()
    assert data.resources.gpu.notna().any()
    device = data.spans[(data.spans.role == "worker") & (data.spans.lane == DEVICE_LANE)]
    assert seen - {"load"} <= set(device.phase)
    assert ("pull" in set(device.phase)) == (link == "tcp")
    updated = data.spans[(data.spans.role == "server") & (data.spans.lane == DEVICE_LANE)]
    assert ("update" in set(updated.phase)) == (link == "shm")  # over TCP the server is in host memory


SLEEPS = """
class Sleeps(nn.Module):
    def forward(self, x):
        torch.cuda._sleep(50_000_000)
        return x
"""


def test_time_on_the_gpu_is_the_kernels_and_not_the_threads(run):
    """A forward that the CPU hands over in a moment, and that takes the GPU 20 ms (at up to 2.5 GHz)."""
    source = SOURCE.replace("model = nn.Sequential(", "model = nn.Sequential(Sleeps(), ")
    assert source != SOURCE
    ran = run("DEVICE = 'cuda'" + SLEEPS + source, workers=1, servers=1, mode="bsp")
    assert ran.error is None, ran.error
    worker = facts_of(RunData(ran.run.path)).device.workers[0]
    assert worker.steps >= 5
    assert worker.gpu["forward"] > 0.015
    assert worker.cpu["forward"] < 0.5 * worker.gpu["forward"]
    # The marks add up to the step, on the thread's clock and on the device's.
    assert sum(worker.cpu.values()) == pytest.approx(worker.gpu_s, rel=0.2)


WIDE = "400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 2)"


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "bsp", "workers": 2, "overlap": True},
        {"mode": "asp", "workers": 1, "overlap": True},
        {"mode": "asp", "workers": 1, "overlap": True, "link": "tcp"},
    ],
)
def test_overlap_gives_the_same_bits_on_the_gpu(run, settings):
    """Slices leave the GPU during backward, and are put there before a module looks at them."""
    source = "DEVICE = 'cuda'" + SOURCE.replace("64), nn.Tanh(), nn.Linear(64, 2)", WIDE)
    hidden = run(source, servers=2, **settings)
    plain = run(source, servers=2, **{**settings, "overlap": False})
    assert hidden.error is None, hidden.error
    assert plain.error is None
    assert hidden.results() == plain.results()
    for name, value in plain.model.items():
        assert torch.equal(hidden.model[name], value), name


@pytest.mark.parametrize(
    "settings", [{"prefetch": 2}, {"prefetch": 2, "overlap": True}, {"compress": "qsgd:8"}]
)
def test_hidden_and_compressed_exchanges_train_on_the_gpu(run, settings):
    source = "DEVICE = 'cuda'" + SOURCE.replace("64), nn.Tanh(), nn.Linear(64, 2)", WIDE)
    ran = run(source, workers=2, servers=2, mode="asp", **settings)
    assert ran.error is None, ran.error
    assert ran.status.samples == 192
