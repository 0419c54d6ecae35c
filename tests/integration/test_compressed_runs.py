"""Compressed runs: what servers apply is what was written, nothing is lost that is not counted."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.compression import parse_compression
from paceline.comm.compression.slice_codec import Decoder, Encoder, Piece
from paceline.exceptions import UsageError
from paceline.params import describe
from paceline.plan import Job, make_plan
from paceline.worker.exchange.encoders import Encoders
from tests.integration.test_checkpoints import died_at, everything
from tests.integration.test_checkpoints import train as checkpointed
from tests.integration.test_equivalence import assert_same_bits
from tests.integration.test_faults import TOOLS, assert_died, assert_every_sample_once
from tests.speed import first

COMMON = """
def build():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 2))

def data():
    x = torch.randn(48, 20, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())

loss_of = nn.functional.cross_entropy
"""

TRAIN = (
    COMMON
    + """
o = {"optimizer": "SGD", "lr": 0.1, "epochs": 2} | (json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
epochs, kind = o.pop("epochs"), o.pop("optimizer")
schedule = o.pop("momenta", None)
torch.set_num_threads(1)
model = build()
optimizer = getattr(torch.optim, kind)(model.parameters(), **o)
loader = DataLoader(data(), batch_size=4)
model, optimizer, loader = paceline.prepare(model, optimizer, loader)
losses, steps = [], 0
for epoch in range(epochs):
    for x, y in loader:
        if schedule is not None:
            optimizer.param_groups[0]["momentum"] = schedule[steps % len(schedule)]
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        steps += 1
parameters = float(sum(p.detach().double().sum() for p in model.parameters()))
from paceline.worker.session import current_session
result({"losses": losses, "parameters": parameters, "pushed": current_session().client.links.bytes_sent})
"""
)

here: dict[str, Any] = {"torch": torch, "nn": nn}
exec(COMMON, here)
SIZE = sum(p.nbytes for p in here["build"]().parameters())


def train(run: Any, *, job: dict[str, Any], **options: Any) -> Any:
    settings = {"workers": 1, "servers": 1, "threads": 1, "mode": "asp", **job}
    ran = run(TRAIN, args=(json.dumps(options),), **settings)
    assert ran.error is None, ran.error
    return ran


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("compress", "ratio", "link"),
    [
        ("fp16", 1.99, "auto"),
        ("bf16", 1.99, "tcp"),
        ("fp8", 3.9, "auto"),
        ("terngrad", 18, "auto"),
        ("qsgd:4", 7.5, "auto"),
        ("signsgd", 28, "auto"),
        ("topk:0.01", 60, "tcp"),
        ("dgc:0.01", 60, "auto"),
        ("sbc:0.01", 250, "auto"),
        ("powersgd:1", 20, "auto"),
    ],
)
def test_every_method_trains_and_its_bytes_are_counted(run, compress, ratio, link):
    job = {"workers": 2, "servers": 2, "mode": "bsp", "link": link, "compress": compress}
    ran = train(run, job=job)
    assert ran.status.samples == 96 and ran.status.version == 12
    for rank, worker in ran.status.workers.items():
        assert worker.bytes_out == ran.results()[rank]["pushed"] < 12 * SIZE / ratio
        assert worker.bytes_in >= 12 * SIZE
    assert ran.results()[0]["losses"][-1] < ran.results()[0]["losses"][0]


def reference(
    compress: str, *, momentum: float = 0.0, momenta: list[float] | None = None, replies: str | None = None
) -> tuple[dict[str, torch.Tensor], float]:
    """One worker in asp, by hand: the servers' model, and the sum of what the worker has."""
    spec = parse_compression(compress)
    served, model = here["build"](), here["build"]()
    optimizer = torch.optim.SGD(
        served.parameters(), lr=0.1, momentum=0.0 if spec.has_momentum else momentum, fused=True
    )
    layout, ours = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (piece,) = layout.slices
    pieces = [Piece.whole(*extent) for extent in layout.extents(piece)]
    encoders = Encoders(spec, layout, seed=0)
    decoder = Decoder(spec, pieces)
    if replies is not None:
        back = Encoder(parse_compression(replies), pieces, 0, feedback=False)
        back_decoder = Decoder(parse_compression(replies), pieces)

    def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
        out = torch.zeros(piece.nbytes // 4)
        for tensor, part in zip(tensors, pieces, strict=True):
            out[part.start : part.stop] = tensor.detach().reshape(-1)
        return out

    theirs = list(served.parameters())
    for step in range(24):
        x, y = here["data"]().tensors
        at = slice(step % 12 * 4, step % 12 * 4 + 4)
        model.zero_grad()
        here["loss_of"](model(x[at]), y[at]).backward()
        used = momentum if momenta is None else momenta[step % len(momenta)]
        encoders.use_momentum([used])
        gradient = torch.empty(piece.nbytes // 4)
        decoder.decode(encoders.encode(0, flat([p.grad for p in ours])), gradient)
        for p, part in zip(theirs, pieces, strict=True):
            p.grad = gradient[part.start : part.stop].view(p.shape)
        optimizer.step()
        with torch.no_grad():
            if replies is None:
                torch._foreach_copy_(ours, theirs)
                continue
            change = flat(theirs) - flat(ours)
            back_decoder.decode(back.encode(change), change)
            for mine, part in zip(ours, pieces, strict=True):
                mine.add_(change[part.start : part.stop].view(mine.shape))
    state = {name: p.detach() for name, p in zip(served.state_dict(), theirs, strict=True)}
    return state, float(sum(p.detach().double().sum() for p in ours))


@pytest.mark.parametrize(
    "compress", first(3, ["topk:0.05", "signsgd", "fp16", "sbc:0.1", "qsgd:4", "terngrad"])
)
def test_servers_apply_what_a_worker_wrote_with_error_feedback(run, compress):
    """To the bit, rounding at random included: against the same steps made by hand."""
    ran = train(run, job={"compress": compress}, momentum=0.9)
    expected, _ = reference(compress, momentum=0.9)
    assert_same_bits(ran.model, expected)


def test_dgc_takes_the_momentum_over_also_when_it_changes(run):
    momenta = [0.9, 0.9, 0.5]
    ran = train(run, job={"compress": "dgc:0.05"}, momentum=0.9, momenta=momenta)
    assert_same_bits(ran.model, reference("dgc:0.05", momenta=momenta)[0])


@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"prefetch": 1}])
def test_compressed_replies_are_what_the_server_thinks_the_worker_has(run, settings):
    job = {"compress": "topk:0.2", "compress_replies": True, **settings}
    ran = train(run, job=job)
    worker = ran.status.workers[0]
    assert worker.bytes_in < 24 * SIZE / 3 + 3 * SIZE
    if not settings.get("prefetch"):
        expected, mine = reference("topk:0.2", replies="topk:0.2")
        assert_same_bits(ran.model, expected)
        assert ran.results()[0]["parameters"] == mine


