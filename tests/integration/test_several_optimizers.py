"""Several models and optimizers in one run compute what a plain PyTorch loop computes.

The scripts are built from COMMON, which the tests execute too: the plain loop that a run is compared with has
the same models, data, optimizers and losses, and nothing of Paceline in it.
"""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.testing import faulty
from tests.integration.conftest import PRELUDE
from tests.speed import first

COMMON = """
def make_gan():
    torch.manual_seed(3)
    g = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6)).double()
    d = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    teacher = nn.Linear(6, 1).double().requires_grad_(False)
    if not with_norm:
        g[1] = nn.Identity()
    opt_g = torch.optim.Adam(g.parameters(), lr=1e-2)
    if all_sgd:
        opt_g = torch.optim.SGD(g.parameters(), lr=1e-2)
    opt_d = torch.optim.SGD(
        [{"params": d[0].parameters()}, {"params": d[2].parameters(), "lr": 0.02}],
        lr=0.05,
        momentum=0 if all_sgd else 0.9,
    )
    return g, d, teacher, opt_g, opt_d

def make_data(samples=64):
    generator = torch.Generator().manual_seed(7)
    real = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    noise = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(real, noise)

def train_batch(i, batch, g, d, teacher, opt_g, opt_d):
    real, noise = batch
    opt_d.zero_grad()
    loss = nn.functional.softplus(-d(real)).mean() + nn.functional.softplus(d(g(noise).detach())).mean()
    loss.backward()
    opt_d.step()
    if i % 2 == 1:  # n_critic = 2
        opt_g.zero_grad()
        fake = g(noise)
        loss = nn.functional.softplus(-d(fake)).mean() + (teacher(fake) ** 2).mean()
        loss.backward()  # leaves gradients in d, too
        opt_g.step()
"""

SCRIPT = (
    """
o = {"epochs": 3, "batch": 8, "norm": True, "sgd": False}
o |= json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
with_norm, all_sgd = o["norm"], o["sgd"]
torch.set_num_threads(1)
"""
    + COMMON
    + """
g, d, teacher, opt_g, opt_d = make_gan()
if RANK:  # only worker 0's values count
    for p in (*g.parameters(), *d.parameters(), *teacher.parameters()):
        p.data.add_(1.0)
loader = DataLoader(make_data(), batch_size=o["batch"])
g, d, teacher, opt_g, opt_d, loader = paceline.prepare(g, d, teacher, opt_g, opt_d, loader)
steps = 0

def die(*_):
    # In the middle of a batch: the first optimizer has stepped, the second one has not.
    if steps == 5 and not (RUN_DIR / "killed").exists():
        (RUN_DIR / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

if o.get("kill") == RANK:
    opt_g.register_step_pre_hook(die)
for epoch in range(o["epochs"]):
    for i, batch in enumerate(loader):
        train_batch(i, batch, g, d, teacher, opt_g, opt_d)
        steps += 1
states = [o.state_dict()["state"] for o in (opt_g, opt_d)]
result({"steps": steps, "kept": [sorted({w for v in s.values() for w in v}) for s in states]})
"""
)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def plain(
    *, epochs: int = 3, batch: int = 8, norm: bool = True, sgd: bool = False
) -> dict[str, torch.Tensor]:
    """The plain loop, with the fused kernels that the servers use."""
    space: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "TensorDataset": torch.utils.data.TensorDataset,
        "with_norm": norm,
        "all_sgd": sgd,
    }
    exec(COMMON, space)
    common = SimpleNamespace(**space)
    g, d, teacher, opt_g, opt_d = common.make_gan()
    for optimizer in (opt_g, opt_d):
        for group in optimizer.param_groups:
            group.update(fused=True, foreach=False)
    data = torch.utils.data.DataLoader(common.make_data(), batch_size=batch)
    for _ in range(epochs):
        for i, pair in enumerate(data):
            common.train_batch(i, pair, g, d, teacher, opt_g, opt_d)
    return {
        f"{k}.{name}": value for k, m in enumerate((g, d, teacher)) for name, value in m.state_dict().items()
    }


def assert_equal(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0
) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_one_asp_worker_computes_the_same_bits_as_a_plain_loop(run):
    ran = run(SCRIPT, workers=1, servers=1, mode="asp")
    assert ran.error is None
    assert_equal(ran.model, plain())
    assert ran.results()[0]["kept"] == [["exp_avg", "exp_avg_sq", "step"], ["momentum_buffer"]]
    assert ran.status.samples == 3 * 64  # the steps of the second optimizer count no sample again


