"""Runs whose workers compute batches in parts learn what they learn without."""

import pytest

TRAIN = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
data = TensorDataset(torch.randn(48, 6, dtype=torch.float64), torch.randint(0, 3, (48,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=7))
for _ in range(2):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
result([torch.get_num_threads(), len(children), sys.argv[1:]])
"""


def assert_learns_the_same(run, mode, kinds, workers):
    expected = run(TRAIN, mode=mode, workers=workers, threads=1)
    assert expected.error is None, expected.error
    for kind in kinds:
        ran = run(TRAIN, mode=mode, workers=workers, threads=2, local=f"{kind}:3")
        assert ran.error is None, ran.error
        assert all(r == [1, 2 if kind == "processes" else 0, []] for r in ran.results().values())
        assert expected.model.keys() == ran.model.keys()
        for name, value in expected.model.items():
            assert (ran.model[name] - value).abs().max() < 1e-10, name
    return expected


def test_two_bsp_workers_learn_what_they_learn_without(run):
    ran = assert_learns_the_same(run, "bsp", ("threads", "processes"), workers=2)
    assert ran.status.version == 8


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["asp", "local:2", "easgd:2", "downpour:2,2", "allreduce", "hybrid:bsp"])
def test_so_does_a_worker_in_other_modes(run, mode):
    workers = 2 if mode in ("allreduce", "hybrid:bsp") else 1
    assert_learns_the_same(run, mode, ("threads", "processes"), workers=workers)


PREPARES_TWICE = """
a, b = nn.Linear(3, 3), nn.Linear(3, 1)
one, two = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b))
data = TensorDataset(torch.ones(8, 3))
a, one = paceline.prepare(a, one)
a(torch.ones(4, 3))  # forks
b, two, loader = paceline.prepare(b, two, DataLoader(data, batch_size=4))
for (x,) in loader:
    b(a(x)).sum().backward()
    for optimizer in (one, two):
        optimizer.step()
        optimizer.zero_grad()
result(float(b.weight.sum()))
"""


def test_a_script_that_prepares_twice(run):
    ran = run(PREPARES_TWICE, workers=1, local="processes:2")
    assert ran.error is None, ran.error


FAILS = """
class Loss(nn.Linear):
    def forward(self, x):
        return super().forward(x).mean()

model = Loss(6, 3)
model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(4, 6)).backward()
"""


def test_what_cannot_be_split_ends_the_run_with_the_reason(run):
    ran = run(FAILS, workers=1, local="processes:2")
    assert ran.error is not None and "--local processes:2" in ran.error and "every sample" in ran.error
    assert "Traceback" not in ran.error


DIES = """
model = nn.Linear(6, 3)
model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(4, 6)).sum().backward()
first = not (RUN_DIR / "killed").exists()
(RUN_DIR / "killed").touch()
if first:
    child = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[0]
    os.kill(int(child), signal.SIGKILL)
    os.waitpid(int(child), 0)
model(torch.ones(4, 6)).sum().backward()
optimizer.step()
"""


@pytest.mark.chaos
def test_a_worker_that_loses_a_process_is_replaced(run):
    ran = run(DIES, workers=1, local="processes:2")
    assert ran.error is None, ran.error
    assert ran.status.restarts == 1 and ran.status.version == 1
    assert any("process 1 of --local processes:2" in said for said in ran.status.messages)
