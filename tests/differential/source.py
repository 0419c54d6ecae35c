"""Writes a case as a script that anybody can run.

The script holds its own reference: `plain` and `whole` iterate over the order of samples that
docs/training.md documents and use the same kernels, without a line of Paceline.
"""

from tests.differential.description import Case
from tests.differential.reference import REFERENCE

__all__ = ["script_of"]

_HEAD = '''\
"""{case}

    python case.py plain        PyTorch alone, batches of {batch}
    python case.py whole        PyTorch alone, batches of {whole}
    python case.py whole:1      the same, with inputs that differ in their last bits
    python case.py alone        through paceline.prepare(), without a run
    paceline run --mode {way} --workers {world} --servers 1{clip_option} case.py

Expected: {expected}.
"""

'''

_CONSTANTS = """\
# --- the script -------------------------------------------------------------------------------------

DTYPE = torch.{dtype}
D, CLASSES, SAMPLES, BATCH, EPOCHS, ACCUMULATE = 4, 3, {samples}, {batch}, {epochs}, {accumulate}
SPARSE = {sparse}


"""

_BLOCKS: dict[str, tuple[str, str]] = {
    # name: (lines of __init__, lines of forward); {b} is the attribute
    "linear": ("self.{b} = nn.Linear(D, D)", "x = torch.relu(self.{b}(x)) + x"),
    "tanh": ("self.{b} = nn.Linear(D, D)", "x = torch.tanh(self.{b}(x))"),
    "late": ("self.{b} = nn.Linear(D, D)", "if clock >= 2:\n    x = x + self.{b}(x)"),
    "never": ("self.{b} = nn.Linear(D, D)", "pass  # {b} is never used"),
    "alternating": ("self.{b} = nn.Linear(D, D)", "if clock % 2 == 0:\n    x = x + self.{b}(x)"),
    "by_rows": (
        "self.{b} = nn.Linear(D, D)",
        "rows = x[:, 0] > 0.5\nif rows.any():\n    x = x.clone()\n    x[rows] = x[rows] + self.{b}(x[rows])",
    ),
    "tied": (
        "self.{b} = nn.Linear(D, D)\nself.{b}_too = nn.Linear(D, D)\nself.{b}_too.weight = self.{b}.weight",
        "x = torch.tanh(self.{b}_too(torch.tanh(self.{b}(x))))",
    ),
    "frozen": ("self.{b} = nn.Linear(D, D).requires_grad_(False)", "x = torch.tanh(self.{b}(x)) + x"),
    "tied_frozen": (
        "self.{b} = nn.Linear(D, D)\nself.{b}_too = nn.Linear(D, D)\nself.{b}_too.weight = self.{b}.weight\n"
        "self.{b}.weight.requires_grad_(False)",
        "x = torch.tanh(self.{b}_too(torch.tanh(self.{b}(x))))",
    ),
    "shared_buffer": (
        "shift = torch.full((D,), 0.1)\nself.{b}, self.{b}_too = Shift(shift), Shift(shift)",
        "self.{b}.shift.fill_(0.01 * (clock % 10))\nx = self.{b}_too(x)",
    ),
    "counter": (
        "self.register_buffer('{b}', torch.zeros((), dtype=torch.int64))",
        "self.{b} += 1",
    ),
    "hidden_buffer": (
        "self.register_buffer('{b}', torch.rand(D), persistent=False)",
        "self.{b}.mul_(0.5).add_(0.01 * (clock % 10)) if clock < 0 else None\nx = x + self.{b}",
    ),
    "mean_buffer": (
        "self.register_buffer('{b}', torch.zeros(D))",
        "if self.training:\n    self.{b}.lerp_(x.detach().mean(0), 0.1)\nx = x - self.{b}",
    ),
    "batchnorm": ("self.{b} = nn.BatchNorm1d(D)", "x = self.{b}(x)"),
    "layernorm": ("self.{b} = nn.LayerNorm(D)", "x = self.{b}(x)"),
    "dropout": ("self.{b} = nn.Dropout(0.3)", "x = self.{b}(x)"),
    "embedding": (
        "self.{b} = nn.Embedding(5, D, padding_idx=0)",
        "x = x + self.{b}((x[:, 1].detach() * 4).long().clamp(0, 4))",
    ),
    "sparse_embedding": (
        "self.{b} = nn.Embedding(5, D, sparse=True)",
        "x = x + self.{b}((x[:, 1].detach() * 4).long().clamp(0, 4))",
    ),
    "scalar": ("self.{b} = nn.Parameter(torch.tensor(0.9))", "x = x * self.{b}"),
    "transposed": ("self.{b} = nn.Parameter(torch.randn(D, 2).t())", "x = x + (x @ self.{b}.t()) @ self.{b}"),
    "conv": ("self.{b} = nn.Conv1d(1, 1, 3, padding=1)", "x = self.{b}(x.unsqueeze(1)).squeeze(1)"),
    "weight_norm": (
        "self.{b} = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))",
        "x = torch.tanh(self.{b}(x))",
    ),
    "spectral_norm": (
        "self.{b} = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))",
        "x = torch.tanh(self.{b}(x))",
    ),
    "shared_module": ("self.{b} = nn.Linear(D, D)", "x = torch.tanh(self.{b}(torch.tanh(self.{b}(x))))"),
    "parameter_list": (
        "self.{b} = nn.ParameterList([torch.full((D,), 0.9), torch.full((1,), 0.1)])",
        "x = x * self.{b}[0] + self.{b}[1]",
    ),
    "mixed_dtype": ("self.{b} = Other(D, D)", "x = x + self.{b}(x)"),
    "random_depth": (
        "self.{b} = nn.Linear(D, D)",
        "if not self.training or torch.rand(()) < 0.5:\n    x = x + self.{b}(x)",
    ),
}