@pytest.mark.parametrize(
    "settings",
    first(
        2,
        [
            {"servers": 3},
            {"servers": 2, "link": "tcp"},
            {"servers": 1},
            {"servers": 2, "link": "tcp", "overlap": True},
            {"servers": 2, "clip_norm": 1e6},
        ],
    ),
)
def test_two_bsp_workers_compute_what_the_whole_batch_does(run, settings):
    ran = run(SCRIPT, workers=2, mode="bsp", args=['{"norm": false, "batch": 4}'], **settings)
    assert ran.error is None
    assert_equal(ran.model, plain(norm=False), tolerance=1e-10)


@pytest.mark.parametrize("mode", first(1, ["local:3", "asp+period=2", "hogwild"]))
def test_each_optimizer_counts_its_own_local_steps(run, mode):
    """One worker with plain SGD: what it pushes, however late, is what it did."""
    ran = run(SCRIPT, workers=1, servers=2, mode=mode, args=['{"norm": false, "sgd": true}'])
    assert ran.error is None
    assert_equal(ran.model, plain(norm=False, sgd=True), tolerance=1e-10)


@pytest.mark.slow
def test_local_rounds_of_two_workers_are_rounds_of_one_optimizer(run):
    """Every local step is averaged: with plain SGD that is a step of the whole batch."""
    ran = run(SCRIPT, workers=2, mode="local:1", args=['{"norm": false, "sgd": true, "batch": 4}'])
    assert ran.error is None
    assert_equal(ran.model, plain(norm=False, sgd=True), tolerance=1e-10)


@pytest.mark.parametrize(
    "settings", first(1, [{"mode": "easgd:2"}, {"compress": "topk:0.3"}, {"mode": "asp+quorum=2"}])
)
def test_every_step_counts_in_other_modes(run, settings):
    ran = run(SCRIPT, workers=2, servers=2, args=['{"batch": 4}'], **{"mode": "ssp:1", **settings})
    assert ran.error is None
    assert ran.status.samples == 3 * 64 and ran.status.refused == 0
    assert all(value.isfinite().all() for value in ran.model.values())
    assert not torch.equal(ran.model["0.0.weight"], plain(epochs=0)["0.0.weight"])
    assert not torch.equal(ran.model["1.0.weight"], plain(epochs=0)["1.0.weight"])


def test_a_resumed_run_computes_the_same_bits(run):
    first = run(SCRIPT, workers=1, servers=2, mode="asp", args=['{"epochs": 2}'])
    ran = run(SCRIPT, workers=1, servers=3, mode="asp", args=['{"epochs": 4}'], resume=first)
    assert ran.error is None
    assert_equal(ran.model, plain(epochs=4))


def test_a_server_that_is_replaced_by_its_replica_changes_no_bit(run):
    with faulty("kill server:0@7"):
        ran = run(SCRIPT, workers=2, servers=2, replicas=1, mode="bsp", args=['{"norm": false, "batch": 4}'])
    assert ran.error is None
    assert any("server:0 was killed" in text for text in ran.status.messages)
    assert_equal(ran.model, plain(norm=False), tolerance=1e-10)


def test_a_worker_killed_between_two_optimizers_is_replaced_and_falls_into_step(run):
    ran = run(SCRIPT, workers=2, servers=2, mode="bsp", args=['{"kill": 1, "batch": 4}'])
    assert ran.error is None
    assert any("worker:1 was killed" in text for text in ran.status.messages)
    assert ran.status.samples == 3 * 64
    assert all(value.isfinite().all() for value in ran.model.values())


@pytest.mark.slow
def test_a_script_alone_computes_the_same_bits_as_a_plain_loop(tmp_path):
    script = tmp_path / "train.py"
    save = "torch.save([m.state_dict() for m in (g, d, teacher)], RUN_DIR / 'models.pt')"
    header = f"import os; os.environ['TEST_RUN_DIR'] = {str(tmp_path)!r}\n"
    script.write_text(header + PRELUDE + SCRIPT + save)
    subprocess.run([sys.executable, str(script)], check=True, timeout=120)
    states = torch.load(tmp_path / "models.pt")
    found = {f"{k}.{name}": value for k, state in enumerate(states) for name, value in state.items()}
    assert_equal(found, plain())


