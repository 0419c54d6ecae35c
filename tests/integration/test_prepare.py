"""prepare(): the user's loop stays as it is, and means what it means in plain PyTorch.

References are hand-written loops of plain torch in this process. Data come in order (no shuffling), so that
a reference knows which worker had which batch: in bsp worker r of w has batch r of each w.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.speed import first

SETUP = """
def build():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

def samples(n):
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g))

loss_of = nn.functional.cross_entropy
"""

here: dict[str, Any] = {}
exec(
    "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n" + SETUP,
    here,
)
build, samples, loss_of = here["build"], here["samples"], here["loss_of"]


def batches(n: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """The data set of SETUP in order, in batches."""
    x, y = samples(n).tensors
    return list(zip(x.split(size), y.split(size), strict=True))


def gradient(model: nn.Module, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss_of(model(batch[0]), batch[1]), list(model.parameters())))


def set_mean(model: nn.Module, gradients: list[list[Tensor]], weights: list[int]) -> None:
    """The weighted mean of several workers' gradients becomes .grad."""
    total = sum(weights)
    for p, parts in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
        p.grad = sum(g * (w / total) for g, w in zip(parts, weights, strict=True))  # type: ignore[assignment]


def close(ours: dict[str, Tensor], reference: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert set(ours) == set(reference)
    for name, value in reference.items():
        torch.testing.assert_close(ours[name], value, atol=atol, rtol=1e-5)


def same(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert set(ours) == set(reference)
    for name, value in reference.items():
        assert torch.equal(ours[name], value), name


# --- gradients --------------------------------------------------------------------------------------


def test_clipping_in_the_script_clips_each_workers_own_gradient_and_uneven_batches_are_weighted(run):
    """22 samples, 2 workers, batch 4: two whole rounds, then a round of 3 and 3."""
    ran = run(
        SETUP
        + """
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(22), batch_size=4))
norms, sizes = [], []
for x, y in loader:
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.4)))
    sizes.append(len(x))
    optimizer.step()
result({"norms": norms, "sizes": sizes, "len": len(loader)})
"""
    )
    assert ran.error is None, ran.error
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    x, y = samples(22).tensors
    rounds = [((0, 4), (4, 8)), ((8, 12), (12, 16)), ((16, 19), (19, 22))]
    for shares in rounds:
        gradients = []
        for a, b in shares:
            model.zero_grad()
            loss_of(model(x[a:b]), y[a:b]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.4)
            gradients.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
        set_mean(model, gradients, [b - a for a, b in shares])
        optimizer.step()
    close(ran.model, model.state_dict())
    assert ran.results()[0]["sizes"] == [4, 4, 3] and ran.results()[0]["len"] == 3
    assert all(n > 0.4 for r in ran.results().values() for n in r["norms"]), "the clip never bit"


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_accumulation_with_no_sync_also_when_the_epoch_ends_in_the_middle_of_it(run, mode):
    """5 batches a worker and a step every 2: the fifth's gradient is carried into the next epoch."""
    workers = 2 if mode == "bsp" else 1
    ran = run(
        SETUP
        + f"""
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = paceline.prepare(
    model, optimizer, DataLoader(samples({20 * workers}), batch_size=4))
count = 0
for epoch in range(2):
    for x, y in loader:
        count += 1
        if count % 2:
            with (model.no_sync() if epoch == 0 else paceline.no_sync(model)):
                (loss_of(model(x), y) / 2).backward()
            continue
        (loss_of(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
result(count)
""",
        mode=mode,
        workers=workers,
        deadline_s=5.0,
    )
    assert ran.error is None, ran.error
    assert list(ran.results().values()) == [10] * workers
    assert ran.status.version == 5
    assert ran.status.samples == 40 * workers
    assert [a["applied"] for a in ran.status.leases[:2]] == [20 * workers] * 2
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mine = [batches(20 * workers, 4)[r::workers] * 2 for r in range(workers)]
    for i in range(0, 10, 2):
        sums = [
            [a / 2 + b / 2 for a, b in zip(gradient(model, m[i]), gradient(model, m[i + 1]), strict=True)]
            for m in mine
        ]
        set_mean(model, sums, [8] * workers)
        optimizer.step()
    close(ran.model, model.state_dict())


def test_a_batch_that_got_no_step_does_not_hold_up_the_epoch(run):
    """`break` before the step and `continue` in place of it: the others do not wait for ever."""
    ran = run(
        SETUP
        + """
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(40), batch_size=4))
seen = []
for epoch in range(4):
    n = 0
    for i, (x, y) in enumerate(loader):
        if epoch == 0 and i == 2:
            break
        if epoch == 1 and i == 4:
            continue  # the last one of the epoch
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        n += 1
        if epoch == 2 and i == 1:
            break
    seen.append(n)
result(seen)
""",
        deadline_s=5.0,
    )
    assert ran.error is None, ran.error
    assert ran.results() == {0: [2, 4, 2, 5], 1: [2, 4, 2, 5]}
    assert [a["epoch"] for a in ran.status.leases[:4]] == [0, 1, 2, 3]
    for account in ran.status.leases[:4]:
        assert sum(account[fate] for fate in ("applied", "refused", "skipped", "unused")) == 40
    assert [account["skipped"] for account in ran.status.leases[:4]] == [0, 8, 0, 0]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_are_the_users_in_every_way_torch_offers(run):
    """set_to_none=False, .grad replaced, changed in place, None in some steps, a closure, create_graph."""
    body = """
for step, (x, y) in enumerate(loader):
    if step == 0:
        loss_of(model(x), y).backward()
        optimizer.step()
    elif step == 1:  # a zero gradient is a gradient: momentum and decay go on
        optimizer.zero_grad(set_to_none=False)
        model[0](x).sum().backward()
        optimizer.step()
    elif step == 2:  # no gradient at all: the second layer is skipped
        optimizer.zero_grad()
        model[0](x).sum().backward()
        optimizer.step()
    elif step == 3:  # replaced
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        model[0].weight.grad = torch.ones_like(model[0].weight) * 0.01
        model[2].bias.grad = None
        optimizer.step()
    elif step == 4:  # on top of the replaced one
        loss_of(model(x), y).backward()
        optimizer.step()
    elif step == 5:
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            return loss
        losses.append(optimizer.step(closure).item())
    elif step == 6:
        optimizer.zero_grad()
        loss_of(model(x), y).backward(create_graph=True)
        for p in model.parameters():
            p.grad = p.grad.detach().sign() * 1e-2
        optimizer.step()
    else:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
"""
    ran = run(
        SETUP
        + """
import warnings
warnings.filterwarnings("ignore", message="Using backward")
model, losses = build(), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(32), batch_size=4))
"""
        + body
        + "\nresult(losses)",
        mode="asp",
        workers=1,
        servers=2,
    )
    assert ran.error is None, ran.error
    model, losses = build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, fused=True)
    scope = {**here, "model": model, "optimizer": optimizer, "losses": losses, "loader": batches(32, 4)}
    exec(body, scope)
    same(ran.model, model.state_dict())
    assert ran.results()[0] == losses


def test_in_bsp_a_tensor_is_skipped_only_if_no_worker_has_a_gradient_for_it(run):
    """Absent gradients count as zero when another worker has one, also after an assign()."""
    ran = run(
        SETUP
        + """
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(24), batch_size=4))
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    if step == 2:
        with torch.no_grad():
            model[2].bias.fill_(1.0)
        paceline.assign()
    if RANK == 0 or step == 1:  # worker 0 never, worker 1 in step 1 not
        model[0](x).sum().backward()
    else:
        loss_of(model(x), y).backward()
    optimizer.step()
"""
    )
    assert ran.error is None, ran.error
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    data = batches(24, 4)
    for step in range(3):
        optimizer.zero_grad()
        if step == 2:
            with torch.no_grad():
                model[2].bias.fill_(1.0)
        (model[0](data[2 * step][0]).sum() / 2).backward()
        x, y = data[2 * step + 1]
        (model[0](x).sum() / 2 if step == 1 else loss_of(model(x), y) / 2).backward()
        optimizer.step()
    close(ran.model, model.state_dict())


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_a_nan_in_one_workers_gradient_is_refused_counted_and_reported_and_the_others_go_on(run, mode):
    ran = run(
        SETUP
        + """
model = build()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(40), batch_size=4))
steps = 0
for x, y in loader:
    optimizer.zero_grad()
    loss = loss_of(model(x), y)
    (loss * float("nan") if RANK == 1 and steps == 0 else loss).backward()
    optimizer.step()
    steps += 1
result([steps, all(bool(p.isfinite().all()) for p in model.parameters())])
""",
        mode=mode,
        servers=2,
    )
    assert ran.error is None, ran.error
    assert ran.status.refused == 1
    assert ran.status.leases[0]["refused"] == 4 and ran.status.leases[0]["applied"] == 36
    assert "worker:1 pushed NaN or Inf at step 1: refused" in ran.log("server", 0)
    assert all(p.isfinite().all() for p in ran.model.values())
    assert sum(r[0] for r in ran.results().values()) == 10
    assert all(r[1] for r in ran.results().values())


def test_a_nan_made_after_backward_is_refused_too(run):
    """The worker looks again at what was changed since; over TCP the server looks at what arrives, too."""
    ran = run(
        SETUP
        + """
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(40), batch_size=4))
for i, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    if RANK == 1 and i == 1:
        model[0].weight.grad[0, 0] = float("inf")
    optimizer.step()
"""
    )
    assert ran.error is None, ran.error
    assert ran.status.refused == 1
    assert "worker:1 pushed NaN or Inf" in ran.log("server", 0)
    assert all(p.isfinite().all() for p in ran.model.values())


def test_a_sparse_gradient_gets_a_clear_refusal(run):
    ran = run(
        """
model = nn.Embedding(10, 4, sparse=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = paceline.prepare(
    model, optimizer, DataLoader(TensorDataset(torch.arange(10)), batch_size=2))
for (x,) in loader:
    model(x).sum().backward()
    optimizer.step()
""",
        workers=1,
    )
    assert ran.error is not None
    assert "UsageError: parameter 'weight' [10, 4] got a sparse gradient" in ran.error


# --- schedulers, precision, modes of a module -------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_reach_the_servers_and_nothing_warns(run, when):
    """Learning rate and momentum of every step are those of plain torch, with warnings as errors."""
    make = (
        "schedulers = [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=8),"
        " torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.9 ** k)]\n"
    )
    prepare = "model, optimizer, loader = paceline.prepare(model, optimizer, loader)\n"
    loop = """
rates = []
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
    for s in schedulers:
        s.step()
    optimizer.zero_grad()
    rates.append([optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]])
"""
    build_it = """
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
"""
    ran = run(
        SETUP
        + "import warnings; warnings.simplefilter('error')\n"
        + build_it
        + "loader = DataLoader(samples(32), batch_size=4)\n"
        + (make + prepare if when == "before" else prepare + make)
        + loop
        + "result(rates)",
        mode="asp",
        workers=1,
        servers=2,
    )
    assert ran.error is None, ran.error
    scope = {**here, "loader": batches(32, 4)}
    exec(build_it.replace("momentum=0.9", "momentum=0.9, fused=True") + make + loop, scope)
    same(ran.model, scope["model"].state_dict())
    assert ran.results()[0] == scope["rates"]
    assert len({tuple(r) for r in scope["rates"]}) > 3


def test_a_prepared_scheduler_and_settings_changed_by_hand_reach_the_servers_in_bsp(run):
    """Settings of several groups, changed in the loop; a frozen group's settings stay its own."""
    ran = run(
        SETUP
        + """
model = build()
groups = [
    {"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.3}, {"params": model[2].parameters()}]
optimizer = torch.optim.SGD(groups, lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
model, optimizer, loader, same = paceline.prepare(
    model, optimizer, DataLoader(samples(24), batch_size=4), scheduler)
assert same is scheduler
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    optimizer.param_groups[1]["weight_decay"] = 0.2
"""
    )
    assert ran.error is None, ran.error
    model = build()
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.3},
        {"params": model[2].parameters()},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for batch in batches(24, 8):
        set_mean(model, [gradient(model, batch)], [1])
        optimizer.step()
        scheduler.step()
        optimizer.param_groups[1]["weight_decay"] = 0.2
    close(ran.model, model.state_dict())


