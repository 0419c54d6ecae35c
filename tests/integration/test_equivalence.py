"""What a run computes is what plain PyTorch computes: to rounding with several workers, to the bit with one.

Every script here is built from COMMON, which the tests execute too: so the plain loop that a run is
compared with has the same model, data, optimizers and loss, and nothing of Paceline in it.
"""

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.params import StateBook
from paceline.ps.saving import state_book
from paceline.storage import checkpoint as checkpoints
from tests.speed import first

COMMON = """
class Pair(nn.Module):
    # The same little net in float32 (if wanted) and in float64, trained together.
    def __init__(self, hidden, single):
        super().__init__()
        def net():
            return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(),
                                 nn.Linear(hidden, 4))
        self.low = net() if single else None
        self.high = net().double()

    def loss(self, x, y):
        loss = nn.functional.cross_entropy(self.high(x.double()), y)
        return loss if self.low is None else loss + nn.functional.cross_entropy(self.low(x), y)


def make_data(samples):
    g = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 6, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] * x[:, 2] > 0).long())


SETTINGS = {
    "sgd": ("SGD", dict(lr=0.1)),
    "momentum": ("SGD", dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)),
    "adam": ("Adam", dict(lr=3e-3)),
    "adamw": ("AdamW", dict(lr=3e-3, weight_decay=0.05, amsgrad=True)),
    "adagrad": ("Adagrad", dict(lr=0.02)),
    "rmsprop": ("RMSprop", dict(lr=1e-3, momentum=0.5)),
    "nadam": ("NAdam", dict(lr=2e-3)),
}


def make_optimizer(model, name, **more):
    # Two groups of unlike settings: biases learn slower.
    kind, settings = SETTINGS[name]
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": weights}, {"params": biases, "lr": settings["lr"] / 2}]
    return getattr(torch.optim, kind)(groups, **settings, **more)
"""

CLIP = 1.1