def test_workers_of_one_round_get_compressed_replies_too(run):
    job = {"workers": 2, "servers": 2, "mode": "bsp", "compress": "qsgd:8", "compress_replies": True}
    ran = train(run, job=job)
    assert ran.status.samples == 96
    assert ran.results()[0]["losses"][-1] < ran.results()[0]["losses"][0]


def test_compressed_deltas(run):
    ran = train(run, job={"workers": 2, "mode": "local:3", "compress": "sbc:0.05"})
    assert ran.status.samples == 96


# --- what survives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"overlap": True}])
def test_resuming_equals_not_having_stopped_to_the_bit(run, tmp_path, settings):
    """What two workers' encoders held back is in the checkpoint."""
    job = {"compress": "topk:0.1", **settings}
    whole = checkpointed(run, job={**job, "checkpoint_every": 3})
    assert whole.error is None
    held = [k for k in everything(whole) if k.startswith("worker-1.safetensors/encoder:")]
    assert any(k.endswith(":residual") for k in held)
    ran = checkpointed(run, resume=died_at(whole, 9, tmp_path / "dead"), job=job)
    assert ran.error is None and ran.status.version == 24
    for rank in range(2):
        assert ran.results()[rank]["losses"] == whole.results()[rank]["losses"][9:]
    assert_same_bits(everything(ran), everything(whole))


def test_resuming_with_another_compression_says_what_is_dropped(run, tmp_path):
    whole = checkpointed(run, job={"compress": "topk:0.1", "checkpoint_every": 3})
    dead = died_at(whole, 9, tmp_path / "dead")
    ran = checkpointed(run, resume=dead, job={"compress": "qsgd:4"})
    assert ran.error is None
    assert "that compression topk:0.1 had held back is dropped" in ran.log("worker", 0)


def test_what_a_dead_worker_had_held_back_is_counted_and_said(run):
    source = "train(prepared(width=300), at_step=lambda step: die() if step == 3 else None)"
    ran = run(TOOLS + source, workers=2, servers=2, mode="asp", compress="topk:0.05")
    assert_died(ran)
    assert_every_sample_once(ran)
    (note,) = [m for m in ran.status.messages if "compression had held back" in m]
    assert "is gone, and with it a gradient of L2 norm " in note
    assert note in ran.log("server", 0)


def test_a_tensor_without_a_gradient_still_gets_what_was_held_back(run):
    """But one that never had any is skipped, also by weight decay, as in plain torch."""
    source = """
model = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
start = [m.weight.detach().clone() for m in model]
model, optimizer = paceline.prepare(model, optimizer)
moved = []
for step in range(3):
    used = model[:2] if step == 0 else model[:1]
    sum(m(torch.ones(40)).sum() for m in used).backward()
    optimizer.step()
    optimizer.zero_grad()
    moved.append([int((m.weight != s).sum()) for m, s in zip(model, start)])
result(moved)
"""
    ran = run(source, workers=1, threads=1, mode="asp", compress="topk:0.01")
    assert ran.error is None
    moved = ran.results()[0]
    assert all(m[2] == 0 for m in moved), "it never had a gradient"
    assert all(m[1] == 1600 for m in moved), "weight decay goes on"


