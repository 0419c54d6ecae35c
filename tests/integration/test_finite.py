"""NaN and Inf never reach the model, also where no server checks gradients or the update itself overflows."""

import pytest

SETUP = """
torch.manual_seed(3)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=4))
"""
LOOP = """
for step, (x, y) in enumerate(loader):
    nn.functional.cross_entropy(model(x), y).backward()
    BEFORE
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("mode", ["hogwild", "dogwild", "local:2"])
def test_a_nan_gradient_where_workers_step_by_themselves_leaves_the_model_finite(run, mode):
    spoil = "if step == 1: model.weight.grad[0, 0] = float('nan')"
    ran = run(SETUP + LOOP.replace("BEFORE", spoil), mode=mode, workers=1)
    assert ran.error is None, ran.error
    assert ran.status.refused >= 1
    assert all(p.isfinite().all() for p in ran.model.values())


@pytest.mark.parametrize("mode", ["asp", "bsp"])
def test_an_update_that_overflows_ends_the_run_and_says_why(run, mode):
    spoil = "if step == 2: optimizer.param_groups[0]['lr'] = 1e300"
    ran = run(SETUP + LOOP.replace("BEFORE", spoil), mode=mode, workers=1, checkpoint_every=1)
    assert ran.error is not None
    assert "UpdateOverflow: an update of parameter 'weight' (float32) overflowed" in ran.error
    assert "The learning rate is 1e+300" in ran.error
    assert all(p.isfinite().all() for p in ran.model.values())  # of the last checkpoint


@pytest.mark.parametrize(
    ("spoil", "when"),
    [
        ("", "at prepare()"),
        (
            "with torch.no_grad(): model.weight[0, 0] = float('inf')\npaceline.assign()",
            "when it was assigned",
        ),
    ],
)
def test_parameters_that_are_not_finite_are_not_taken_over(run, spoil, when):
    early = "" if spoil else "with torch.no_grad(): model.weight[0, 0] = float('nan')\n"
    ran = run(
        SETUP.replace("model, optimizer, loader", early + "model, optimizer, loader") + spoil, workers=1
    )
    assert ran.error is not None
    assert f"UsageError: parameter 'weight' held NaN or Inf {when}" in ran.error


@pytest.mark.parametrize("servers", [1, 2])
def test_nan_that_a_worker_writes_into_the_servers_memory_ends_the_run_and_names_it(run, servers):
    """It opens their memory anew, for writing: nothing keeps a process of the same user from that."""
    spoil = """
    if step == 2:
        import mmap
        for entry in os.scandir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if "memfd:paceline" in os.readlink(entry.path) and not os.stat(entry.path).st_size % 4:
                    with open(entry.path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                        memory[:] = b"\\xff" * len(memory)
                        (RUN_DIR / "fired").touch()
"""
    source = SETUP.replace("batch_size=4", "batch_size=1") + LOOP.replace("    BEFORE\n", spoil.lstrip("\n"))
    ran = run(source, mode="bsp", workers=1, servers=servers, checkpoint_every=1)
    assert (ran.run.path / "fired").exists()
    assert ran.error is not None
    assert "NaN or Inf" in ran.error or "overflowed" in ran.error
    assert "parameter '" in ran.error
    assert all(p.isfinite().all() for p in ran.model.values())  # of the last checkpoint
