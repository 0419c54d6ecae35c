"""Batches in parts, side by side: outputs and gradients are those of the whole batch."""

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from paceline.core.local_spec import LocalSpec, parse_local
from paceline.exceptions import LinkError, UsageError
from paceline.plan import Job, make_plan
from paceline.worker.parallel import LocalParallelism
from paceline.worker.plain_copies import copy_plainly

KINDS = ("threads", "processes")


@pytest.fixture
def split() -> Iterator[Callable[..., LocalParallelism]]:
    made: list[LocalParallelism] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def start(*models: nn.Module, kind: str, count: int) -> LocalParallelism:
        made.append(LocalParallelism(models, local=parse_local(f"{kind}:{count}"), deadline_s=30.0))
        return made[-1]

    yield start
    for each in made:
        each.close()
    torch.set_num_threads(threads)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 5, batch_first=True)
        self.tied = nn.Linear(5, 5)
        self.out = nn.Linear(5, 5)
        self.out.weight = self.tied.weight
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, *, scale: float, more: dict[str, Tensor]) -> dict[str, Any]:
        found = self.out(self.tied(self.cells(x)[0][:, -1]) + more["shift"])
        return {"scores": self.frozen(found) * scale, "best": found.argmax(1), "kind": "a"}


def gradients(model: nn.Module, x: Tensor, shift: Tensor) -> tuple[dict[str, Any], list[Tensor | None]]:
    x, shift = x.clone().requires_grad_(), shift.clone().requires_grad_()
    model.zero_grad()
    out = model(x, scale=2.0, more={"shift": shift})
    out["scores"].square().mean().backward()
    out["scores"] = out["scores"].detach()
    return out, [x.grad, shift.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 3])
def test_outputs_and_gradients_are_those_of_the_whole_batch(split, kind, count):
    torch.manual_seed(3)
    model = Recurrent().double()
    x, shift = torch.randn(7, 4, 6, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    expected, whole = gradients(model, x, shift)
    split(model, kind=kind, count=count)
    for _ in range(2):  # again: processes keep nothing of the call before
        found, parts = gradients(model, x, shift)
        assert (found["scores"] - expected["scores"]).abs().max() < 1e-10
        assert torch.equal(found["best"], expected["best"]) and found["kind"] == "a"
        assert [g is None for g in parts] == [g is None for g in whole]
        assert all((a - b).abs().max() < 1e-10 for a, b in zip(parts, whole, strict=True) if a is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_every_time(split, kind):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 4))
    x = torch.randn(30, 9)
    split(model, kind=kind, count=3)
    seen = []
    for _ in range(4):
        model.zero_grad()
        model(x).square().sum().backward()
        seen.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for later in seen[1:] for a, b in zip(seen[0], later, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_follow_the_model(split, kind):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    plain = copy.deepcopy(model)
    x = torch.randn(8, 4, dtype=torch.float64)
    split(model, kind=kind, count=2)
    model(x).sum().backward()  # each part by its own statistics; the first part's are remembered
    plain(x[:4])
    assert torch.allclose(model[1].running_mean, plain[1].running_mean, atol=1e-12)
    assert model[1].num_batches_tracked == 1
    with torch.no_grad():
        model[0].weight.mul_(2.0)
        plain[0].weight.mul_(2.0)
    model.eval(), plain.eval()
    with torch.no_grad():
        assert torch.allclose(model(x), plain(x), atol=1e-12)
    model.zero_grad()
    model[0].requires_grad_(False)
    model(x).sum().backward()
    assert model[0].weight.grad is None and model[2].weight.grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_several_calls_before_a_backward_pass_and_some_without_one(split, kind):
    torch.manual_seed(1)
    model, other = nn.Linear(3, 2).double(), nn.Linear(2, 1).double()
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    (other(model(x)).sum() + model(y).square().sum()).backward()
    expected = [p.grad.clone() for p in (*model.parameters(), *other.parameters())]
    model.zero_grad(), other.zero_grad()
    split(model, other, kind=kind, count=2)
    model(x)  # and never goes backward
    (other(model(x)).sum() + model(y).square().sum()).backward()
    found = [p.grad for p in (*model.parameters(), *other.parameters())]
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_reaches_the_replicas(split, kind):
    model = nn.Linear(8, 8)
    split(model, kind=kind, count=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.ones(4, 8)).dtype == torch.bfloat16
    assert model(torch.ones(4, 8)).dtype == torch.float32


def test_a_single_sample_is_not_split_and_an_empty_batch_neither(split):
    model = nn.Linear(2, 1)
    split(model, kind="threads", count=4)
    assert model(torch.ones(1, 2)).shape == (1, 1)
    assert model(torch.ones(0, 2)).shape == (0, 1)
    assert model(torch.ones(3, 2)).shape == (3, 1)  # fewer samples than replicas


def test_a_closed_one_leaves_the_model_as_it_was(split):
    model = nn.Linear(2, 1)
    split(model, kind="threads", count=2).close()
    assert "forward" not in vars(model)


def test_copies_of_a_split_model_are_plain(split):
    model = nn.Linear(2, 1)
    copy_plainly(model.modules())
    split(model, kind="threads", count=2)
    assert "forward" not in vars(copy.deepcopy(model))


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Returns(nn.Module):
    def __init__(self, how: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self._how = how

    def forward(self, x: Any) -> Any:
        return self._how(x)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda x: x.mean(), "shape \\[\\].*row for every sample"),
        (lambda x: x.T, "shape \\[2, 3\\].*along the samples"),
        (lambda x: float(x[0, 0]), "differs between the parts"),
    ],
)
def test_outputs_that_cannot_be_put_together_are_refused(split, how, said):
    model = Returns(how)
    split(model, kind="threads", count=2)
    with pytest.raises(UsageError, match=said):
        model(torch.arange(12.0).view(6, 2))


