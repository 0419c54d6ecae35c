"""Servers run torch's own optimizers: the same bits as a plain loop, or a refusal with the reason."""

import inspect
from typing import Any

import pytest
import torch

from tests.speed import first

SETUP = """
def build(matrices_only=False):
    torch.manual_seed(7)
    model = nn.Module()
    model.first = nn.Linear(6, 700, bias=not matrices_only)  # larger than a slice, with two servers
    model.middle = nn.Linear(700, 70, bias=not matrices_only)
    model.last = nn.Linear(70, 3, bias=not matrices_only)
    if not matrices_only:
        model.scale = nn.Parameter(torch.tensor(0.9))
    return model

def loss_of(model, x, y):
    x = torch.tanh(model.middle(torch.tanh(model.first(x)))) * getattr(model, "scale", 1.0)
    return nn.functional.cross_entropy(model.last(x), y)

def samples():
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(20, 6, generator=g), torch.randint(0, 3, (20,), generator=g))

def train(model, optimizer, loader):
    for x, y in loader:
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
here: dict[str, Any] = {}
exec(
    "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n" + SETUP,
    here,
)

SCRIPT = (
    SETUP
    + """
model = build({matrices_only})
optimizer = {optimizer}
model, optimizer, loader = paceline.prepare(model, optimizer, DataLoader(samples(), batch_size=4))
train(model, optimizer, loader)
torch.save(optimizer.state_dict(), RUN_DIR / "state.pt")
"""
)

ELEMENT_WISE = [
    "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)",
    "torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)",
    "torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), weight_decay=0.2)",
    "torch.optim.ASGD(model.parameters(), lr=0.1, t0=2)",
    "torch.optim.Adagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.1)",
    "torch.optim.Adam(model.parameters(), lr=0.01, foreach=True)",
    "torch.optim.NAdam(model.parameters(), lr=0.01)",
    "torch.optim.RAdam(model.parameters(), lr=0.01)",
    "torch.optim.Adamax(model.parameters(), lr=0.01)",
    "torch.optim.Adadelta(model.parameters(), lr=0.5)",
    "torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9, centered=True)",
    "torch.optim.Rprop(model.parameters(), lr=0.01)",
]
WHOLE_TENSOR = [
    "torch.optim.Adafactor(model.parameters(), lr=0.05)",
    "torch.optim.Muon(model.parameters(), lr=0.02)",
]
REFUSED = {
    "LBFGS": "torch.optim.LBFGS(model.parameters())",
    "SparseAdam": "torch.optim.SparseAdam(list(model.parameters()))",
}


def reference(optimizer: str, *, matrices_only: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Model and optimizer state after the same steps in a plain loop, with the servers' choice of kernel."""
    scope = {**here, "model": here["build"](matrices_only)}
    plain = eval(optimizer, scope)
    if "fused" in inspect.signature(type(plain)).parameters and not plain.defaults["foreach"]:
        # A fused kernel wants its number as a number.
        plain = eval(
            optimizer.replace("torch.tensor(0.01)", "torch.tensor(0.01).item()")[:-1] + ", fused=True)", scope
        )
    x, y = here["samples"]().tensors
    here["train"](scope["model"], plain, list(zip(x.split(4), y.split(4), strict=True)))
    return scope["model"].state_dict(), plain.state_dict()["state"]


@pytest.mark.parametrize("optimizer", [*first(5, ELEMENT_WISE), *WHOLE_TENSOR])
def test_five_steps_on_two_servers_are_those_of_plain_torch_bit_for_bit(run, optimizer):
    """Parameters and the state that optimizer.state_dict() shows."""
    matrices_only = "Muon" in optimizer
    ran = run(
        SCRIPT.format(optimizer=optimizer, matrices_only=matrices_only), mode="asp", workers=1, servers=2
    )
    assert ran.error is None, ran.error
    assert ran.status.version == 5
    model, state = reference(optimizer, matrices_only=matrices_only)
    ours = ran.model
    assert ours.keys() == model.keys()
    for name, value in model.items():
        assert torch.equal(ours[name], value), name
    kept = torch.load(ran.run.path / "state.pt")["state"]
    assert kept.keys() == state.keys()
    for i, values in state.items():
        assert kept[i].keys() == values.keys()
        for what, value in values.items():
            mine = kept[i][what]
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(value)), (i, what)
            assert type(mine) is type(value), (i, what)


