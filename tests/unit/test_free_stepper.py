"""dogwild's stepper: whatever the exchange thread does during a step, a later flush carries the step."""

import pytest
import torch
from torch import nn

from paceline.core.modes import parse_mode
from paceline.params import bind, describe, tensor_views
from paceline.worker.steppers import StepperMemory, make_stepper


@pytest.mark.parametrize("during_step", ["before", "after", "never"])
def test_a_flush_after_the_last_step_carries_it(during_step: str) -> None:
    """The exchange thread flushes before or after the local step has changed the parameters, or not at all.
    The server adds what is pushed."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    layout, parameters = describe(model, optimizer)
    slot, base, near = (torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(3))
    bind(parameters, tensor_views(near, layout))

    def flush() -> int:
        flushes = 0
        for _ in stepper.flush():
            base.view(torch.float32).sub_(slot.view(torch.float32))
            flushes += 1
        return flushes

    def local_step() -> None:
        if during_step == "before":
            flush()
        with torch.no_grad():
            for p in parameters:
                p.sub_(1.0)
        if during_step == "after":
            flush()

    memory = StepperMemory(slot, base, near)
    stepper = make_stepper(parse_mode("dogwild"), layout, memory, parameters, optimizer, local_step)
    for _ in range(3):
        list(stepper.step())
        stepper.step_ended()
    assert flush() == 1, "the samples of the last step go with this push"
    assert all(view.eq(-3.0).all() for view in tensor_views(base, layout))
    assert flush() == 0
