"""Runs whose servers and workers share a device: the same promises as in host memory, and the same results.

Each test runs with HostDevice, which takes a GPU's place (all processes, messages and memory are those of a
run on a GPU), and on a GPU if there is one.
"""

import json
import math

import pytest
import torch

from paceline.exceptions import PlanError, UsageError
from paceline.observe.analyse.facts import facts_of
from paceline.observe.analyse.run_data import RunData
from paceline.observe.record.device_lane import DEVICE_LANE
from paceline.observe.show.run_report import write_html
from paceline.plan import Job, make_plan
from tests.speed import first

STAND_IN = "paceline.testing.host_device:HostDevice"
PLACES = [
    pytest.param(STAND_IN, id="stand-in"),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


@pytest.fixture(params=PLACES)
def place(request):
    return request.param


OPTIMIZER = "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)"
SOURCE = """
torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = False
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2)).to(DTYPE)
optimizer = OPTIMIZER
g = torch.Generator().manual_seed(1)
inputs = torch.randn(SAMPLES, 8, generator=g, dtype=DTYPE)
data = TensorDataset(inputs, torch.randint(0, 2, (SAMPLES,), generator=g))
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
step = 0
for epoch in range(3):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        step += 1
        BEFORE_STEP
        optimizer.step()
        optimizer.zero_grad()
ENDING
result({"steps": step, "on": str(next(model.parameters()).device), "finite": all(
    bool(p.isfinite().all()) for p in model.parameters())})
"""


def source(
    *,
    optimizer: str = OPTIMIZER,
    before_step: str = "pass",
    ending: str = "",
    dtype: str = "torch.float32",
    samples: int = 64,
) -> str:
    return (
        SOURCE.replace("OPTIMIZER", optimizer)
        .replace("BEFORE_STEP", before_step)
        .replace("ENDING", ending)
        .replace("DTYPE", dtype)
        .replace("SAMPLES", str(samples))
    )


def on(place, **settings):
    """Settings of a run on a device."""
    return {"workers": 1, "device": place, "mps": False, **settings}


def adopted_on_device(ran) -> bool:
    return "the parameters are on" in ran.log("server", 0)


def check_alike(place, one, other, *, rtol=1e-4, atol=1e-5):
    """The stand-in computes with the same kernels, so its results are the same bits."""
    assert one.error is None, one.error
    assert other.error is None, other.error
    mine, theirs = one.model, other.model
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if place == STAND_IN:
            assert torch.equal(value, theirs[name]), name
        else:
            torch.testing.assert_close(value, theirs[name], rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "mode",
    first(
        4,
        [
            "bsp",
            "asp",
            "asp+damping=dc",
            "local:2",
            "ssp:1",
            "asp+damping=gap",
            "downpour:2,2",
            "easgd:2",
            "diloco:2",
            "hogwild",
            "bsp+period=2",
        ],
    ),
)
def test_a_worker_alone_gets_what_it_gets_in_host_memory(run, place, mode):
    there, here = run(source(), mode=mode, **on(place)), run(source(), mode=mode, workers=1)
    assert adopted_on_device(there) and not adopted_on_device(here)
    check_alike(place, there, here)
    assert there.results()[0]["steps"] == here.results()[0]["steps"]
    assert there.status.version == here.status.version


@pytest.mark.parametrize(
    "optimizer",
    first(
        3,
        [
            "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)",
            "torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)",
            "torch.optim.RMSprop(model.parameters(), lr=0.01)",
            "torch.optim.SGD(model.parameters(), lr=0.1)",
            "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)",
            "torch.optim.AdamW(model.parameters(), lr=0.01)",
            "torch.optim.Adagrad(model.parameters(), lr=0.05)",
        ],
    ),
)
def test_every_optimizer_steps_as_in_host_memory(run, place, optimizer):
    script = source(optimizer=optimizer)
    there, here = run(script, mode="asp", **on(place)), run(script, mode="asp", workers=1)
    check_alike(place, there, here)


@pytest.mark.parametrize("samples", [64, 60])
def test_two_synchronous_workers_equal_one_process(run, place, samples):
    """With batches of unequal sizes, too."""
    script = source(dtype="torch.float64", samples=samples)
    pair = run(script, mode="bsp", **on(place, workers=2))
    assert adopted_on_device(pair)
    alone = run(script.replace("batch_size=8", "batch_size=16"), mode="bsp", workers=1)
    assert pair.error is None and alone.error is None
    for name, value in alone.model.items():
        torch.testing.assert_close(pair.model[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "mode", ["asp", "ssp:2", "backup:1", "easgd:2", "downpour:2,2", "dogwild", "hogwild"]
)
def test_every_sample_is_applied_once_with_several_workers(run, place, mode):
    ran = run(source(samples=128), mode=mode, **on(place, workers=3))
    assert ran.error is None, ran.error
    assert adopted_on_device(ran)
    assert ran.status.samples == 3 * 128
    assert all(each["finite"] for each in ran.results().values())


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_a_gradient_that_is_not_finite_is_refused_on_the_device(run, place, mode):
    """The worker does not look at it: the device does."""
    spoil = "RANK == 1 and step == 3 and model[0].weight.grad.fill_(float('nan'))"
    ran = run(source(before_step=spoil), mode=mode, **on(place, workers=2))
    assert ran.error is None, ran.error
    assert ran.status.refused == 1
    assert all(value.isfinite().all() for value in ran.model.values())
    assert "worker:1 pushed NaN or Inf" in ran.log("server", 0)


def test_a_first_gradient_that_is_not_finite_leaves_no_momentum(run, place):
    """A fused step that is skipped on the device writes no momentum buffer: the first one is waited for."""
    spoil = "step == 1 and model[0].weight.grad.fill_(float('inf'))"
    ran = run(source(before_step=spoil), mode="asp", **on(place))
    assert ran.error is None, ran.error
    assert ran.status.refused == 1
    assert all(value.isfinite().all() for value in ran.model.values())


def test_other_workers_gradients_of_a_round_count_when_one_is_not_finite(run, place):
    """As in host memory: the mean is that of the others."""
    spoil = "RANK == 1 and step == 2 and [p.grad.fill_(float('nan')) for p in model.parameters()]"
    script = source(before_step=spoil, optimizer="torch.optim.SGD(model.parameters(), lr=0.1)")
    there = run(script, mode="bsp", **on(place, workers=2))
    here = run(script, mode="bsp", workers=2)
    # In host memory the worker sees it itself, and its samples are drawn again.
    assert there.error is None and here.error is None
    assert there.status.refused == here.status.refused == 1


def test_an_update_that_overflows_ends_the_run_with_its_name(run, place):
    spoil = "if step == 9: optimizer.param_groups[0]['lr'] = 1e39"
    ran = run(source(before_step=spoil), mode="asp", **on(place, checkpoint_every=1))
    assert ran.error is not None
    assert "UpdateOverflow: an update of parameter" in ran.error
    assert "The learning rate is 1e+39" in ran.error
    assert all(value.isfinite().all() for value in ran.model.values())  # of the last checkpoint


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_what_the_device_did_is_beside_what_the_threads_did(run, place, mode):
    """And in no sum of the threads."""
    ran = run("import time\n" + source(samples=256, before_step="time.sleep(0.005)"), mode=mode, **on(place))
    assert ran.error is None, ran.error
    data = RunData(ran.run.path)
    device = data.spans[data.spans.lane == DEVICE_LANE]
    assert {"forward", "backward", "push", "wait"} <= set(device[device.role == "worker"].phase)
    assert set(device[device.role == "server"].phase) - {"checkpoint"} == {"update"}
    facts = facts_of(data)
    (worker,), (server,) = facts.workers, facts.servers
    assert server.updates == ran.status.version
    threads = data.totals[(data.totals.role == "worker") & (data.totals.lane == 0)]
    assert worker.total_s == pytest.approx(threads.ns.sum() / 1e9)
    found = facts.device.workers[0]
    assert found.steps >= 3  # of about 6 ms: every fourth
    assert found.gpu_s == pytest.approx(sum(found.cpu.values()), rel=0.3)
    write_html(data, ran.run.path / "page.html")
    assert "On the GPU" in (ran.run.path / "page.html").read_text()


@pytest.mark.parametrize("mode", ["bsp", "asp"])
def test_a_killed_worker_is_replaced_and_no_sample_is_lost(run, place, mode):
    kill = "RANK == 1 and step == 3 and not (RUN_DIR / 'died').exists() and die()"
    die = "def die():\n    (RUN_DIR / 'died').touch()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    ran = run(die + source(before_step=kill, samples=128), mode=mode, **on(place, workers=2))
    assert ran.error is None, ran.error
    assert (ran.run.path / "died").exists()
    assert ran.status.samples == 3 * 128
    assert ran.status.restarts == 1


@pytest.mark.slow
def test_a_killed_server_sends_the_run_back_to_its_checkpoint(run, place):
    killed = []

    def watch(status, lines, engine):
        if status.version >= 12 and not killed:
            killed.append(status.version)
            engine.local.end("server", 0)

    slow = "time.sleep(0.05)"
    script = "import time\n" + source(before_step=slow, samples=256)
    ran = run(script, mode="bsp", watch=watch, **on(place, checkpoint_every=4))
    assert killed
    assert ran.error is None, ran.error
    assert all(value.isfinite().all() for value in ran.model.values())


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(run, place):
    stop = "step == 10 and not (RUN_DIR / 'again').exists() and sys.exit(3)"
    adam = "torch.optim.Adam(model.parameters(), lr=0.01)"
    settings = on(place, mode="bsp", checkpoint_every=4)
    broken = run(source(before_step=stop, optimizer=adam), max_restarts=0, **settings)
    assert broken.error is not None
    (broken.run.path / "again").touch()
    resumed = run(source(before_step=stop, optimizer=adam), resume=broken, **settings)
    whole = run(source(optimizer=adam), **settings)
    assert resumed.error is None and whole.error is None
    for name, value in whole.model.items():
        assert torch.equal(resumed.model[name], value), name


@pytest.mark.slow
def test_a_checkpoint_of_a_device_goes_on_in_host_memory(run, place):
    stop = "step == 10 and not (RUN_DIR / 'again').exists() and sys.exit(3)"
    settings = {"mode": "bsp", "checkpoint_every": 4}
    broken = run(source(before_step=stop), max_restarts=0, **on(place, **settings))
    (broken.run.path / "again").touch()
    resumed = run(source(before_step=stop), resume=broken, workers=1, **settings)
    whole = run(source(), workers=1, **settings)
    check_alike(place, resumed, whole)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [("6=asp",), ("6=ssp:1", "12=bsp")])
def test_a_run_changes_its_mode(run, place, schedule):
    """Workers that read in place get a copy of their own, and the other way round."""
    one = run(source(samples=128), mode="bsp", schedule=schedule, **on(place))
    plain = run(source(samples=128), mode="bsp", schedule=schedule, workers=1)
    check_alike(place, one, plain)
    several = run(source(samples=128), mode="bsp", schedule=schedule, **on(place, workers=2))
    assert several.error is None, several.error
    assert several.status.samples == 3 * 128


def test_averaged_gradients_are_clipped(run, place):
    there = run(source(), mode="bsp", clip_norm=0.05, **on(place, workers=2))
    here = run(source(), mode="bsp", clip_norm=0.05, workers=2)
    check_alike(place, there, here)


def test_a_tensor_without_a_gradient_is_skipped_for_that_step(run, place):
    """Steps on whole slices go back to steps on tensors, and keep each tensor's count."""
    adam = "torch.optim.Adam(model.parameters(), lr=0.01)"
    drop = "if step in (5, 9): model[2].bias.grad = None"
    script = source(optimizer=adam, before_step=drop)
    there, here = run(script, mode="asp", **on(place)), run(script, mode="asp", workers=1)
    check_alike(place, there, here)


def test_loaded_parameters_and_the_optimizers_state_are_the_runs(run, place):
    ending = """
state = optimizer.state_dict()
momenta = sum(float(s["momentum_buffer"].abs().sum()) for s in state["state"].values())
model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
(RUN_DIR / "momenta.json").write_text(json.dumps(momenta))
"""
    there, here = (
        run(source(ending=ending), mode="bsp", **on(place)),
        run(source(ending=ending), mode="bsp", workers=1),
    )
    check_alike(place, there, here)
    assert all(bool(value.eq(1).all()) for value in there.model.values())
    found, wanted = (json.loads((ran.run.path / "momenta.json").read_text()) for ran in (there, here))
    assert math.isclose(found, wanted, rel_tol=1e-3) and found > 0


SEVERAL = """
torch.manual_seed(0)
g = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(64, 8, generator=g), torch.randn(64, 2, generator=g))
first, second = nn.Linear(8, 16), nn.Linear(16, 2)
a = torch.optim.SGD(first.parameters(), lr=0.05, momentum=0.9)
b = torch.optim.Adam(second.parameters(), lr=0.01)
PREPARE
for epoch in range(3):
    for x, y in loader:
        nn.functional.mse_loss(second(first(x).tanh()), y).backward()
        a.step(); a.zero_grad()
        b.step(); b.zero_grad()
"""
AT_ONCE = (
    "first, second, a, b, loader = paceline.prepare(first, second, a, b, DataLoader(data, batch_size=8))"
)
IN_TWO = """
first, a = paceline.prepare(first, a)
second, b, loader = paceline.prepare(second, b, DataLoader(data, batch_size=8))
"""


@pytest.mark.parametrize("prepare", [AT_ONCE, IN_TWO])
def test_several_optimizers_and_calls_of_prepare(run, place, prepare):
    script = SEVERAL.replace("PREPARE", prepare)
    there, here = run(script, mode="bsp", **on(place)), run(script, mode="bsp", workers=1)
    check_alike(place, there, here)


@pytest.mark.parametrize("dtype", ["torch.float16", "torch.bfloat16"])
def test_two_byte_parameters_are_averaged_in_float32(run, place, dtype):
    ran = run(
        source(dtype=dtype, optimizer="torch.optim.SGD(model.parameters(), lr=0.1)"),
        mode="bsp",
        **on(place, workers=2),
    )
    assert ran.error is None, ran.error
    assert ran.status.refused == 0
    assert all(value.isfinite().all() for value in ran.model.values())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"replicas": 1, "servers": 2}, "replicas on a GPU would be lost"),
        ({"servers": 2}, "one server uses all of a GPU"),
        ({"mode": "allreduce"}, "workers hold the parameters"),
        ({"mode": "sandblaster"}, "L-BFGS"),
        ({"overlap": True}, "travels through host memory"),
        ({"link": "tcp"}, "over sockets"),
        ({"device": "cpu"}, "device=cpu"),
    ],
)
def test_what_servers_on_a_gpu_cannot_do_is_refused_by_name(settings, reason, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    with pytest.raises(UsageError, match=f"server_device=cuda: .*{reason}"):
        make_plan(Job(script=str(script), server_device="cuda", **settings))


@pytest.mark.parametrize(
    "settings", [{"replicas": 1, "servers": 2}, {"servers": 2}, {"server_device": "cpu"}]
)
def test_servers_stay_in_host_memory_where_they_must(run, place, settings):
    ran = run(source(), mode="bsp", **on(place, workers=2, **settings))
    assert ran.error is None, ran.error
    assert not adopted_on_device(ran)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there_is_refused_by_the_plan(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    with pytest.raises(PlanError, match="device=cuda: NVIDIA's driver shows no GPU"):
        make_plan(Job(script=str(script), device="cuda"))


# --- servers in host memory, slices copied while the model computes -----------------------------------

MIRRORED = """
from paceline.worker.session import current_session
assert current_session()._joined().memory.mirror is not None
"""
HIDDEN = {"server_device": "cpu", "overlap": True}


def wide(**settings) -> str:
    """Several slices: two layers are larger than one. At a larger rate such a model makes 1e-3 of a rounding
    of 1e-7 within these steps."""
    optimizer = "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)"
    return (
        source(optimizer=optimizer, **settings)
        .replace("nn.Linear(8, 64)", "nn.Linear(8, 1500)")
        .replace("nn.Linear(64, 2)", "nn.Linear(1500, 1000), nn.Tanh(), nn.Linear(1000, 2)")
    )


@pytest.mark.parametrize("mode", first(2, ["bsp", "asp", "ssp:1", "asp+damping=dc"]))
@pytest.mark.parametrize("servers", first(1, [2, 1]))
def test_slices_travel_while_the_model_computes(run, place, mode, servers):
    """The same bits as without overlap in host memory, with several slices and servers."""
    script = wide(ending=MIRRORED)
    there = run(script, mode=mode, servers=servers, **on(place, **HIDDEN))
    here = run(wide(), mode=mode, servers=servers, workers=1)
    check_alike(place, there, here)
    assert there.status.version == here.status.version


def test_synchronous_workers_that_hide_the_exchange_equal_one_process(run, place):
    script = wide(dtype="torch.float64", ending=MIRRORED)
    pair = run(script, mode="bsp", servers=2, **on(place, workers=2, **HIDDEN))
    alone = run(wide(dtype="torch.float64").replace("batch_size=8", "batch_size=16"), mode="bsp", workers=1)
    assert pair.error is None and alone.error is None, pair.error
    for name, value in alone.model.items():
        torch.testing.assert_close(pair.model[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "change",
    first(
        2,
        [
            "[p.grad.mul_(0.5) for p in model.parameters()]",
            "[p.grad.data.mul_(0.5) for p in model.parameters()]",
            "nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
            "nn.functional.cross_entropy(model(x), y).backward()",
            "model[0].weight.grad = None",
        ],
    ),
)
def test_a_gradient_that_changes_after_it_has_left_counts_as_it_is(run, place, change):
    there = run(wide(before_step=change, ending=MIRRORED), mode="asp", **on(place, **HIDDEN))
    here = run(wide(before_step=change), mode="asp", workers=1)
    check_alike(place, there, here)


def test_a_state_dict_between_two_steps_has_what_is_on_its_way(run, place):
    """Read right after step(): the same values, step by step, as in host memory."""

    def looking(**settings) -> str:
        keep = "(RUN_DIR / 'seen.json').write_text(json.dumps(seen))\n"
        look = "seen.append(model.state_dict()['0.weight'].double().sum().item())"
        script = wide(ending=keep + settings.get("ending", ""))
        script = script.replace("step = 0\n", "step = 0\nseen = []\n")
        return script.replace("        optimizer.step()\n", f"        optimizer.step()\n        {look}\n")

    there = run(looking(ending=MIRRORED), mode="asp", **on(place, **HIDDEN))
    here = run(looking(), mode="asp", workers=1)
    assert there.error is None, there.error
    mine, theirs = (json.loads((ran.run.path / "seen.json").read_text()) for ran in (there, here))
    assert len(mine) == len(theirs) == 24 and len(set(theirs)) == 24
    assert mine == pytest.approx(
        theirs, rel=0 if place == STAND_IN else 1e-4, abs=0 if place == STAND_IN else 1e-2
    )


def test_a_killed_server_lets_the_device_go(run, place):
    """A worker's device waits for a slice of a server that is gone: the run goes back to its checkpoint."""
    kill = "RANK == 0 and step == 9 and ONCE and os.kill(SERVER, 9)"
    script = wide(before_step=kill, ending=MIRRORED).replace(
        "step = 0\n",
        "step = 0\nflag = RUN_DIR / 'killed'\nONCE = not flag.exists()\n"
        "SERVER = json.load(open(RUN_DIR / 'status.json'))['servers']['1']['pid']\nflag.touch()\n",
    )
    ran = run(script, mode="bsp", servers=2, checkpoint_every=4, **on(place, **HIDDEN))
    assert ran.error is None, ran.error
    assert any("server:1" in said and "SIGKILL" in said for said in ran.status.messages), ran.status.messages
    here = run(wide(), mode="bsp", servers=2, workers=1)
    check_alike(place, ran, here)