@pytest.mark.parametrize("optimizer", ["Adam", "Adafactor"])
def test_large_tensors_are_cut_only_for_element_wise_optimizers(optimizer):
    """What the test above relies on."""
    from paceline.params import OptimizerSpec, describe, partition

    model = here["build"]()
    made = getattr(torch.optim, optimizer)(model.parameters())
    spec = OptimizerSpec.of(made)
    layout, _ = describe(model, made, servers=2, whole_tensors=spec.whole_tensors)
    large = layout.index["middle.weight"]
    holders = {
        server
        for server, shard in enumerate(partition(layout, 2))
        for piece in shard
        if any(g.tensor == large for g in piece.segments)
    }
    pieces = [g for s in layout.slices for g in s.segments if g.tensor == large]
    assert (len(pieces) > 1) == (optimizer == "Adam")
    assert len(holders) == (2 if optimizer == "Adam" else 1)


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_servers_cannot_run_are_refused_with_the_reason(run, name):
    ran = run(SCRIPT.format(optimizer=REFUSED[name], matrices_only=False), workers=1)
    assert ran.error is not None
    assert ran.error.startswith(f"worker:0: UsageError: torch.optim.{name} cannot run on parameter servers: ")
    assert ("loss several times" if name == "LBFGS" else "use Adam") in ran.error


def test_no_optimizer_of_torch_is_forgotten():
    names = {
        n
        for n, c in vars(torch.optim).items()
        if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer
    }
    tested = {o.removeprefix("torch.optim.").partition("(")[0] for o in [*ELEMENT_WISE, *WHOLE_TENSOR]}
    assert names == tested | set(REFUSED)


# --- a user's own -----------------------------------------------------------------------------------

LARS = """
import torch

class LARS(torch.optim.Optimizer):
    "Scales each tensor's step by the ratio of its norms: it must see whole tensors."

    def __init__(self, params, lr=0.1, momentum=0.9, trust=0.02):
        super().__init__(params, {"lr": lr, "momentum": momentum, "trust": trust})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                rate = group["trust"] * p.norm() / (p.grad.norm() + 1e-9)
                state = self.state[p]
                if "velocity" not in state:
                    state["velocity"], state["count"] = torch.zeros_like(p), 0
                state["count"] += 1
                state["velocity"].mul_(group["momentum"]).add_(p.grad, alpha=float(rate))
                p.add_(state["velocity"], alpha=-group["lr"])
"""


@pytest.fixture
def lars(tmp_path) -> str:
    """A module beside the script, of a name that no other test's fork server has seen."""
    (tmp_path / "our_lars.py").write_text(LARS)
    return "our_lars"


def test_a_users_own_optimizer_gets_whole_tensors_on_the_servers(run, lars):
    """It is imported from beside the script, as the script does it."""
    script = f"from {lars} import LARS\n" + SCRIPT.format(
        optimizer="LARS(model.parameters(), lr=0.5)", matrices_only=False
    )
    ran = run(script, mode="asp", workers=1, servers=2, optimizers=(f"{lars}:LARS",))
    assert ran.error is None, ran.error
    exec(LARS, here)
    model, state = reference("LARS(model.parameters(), lr=0.5)", matrices_only=False)
    for name, value in model.items():
        assert torch.equal(ran.model[name], value), name
    kept = torch.load(ran.run.path / "state.pt")["state"]
    assert [s["count"] for s in kept.values()] == [s["count"] for s in state.values()] == [5] * 7


def test_a_users_own_optimizer_is_not_imported_unasked(run, lars):
    script = f"from {lars} import LARS\n" + SCRIPT.format(
        optimizer="LARS(model.parameters())", matrices_only=False
    )
    ran = run(script, workers=1)
    assert ran.error is not None
    assert ran.error.startswith("worker:0: UsageError: optimizer LARS is not from torch.optim")
    assert f"--optimizer {lars}:LARS" in ran.error


def test_an_optimizer_defined_in_the_script_itself_is_refused_even_if_named(run):
    """`__main__` is another module on a server."""
    script = LARS + SCRIPT.format(optimizer="LARS(model.parameters())", matrices_only=False)
    ran = run(script, workers=1, optimizers=("__main__:LARS",))
    assert ran.error is not None
    assert "UsageError: optimizer LARS is not from torch.optim" in ran.error
    assert "move class LARS from the script into a module beside it" in ran.error


def test_an_optimizer_that_only_the_workers_find_is_refused_with_the_reason(run, tmp_path):
    """The script found it on a path of its own; the servers do not have that path."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "hidden_lars.py").write_text(LARS)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'elsewhere')!r})\nfrom hidden_lars import LARS\n"
    )
    ran = run(
        script + SCRIPT.format(optimizer="LARS(model.parameters())", matrices_only=False),
        servers=2,
        optimizers=("hidden_lars:LARS",),
    )
    assert ran.error is not None
    assert "--optimizer hidden_lars:LARS cannot be imported by the servers" in ran.error
    assert "PYTHONPATH" in ran.error


def test_settings_that_an_optimizer_refuses_name_the_setting(run):
    """What cannot travel as plain data is refused by its name."""
    ran = run(
        SETUP
        + """
model = build()
optimizer = torch.optim.SGD([{"params": model.parameters(), "rule": lambda x: x}], lr=0.1)
paceline.prepare(model, optimizer)
""",
        workers=1,
    )
    assert ran.error is not None and "UsageError: optimizer setting 'rule' is function" in ran.error