_MODULES = {
    "shared_buffer": """\
class Shift(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.register_buffer("shift", shift)

    def forward(self, x):
        return x + self.shift


""",
    "mixed_dtype": '''\
class Other(nn.Linear):
    """A layer in another precision than the rest."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


''',
}


class _Writer:
    """Lines of source text at some depth."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, text: str, depth: int = 0) -> None:
        for line in text.split("\n"):
            self.lines.append("    " * depth + line if line else "")

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def script_of(case: Case) -> str:
    """The case as a script."""
    head = _HEAD.format(
        case=case,
        batch=case.batch,
        whole=case.batch * case.world,
        way=case.way,
        world=case.world,
        clip_option=" --clip-norm 0.5" if _server_clips(case) else "",
        expected="plain and alone agree to the last bit, the run refuses the sparse gradient"
        if case.refused
        else "plain, alone and the run agree to the last bit"
        if case.way == "asp"
        else "plain and alone agree to the last bit, whole and the run to 1e-10, "
        "or as closely as whole and whole:1, whole:2, …",
    )
    out = _Writer()
    if case.default_dtype:
        out.add("torch.set_default_dtype(DTYPE)\n\n")
    _write_model(out, case)
    _write_data(out, case)
    _write_setup(out, case)
    _write_loop(out, case)
    _write_result(out, case)
    constants = _CONSTANTS.format(
        dtype=case.dtype,
        sparse="sparse_embedding" in case.blocks,
        samples=case.samples,
        batch=case.batch,
        epochs=case.epochs,
        accumulate=case.accumulate,
    )
    return f"{head}{REFERENCE}\n\n{constants}{out.text()}"


def _server_clips(case: Case) -> bool:
    return case.way == "bsp" and case.clip == "norm"


def _write_model(out: _Writer, case: Case) -> None:
    for name, text in _MODULES.items():
        if name in case.blocks:
            out.add(text.rstrip("\n") + "\n\n")
    out.add("class Model(nn.Module):")
    out.add("def __init__(self):", 1)
    out.add("super().__init__()", 2)
    for number, name in enumerate(case.blocks):
        out.add(_BLOCKS[name][0].format(b=f"b{number}"), 2)
    out.add("self.head = nn.Linear(D, CLASSES)", 2)
    out.add("\ndef forward(self, x, clock):", 1)
    for number, name in enumerate(case.blocks):
        out.add(_BLOCKS[name][1].format(b=f"b{number}"), 2)
    out.add("return self.head(x)\n\n", 2)


def _write_data(out: _Writer, case: Case) -> None:
    out.add("drawing = torch.Generator().manual_seed(11)")
    out.add("X = nudged(torch.rand(SAMPLES, D, generator=drawing, dtype=torch.float64).to(DTYPE))")
    if case.loss == "cross_entropy":
        out.add("Y = torch.randint(CLASSES, (SAMPLES,), generator=drawing)")
    else:
        out.add("Y = torch.rand(SAMPLES, CLASSES, generator=drawing, dtype=torch.float64).to(DTYPE)")
    items = {"dataset": "X[i], Y[i]", "augmented": "X[i] + 0.1 * torch.rand(D, dtype=DTYPE), Y[i]"}
    items["dicts"] = '{"x": X[i], "y": Y[i], "name": f"sample {i}"}'
    if case.data in items:
        out.add("\n\nclass Data(tud.Dataset):")
        out.add("def __len__(self):\n    return SAMPLES\n", 1)
        out.add(f"def __getitem__(self, i):\n    return {items[case.data]}\n\n", 1)
        out.add("data = Data()")
    elif case.data == "stream":
        out.add("\n\nclass Data(tud.IterableDataset):")
        out.add("def __iter__(self):\n    return iter(zip(X, Y))\n\n", 1)
        out.add("data = Data()")
    elif case.data == "subset":
        out.add("data = tud.Subset(tud.TensorDataset(X.flip(0), Y.flip(0)), range(SAMPLES)[::-1])")
    else:
        out.add("data = tud.TensorDataset(X, Y)")
    if case.sampler == "uneven_batches":
        out.add('''

class Uneven(tud.Sampler):
    """Batches of one sample and of BATCH samples, in turn."""

    def __iter__(self):
        left, size = torch.randperm(SAMPLES).tolist(), 1
        while left:
            yield left[:size]
            left, size = left[size:], 1 + BATCH - size

    def __len__(self):
        full, rest = divmod(SAMPLES, 1 + BATCH)
        return 2 * full + (rest > 0) + (rest > 1)

''')
    if case.sampler == "python_random":
        out.add("""