def test_autocast_and_a_gradient_scaler_do_what_they_do_in_plain_torch(run):
    """bf16 autocast; a scaler unscales before the push, also for an optimizer that could do it itself."""
    loop = """
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for i, (x, y) in enumerate(loader):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model(x), y)
    scaler.scale(loss).backward()
    if i == 2:
        model[0].weight.grad[0, 0] = float("inf")
    scaler.unscale_(optimizer) if i % 2 else None
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
scale = scaler.get_scale()
"""
    make = "optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)\n"
    ran = run(
        SETUP
        + "model = build()\n"
        + make
        + "loader = DataLoader(samples(24), batch_size=4)\n"
        + "model, optimizer, loader = paceline.prepare(model, optimizer, loader)\n"
        + loop
        + "result(scale)",
        mode="asp",
        workers=1,
    )
    assert ran.error is None, ran.error
    scope = {**here, "model": build(), "loader": batches(24, 4)}
    exec(make + loop, scope)
    assert ran.results()[0] == scope["scale"] == 32.0
    assert ran.status.version == 5, "the step with the infinity is skipped"
    close(ran.model, scope["model"].state_dict())


def test_batch_norm_buffers_start_from_worker_0_stay_each_workers_own_and_rank_0s_are_saved(run):
    """And model.eval() uses them, without an effect on training."""
    ran = run(
        SETUP
        + """
model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
model[1].running_mean.fill_(10.0 * (RANK + 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(32), batch_size=4))
start = model[1].running_mean.tolist()
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    before = model[1].running_mean.clone()
    with torch.no_grad():
        model(x)
    assert torch.equal(before, model[1].running_mean) and not model.training
    model.train()
result({"start": start, "mean": model[1].running_mean.tolist(), "seen": int(model[1].num_batches_tracked)})
"""
    )
    assert ran.error is None, ran.error
    results = ran.results()
    assert results[0]["start"] == results[1]["start"] == [10.0] * 4
    assert results[0]["mean"] != results[1]["mean"]
    assert ran.model["1.running_mean"].tolist() == results[0]["mean"]
    assert int(ran.model["1.num_batches_tracked"]) == results[0]["seen"] == 4
    plain = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    plain.load_state_dict(ran.model)


