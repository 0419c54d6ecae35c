"""The workers' side of the modes: what optimizer.step() does.

| stepper         | between two pushes              | what it pushes                         |
|-----------------|---------------------------------|----------------------------------------|
| GradientStepper | nothing: every step is a push   | the gradient                           |
| SumStepper      | plain SGD steps                 | the sum of the gradients               |
| DeltaStepper    | steps of the script's optimizer | how far it moved, as a gradient        |
| ElasticStepper  | steps of the script's optimizer | its parameters                         |
| InPlaceStepper  | -                               | nothing: it wrote to the shared memory |
| FreeStepper     | steps of the script's optimizer | what changed, from a thread of its own |
| GroupStepper    | an all-reduce within the group  | what the mode between the groups says  |

* `stepper.py`          Stepper: one worker's side of a mode; Request: an exchange that it asks for.
* `factory.py`          make_stepper: chooses the stepper of a mode.
* `gradient_stepper.py` GradientStepper.
* `local_steppers.py`   SumStepper, DeltaStepper, ElasticStepper, InPlaceStepper, FreeStepper.
* `group_stepper.py`    GroupStepper: a member of a group.
* `gradient_memory.py`  GradientMemory: collects gradients in the push memory and checks them.
* `served_optimizer.py` served_optimizer: the optimizer that the servers run in a mode.
"""

from paceline.worker.steppers.factory import make_stepper
from paceline.worker.steppers.gradient_stepper import GradientStepper
from paceline.worker.steppers.group_stepper import GroupMemory, GroupRun, GroupStepper
from paceline.worker.steppers.served_optimizer import (
    follows_rate,
    local_step_of,
    runs_here,
    served_optimizer,
)
from paceline.worker.steppers.stepper import Request, Stepper, StepperMemory

__all__ = [
    "GradientStepper",
    "GroupMemory",
    "GroupRun",
    "GroupStepper",
    "Request",
    "Stepper",
    "StepperMemory",
    "follows_rate",
    "local_step_of",
    "make_stepper",
    "runs_here",
    "served_optimizer",
]