class Shuffled(tud.Sampler):
    def __iter__(self):
        order = list(range(SAMPLES))
        random.shuffle(order)
        return iter(order)

    def __len__(self):
        return SAMPLES

""")
    out.add(f"loader = tud.DataLoader(data, {_loader_arguments(case)})")


def _loader_arguments(case: Case) -> str:
    sampler = {
        "shuffle": "shuffle=True",
        "sequential": "shuffle=False",
        "replacement": "sampler=tud.RandomSampler(data, replacement=True)",
        "weighted": "sampler=tud.WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), SAMPLES)",
        "subset_random": "sampler=tud.SubsetRandomSampler(range(SAMPLES - 2))",
        "fewer": "sampler=tud.RandomSampler(data, num_samples=SAMPLES - 2)",
        "batch_sampler": "batch_sampler=tud.BatchSampler(tud.RandomSampler(data), BATCH, False)",
        "uneven_batches": "batch_sampler=Uneven()",
        "own_generator": "sampler=tud.WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), SAMPLES, "
        "generator=torch.Generator().manual_seed(5))",
        "loader_generator": "shuffle=True, generator=torch.Generator().manual_seed(5)",
        "python_random": "sampler=Shuffled()",
    }[case.sampler]
    arguments = [sampler]
    if not sampler.startswith("batch_sampler"):
        arguments.append("batch_size=BATCH")
    if case.drop_last:
        arguments.append("drop_last=True")
    if case.num_workers:
        arguments.append(f"num_workers={case.num_workers}")
    return ", ".join(arguments)


def _write_setup(out: _Writer, case: Case) -> None:
    out.add("torch.manual_seed(7)\nrandom.seed(7)\nnp.random.seed(7)")
    out.add("model = Model().to(DTYPE)")
    if "mixed_dtype" in case.blocks:
        other = "float32" if case.dtype == "float64" else "float64"
        out.add("for module in model.modules():\n    if isinstance(module, Other):")
        out.add(f"module.to(torch.{other})", 2)
    name, _, settings = case.optimizer.partition("(")
    lr = float(settings.partition("lr=")[2].split(",")[0].rstrip(")"))
    parameters = {
        "one": "model.parameters()",
        "bias": f'[{{"params": [p for p in model.parameters() if p.dim() > 1]}}, {{"params": [p for p in '
        f'model.parameters() if p.dim() < 2], "lr": {lr / 2}}}]',
        "head": '[{"params": [p for n, p in model.named_parameters() if n != "head.weight"]}, '
        f'{{"params": [model.head.weight], "lr": {lr / 2}}}]',
        "partial": '[p for n, p in model.named_parameters() if not n.startswith("b0")]',
        "named": "model.named_parameters()",
        "trainable": "[p for p in model.parameters() if p.requires_grad]",
    }[case.groups]
    optimizers = "optimizer"
    if case.second_optimizer:
        # A GradScaler refuses a step without any gradient: head.bias always has one.
        kept = "head" if case.scaler == "none" else "head.weight"
        out.add(f'first = [p for n, p in model.named_parameters() if "{kept}" not in n and p.requires_grad]')
        out.add(f"optimizer = torch.optim.{name}(first or [model.head.bias], {settings}")
        out.add("second = torch.optim.Adam([model.head.weight], lr=0.01)")
        optimizers = "optimizer, second"
    else:
        out.add(f"optimizer = torch.optim.{name}({parameters}, {settings}")
    all_groups = (
        "[*optimizer.param_groups, *second.param_groups]"
        if case.second_optimizer
        else "optimizer.param_groups"
    )
    out.add(f'trained = [p for group in {all_groups} for p in group["params"] if p.requires_grad]')
    if case.edit == "hook":
        out.add("for p in trained:\n    p.register_hook(lambda g: g * 0.5)")
    if case.before != "none":
        out.add("for _ in range(2):  # before prepare()\n    optimizer.zero_grad()")
        out.add("model(X, 4).square().mean().backward()\noptimizer.step()", 1)
        if case.before == "state":  # as from a checkpoint
            out.add("saved = copy.deepcopy(optimizer.state_dict())")
            out.add("optimizer.load_state_dict(saved)")
        out.add("optimizer.zero_grad()")
    scheduler = {
        "none": "",
        "by_hand": "",
        "step": "lr_scheduler.StepLR(optimizer, 1, 0.5)",
        "exponential": "lr_scheduler.ExponentialLR(optimizer, 0.8)",
        "one_cycle": f"lr_scheduler.OneCycleLR(optimizer, {lr}, total_steps=200, cycle_momentum=False)",
        "lambda": "lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))",
        "plateau": "lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)",
        "chained": "lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(optimizer, 0.9), "
        "lr_scheduler.StepLR(optimizer, 2, 0.5)])",
    }[case.scheduler]
    late = case.scheduler_after and not case.scheduler_prepared
    if scheduler and not late:
        out.add(f"scheduler = {scheduler}")
    with_scheduler = ", scheduler" if scheduler and case.scheduler_prepared else ""
    together = f"model, {optimizers}, loader{with_scheduler}"
    out.add(f"""