# --- state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_load_state_dict_after_prepare_hands_the_values_to_the_servers(run, mode):
    """Training goes on from what was loaded, also the frozen part; reading afterwards sees the servers."""
    ran = run(
        SETUP
        + """
model = build()
model[2].bias.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(48), batch_size=4))
fresh = {k: torch.full_like(v, 0.25) for k, v in model.state_dict().items()}
copies = []
for i, (x, y) in enumerate(loader):
    if i == 2:
        model.load_state_dict(fresh)
        assert all(torch.equal(v, fresh[k]) for k, v in model.state_dict().items())
    loss_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
result({k: v.tolist() for k, v in model.state_dict().items()})
""",
        mode=mode,
        workers=2 if mode == "bsp" else 1,
        servers=2,
    )
    assert ran.error is None, ran.error
    model = build()
    model[2].bias.requires_grad_(False)
    model.load_state_dict({k: torch.full_like(v, 0.25) for k, v in model.state_dict().items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(48, 8 if mode == "bsp" else 4)[2:]:
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    close(ran.model, model.state_dict())
    for seen in ran.results().values():  # nobody reads private pages any more
        same({k: torch.tensor(v) for k, v in seen.items()}, ran.model)


BIG = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.big = nn.Parameter(torch.randn(1_200_000) * 0.01)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(4, 3)
    def forward(self, x):
        x = self.conv(x.to(memory_format=torch.channels_last)).mean((2, 3)) * self.scale
        return self.head(x) + self.big[:300_000].mean() + (self.big ** 2).mean()

def images(n):
    g = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(n, 2, 5, 5, generator=g), torch.randint(0, 3, (n,), generator=g))

def train(model, optimizer, data):
    for x, y in data:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
exec(BIG, here)


@pytest.mark.parametrize(
    ("optimizer", "link"),
    [
        ("SGD(model.parameters(), lr=0.1, momentum=0.9)", "shm"),
        ("Adam(model.parameters(), lr=0.01, amsgrad=True)", "tcp"),
    ],
)
def test_optimizer_state_dict_equals_plain_torchs_and_loading_restores_it(run, optimizer, link, tmp_path):
    """A tensor larger than a slice, a channels_last one and a 0-dim one; two servers."""
    ran = run(
        BIG
        + f"""
model = Model()
optimizer = torch.optim.{optimizer}
data = DataLoader(images(24), batch_size=4)
model, optimizer, loader = paceline.prepare(model, optimizer, data)
batches = list(data)
train(model, optimizer, batches[:3])
import copy
kept, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
torch.save(kept, sys.argv[1])
train(model, optimizer, batches[3:])
first = {{k: v.clone() for k, v in model.state_dict().items()}}
optimizer.load_state_dict(torch.load(sys.argv[1]))
model.load_state_dict(weights)
train(model, optimizer, batches[3:])
result([bool(torch.equal(first[k], v)) for k, v in model.state_dict().items()])
""",
        mode="asp",
        workers=1,
        servers=2,
        link=link,
        args=(str(tmp_path / "kept.pt"),),
    )
    assert ran.error is None, ran.error
    assert ran.results()[0] == [True] * 6, "loading parameters and state repeats the steps"
    model = here["Model"]()
    plain = eval(f"torch.optim.{optimizer}")
    for group in plain.param_groups:
        group["fused"] = True
    data = images_batches(24, 4)
    here["train"](model, plain, data[:3])
    ours, theirs = torch.load(tmp_path / "kept.pt"), plain.state_dict()
    for group in (ours["param_groups"][0], theirs["param_groups"][0]):
        group.pop("fused"), group.pop("foreach")
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for i, state in theirs["state"].items():
        assert ours["state"][i].keys() == state.keys()
        for what, value in state.items():
            mine = ours["state"][i][what]
            assert torch.equal(mine, value) and mine.dtype == value.dtype, (i, what)
    here["train"](model, plain, data[3:])
    same(ran.model, model.state_dict())


def images_batches(n: int, size: int) -> list[tuple[Tensor, Tensor]]:
    x, y = here["images"](n).tensors
    return list(zip(x.split(size), y.split(size), strict=True))


def test_loading_an_empty_optimizer_state_forgets_the_momentum(run):
    """As in plain torch: a fresh optimizer's state_dict starts the optimizer over."""
    ran = run(
        SETUP
        + """
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
fresh = optimizer.state_dict()
data = DataLoader(samples(24), batch_size=4)
model, optimizer, loader = paceline.prepare(model, optimizer, data)
for i, (x, y) in enumerate(data):
    if i == 3:
        optimizer.load_state_dict(fresh)
    loss_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        mode="asp",
        workers=1,
    )
    assert ran.error is None, ran.error
    model = build()
    for part in (batches(24, 4)[:3], batches(24, 4)[3:]):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        for batch in part:
            set_mean(model, [gradient(model, batch)], [1])
            optimizer.step()
    same(ran.model, model.state_dict())


@pytest.mark.parametrize("mode", ["bsp", "asp"])
@pytest.mark.parametrize(
    "change",
    [
        "nn.init.zeros_(model[0].weight)",
        "model[0].weight.data = torch.zeros(8, 6)",
        "model[0].load_state_dict({k: v * 0 for k, v in model[0].state_dict().items()})",
    ],
)
def test_a_change_behind_the_servers_back_is_an_error_and_assign_makes_it_legal(run, mode, change):
    ran = run(
        SETUP
        + f"""
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(samples(24), batch_size=4)
model, optimizer, loader = paceline.prepare(model, optimizer, data)
def step(x, y):
    loss_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
x, y = next(iter(data))
step(x, y)
{change}
try:
    step(x, y)
    raised = ""
except paceline.exceptions.UsageError as error:
    raised = str(error)
optimizer.zero_grad()
paceline.assign()
step(x, y)
result([raised, model[0].weight.tolist()])
""",
        mode=mode,
        workers=1,
    )
    assert ran.error is None, ran.error
    raised, weight = ran.results()[0]
    assert "parameter '0.weight' was changed" in raised and "paceline.assign()" in raised
    assert torch.equal(torch.tensor(weight), ran.model["0.weight"])
    assert ran.model["0.weight"].abs().max() < 0.1, "the servers took the zeros over"


def test_a_copy_of_the_model_is_an_ordinary_model(run):
    """An average (EMA): copying, updating, loading and saving it does not talk to the servers."""
    ran = run(
        SETUP
        + """
import copy
from torch.optim.swa_utils import AveragedModel
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(24), batch_size=4))
average, copied = AveragedModel(model), copy.deepcopy(model)
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    if RANK == 0:  # only here: it must not need the other worker
        copied.load_state_dict(model.state_dict())
        (copied(x).sum() + average(x).sum()).backward()