SOURCE = (
    COMMON
    + """
import random, time
from paceline.worker import current_session

o = {"optimizer": "sgd", "samples": 125, "batch": 6, "epochs": 5, "shuffle": False, "hidden": 16,
     "single": True, "dither": 0}
o |= json.loads(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(RANK)  # only worker 0's weights count
model = Pair(o["hidden"], o["single"])
optimizer = make_optimizer(model, o["optimizer"])
loader = DataLoader(make_data(o["samples"]), batch_size=o["batch"], shuffle=o["shuffle"])
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
sizes, arrivals = [], []
chance = random.SystemRandom()
for _ in range(o["epochs"]):
    for x, y in loader:
        model.loss(x, y).backward()
        end = time.perf_counter() + o["dither"] * chance.random()
        while time.perf_counter() < end:
            pass  # works: a slow worker, another one each step
        arrivals.append(time.monotonic_ns())
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(len(x))
client = getattr(current_session(), "client", None)
result({"sizes": sizes, "arrivals": arrivals, "over_memory": client is not None and client.links.local})
if client is None:
    from safetensors.torch import save_file
    save_file(model.state_dict(), RUN_DIR / "alone.safetensors")
"""
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A kernel that divides its work among threads may sum in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def common() -> SimpleNamespace:
    space: dict[str, Any] = {"torch": torch, "nn": nn, "TensorDataset": torch.utils.data.TensorDataset}
    exec(COMMON, space)
    return SimpleNamespace(**space)


def order_of(epoch: int, samples: int, *, shuffle: bool, seed: int = 0) -> list[int]:
    """The order in which a run reads an epoch, written down a second time (worker/orders.py)."""
    if not shuffle:
        return list(range(samples))
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    return torch.randperm(samples, generator=generator).tolist()


def plain(
    optimizer: str,
    *,
    batch: int,
    samples: int = 125,
    epochs: int = 5,
    shuffle: bool = False,
    hidden: int = 16,
    single: bool = True,
    clip_norm: float | None = None,
    **more: Any,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The plain PyTorch loop: the trained model, and the norm of every gradient."""
    space = common()
    torch.manual_seed(0)
    model = space.Pair(hidden, single)
    updater = space.make_optimizer(model, optimizer, **more)
    x, y = space.make_data(samples).tensors
    norms = []
    for epoch in range(epochs):
        order = order_of(epoch, samples, shuffle=shuffle)
        for start in range(0, samples, batch):
            chosen = order[start : start + batch]
            model.loss(x[chosen], y[chosen]).backward()
            if clip_norm is not None:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip_norm)))
            updater.step()
            updater.zero_grad()
    return model.state_dict(), norms


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """float64 to 1e-10, float32 to 1e-5."""
    assert got.keys() == expected.keys()
    for name, value in got.items():
        bound = 1e-10 if value.dtype == torch.float64 else 1e-5
        assert (value - expected[name]).abs().max() <= bound, name


def assert_same_bits(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name


def with_state(ran: Any) -> dict[str, torch.Tensor]:
    """Parameters and all optimizer state of a finished run, as whole tensors."""
    found = checkpoints.latest(ran.run.path / "checkpoints")
    book: StateBook = state_book(found)
    state = {}
    for name, shape, *_ in found.meta["layout"]["tensors"]:
        count = torch.Size(shape).numel()
        for what in ["", *book.kinds(name)]:
            state[f"{name}|{what}"] = book.piece(name, what, 0, count)
    return state


def go(run: Any, *, workers: int, job: dict[str, Any] | None = None, **options: Any) -> Any:
    settings = {"mode": "bsp", "servers": 2, "threads": 1, **(job or {})}
    ran = run(SOURCE, workers=workers, args=(json.dumps(options),), **settings)
    assert ran.error is None
    return ran


# --- several workers and one process with their batches together ---------------------------------------


@pytest.mark.parametrize("workers, shuffle", [(2, False), (3, True)], ids=["2-in-order", "3-shuffled"])
@pytest.mark.parametrize("optimizer", first(2, ["momentum", "adam", "sgd", "adamw"]))
def test_bsp_of_w_workers_equals_one_process_with_w_times_the_batch(run, optimizer, workers, shuffle):
    """After 55 steps, with an uneven last batch in every epoch, to 1e-10 (float64) and 1e-5 (float32)."""
    batch = 12 // workers
    ran = go(run, workers=workers, optimizer=optimizer, batch=batch, shuffle=shuffle)
    sizes = [ran.results()[rank]["sizes"] for rank in range(workers)]
    assert all(len(s) == 55 for s in sizes)
    last = [s[10] for s in sizes]  # 125 = 10 · 12 + 5: unequal parts, so their weights matter
    assert sum(last) == 5 and len(set(last)) == 2
    expected, _ = plain(optimizer, batch=12, shuffle=shuffle)
    assert_close(ran.model, expected)


def test_bsp_over_tcp_with_three_servers_equals_one_process(run):
    """The same promise where every byte goes through a socket."""
    ran = go(run, workers=3, optimizer="adam", batch=4, job={"link": "tcp", "servers": 3})
    assert not any(r["over_memory"] for r in ran.results().values())
    assert_close(ran.model, plain("adam", batch=12)[0])


def test_a_round_that_leaves_workers_without_a_sample_still_equals_one_process(run):
    """61 = 5 · 12 + 1: in the last round only worker 0 has a sample, the others rest."""
    ran = go(run, workers=3, optimizer="momentum", batch=4, samples=61, epochs=9)
    assert [len(ran.results()[r]["sizes"]) for r in range(3)] == [54, 45, 45]
    assert_close(ran.model, plain("momentum", batch=12, samples=61, epochs=9)[0])


@pytest.mark.parametrize("link", ["shm", "tcp"])
@pytest.mark.parametrize("servers", [1, 3])
def test_clip_norm_in_bsp_is_a_clip_of_the_averaged_gradient(run, servers, link):
    """clip_grad_norm_ over all parameters in one process with the whole batch gives the same model."""
    job = {"clip_norm": CLIP, "servers": servers, "link": link}
    # Large enough to be cut for three servers; in float64 only, or float32's rounding is in the norm too.
    options = {"hidden": 150, "single": False}
    ran = go(run, workers=2, optimizer="momentum", batch=6, **options, job=job)
    expected, norms = plain("momentum", batch=12, **options, clip_norm=CLIP)
    assert min(norms) < CLIP < max(norms)  # some steps are clipped and some are not
    assert_close(ran.model, expected)


# --- the same bits ---------------------------------------------------------------------------------------


def test_bsp_gives_the_same_bits_whatever_order_the_workers_arrive_in(run):
    """Three runs whose three workers are slow at random: other orders of arrival, one model."""
    runs = [
        go(run, workers=3, optimizer="adam", batch=4, epochs=4, shuffle=True, dither=0.004) for _ in range(3)
    ]
    orders = []
    for ran in runs:
        times = zip(*(ran.results()[rank]["arrivals"] for rank in range(3)), strict=True)
        orders.append([tuple(sorted(range(3), key=lambda r, at=at: at[r])) for at in times])
    assert all(len(set(order)) > 1 for order in orders)  # it did happen: not always the same one first
    assert orders[0] != orders[1] != orders[2] != orders[0]
    first = with_state(runs[0])
    for other in runs[1:]:
        assert_same_bits(with_state(other), first)


@pytest.mark.parametrize(
    "optimizer, shuffle",
    [(name, False) for name in ("momentum", "adamw", "adagrad", "rmsprop")]
    + [("adam", True), ("nadam", True)],
)
def test_asp_with_one_worker_is_plain_pytorch_to_the_bit(run, optimizer, shuffle):
    """Servers use torch's fused kernels where it has them: so does the plain loop here."""
    fused = {} if optimizer in ("rmsprop", "nadam") else {"fused": True}
    ran = go(run, workers=1, optimizer=optimizer, batch=12, shuffle=shuffle, job={"mode": "asp"})
    assert_same_bits(ran.model, plain(optimizer, batch=12, shuffle=shuffle, **fused)[0])


@pytest.mark.parametrize("mode", ["asp", "bsp", "ssp:1"])
def test_one_worker_is_plain_pytorch_to_the_bit_for_a_model_of_many_slices(run, mode):
    """Cut into slices of two dtypes and two groups on three servers, nothing changes in the last bit."""
    options = {"optimizer": "adamw", "hidden": 1100, "samples": 30, "epochs": 2}
    ran = go(run, workers=1, batch=12, **options, job={"mode": mode, "servers": 3})
    layout = checkpoints.latest(ran.run.path / "checkpoints").meta["layout"]
    assert {(s[0], s[1]) for s in layout["slices"]} == {
        (d, g) for d in ("float32", "float64") for g in (0, 1)
    }
    assert len(layout["slices"]) > 4 and len(layout["slices"][0][4]) >= 1
    assert_same_bits(ran.model, plain(batch=12, **options, fused=True)[0])


def test_the_script_alone_gives_the_same_bits_as_asp_with_one_worker(run, tmp_path):
    """`python script.py` is the same training without servers."""
    options = {"optimizer": "adam", "batch": 12, "shuffle": True}
    ran = go(run, workers=1, job={"mode": "asp"}, **options)
    script = next(tmp_path.glob("script*.py"))
    text = script.read_text()
    script.write_text(text.replace(str(ran.run.path), str(tmp_path)))
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=60,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    )
    assert done.returncode == 0, textwrap.indent(done.stderr, "  ")
    from safetensors.torch import load_file

    assert_same_bits(load_file(tmp_path / "alone.safetensors"), ran.model)


@pytest.mark.parametrize("mode, workers", [("bsp", 2), ("asp", 1), ("ssp:2", 1)])
def test_one_server_and_three_servers_give_the_same_bits(run, mode, workers):
    """Parameters and optimizer state of a model of many slices, two dtypes and two groups."""
    options = {"optimizer": "adamw", "hidden": 1100, "samples": 33, "epochs": 2}
    one, three = (
        go(run, workers=workers, batch=6, **options, job={"mode": mode, "servers": servers})
        for servers in (1, 3)
    )
    parts = {n: i.bytes for n, i in checkpoints.latest(three.run.path / "checkpoints").files.items()}
    sizes = [parts[f"server-{k}.safetensors"] for k in range(3)]
    assert min(sizes) > 4 << 20 and max(sizes) < 1.5 * min(sizes)
    assert_same_bits(with_state(one), with_state(three))


@pytest.mark.parametrize("mode, workers", [("bsp", 3), ("asp", 1)])
def test_shared_memory_and_tcp_give_the_same_bits(run, mode, workers):
    options = {"optimizer": "adamw", "hidden": 150, "batch": 4, "shuffle": True}
    memory, sockets = (
        go(run, workers=workers, **options, job={"mode": mode, "servers": 2, "link": link})
        for link in ("shm", "tcp")
    )
    assert all(r["over_memory"] for r in memory.results().values())
    assert not any(r["over_memory"] for r in sockets.results().values())
    assert_same_bits(with_state(memory), with_state(sockets))