ACTOR_CRITIC = """
torch.manual_seed(1)
torch.set_num_threads(1)
trunk, actor, critic = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)
model = nn.ModuleList([trunk, actor, critic]).double()
shared = torch.optim.Adam([*trunk.parameters(), *actor.parameters()], lr=0.01)
of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
x = torch.randn(48, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
loader = DataLoader(TensorDataset(x), batch_size=6)
scheduler = torch.optim.lr_scheduler.StepLR(of_critic, 3, gamma=0.5)
if "plain" in sys.argv:
    for o in (shared, of_critic):
        for group in o.param_groups:
            group.update(fused=True, foreach=False)
else:
    prepared = paceline.prepare(model, shared, of_critic, loader, scheduler)
    model, shared, of_critic, loader, scheduler = prepared
for epoch in range(2):
    for (x,) in loader:
        h = trunk(x).tanh()
        loss = nn.functional.softplus(actor(h)).mean() + (critic(h) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        shared.step()
        of_critic.step()
        shared.zero_grad()
        of_critic.zero_grad()
        scheduler.step()
saved = of_critic.state_dict()
result({name: value.tolist() for name, value in model.state_dict().items()})
"""


@pytest.mark.slow
def test_one_model_with_two_optimizers_over_a_shared_trunk(run, tmp_path):
    ran = run(ACTOR_CRITIC, workers=1, servers=2, mode="asp")
    assert ran.error is None
    script = tmp_path / "plain.py"
    header = f"import os; os.environ['TEST_RUN_DIR'] = {str(tmp_path)!r}\n"
    script.write_text(header + PRELUDE + ACTOR_CRITIC)
    subprocess.run([sys.executable, str(script), "plain"], check=True, timeout=120)
    assert ran.results()[0] == json.loads((tmp_path / "result-0.json").read_text())
    assert set(ran.model) == {f"{k}.{what}" for k in range(3) for what in ("weight", "bias")}
    # Every sample counts once, and each of the optimizers made an update of it.
    assert ran.status.samples == 2 * 48 and ran.status.version == 2 * 2 * 8


IN_TWO_CALLS = SCRIPT.replace(
    "g, d, teacher, opt_g, opt_d, loader = paceline.prepare(g, d, teacher, opt_g, opt_d, loader)",
    """
g, opt_g, loader = paceline.prepare(g, opt_g, loader)
shown = [p.sum().item() for p in g.parameters()]
d, teacher, opt_d = paceline.prepare(d, teacher, opt_d)
now = [p.sum().item() for p in g.parameters()]
assert shown == now or o.get("epochs") == 4 or (RUN_DIR / "killed").exists(), "worker 0's values were there"
""",
)


@pytest.mark.parametrize(
    "settings",
    first(
        2,
        [
            {"servers": 2, "workers": 2, "link": "tcp"},
            {"servers": 2, "workers": 2, "replicas": 1},
            {"servers": 3, "workers": 2, "mode": "bsp", "overlap": True},
        ],
    ),
)
def test_a_second_call_of_prepare_adds_another_pair(run, settings):
    arguments = ['{"norm": false, "batch": 4}']
    ran = run(IN_TWO_CALLS, **{"mode": "bsp", "args": arguments, **settings})
    assert ran.error is None
    assert_equal(ran.model, plain(norm=False), tolerance=1e-10)


def test_a_run_prepared_by_two_calls_is_resumed_and_its_workers_are_replaced(run):
    first = run(IN_TWO_CALLS, workers=1, servers=2, mode="asp", args=['{"epochs": 2}'])
    assert first.error is None
    ran = run(IN_TWO_CALLS, workers=1, servers=1, mode="asp", args=['{"epochs": 4}'], resume=first)
    assert ran.error is None
    assert_equal(ran.model, plain(epochs=4))
    killed = run(IN_TWO_CALLS, workers=2, servers=2, mode="bsp", args=['{"kill": 1, "batch": 4}'])
    assert killed.error is None
    assert any("worker:1 was killed" in text for text in killed.status.messages)
    assert killed.status.samples == 3 * 64


LATE = """
model, other = nn.Linear(2, 2), nn.Linear(2, 2)
optimizer, another = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
paceline.prepare(model, optimizer)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
paceline.prepare(other, another)
"""


def test_prepare_after_the_first_step_is_refused_by_name(run):
    ran = run(LATE, workers=1)
    assert "prepare() was called again after the first batch or step" in ran.error
