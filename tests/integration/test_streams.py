"""An IterableDataset: every worker counts out its part, for the number of workers that the run began with."""

from tests.integration.test_scaling import Scaling

SOURCE = """
import time

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(24))

class Witness(nn.Module):
    def __init__(self):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(24))
    def forward(self, i):
        return -self.counts[i].sum()

model = Witness()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(Stream(), batch_size=4))
for epoch, batches in until_enough(loader):
    for which in batches:
        optimizer.zero_grad()
        model(which).backward()
        optimizer.step()
        time.sleep(0.01)  # computing, as it were
"""


def test_another_number_of_workers_is_refused_by_name_and_every_batch_counts_once(run):
    """With 3 workers of which two count for 2, batches were lost and done twice."""
    watch = Scaling(3, 1)
    ran = run(SOURCE, workers=2, mode="asp+damping=none", threads=1, watch=watch)
    watch.join()
    assert ran.error is None, ran.error
    for answer, wanted in zip(watch.answers, (3, 1), strict=True):
        assert "a stream (IterableDataset)" in answer["refused"]
        assert f"`paceline resume` it with --workers {wanted}" in answer["refused"]
    counts = ran.model["counts"]
    assert counts.min() == counts.max() == ran.status.epoch > 0
