"""Samplers with a generator of their own: every sample once an epoch, whoever drew how often.

The model is the witness: its parameters count how often each sample was applied.
"""

SETUP = """
import numpy as np

N = 60

class Shuffled(torch.utils.data.Sampler):
    def __init__(self):
        self.rng = np.random.default_rng(RANK)
    def __len__(self):
        return N
    def __iter__(self):
        return iter(self.rng.permutation(N).tolist())

class Witness(nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(N))
    def forward(self, i):
        return -self.counts[i].sum()

def train(sampler, epochs=3, at_step=lambda epoch, i: None):
    model = Witness()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.arange(N)), batch_size=4, sampler=sampler)
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        for i, (which,) in enumerate(loader):
            optimizer.zero_grad()
            model(which).backward()
            at_step(epoch, i)
            optimizer.step()
"""


def test_every_sample_once_also_when_a_worker_is_replaced(run):
    """The replaced worker draws the order of its epoch first; the others have drawn others before."""
    ran = run(
        SETUP
        + """
def die(epoch, i):
    died = RUN_DIR / "died"
    if RANK == 1 and epoch == 1 and i == 1 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
list(Shuffled())
train(Shuffled(), at_step=die)
""",
        mode="asp+damping=none",
        threads=1,
    )
    assert ran.error is None, ran.error
    assert ran.status.restarts == 1
    assert ran.model["counts"].tolist() == [3.0] * 60
    assert [a["applied"] for a in ran.status.leases[:3]] == [60] * 3


def test_workers_whose_samplers_disagree_are_told_which_and_what_to_do(run):
    ran = run(
        SETUP
        + """
class Ranked(Shuffled):
    def __iter__(self):
        return iter(np.random.default_rng(RANK).permutation(N).tolist())
train(Ranked())
""",
        mode="asp",
        threads=1,
    )
    assert ran.error is not None
    assert "draws another order of the samples of epoch 1 than worker:" in ran.error
    assert "(Ranked)" in ran.error and "set_epoch(epoch)" in ran.error