from safetensors.torch import save_file, load_file
save_file(model.state_dict(), RUN_DIR / f"{RANK}.safetensors")
torch.save(model.state_dict(), RUN_DIR / f"{RANK}.pt")
loaded, again = load_file(RUN_DIR / f"{RANK}.safetensors"), torch.load(RUN_DIR / f"{RANK}.pt")
result([all(torch.equal(loaded[k], v) and torch.equal(again[k], v) for k, v in model.state_dict().items()),
        float((average.module[0].weight - model[0].weight).abs().max())])
"""
    )
    assert ran.error is None, ran.error
    assert ran.status.version == 3
    assert all(same_ and distance > 0 for same_, distance in ran.results().values())


# --- data -------------------------------------------------------------------------------------------

COUNTING = """
import random
from torch.utils.data import (
    BatchSampler, IterableDataset, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler,
    WeightedRandomSampler, get_worker_info)

data = TensorDataset(torch.arange(30))

class Shuffled(Sampler):
    "Draws from Python's own generator, as many samplers do."
    def __len__(self):
        return 30
    def __iter__(self):
        return iter(random.sample(range(30), 30))

class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n
    def __iter__(self):
        info = get_worker_info()
        return iter(torch.arange(self.n) if info is None else torch.arange(self.n)[info.id::info.num_workers])

