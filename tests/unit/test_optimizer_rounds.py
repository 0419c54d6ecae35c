"""Rounds of a run with several optimizers: an update is of one, and workers fall into step. No sockets."""

import itertools
import random

import pytest
import torch
from torch import nn

from paceline.core.events import Push
from paceline.core.modes import Admit, Apply, PushId, Rounds
from paceline.core.modes.parsing import parse_mode
from paceline.core.out_of_step import OUT_OF_STEP, OutOfStep
from paceline.exceptions import FrameError
from paceline.params import OptimizerSpec, StateBook, describe
from paceline.ps.shard import Contribution, Gradients, Shard
from paceline.worker.prepared import Models
from tests.deciding import JsonDecider, copied


def push(worker: int, sequence: int = 0) -> PushId:
    return PushId(worker, 0, sequence)


def rounds(workers: int) -> Rounds:
    machine = Rounds()
    for worker in range(workers):
        machine.joined(worker, 0)
    return machine


def test_a_round_updates_the_optimizer_with_the_most_pushes_and_the_others_stay_pending():
    machine = rounds(3)
    machine.pushed(push(0), 0, optimizer=0)
    machine.pushed(push(1), 0, optimizer=1)
    assert machine.pushed(push(2), 0, optimizer=1) == [Apply((push(1), push(2))), Admit(1), Admit(2)]
    assert machine.mixed == 1 and machine.last_mix == {0: 0, 1: 1, 2: 1}
    machine.pushed(push(1, 1), 1, optimizer=0)
    made = machine.pushed(push(2, 1), 1, optimizer=0)
    assert made[0] == Apply((push(0), push(1, 1), push(2, 1)))
    assert machine.mixed == 0


def test_of_as_many_pushes_the_first_to_come_decides():
    machine = rounds(2)
    machine.pushed(push(1), 0, optimizer=1)
    assert machine.pushed(push(0), 0) == [Apply((push(1),)), Admit(1)]


def test_a_worker_that_leaves_takes_its_pending_push_along():
    machine = rounds(3)
    machine.pushed(push(0), 0, optimizer=1)
    machine.pushed(push(1), 0)
    machine.left(0)
    machine.joined(0, 1)
    machine.pushed(push(2), 0)
    fresh = PushId(0, 1, 0)
    made = machine.pushed(fresh, 0)
    assert made[0] == Apply((fresh, push(1), push(2))) or made[0] == Apply((push(1), push(2), fresh))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("pattern", [(0, 1), (0, 0, 1), (0, 1, 2), (0, 0, 0, 0, 0, 1)])
def test_workers_at_different_places_of_the_same_order_fall_into_step(pattern, seed):
    """Whatever the places at which they begin, soon every round is of one optimizer and has all workers."""
    chance = random.Random(seed)
    machine = rounds(3)
    at = [chance.randrange(len(pattern)) for _ in range(3)]
    sequences = [0, 0, 0]
    computing = {0, 1, 2}
    complete = 0
    for _ in range(12 * len(pattern)):
        made = []
        for worker in sorted(computing, key=lambda _: chance.random()):
            optimizer = pattern[at[worker] % len(pattern)]
            at[worker] += 1
            sequences[worker] += 1
            version = machine.version
            made += machine.pushed(push(worker, sequences[worker]), version, optimizer=optimizer)
        computing = {each.worker for each in made if isinstance(each, Admit)}
        (update,) = [each for each in made if isinstance(each, Apply)]
        complete = complete + 1 if len(update.pushes) == 3 else 0
    assert complete >= len(pattern) and machine.mixed == 0
    assert len({place % len(pattern) for place in at}) == 1


def lead(**settings) -> JsonDecider:
    made = JsonDecider(parse_mode("bsp"), **settings)
    for worker in range(2):
        made.join(worker, 0)
    return made


def test_workers_that_never_fall_into_step_are_named_with_steps_and_optimizers():
    order = lead()
    with pytest.raises(OutOfStep) as caught:
        for sequence in range(OUT_OF_STEP + 1):
            for worker in range(2):
                if worker not in order.machine.waiting:
                    order.push(Push(push(worker, sequence), order.version, 4, (), False, optimizer=worker))
    text = str(caught.value)
    assert f"for {OUT_OF_STEP} rounds" in text and "mode bsp" in text
    assert "worker:0 steps optimizer 0 (step " in text and "worker:1 steps optimizer 1 (step " in text


def test_a_step_with_the_same_batch_weighs_its_samples_and_counts_none():
    order = lead()
    for worker, samples in ((0, 4), (1, 2)):
        order.push(Push(push(worker), 0, samples, (), False))
    assert order.totals.samples == 6
    order.push(Push(push(0, 1), 1, 0, (), False, optimizer=1, weight=4))
    (apply, *_) = order.push(Push(push(1, 1), 1, 0, (), False, optimizer=1, weight=2))
    assert apply == ["apply", [[0, 0, 1, 4, 1.0], [1, 0, 1, 2, 1.0]]]
    assert order.totals.samples == 6