if HOW in ("plain", "whole"):
    RANK = 0
    loader = Reference(loader, {case.world} if HOW == "whole" else 1, [{optimizers}])
    for each in ({optimizers},):
        use_same_kernels(each)
else:
    import paceline

    RANK = paceline.rank()
    {together} = paceline.prepare({together})
""")
    if scheduler and late:
        out.add(f"scheduler = {scheduler}")
    if case.average:
        out.add("average = AveragedModel(model)")
    if case.scaler != "none":
        out.add('scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)')
    loss = "nn.functional.cross_entropy" if case.loss == "cross_entropy" else "nn.functional.mse_loss"
    out.add(f"loss_of = {loss}")
    out.add("losses, evaluations = [], []\n")
    if case.evaluate != "none":
        out.add("""
def evaluate():
    model.eval()
    with torch.no_grad():
        evaluations.append(loss_of(model(X, 4), Y).item())
    model.train()

""")


def _write_loop(out: _Writer, case: Case) -> None:
    step_wise = case.scheduler in ("one_cycle", "lambda")
    if case.peek:
        out.add("first_batch = next(iter(loader))")
    out.add("for epoch in range(EPOCHS):")
    if case.scheduler == "by_hand":
        out.add('for group in optimizer.param_groups:\n    group["lr"] *= 0.7', 1)
    out.add("for i, batch in enumerate(loader):", 1)
    body = _Writer()
    body.add("clock = 100 * epoch + i")
    if case.skip == "empty":
        body.add("if epoch == 0:\n    break")
    body.add('x, y = batch["x"], batch["y"]' if case.data == "dicts" else "x, y = batch")
    if case.skip == "continue":
        body.add("if clock % 3 == 1:\n    continue")
    window = "i % ACCUMULATE == 0"
    at_start = {
        "start": "optimizer.zero_grad()",
        "zeros": "optimizer.zero_grad(set_to_none=False)",
        "model": "model.zero_grad()",
    }.get(case.zero_grad)
    if at_start is not None:
        more = "\n    second.zero_grad()" if case.second_optimizer and case.zero_grad != "model" else ""
        body.add(f"if {window}:\n    {at_start}{more}")
    if case.edit == "closure":
        body.add("""
