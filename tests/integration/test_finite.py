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
    spoil = "if step == 2: optimizer.param_groups[0]['lr'] = 1e39"
    ran = run(SETUP + LOOP.replace("BEFORE", spoil), mode=mode, workers=1, checkpoint_every=1)
    assert ran.error is not None
    assert "UpdateOverflow: an update of parameter 'weight' (float32) overflowed" in ran.error
    assert "The learning rate is 1e+39" in ran.error
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
