"""What prepare() takes: one or several models and optimizers, and what it refuses by name."""

import pytest
import torch
from torch import nn

from paceline.core.modes import parse_mode
from paceline.exceptions import UsageError
from paceline.params import describe
from paceline.worker.alone import AloneSession
from paceline.worker.optimizer_side import Incomplete
from paceline.worker.prepared import Models, Prepared
from paceline.worker.script_optimizer import make_exchanging, stop_exchanging


def sgd(*models, **settings):
    return torch.optim.SGD([p for m in models for p in m.parameters()], **{"lr": 0.1, **settings})


def test_only_the_names_of_later_models_have_a_prefix():
    first, second = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
    models = Models([first, second])
    names = [name for name, _ in models.named_parameters()]
    assert names == ["weight", "bias", "1:0.weight", "1:0.bias", "1:1.weight", "1:1.bias"]
    assert {*models.state()} - {*names} == {"1:1.running_mean", "1:1.running_var", "1:1.num_batches_tracked"}
    assert [n for n, _ in Models([first]).named_parameters()] == [n for n, _ in first.named_parameters()]


def test_a_part_that_two_models_share_is_laid_out_once_and_known_by_both_names():
    trunk = nn.Linear(2, 2)
    actor, critic = nn.Sequential(trunk, nn.Linear(2, 3)), nn.Sequential(trunk, nn.Linear(2, 1))
    layout, parameters = describe(Models([actor, critic]), [sgd(actor), sgd(critic[1])])
    assert {t.name: t.group for t in layout.tensors} == {
        "0.weight": 0,
        "0.bias": 0,
        "1.weight": 0,
        "1.bias": 0,
        "1:1.weight": 1,
        "1:1.bias": 1,
    }
    assert layout.aliases == (("1:0.bias", "0.bias"), ("1:0.weight", "0.weight"))
    assert len(parameters) == 6


def test_a_slice_is_of_one_optimizer_and_a_part_of_the_layout_keeps_its_places():
    models = [nn.Linear(3, 3) for _ in range(3)]
    layout, _ = describe(Models(models), [sgd(m) for m in models])
    assert [s.group for s in layout.slices] == [0, 1, 2]
    part = layout.of_groups([1])
    (mine,) = part.slices
    assert mine.index == 1 and (mine.start, mine.stop) == (layout.slices[1].start, layout.slices[1].stop)
    assert [t.name for t in part.tensors] == ["1:weight", "1:bias"]
    assert [g.tensor for g in mine.segments] == [0, 1] and part.nbytes == layout.nbytes


MODEL, OTHER = nn.Linear(2, 2), nn.Linear(2, 2)
REFUSED = {
    "shared": (
        [MODEL, OTHER, sgd(MODEL), sgd(MODEL, OTHER)],
        "parameter 'weight' is in optimizer 0 (SGD) and in optimizer 1 (SGD)",
    ),
    "stranger": ([MODEL, sgd(MODEL), sgd(OTHER)], "of optimizer 1 (SGD) is not in the model"),
    "frozen": (
        [MODEL, frozen := nn.Linear(1, 1).requires_grad_(False), sgd(MODEL), sgd(frozen)],
        "optimizer 1 (SGD) has no parameter that requires a gradient",
    ),
    "same model": ([MODEL, MODEL, sgd(MODEL)], "the same model twice"),
    "no optimizer": ([MODEL, OTHER], "prepare() got 2 models, 0 optimizers"),
    "lazy": (
        [nn.Sequential(MODEL, nn.LazyLinear(3)), sgd(MODEL)],
        "'1.weight' of a Sequential belongs to a lazy module and has no shape yet",
    ),
    "lazy buffer": (
        [nn.Sequential(MODEL, nn.LazyBatchNorm1d(affine=False)), sgd(MODEL)],
        "Run one batch through the model before prepare()",
    ),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_prepared_is_refused_by_name(case):
    objects, message = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        AloneSession().prepare(objects)
    assert message in str(caught.value)
    with pytest.raises(UsageError) as caught:  # a run lays out what Prepared has accepted
        got = Prepared(objects)
        describe(Models(got.models), got.optimizers)
    assert message in str(caught.value)


def test_a_lazy_module_that_has_seen_a_batch_is_prepared():
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    model(torch.zeros(2, 4))
    AloneSession().prepare([model, sgd(model)])


def test_another_pair_may_be_prepared_before_the_first_batch_and_not_after_it():
    session = AloneSession()
    model, other, third = (nn.Linear(2, 2) for _ in range(3))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(4, 2)))
    _, _, loader = session.prepare([model, sgd(model), loader])
    session.prepare([other, sgd(other)])
    with pytest.raises(UsageError, match="the same model twice"):
        session.prepare([other, sgd(other)])
    next(iter(loader))
    with pytest.raises(UsageError, match="called again after the first batch"):
        session.prepare([third, sgd(third)])


def test_an_optimizer_that_stops_exchanging_is_of_its_own_class_again():
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    make_exchanging(optimizer, Incomplete(1))
    with pytest.raises(UsageError, match=r"has called prepare\(\) 1 time"):
        optimizer.step()
    stop_exchanging(optimizer)
    assert type(optimizer) is torch.optim.SGD
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("mode", ["backup:1", "sandblaster", "allreduce", "hybrid:bsp"])
def test_modes_for_one_optimizer_say_why_and_which_to_use(mode):
    reason = parse_mode(mode).one_optimizer_reason()
    assert reason is not None and f"mode {mode}" in reason and "use bsp" in reason


@pytest.mark.parametrize(
    "mode", ["bsp", "ssp:2", "asp", "downpour", "easgd:2", "local:4", "diloco:2", "hogwild"]
)
def test_other_modes_take_several(mode):
    assert parse_mode(mode).one_optimizer_reason() is None