def closure():
    loss = loss_of(model(x, clock), y)
    losses.append([epoch, i, len(y), loss.item()])
    loss.backward()
    return loss
""")
    else:
        body.add("loss = loss_of(model(x, clock), y)")
        body.add("losses.append([epoch, i, len(y), loss.item()])")
        _write_backward(body, case)
    if case.skip == "continue_late":
        body.add("if clock % 3 == 1:\n    continue")
    if case.accumulate == 1:
        _write_step(body, case, step_wise)
    else:
        inner = _Writer()
        _write_step(inner, case, step_wise)
        body.add("if (i + 1) % ACCUMULATE == 0:")
        body.add(inner.text().rstrip("\n"), 1)
    if case.evaluate == "steps":
        body.add("if i % 2 == 1:\n    evaluate()")
    if case.skip == "break":
        body.add("if i == 1:\n    break")
    out.add(body.text().rstrip("\n"), 2)
    after = _Writer()
    if case.flush:
        # A GradScaler refuses a step without any gradient, as after a loop that was left at once, and before
        # it has scaled a loss (gradients may be there from before prepare()).
        given = "" if case.scaler == "none" else " and losses and any(p.grad is not None for p in trained)"
        after.add(f"if (i + 1) % ACCUMULATE != 0{given}:")
        inner = _Writer()
        _write_step(inner, case, step_wise)
        after.add(inner.text().rstrip("\n"), 1)
    if case.scheduler in ("step", "exponential", "chained"):
        after.add("scheduler.step()")
    elif case.scheduler == "plateau":
        after.add("scheduler.step(losses[-1][-1] if losses else 1.0)")
    if case.evaluate == "epoch":
        after.add("evaluate()")
    if case.reload in ("model", "both"):
        after.add("model.zero_grad()\nmodel.load_state_dict(copy.deepcopy(model.state_dict()))")
    if case.reload in ("optimizer", "both"):
        after.add("optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))")
        if case.second_optimizer:
            after.add("second.load_state_dict(copy.deepcopy(second.state_dict()))")
    if after.lines:
        out.add(after.text().rstrip("\n"), 1)
    out.add("")


def _write_backward(body: _Writer, case: Case) -> None:
    if case.scaler == "overflow":
        body.add('if clock % 100 == 1:\n    loss = loss * float("inf")')
    loss = "loss" if case.accumulate == 1 else "loss / ACCUMULATE"
    if case.edit == "autograd_grad":
        body.add(
            "for p, g in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True)):\n    p.grad = g"
        )
    elif case.scaler != "none":
        body.add(f"scaler.scale({loss}).backward()")
    else:
        body.add(f"({loss}).backward()" if case.accumulate > 1 else "loss.backward()")
    edits = {
        "scale": "p.grad.mul_(0.5)",
        "replace": "p.grad = p.grad * 0.5",
    }
    if case.edit in edits:
        body.add(f"for p in trained:\n    if p.grad is not None:\n        {edits[case.edit]}")
    elif case.edit == "drop":
        body.add("if clock % 2 == 1:\n    model.head.bias.grad = None")


def _write_step(body: _Writer, case: Case, step_wise: bool) -> None:
    if case.scaler == "unscale" or (case.scaler != "none" and case.clip != "none"):
        body.add("scaler.unscale_(optimizer)")
        if case.second_optimizer:
            body.add("scaler.unscale_(second)")
    if case.clip == "norm":
        here = 'if HOW != "run":  # the servers do it\n    ' if _server_clips(case) else ""
        body.add(f"{here}nn.utils.clip_grad_norm_(trained, 0.5)")
    elif case.clip == "value":
        # torch refuses to clip nothing: trained parts may have no gradient yet, or none after an empty epoch.
        body.add("if any(p.grad is not None for p in trained):")
        body.add("nn.utils.clip_grad_value_(trained, 0.05)", 1)
    if case.scaler != "none":
        body.add("scaler.step(optimizer)")
        if case.second_optimizer:
            body.add("scaler.step(second)")
        body.add("scaler.update()")
    else:
        body.add("optimizer.step(closure)" if case.edit == "closure" else "optimizer.step()")
        if case.second_optimizer:
            body.add("second.step()")
    if case.zero_grad == "end":
        body.add("optimizer.zero_grad()")
        if case.second_optimizer:
            body.add("second.zero_grad()")
    if step_wise:
        body.add("scheduler.step()")
    if case.average:
        body.add("average.update_parameters(model)")


def _write_result(out: _Writer, case: Case) -> None:
    scheduler = case.scheduler not in ("none", "by_hand", "plateau")
    optimizers = "optimizer, second" if case.second_optimizer else "optimizer"
    average = "copy.deepcopy(average.state_dict())" if case.average else "{}"
    out.add(f"""
RESULT = {{
    "losses": losses,
    "evaluations": evaluations,
    "model": {{k: v.detach().clone() for k, v in model.state_dict().items()}},
    "buffers": {{k: v.clone() for k, v in model.named_buffers(remove_duplicate=False)}},
    "optimizers": [copy.deepcopy(each.state_dict()) for each in ({optimizers},)],
    "average": {average},
    "rates": {"scheduler.get_last_lr()" if scheduler else "[]"},
    "random": torch.get_rng_state(),
}}
if OUT:
    torch.save(RESULT, pathlib.Path(OUT) / f"{{HOW}}-{{RANK}}.pt")
elif OUT is None:
    for step in losses:
        print(*step)
    print({{k: v.tolist() for k, v in RESULT["model"].items()}})
""")