# --- bad input ------------------------------------------------------------------------------------------

STRANGER = """
import paceline.worker.exchange.server_links as client_module
from paceline.comm import Connection, Kind, connect
from paceline.worker.session import current_session
known = {}
real_connect = client_module.connect
def spying(address, *, secret, **more):
    known["server"] = (address, secret)
    return real_connect(address, secret=secret, **more)
client_module.connect = spying

incarnations = itertools.count()

def attach(**body):
    # As worker 9, by hand. Each time as another one: the server may not have heard yet that the last is gone.
    address, secret = known["server"]
    incarnation = next(incarnations)
    link = connect(address, secret, peer="server:0")
    link.sock.settimeout(20)
    link.send(Kind.HELLO, {"role": "worker", "rank": 9, "incarnation": incarnation})
    layout = current_session().client.memory.layout
    link.send(Kind.ATTACH, {"fingerprint": layout.fingerprint, "incarnation": incarnation,
                            "carrier": "inline", **body})
    return link

def answer(link):
    frame = link.receive()
    if frame.payload_bytes:
        link.read_blob(frame, 1 << 30)
    return [frame.kind.name, frame.body.get("error"), frame.body.get("message")]
"""


def test_a_process_that_was_never_started_is_refused_however_it_compresses(run):
    """It holds the secret. What a worker of the run may not send is in test_hostile_messages.py."""
    source = """
objects = prepared(samples=96)
heard = []
def fate(step):
    if RANK or step != 2:
        return
    for body in ({"compress": "zip"}, {"compress_replies": True}, {"compress": "topk:0.5"}, {}):
        link = attach(**body)
        heard.append(answer(link))
        link.close()
train(objects, at_step=fate)
result(heard)
"""
    ran = run(TOOLS + STRANGER + source, workers=2, servers=1, mode="asp")
    assert_every_sample_once(ran, samples=96)
    heard = ran.results()[0]
    assert len(heard) == 4
    assert all(kind == "ERROR" and error == "FrameError" for kind, error, _ in heard), heard
    assert all("worker:9 is no process of this run" in message for *_, message in heard)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compress": "zip"}, "there is no such compression"),
        ({"compress": "topk:0"}, "fraction above 0"),
        ({"compress": "fp16", "mode": "easgd:2"}, "parameters are not gradients"),
        ({"compress": "fp16", "mode": "hogwild"}, "nothing to compress"),
        ({"compress": "fp16", "mode": "allreduce"}, "nothing to compress"),
        ({"compress": "dgc", "mode": "downpour:2,2"}, "use topk:0.001"),
        ({"compress": "dgc", "mode": "local:2"}, "use topk:0.001"),
        ({"compress": "bf16", "link": "shm"}, "link=shm shares memory"),
        ({"compress_replies": True}, "say how with compress"),
        (
            {"compress": "bf16", "compress_replies": True, "mode": "asp+damping=dc"},
            "leave compress_replies out",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(settings, words):
    with pytest.raises(UsageError, match=".") as caught:
        make_plan(Job(workers=2, **settings))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("compress", "build", "words"),
    [
        ("dgc:0.1", "Adam(model.parameters(), lr=0.1)", "and the script's is Adam"),
        ("dgc:0.1", "SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)", "has nesterov"),
        ("powersgd:2", "SGD([model.bias], lr=0.1)", "powersgd on 1-D tensors"),
    ],
)
def test_what_does_not_fit_the_model_or_its_optimizer_is_refused_by_prepare(run, compress, build, words):
    source = f"""
model = nn.Linear(4, 2)
paceline.prepare(model, torch.optim.{build})
"""
    ran = run(source, workers=1, compress=compress)
    assert "UsageError" in ran.error and words in ran.error


def test_the_text_is_kept_in_its_canonical_form():
    job = Job(compress=" TopK ")
    assert job.compress == "topk:0.01"
    assert Job.from_json(job.to_json()) == job


REFUSED = (
    COMMON
    + """
torch.set_num_threads(1)
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data(), batch_size=2))
steps = 0
for epoch in range(2):
    for x, y in loader:
        steps += 1
        if steps == 30 and sys.argv[1] == "without":
            continue
        loss_of(model(x), y).backward()
        if steps == 30:
            for p in model.parameters():
                p.grad.mul_(1e6)
        optimizer.step()
        optimizer.zero_grad()
"""
)


@pytest.mark.parametrize(
    ("compress", "overlap"), [("topk:0.05", False), ("signsgd", False), ("topk:0.05", True)]
)
def test_a_gradient_that_is_refused_for_its_norm_is_not_applied_later_either(run, compress, overlap):
    """The result is bitwise that of a run in which this one step was not made."""
    settings = {
        **{"workers": 1, "servers": 2, "threads": 1, "mode": "asp", "norm_bound": 100.0, "overlap": overlap},
        "compress": compress,
    }
    ran, without = (run(REFUSED, args=(case,), **settings) for case in ("with", "without"))
    assert ran.error is None and without.error is None
    assert ran.status.refused == 1
    assert_same_bits(ran.model, without.model)