def count(model, optimizer, loader, epochs=2, stop=None):
    seen = []
    for epoch in range(epochs):
        seen.append([])
        for i, (x,) in enumerate((b if isinstance(b, (list, tuple)) else [b]) for b in loader):
            seen[-1].append(x.tolist())
            model(x.float()[:, None]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if i + 1 == stop and epoch == 0:
                break
    return seen
"""
exec(COUNTING, here)

IN_PROCESSES = ", num_workers=2, persistent_workers=True"

COUNT = (
    COUNTING
    + """
random.seed(RANK)
torch.manual_seed(RANK)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
model, optimizer, loader = paceline.prepare(model, optimizer, {loader})
result(count(model, optimizer, loader, stop={stop}))
"""
)


def seen_by_epoch(results: dict[int, Any]) -> list[list[int]]:
    """What all workers saw, sorted, epoch by epoch."""
    return [
        sorted(i for seen in results.values() for batch in seen[epoch] for i in batch) for epoch in range(2)
    ]


@pytest.mark.parametrize(
    "loader",
    [
        "DataLoader(data, batch_size=4, sampler=WeightedRandomSampler(torch.arange(30.0), 25))",
        "DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(5, 25)))",
        "DataLoader(data, batch_size=4, sampler=RandomSampler(data, num_samples=70))",
        "DataLoader(data, batch_size=4, sampler=Shuffled())",
        "DataLoader(data, batch_sampler=BatchSampler(Shuffled(), 7, drop_last=True))",
        "DataLoader(data, batch_size=4, shuffle=True, drop_last=True)",
        "DataLoader(data, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)",
    ],
)
def test_the_users_sampler_decides_what_an_epoch_is_and_each_draw_is_used_once(run, loader):
    """Whatever the ranks' own random state: all workers together see what one process alone sees."""
    from paceline.worker.alone import AloneSession

    ran = run(COUNT.format(loader=loader, stop=None), mode="ssp:1")
    assert ran.error is None, ran.error
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    alone = AloneSession().prepare([model, optimizer, eval(loader.replace(IN_PROCESSES, ""), here)])
    expected = seen_by_epoch({0: here["count"](*alone)})
    seen = seen_by_epoch(ran.results())
    if "drop_last=True)" in loader and "batch_sampler" not in loader:
        assert [len(s) for s in seen] == [28, 28] == [len(set(s)) for s in seen]
    else:
        assert seen == expected
    assert len(ran.results()) == 2


@pytest.mark.parametrize("stop", [None, 1])
@pytest.mark.parametrize("mode", first(1, ["asp", "bsp"]))
def test_a_stream_is_dealt_by_batches_and_nobody_waits_for_the_one_that_has_fewer(run, mode, stop):
    """7 batches over 2 workers: 4 and 3, in two epochs; also if all leave the first epoch early."""
    ran = run(
        COUNT.format(loader="DataLoader(Stream(27), batch_size=4)", stop=stop), mode=mode, deadline_s=5.0
    )
    assert ran.error is None, ran.error
    whole = [list(range(a, min(a + 4, 27))) for a in range(0, 27, 4)]
    first = whole if stop is None else whole[:2]
    assert ran.results() == {r: [first[r::2], whole[r::2]] for r in (0, 1)}
    assert ran.status.samples == sum(map(len, first)) + 27


def test_a_stream_with_loader_processes(run):
    loader = "DataLoader(Stream(24), batch_size=4, num_workers=2)"
    ran = run(COUNT.format(loader=loader, stop=None), mode="asp")
    assert ran.error is None, ran.error
    assert seen_by_epoch(ran.results()) == [list(range(24))] * 2


@pytest.mark.parametrize("extra", ["", ", num_workers=1, persistent_workers=True"])
def test_leaving_the_loop_early_on_every_worker_ends_the_epoch(run, extra):
    """What was not used counts as unused, and the next epoch is a whole one."""
    loader = f"DataLoader(data, batch_size=3, shuffle=True{extra})"
    ran = run(COUNT.format(loader=loader, stop=2), deadline_s=10.0)
    assert ran.error is None, ran.error
    first, second = seen_by_epoch(ran.results())
    assert len(first) == len(set(first)) == 12 and second == list(range(30))
    assert [a["unused"] for a in ran.status.leases[:2]] == [18, 0]


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ("DataLoader(data, batch_size=None)", "batch_size=None"),
        ("DataLoader(data, batch_size=4, sampler=Endless())", "__len__"),
        ("DataLoader(data, sampler=DistributedSampler(data, 2, RANK))", "DistributedSampler"),
        ("DataLoader(TensorDataset(torch.empty(0)), batch_size=4)", "empty"),
    ],
)
def test_a_loader_that_cannot_be_divided_is_refused_with_the_reason(run, loader, words):
    ran = run(
        COUNTING
        + f"""
from torch.utils.data.distributed import DistributedSampler
class Endless(Sampler):
    def __iter__(self):
        yield 0
model = nn.Linear(1, 1)
paceline.prepare(model, torch.optim.SGD(model.parameters()), {loader})
"""
    )
    assert ran.error is not None and "UsageError" in ran.error and words in ran.error