def test_arguments_that_cannot_be_cut_or_handed_over_are_refused(split):
    model = nn.Bilinear(2, 2, 1)
    split(model, kind="threads", count=2)
    with pytest.raises(UsageError, match=r"\[4, 2\], \[3, 2\]"):
        model(torch.ones(4, 2), torch.ones(3, 2))
    pair = Pair(torch.ones(4, 2), torch.ones(4, 2))
    summed = Returns(lambda both: both.left + both.right)
    split(summed, kind="threads", count=2)
    assert torch.equal(summed(pair), torch.full((4, 2), 2.0))
    summed = Returns(lambda both: both.left + both.right)
    split(summed, kind="processes", count=2)
    with pytest.raises(UsageError, match="a Pair cannot be handed.*--local threads"):
        summed(pair)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_backward_pass_says_why_it_cannot_be(split, kind):
    model = nn.Linear(2, 1)
    split(model, kind=kind, count=2)
    out = model(torch.ones(4, 2)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        out.backward()


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_in_one_part_is_the_scripts_and_the_next_batch_works(split, kind):
    def check(x: Tensor) -> Tensor:
        if x.min() < 0:
            raise ValueError("a negative sample")
        return x

    model = Returns(check)
    split(model, kind=kind, count=2)
    with pytest.raises((ValueError, RuntimeError), match="a negative sample"):
        model(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    assert model(torch.ones(2, 2)).shape == (2, 2)


def test_a_killed_process_is_named(split):
    parent = os.getpid()

    def die(x: Tensor) -> Tensor:
        if os.getpid() != parent:
            os._exit(3)
        return x

    model = Returns(die)
    split(model, kind="processes", count=2)
    with pytest.raises(LinkError, match="process 1 of --local processes:2 .* has ended"):
        model(torch.ones(2, 2))


def test_models_that_cannot_be_split_are_refused(split):
    model = nn.Sequential(nn.Linear(2, 2))
    vars(model[0])["forward"] = lambda x: x
    with pytest.raises(UsageError, match="0 has a forward"):
        split(model, kind="threads", count=2)
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(UsageError, match="'weight' is on meta"):
        split(model, kind="threads", count=2)
    model = nn.Linear(2, 2)
    vars(model)["_compiled_call_impl"] = model.forward  # as model.compile() does
    with pytest.raises(UsageError, match="compiled"):
        split(model, kind="threads", count=2)


# --- the option -------------------------------------------------------------------------------------


def test_the_forms_of_the_option():
    assert parse_local("none") == LocalSpec()
    assert str(parse_local("threads:2")) == "threads:2" and parse_local("threads:2").splits
    assert not parse_local("processes:1").splits
    assert parse_local("threads:2").threads_each(8) == 4
    assert parse_local("threads:4").threads_each(2) == 1
    assert parse_local("processes:2").threads_each(8) == 1


@pytest.mark.parametrize("text", ["threads", "threads:", "threads:two", "forks:2", "threads:-1", "", 3])
def test_other_forms_are_refused(text):
    with pytest.raises(UsageError, match="give none, threads:K, processes:K"):
        Job(local=text)


def test_no_replicas_at_all_are_refused():
    with pytest.raises(UsageError, match="local=threads:0: a batch is split among 1 to"):
        Job(local="threads:0")
    with pytest.raises(UsageError, match="local=processes:5000"):
        Job(local="processes:5000")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"device": "cuda"}, "device=cuda puts the models on a GPU"),
        ({"overlap": True}, "with overlap they arrive"),
        ({"prefetch": 2, "mode": "asp"}, "with prefetch=2 they arrive"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(more, said):
    with pytest.raises(UsageError, match=said):
        Job(local="threads:2", **more)


def test_more_replicas_than_threads_are_warned_of(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    assert any(
        "local=threads:4" in w
        for w in make_plan(Job(script=str(script), local="threads:4", threads=2)).warnings
    )
    assert not make_plan(Job(script=str(script), local="threads:2", threads=2, workers=1)).warnings
