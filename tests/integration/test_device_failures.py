"""A worker whose GPU fails is replaced, and nothing else; nothing stays on the device.

Row 19 of the fault matrix. What needs no CUDA error runs with HostDevice, too, which takes a GPU's place.
"""

import time

import pytest
import torch

from paceline.observe.record.gpu import Gpus
from tests.integration.test_device_runs import on, source
from tests.speed import first

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
STAND_IN = "paceline.testing.host_device:HostDevice"
PLACES = [pytest.param(STAND_IN, id="stand-in"), pytest.param("cuda", marks=NEEDS_GPU)]

ONCE = """
import time

def once(name, act):
    if not (RUN_DIR / name).exists():
        (RUN_DIR / name).touch()
        act()

def leave_work():
    # Worker 1 may be slower to begin, and is to reach the step at which it fails.
    if not (RUN_DIR / "died").exists():
        time.sleep(0.2)
"""
FAILS_ONCE = "RANK == 1 and step == 3 and once('died', fails); RANK == 0 and leave_work()"
RUNS_OUT = """
def fails():
    torch.empty(1 << 50, dtype=torch.uint8, device=model[0].weight.device)
"""
ASSERTS = """
def fails():
    # A kernel that asserts on the device; the CPU goes on until it hears of it.
    numbers, index = torch.zeros(4, device="cuda"), torch.tensor([9], device="cuda")
    found = numbers[index]
    if HEARS_AT_ONCE:
        found.sum().item()
"""


def assert_only_worker_1_was_replaced(ran, epochs=3, samples=128) -> None:
    assert (ran.run.path / "died").exists(), "the fault never fired"
    assert ran.error is None, ran.error
    assert ran.status.restarts == 1, ran.status.messages
    assert ran.status.workers[1].restarts == 1
    assert ran.status.workers[0].restarts == 0
    (said,) = [message for message in ran.status.messages if "replaced" in message]
    assert said.startswith("worker:1 ") and "restart 1 of at most 3" in said
    assert ran.status.samples == epochs * samples
    assert all(value.isfinite().all() for value in ran.model.values())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", first(1, ["asp", "bsp"]))
def test_a_worker_that_runs_out_of_memory_is_replaced_alone(run, place, mode):
    script = ONCE + RUNS_OUT + source(before_step=FAILS_ONCE, samples=128)
    ran = run(script, mode=mode, **on(place, workers=2))
    assert_only_worker_1_was_replaced(ran)
    words = "CUDA out of memory" if place == "cuda" else "can't allocate memory"
    assert words in ran.log("worker", 1)


@pytest.mark.parametrize(
    ("mode", "hears_at_once"),
    [
        pytest.param(mode, hears, id=f"{mode}-{'at-once' if hears else 'later'}", marks=NEEDS_GPU)
        for mode in ("bsp", "asp")
        for hears in (True, False)
    ],
)
def test_a_worker_whose_gpu_reports_an_error_is_replaced_alone(run, mode, hears_at_once):
    """At once, or at a later call, while the servers' device may wait for its gradient."""
    script = ONCE + f"HEARS_AT_ONCE = {hears_at_once}" + ASSERTS + source(before_step=FAILS_ONCE, samples=128)
    ran = run(script, mode=mode, **on("cuda", workers=2))
    assert_only_worker_1_was_replaced(ran)
    assert "device-side assert triggered" in ran.log("worker", 1)


@pytest.mark.parametrize("mode", [pytest.param("asp", marks=NEEDS_GPU)])
def test_a_script_whose_gpu_always_fails_ends_the_run_with_the_error(run, mode):
    """A label that is out of range comes again: the worker is replaced once, not for ever."""
    script = "HEARS_AT_ONCE = True" + ASSERTS + source(before_step="step == 3 and fails()", samples=128)
    ran = run(script, mode=mode, **on("cuda"))
    assert ran.error is not None
    assert "device-side assert triggered" in ran.error
    assert ran.status.restarts <= 1


WIDE = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8000), nn.Linear(8000, 8000), nn.Linear(8000, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
data = TensorDataset(torch.randn(768, 8), torch.randint(0, 2, (768,)))
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=8))
for step, (x, y) in enumerate(loader):
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if RANK == 1 and step >= 3:
        for n in range(KILLS):
            once(f"died-{n}", die)
        (RUN_DIR / "back").touch()
    time.sleep(0.05 if (RUN_DIR / "back").exists() else 0.4)  # worker 0 leaves work for those that come back
"""
MODEL_BYTES = 4 * 8000 * 8000


@pytest.mark.parametrize("kills", [pytest.param(n, marks=NEEDS_GPU) for n in (0, 2)])
def test_nothing_stays_on_the_device(run, kills):
    """Killed workers free what they had mapped, their replacements get the same memory, and a run leaves
    nothing. The driver is asked, as nvidia-smi does."""
    gpus = Gpus()
    used: dict[int, int] = {}

    def watch(status, lines, engine):
        usage = gpus.usage()
        used[status.restarts] = max(used.get(status.restarts, 0), usage.memory)

    before = gpus.usage().memory
    die = "def die():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    script = ONCE + die + WIDE.replace("KILLS", str(kills))
    ran = run(script, mode="asp", watch=watch, **on("cuda", workers=2))
    assert ran.error is None, ran.error
    assert ran.status.restarts == kills
    assert len(list(ran.run.path.glob("died-*"))) == kills and (ran.run.path / "back").exists()
    # The server's parameters, and of each of two workers a gradient and a copy: otherwise this sees nothing.
    assert max(used.values()) - before > 5 * MODEL_BYTES
    assert used[kills] < used[0] + MODEL_BYTES, "a replaced worker took memory again"
    deadline = time.monotonic() + 20
    while (left := gpus.usage().memory - before) > MODEL_BYTES / 4:
        assert time.monotonic() < deadline, f"{left / 1e6:,.0f} MB stay on the device"
        time.sleep(0.1)  # the driver takes a process apart after it has ended
    gpus.close()