def test_what_norm_is_usual_is_known_of_each_optimizer():
    order = lead(norm_bound=10.0)
    for sequence in range(30):
        for worker in range(2):
            norm = 1000.0 if sequence % 2 else 1.0
            read = order.version
            order.push(Push(push(worker, sequence), read, 4, (), False, norm=norm, optimizer=sequence % 2))
    assert order.totals.refused == 0
    order.push(Push(push(0, 30), order.version, 4, (), False, norm=1000.0))
    assert order.refused_norm == (1000.0, 1.0)


def test_a_follower_knows_what_is_pending_for_which_optimizer():
    order = lead()
    order.push(Push(push(0), 0, 4, (), False, optimizer=1))
    other = copied(order.decider)
    last = Push(push(1), 0, 4, (), False, optimizer=1)
    assert other.push(last) == order.decider.push(last)
    assert other.machine.version == 1


# --- on a server --------------------------------------------------------------------------------------


@pytest.fixture
def two():
    """Two models with an optimizer each, a shard of both, and a worker's gradients."""
    torch.manual_seed(0)
    models = [nn.Linear(3, 2, bias=False).double(), nn.Linear(2, 2, bias=False).double()]
    optimizers = [
        torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(models[1].parameters(), lr=0.01),
    ]
    layout, _ = describe(Models(models), optimizers)
    spec = OptimizerSpec.of_all(optimizers)
    base = torch.zeros(layout.nbytes, dtype=torch.uint8)
    slot = torch.zeros(layout.nbytes, dtype=torch.uint8)
    gradients = Gradients(slot, layout, layout.slices)
    for flat in gradients.flat:
        flat.fill_(1.0)
    with torch.no_grad():
        yield Shard(layout, spec, layout.slices, base), spec, gradients


def test_several_optimizers_are_one_spec_and_come_back_from_json():
    models = [nn.Linear(1, 1) for _ in range(3)]
    groups = [{"params": models[1].weight}, {"params": models[1].bias, "lr": 0.5}]
    optimizers = [
        torch.optim.Adam(models[0].parameters()),
        torch.optim.SGD(groups, lr=0.1),
        torch.optim.Muon([models[2].weight]),
    ]
    spec = OptimizerSpec.of_all(optimizers)
    assert spec.targets == ("torch.optim:Adam", "torch.optim:SGD", "torch.optim:Muon")
    assert spec.groups_of == (range(1), range(1, 3), range(3, 4)) and spec.whole_tensors
    assert OptimizerSpec.from_json(spec.to_json()) == spec
    assert type(spec.build(2, [torch.zeros(2)])) is torch.optim.SGD
    alone = OptimizerSpec.of_all(optimizers[:1])
    assert alone == OptimizerSpec.of(optimizers[0])
    assert set(alone.to_json()) == {"target", "groups", "whole_tensors"}


@pytest.mark.parametrize(
    "more", [3, [["torch.optim:SGD"]], [["torch.optim:SGD", 0]], [["torch.optim:SGD", 9]]]
)
def test_a_spec_whose_optimizers_have_no_groups_is_refused(more):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    data = OptimizerSpec.of(optimizer).to_json()
    with pytest.raises(FrameError):
        OptimizerSpec.from_json({**data, "more": more})


def test_a_push_for_one_optimizer_leaves_the_others_slices_alone(two):
    """Also where the memory of the others holds what is not finite."""
    shard, spec, gradients = two
    gradients.flat[1].fill_(float("nan"))
    shard.update([Contribution(0, gradients, groups=spec.groups_of[0])], None)
    assert shard.parameters[0].eq(-0.1).all() and shard.parameters[1].eq(0).all()
    assert shard.take_refusals() == {}
    assert {key.split("|")[0] for key in shard.snapshot() if "momentum" in key} == {"weight"}
    assert not any("exp_avg" in key for key in shard.snapshot())


def test_an_update_of_pushes_for_two_optimizers_is_one_for_each(two):
    """n-softsync collects pushes of all kinds: each optimizer gets the mean of its own."""
    shard, spec, gradients = two
    both = [
        Contribution(k, gradients, groups=spec.groups_of[k], weight=w)
        for k, w in itertools.product((0, 1), (1, 3))
    ]
    shard.update(both, None)
    assert shard.parameters[0].eq(-0.1).all() and shard.parameters[1].ne(0).all()


def test_the_norm_that_clips_is_of_what_is_pushed(two):
    shard, spec, gradients = two
    norms = dict(shard.reduce([Contribution(0, gradients, groups=spec.groups_of[1])]))
    assert norms == {0: 0.0, 1: pytest.approx(4.0)}
    shard.commit(1.0, None)
    assert shard.parameters[0].eq(0).all() and shard.parameters[1].ne(0).all()


def test_loading_one_optimizer_s_state_leaves_the_other_s(two):
    shard, spec, gradients = two
    shard.update([Contribution(0, gradients)], None)
    shard.restore(StateBook([]), parameters=False, groups=spec.groups_of[1])
    assert {key.split("|")[1] for key in shard.snapshot()} == {"", "momentum_buffer"}