# --- parameters -------------------------------------------------------------------------------------


def test_every_kind_of_parameter_trains_as_in_plain_torch(run):
    """Frozen, tied, 0-dim, channels_last, mixed dtypes, groups of own settings, one larger than a slice."""
    source = """
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(2, 6, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.wide = nn.Linear(6, 6).double()
        self.short = nn.Parameter(torch.randn(6).bfloat16())
        self.first = nn.Linear(6, 6, bias=False)
        self.second = nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.transposed = nn.Parameter(torch.randn(3, 6).t())
        self.unused = nn.Parameter(torch.ones(3))
        self.big = nn.Parameter(torch.randn(1100, 1000) * 0.01)
    def forward(self, x):
        x = self.frozen(self.conv(x.to(memory_format=torch.channels_last)).mean((2, 3)))
        x = self.second(torch.tanh(self.first(self.wide(x.double()).float() * self.short.float())))
        return x * self.scale @ self.transposed + (self.big ** 2).sum()

def make(fused):
    model = Odd()
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": no_decay, "lr": 0.05, "betas": (0.8, 0.99)},
    ]
    return model, torch.optim.AdamW(groups, lr=0.01, **fused)
"""
    ran = run(
        BIG
        + source
        + """
model, optimizer = make({})
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(images(20), batch_size=4))
train(model, optimizer, loader)
assert model.second.weight is model.first.weight
result([list(model.conv.weight.stride()), list(model.transposed.stride())])
""",
        mode="asp",
        workers=1,
        servers=2,
    )
    assert ran.error is None, ran.error
    exec(source, here)
    model, optimizer = here["make"]({"fused": True})
    here["train"](model, optimizer, images_batches(20, 4))
    same(ran.model, model.state_dict())
    assert torch.equal(ran.model["unused"], torch.ones(3)), "no gradient: no decay either"
    assert ran.results()[0] == [list(model.conv.weight.stride()), list(model.transposed.stride())]


