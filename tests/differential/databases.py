"""Scripts from PyTorch's own databases of modules and of optimizer settings, several entries in one script.

All modules of a script are parts of one model, and all settings of an optimizer are its parameter groups, so
that one run covers many entries. A script with a single entry shows which of them is at fault.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.testing._internal.common_optimizers import optim_db

from tests.differential.reference import REFERENCE

__all__ = ["literal", "module_script", "optimizer_script"]

_MODULES = '''\
import warnings

from torch.testing._internal.common_modules import module_db

SPARSE = CLOSURE = False
DTYPE = torch.{dtype}
ENTRIES = {entries}  # of module_db: name and number of the input


def moved(value, x):
    """The arguments of a module, with its floating-point tensors depending on a parameter."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach() * (1 + x - x.detach())  # the same value, with a gradient
    if isinstance(value, (list, tuple)):
        return type(value)(moved(each, x) for each in value)
    return value


def floats(value):
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    return [t for each in value for t in floats(each)] if isinstance(value, (list, tuple)) else []


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=DTYPE))
        self.parts, self.inputs = nn.ModuleList(), []
        for name, number in ENTRIES:
            info = next(info for info in module_db if info.name == name)
            how = {"device": "cpu", "dtype": DTYPE, "requires_grad": False, "training": True}
            case = info.module_inputs_func(info, **how)[number]
            made, given = case.constructor_input, case.forward_input
            self.parts.append(info.module_cls(*made.args, **made.kwargs).to(DTYPE))
            self.inputs.append(copy.deepcopy((given.args, given.kwargs)))

    def forward(self, x):
        total = x * self.scale
        for part, (args, kwargs) in zip(self.parts, self.inputs):
            # The losses' targets must stay as they are: only the first argument gets a gradient.
            args, kwargs = copy.deepcopy((args, kwargs))
            if args:
                args = [moved(args[0], self.scale), *args[1:]]
            else:
                kwargs = {name: moved(value, self.scale) for name, value in kwargs.items()}
            out = part(*args, **kwargs)
            for each in floats(out):
                each = each.nan_to_num(0.0, 0.0, 0.0)
                total = total + x * each.square().mean().clamp(max=1e3)
        return total


warnings.simplefilter("ignore")
torch.manual_seed(7)
model = Model()
model(torch.ones(1, dtype=DTYPE))  # lazy modules get their shapes
for p in model.parameters():
    p.register_hook(lambda g: g.nan_to_num(0.0, 0.0, 0.0))  # some entries are meant to have none
torch.manual_seed(7)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
data = tud.TensorDataset(torch.linspace(0.5, 1.5, 12, dtype=DTYPE))
loader = tud.DataLoader(data, batch_size=2, shuffle=True)
'''

_OPTIMIZERS = '''\
DTYPE = torch.{dtype}
NAME = "{name}"
SETTINGS = [  # of optim_db: one parameter group each
{settings}
]
SPARSE, CLOSURE = NAME == "SparseAdam", NAME == "LBFGS"


class Rows(nn.Module):
    """Rows of a table with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)

    def forward(self, x):
        return self.table((x[:, :2] * 2).long().clamp(0, 3)).sum(2) * x[:, :1]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        # Two layers for every setting, without biases: Muon takes matrices only.
        self.parts = nn.ModuleList(Rows() if SPARSE else self.layers() for _ in SETTINGS)

    @staticmethod
    def layers():
        return nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 1, bias=False))

    def forward(self, x):
        x = x.unsqueeze(1) * torch.arange(1, 5)
        return torch.stack([part(x).sum(1) for part in self.parts]).square().mean(0)


torch.manual_seed(7)
model = Model().to(DTYPE)
make = getattr(torch.optim, NAME)
if len(SETTINGS) == 1:
    optimizer = make(model.parameters(), **SETTINGS[0])
else:
    optimizer = make([{**each, "params": part.parameters()} for each, part in zip(SETTINGS, model.parts)])
data = tud.TensorDataset(torch.linspace(0.5, 1.5, 12, dtype=DTYPE))
loader = tud.DataLoader(data, batch_size=2, shuffle=True)
'''

_LOOP = """\

if HOW in ("plain", "whole"):
    RANK = 0
    loader = Reference(loader, 2 if HOW == "whole" else 1, [optimizer])
    use_same_kernels(optimizer)
else:
    import paceline

    RANK = paceline.rank()
    model, optimizer, loader = paceline.prepare(model, optimizer, loader)

losses = []
for epoch in range(2):
    for i, (x,) in enumerate(loader):

        def closure():
            optimizer.zero_grad()
            loss = model(x).mean()
            losses.append([epoch, i, len(x), loss.item()])
            loss.backward()
            return loss

        if CLOSURE:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

RESULT = {
    "losses": losses,
    "evaluations": [],
    "model": {k: v.detach().clone() for k, v in model.state_dict().items()},
    "buffers": {k: v.clone() for k, v in model.named_buffers()},
    "optimizers": [copy.deepcopy(optimizer.state_dict())],
    "rates": [],
    "random": torch.get_rng_state(),
}
if OUT:
    torch.save(RESULT, pathlib.Path(OUT) / f"{HOW}-{RANK}.pt")
elif OUT is None:
    for step in losses:
        print(*step)
"""

_USAGE = (
    '"""python case.py plain | whole | alone, or paceline run --mode {way} --workers {world} case.py"""\n\n'
)


def module_script(entries: Sequence[tuple[str, int]], *, way: str) -> str:
    """Trains modules of module_db, each with one of its inputs."""
    dtype = "float32" if way == "asp" else "float64"
    body = _MODULES.replace("{dtype}", dtype).replace("{entries}", repr(list(entries)))
    return _usage(way) + REFERENCE + "\n\n" + body + _LOOP


def optimizer_script(name: str, settings: Sequence[int], *, way: str) -> str:
    """Trains with an optimizer of optim_db, with the settings of these numbers.

    The script has the settings in words: a run that had to import optim_db would spend 2 s of CPU on it.
    """
    dtype = "float32" if way == "asp" else "float64"
    [info] = [info for info in optim_db if info.optim_cls.__name__ == name]
    assert info.optim_cls is getattr(torch.optim, name)
    inputs = info.optim_inputs_func(device="cpu")
    body = (
        _OPTIMIZERS.replace("{dtype}", dtype)
        .replace("{name}", name)
        .replace("{settings}", "\n".join(f"    {literal(inputs[k].kwargs)}," for k in settings))
    )
    return _usage(way) + REFERENCE + "\n\n" + body + _LOOP


def literal(value: Any) -> str:
    """The expression that makes a value of optim_db: numbers, words, and tensors of one number."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + "".join(f"{literal(each)}, " for each in value) + ")"
    if isinstance(value, torch.Tensor):
        assert value.dim() == 0, f"optim_db has a setting that is more than a number: {value}"
        return f"torch.tensor({value.item()!r}, dtype={value.dtype})"
    assert isinstance(value, bool | int | float | str), f"optim_db has a setting of a new kind: {value!r}"
    return repr(value)


def _usage(way: str) -> str:
    return _USAGE.format(way=way, world=1 if way == "asp" else 2)
