"""What torchrun sets, a script finds under `paceline run`, too; or none of it."""

import pytest

from tests.speed import first

TRAIN = """
torch.manual_seed(7)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = paceline.prepare(model, optimizer)
model(torch.ones(4, 6)).square().mean().backward()
optimizer.step()
"""

OWN_GROUP = (
    TRAIN
    + """
from torch import distributed
distributed.init_process_group("gloo")
total = torch.tensor([1.0 + RANK])
distributed.all_reduce(total)
result([total.item(), distributed.get_rank(), distributed.get_world_size(), os.environ["MASTER_PORT"]])
distributed.destroy_process_group()
"""
)

NAMES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"]


@pytest.mark.parametrize("mode", first(1, ["asp", "allreduce"]))
def test_a_script_makes_a_process_group_of_its_own(run, mode):
    ran = run(OWN_GROUP, workers=2, mode=mode, threads=1)
    assert ran.error is None, ran.error
    (total, first, world, port), other = ran.results()[0], ran.results()[1]
    assert (total, first, world) == (3.0, 0, 2) and int(port) > 0
    assert other == [3.0, 1, 2, port]


def test_without_torchruns_variables_a_script_sees_none(run):
    source = TRAIN + f"result([[name in os.environ for name in {NAMES}], RANK, paceline.world_size()])"
    ran = run(source, workers=2, torchrun_env=False, threads=1)
    assert ran.error is None, ran.error
    assert ran.results() == {rank: [[False] * len(NAMES), rank, 2] for rank in range(2)}