def test_unfreezing_after_prepare_is_an_error_and_freezing_is_not(run):
    ran = run(
        SETUP
        + """
model = build()
model[2].requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(samples(8), batch_size=4)
model, optimizer, loader = paceline.prepare(model, optimizer, data)
x, y = next(iter(data))
model[0].bias.requires_grad_(False)
kept = model[0].bias.clone()
loss_of(model(x), y).backward()
optimizer.step()
assert torch.equal(kept, model[0].bias)
model[2].requires_grad_(True)
loss_of(model(x), y).backward()
optimizer.step()
""",
        workers=1,
    )
    assert ran.error is not None
    assert "UsageError" in ran.error and "'2.weight'" in ran.error and "requires_grad" in ran.error


# --- the script's surroundings ----------------------------------------------------------------------


def test_a_worker_sees_torchruns_environment_and_its_own_arguments(run):
    ran = run(
        SETUP
        + """
model = build()
model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):  # no loader: the script has data of its own
    loss_of(model(torch.ones(4, 6)), torch.zeros(4).long()).backward()
    optimizer.step()
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
result({"env": [os.environ[n] for n in names], "argv": sys.argv[1:], "main": __name__,
        "paceline": [paceline.rank(), paceline.world_size(), paceline.is_main()],
        "beside": sys.path[0] == os.path.dirname(__file__)})
""",
        workers=2,
        args=("--lr", "0.1", "--workers", "-x"),
    )
    assert ran.error is None, ran.error
    assert ran.status.version == 2
    for rank, seen in ran.results().items():
        assert seen["env"] == [str(rank), str(rank), "2", "2"]
        assert seen["argv"] == ["--lr", "0.1", "--workers", "-x"]
        assert seen["main"] == "__main__" and seen["beside"]
        assert seen["paceline"] == [rank, 2, rank == 0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("paceline.prepare(model, optimizer); paceline.prepare(model, optimizer)", "the same model twice"),
        ("paceline.prepare(model, optimizer, 3)", "prepare() got a int"),
        ("paceline.prepare(model, build())", "prepare() got 2 models, 0 optimizers"),
        ("paceline.prepare(build(), optimizer)", "is not in the model"),
        ("paceline.prepare(model.requires_grad_(False), optimizer)", "nothing to train"),
        ("paceline.prepare(model, optimizer); optimizer.add_param_group({'params': []})", "add_param_group"),
    ],
)
def test_wrong_calls_get_one_clear_message(run, call, words):
    ran = run(
        SETUP
        + f"""
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{call}
""",
        workers=1,
    )
    assert ran.error is not None
    assert ran.error.startswith("worker:0: UsageError: ") and words in ran.error
    assert "Traceback" not in ran.error


