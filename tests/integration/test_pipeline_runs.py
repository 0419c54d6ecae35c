"""Runs whose workers cut the model into stages learn what they learn without."""

import pytest

from tests.speed import first

TRAIN = """
torch.manual_seed(0)
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.three.weight = self.two.weight
        self.frozen, self.out = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 3)
    def forward(self, x):
        x = torch.tanh(self.one(x))
        return self.out(torch.tanh(self.frozen(self.three(torch.tanh(self.two(x))) + x)))

model = Tied().double()
data = TensorDataset(torch.randn(48, 6, dtype=torch.float64), torch.randint(0, 3, (48,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=7))
losses = []
for _ in paceline.epochs(2):
    for x, y in loader:
        if "loss_of" in sys.argv:
            loss = paceline.loss_of(model, nn.functional.cross_entropy, x, target=y)
        else:
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
result([torch.get_num_threads(), len(children), losses])
"""


def assert_learns_the_same(run, mode, workers, *, exact=True, **settings):
    args = ("loss_of",) if settings.get("pipeline_schedule") == "1f1b" else ()
    expected = run(TRAIN, mode=mode, workers=workers, threads=1)
    assert expected.error is None, expected.error
    ran = run(TRAIN, mode=mode, workers=workers, threads=1, args=args, **settings)
    assert ran.error is None, ran.error
    assert all(r[:2] == [1, settings["pipeline"] - 1] for r in ran.results().values())
    assert expected.model.keys() == ran.model.keys()  # a plain state_dict
    if exact:
        for one, other in zip(expected.results().values(), ran.results().values(), strict=True):
            assert max(abs(a - b) for a, b in zip(one[2], other[2], strict=True)) < 1e-10
        for name, value in expected.model.items():
            assert (ran.model[name] - value).abs().max() < 1e-10, name
    return ran


@pytest.mark.parametrize(
    "settings",
    first(
        1,
        [
            {"pipeline": 3, "pipeline_schedule": "1f1b", "microbatches": 3},
            {"pipeline": 2, "pipeline_schedule": "gpipe", "split_at": ["three"]},
            {"pipeline": 2},
        ],
        ["1f1b", "gpipe, named", "auto"],
    ),
)
def test_two_bsp_workers_learn_what_they_learn_without(run, settings):
    assert assert_learns_the_same(run, "bsp", 2, **settings).status.version == 8


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("mode", ["asp", "local:2", "easgd:2", "downpour:2,2", "allreduce", "hybrid:bsp"])
def test_so_does_a_worker_in_other_modes(run, mode, schedule):
    workers = 2 if mode in ("allreduce", "hybrid:bsp") else 1
    assert_learns_the_same(run, mode, workers, pipeline=2, pipeline_schedule=schedule)


def test_asynchronous_workers_apply_every_sample(run):
    ran = assert_learns_the_same(run, "asp", 2, exact=False, pipeline=2, microbatches=3)
    # A worker may have asked for the epoch behind the last one before it heard that it is over.
    assert [epoch["applied"] for epoch in ran.status.leases if epoch["applied"]] == [48, 48]


DIES = """
class Deadly(nn.Linear):
    def forward(self, x):
        if x.max() > 100 and not (RUN_DIR / "killed").exists():  # in the middle of the third batch
            (RUN_DIR / "killed").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)

torch.manual_seed(0)
model = nn.Sequential(Deadly(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
x = torch.randn(40, 4)
x[29] = 1e3
model, optimizer, loader = paceline.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(TensorDataset(x), batch_size=8)
)
for _ in paceline.epochs(1):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
result(os.getpid())
"""


@pytest.mark.chaos
@pytest.mark.parametrize("replicas", [0, 1])
def test_a_stage_killed_in_the_middle_of_a_schedule_costs_one_mini_batch(run, replicas):
    ran = run(DIES, workers=1, servers=1 + replicas, replicas=replicas, pipeline=3, microbatches=8)
    assert ran.error is None, ran.error
    killed = int((ran.run.path / "killed").read_text())
    assert killed not in ran.results().values()
    assert ran.status.restarts == 1
    assert any("stage 1 of --pipeline 3" in said for said in ran.status.messages)
    # Nothing that was applied is lost, and of the batch nothing was: it is computed once more.
    assert ran.status.version == 5
    assert [epoch["applied"] for epoch in ran.status.leases] == [40]
    assert ran.status.lost_updates == 0


FAILS = """
model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
model, optimizer = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(4, 6)).sum().backward()
"""


@pytest.mark.parametrize(
    ("settings", "said"),
    first(
        1,
        [
            ({"pipeline": 8}, "consists of 3 layer(s) with parameters"),
            ({"pipeline": 2, "split_at": ["head"]}, "has no module of that name"),
        ],
    ),
)
def test_what_cannot_be_cut_ends_the_run_with_the_reason(run, settings, said):
    ran = run(FAILS, workers=1, **settings)
    assert ran.error is not None and said in ran.error and "Traceback" not in ran.error


STEPS = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)).double()
data = TensorDataset(torch.randn(32, 4, dtype=torch.float64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(data, batch_size=8))
for _ in paceline.epochs(2):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
result(0)
"""


@pytest.mark.slow
def test_the_same_bits_in_every_run_with_dropout(run):
    models = [run(STEPS, workers=2, pipeline=2, microbatches=3).model for _ in range(2)]
    for name, value in models[0].items():
        assert value.equal(models[1][name]), name