def test_a_script_that_runs_alone_gives_the_same_bits(run):
    """No servers: the same batches, the same kernels."""
    from paceline.worker.alone import AloneSession

    loop = """
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = prepare([model, optimizer, DataLoader(samples(50), batch_size=8, shuffle=True)])
for epoch in range(2):
    for x, y in loader:
        with model.no_sync():
            loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    ran = run(
        SETUP + "prepare = lambda objects: paceline.prepare(*objects)\n" + loop,
        mode="asp",
        workers=1,
        servers=2,
    )
    assert ran.error is None, ran.error
    scope = {**here, "prepare": AloneSession().prepare}
    exec(loop, scope)
    same(ran.model, scope["model"].state_dict())


# --- who may assign, and when -----------------------------------------------------------------------


def test_in_bsp_an_assign_is_one_for_all_also_if_it_depends_on_the_old_values(run):
    """Nobody reads what another worker has assigned before it has assigned itself."""
    ran = run(
        SETUP
        + """
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(48), batch_size=4))
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    paceline.assign()
""",
        workers=3,
        servers=2,
    )
    assert ran.error is None, ran.error
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(48, 12):
        set_mean(model, [gradient(model, batch)], [1])
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
    close(ran.model, model.state_dict())


@pytest.mark.parametrize("link", ["shm", "tcp"])
def test_in_bsp_an_assign_by_one_worker_alone_counts_for_all_from_their_next_step_on(run, link):
    """It takes effect when the other one waits, so what the others compute on never changes under them."""
    ran = run(
        SETUP
        + """
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(24), batch_size=4))
if RANK == 1:
    model.load_state_dict({k: torch.full_like(v, 0.5) for k, v in model.state_dict().items()})
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        link=link,
    )
    assert ran.error is None, ran.error
    model, loaded = build(), build()
    loaded.load_state_dict({k: torch.full_like(v, 0.5) for k, v in loaded.state_dict().items()})
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    data = batches(24, 4)
    set_mean(loaded, [gradient(model, data[0]), gradient(loaded, data[1])], [4, 4])
    optimizer.step()
    for i in (2, 4):
        set_mean(loaded, [gradient(loaded, data[i]), gradient(loaded, data[i + 1])], [4, 4])
        optimizer.step()
    close(ran.model, loaded.state_dict())


@pytest.mark.parametrize("mode", ["bsp", "ssp:0"])
def test_a_replaced_worker_that_loads_weights_after_prepare_does_not_undo_the_training(run, mode):
    """Its script begins again, and so loads the old weights again: the run has newer ones."""
    ran = run(
        SETUP
        + """
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = DataLoader(samples(80), batch_size=4)
fresh = optimizer.state_dict()
model, optimizer, loader = paceline.prepare(model, optimizer, data)
if RANK == 0 or MODE == "bsp" or (RUN_DIR / "killed").exists():
    model.load_state_dict({k: torch.full_like(v, 100.0) for k, v in model.state_dict().items()})
    optimizer.load_state_dict(fresh)
start = float(next(model.parameters()).detach().mean())
for i, (x, y) in enumerate(loader):
    if RANK == 1 and i == 3 and not (RUN_DIR / "killed").exists():
        (RUN_DIR / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    (sum(p.sum() for p in model.parameters()) * 10.0).backward()  # one step takes 1 and more off
    optimizer.step()
    optimizer.zero_grad()
result(start)
""".replace("MODE", repr(mode)),
        mode=mode,
    )
    assert ran.error is None, ran.error
    assert ran.status.restarts == 1
    assert ran.results()[0] == 100.0
    assert ran.results()[1] < 99.5, "it starts from the run's parameters"
    assert ran.status.leases[0]["applied"] == 80
    if mode == "bsp":  # the gradient is always 10, whoever died
        value, velocity = 100.0, 0.0
        for _ in range(ran.status.version):
            velocity = 0.9 * velocity + 10.0
            value -= 0.1 * velocity
        assert ran.model["0.weight"].mean().item() == pytest.approx(value, rel=1e-5)


def test_a_write_that_no_version_counter_sees_is_found_and_refused(run):
    """`p.data.clamp_()` goes past autograd's counters; in bsp it would stay on one worker's private pages."""
    ran = run(
        """
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = paceline.prepare(model, optimizer)
        from paceline.worker import reporter
        reporter.STATS_S = 0.0  # look after every step
        for step in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            model.weight.data.clamp_(-0.1, 0.1)
        """,
        workers=1,
        mode="bsp",
    )
    assert ran.error is not None
    assert "written to through .data" in ran.error
    assert "paceline.assign()" in ran.error


def test_a_write_through_data_is_legal_with_assign(run):
    ran = run(
        """
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = paceline.prepare(model, optimizer)
        from paceline.worker import reporter
        reporter.STATS_S = 0.0
        for step in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.weight.data.clamp_(-0.01, 0.01)
            paceline.assign()
        """,
        workers=1,
        mode="bsp",
    )
    assert ran.error is None
    assert ran.model["weight"].abs().max() <= 0.01 + 1e-7
