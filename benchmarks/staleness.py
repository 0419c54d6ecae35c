"""What a mode does to accuracy, without processes: workers in virtual time, the real state machines.

Events are finished steps, in order of virtual time. A worker computes its gradient on the parameters it
read when it was admitted; the mode's machine (paceline.modes) says which pushes make an update and who
goes on; one torch optimizer updates one flat vector. Leases are dealt as in a run: by rounds in bsp,
first come first served elsewhere, and an epoch turns when all of it is applied. Workers take from 1 to
`spread` times as long as the fastest, ± 10 % from step to step. The same seed gives the same numbers.

python -m benchmarks.staleness spirals --workers 4 8 12
python -m benchmarks.staleness spirals --rates     # learning rates from 0.001 to 0.5, 12 workers
"""

import argparse
import heapq
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.tasks import TASKS, Task, task
from paceline.modes import parse_mode
from paceline.modes.machine import Admit, Apply, Drop, Instruction, PushId

MODES = (
    "bsp",
    "asp",
    "ssp:2",
    "asp+damping=staleness",
    "ssp:2+damping=staleness",
    "asp+damping=dc",
    "asp+damping=dc-adaptive",
)
"""Modes and what tempers a stale gradient: `staleness` divides by it, `dc` adds λ·g⊙g⊙(w − w_read) with λ
0.04, `dc-adaptive` with λ = 2/√(mean of g²) (Zheng et al., 2017)."""

RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)

_JITTER = 0.1
_LAMBDA, _LAMBDA_ADAPTIVE, _MEMORY = 0.04, 2.0, 0.95


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a simulated run ended."""

    accuracy: float
    """On the test samples; of a run that went beyond all numbers, that of a guess."""
    updates: int
    mean_staleness: float
    max_staleness: int
    virtual_s: float
    """The fastest worker's step takes one second."""


@dataclass
class _Step:
    """What a worker is computing: a gradient of `samples` at `parameters`, which it read as `version`."""

    samples: Tensor
    parameters: Tensor
    version: int


class _Pool:
    """The epochs' samples, dealt in batches."""

    def __init__(self, count: int, batch: int, workers: int, *, by_round: bool, random: np.random.Generator):
        self._count = count
        self._batch = batch
        self._workers = workers
        self._by_round = by_round
        self._random = random
        self.turn()

    def turn(self) -> None:
        """Begin an epoch."""
        self._left = torch.from_numpy(self._random.permutation(self._count))
        self._round: list[int] = []

    def take(self) -> Tensor | None:
        """The next batch; None when the epoch has no more."""
        size = self._batch
        if self._by_round:
            if not self._round:  # a short last round is split evenly
                least, more = divmod(min(len(self._left), self._workers * size), self._workers)
                self._round = [least + (rank < more) for rank in range(self._workers)]
            size = self._round.pop(0)
        taken, self._left = self._left[:size], self._left[size:]
        return taken if len(taken) else None


class _Replica:
    """A model whose parameters and gradients are views of two flat vectors."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        parameters = list(model.parameters())
        self.flat = torch.cat([p.detach().flatten() for p in parameters])
        self.gradient = torch.zeros_like(self.flat)
        start = 0
        for p in parameters:
            part = slice(start, start + p.numel())
            p.data = self.flat[part].view_as(p)
            p.grad = self.gradient[part].view_as(p)
            start += p.numel()


class Simulation:
    """One run of a task; `run` it once.

    Args:
        mode: a mode's text, and after `+damping=` what tempers stale gradients (see MODES).
        spread: how many times as long as the fastest the slowest worker takes.
    """

    def __init__(
        self,
        task: Task,
        mode: str,
        *,
        workers: int,
        seed: int,
        learning_rate: float | None = None,
        spread: float = 3.0,
    ) -> None:
        name, _, self._damping = mode.partition("+damping=")
        spec = parse_mode(name)
        torch.manual_seed(seed)
        random = np.random.default_rng(seed)
        self._task = task
        self._workers = range(workers)
        self._machine = spec.machine()
        self._replica = _Replica(task.build())
        self._parameters = self._replica.flat.clone().requires_grad_()
        self._optimizer = task.optimizer([self._parameters], learning_rate or task.learning_rate)
        self._random = random
        self._pace = random.permutation(np.linspace(1.0, spread, workers))
        self._pool = _Pool(len(task.train[1]), task.batch, workers, by_round=spec.spare == 0, random=random)
        self._now = 0.0
        self._finishing: list[tuple[float, int]] = []
        self._steps: dict[int, _Step] = {}
        self._gradients: dict[PushId, Tensor] = {}
        self._sequence = [0] * workers
        self._resting: set[int] = set()
        self._version = 0
        self._staleness: list[int] = []
        self._mean_square = torch.zeros_like(self._replica.flat)

    def run(self) -> Outcome:
        """Train for the task's epochs, then test."""
        for worker in self._workers:
            self._carry_out(self._machine.joined(worker, 0))
        for _ in range(self._task.epochs):
            self._pool.turn()
            self._resting.clear()
            for worker in self._workers:
                self._carry_out(self._machine.woke(worker))
            for worker in self._workers:
                self._begin(worker)
            while self._finishing:
                self._now, worker = heapq.heappop(self._finishing)
                if not self._finish(worker):
                    return self._outcome(1 / (int(self._task.train[1].max()) + 1))
            assert len(self._resting) == len(self._workers), "a worker waits for nobody"
        self._replica.flat.copy_(self._parameters.detach())
        return self._outcome(self._task.accuracy(self._replica.model))

    def _begin(self, worker: int) -> None:
        samples = self._pool.take()
        if samples is None:
            self._resting.add(worker)
            self._carry_out(self._machine.rested(worker))
            return
        self._steps[worker] = _Step(samples, self._parameters.detach().clone(), self._version)
        takes = self._pace[worker] * len(samples) / self._task.batch * self._random.lognormal(0, _JITTER)
        heapq.heappush(self._finishing, (self._now + takes, worker))

    def _finish(self, worker: int) -> bool:
        """Compute what the worker has finished and push it; False if it is not a number."""
        step = self._steps[worker]
        self._replica.flat.copy_(step.parameters)
        self._replica.gradient.zero_()
        inputs, labels = self._task.train
        loss = self._task.backward(self._replica.model, inputs[step.samples], labels[step.samples])
        push = PushId(worker, 0, self._sequence[worker])
        self._sequence[worker] += 1
        self._gradients[push] = self._replica.gradient.clone()
        self._carry_out(self._machine.pushed(push, step.version))
        return math.isfinite(loss)

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        admitted = []
        for instruction in instructions:
            match instruction:
                case Apply(pushes):
                    self._apply(pushes)
                case Drop(push):
                    self._gradients.pop(push, None)
                case Admit(worker):
                    admitted.append(worker)
        for worker in admitted:
            self._begin(worker)

    def _apply(self, pushes: Sequence[PushId]) -> None:
        gradients = [self._tempered(push) for push in pushes]
        self._parameters.grad = torch.stack(gradients).mean(0) if len(gradients) > 1 else gradients[0]
        self._optimizer.step()
        self._version += 1

    def _tempered(self, push: PushId) -> Tensor:
        gradient, step = self._gradients.pop(push), self._steps[push.worker]
        staleness = self._version - step.version
        self._staleness.append(staleness)
        match self._damping:
            case "":
                return gradient
            case "staleness":
                return gradient / max(1, staleness)
            case "dc":
                moved = self._parameters.detach() - step.parameters
                return gradient + _LAMBDA * gradient * gradient * moved
            case "dc-adaptive":
                moved = self._parameters.detach() - step.parameters
                square = gradient * gradient
                self._mean_square.lerp_(square, 1 - _MEMORY)
                return gradient + _LAMBDA_ADAPTIVE * square * moved / (self._mean_square + 1e-7).sqrt()
        raise ValueError(f"there is no damping {self._damping!r}")

    def _outcome(self, accuracy: float) -> Outcome:
        return Outcome(
            accuracy=accuracy,
            updates=self._version,
            mean_staleness=statistics.fmean(self._staleness),
            max_staleness=max(self._staleness),
            virtual_s=self._now,
        )


def simulate(
    task: Task,
    mode: str,
    *,
    workers: int,
    seed: int,
    learning_rate: float | None = None,
    spread: float = 3.0,
) -> Outcome:
    """Run one simulation; see Simulation."""
    return Simulation(
        task, mode, workers=workers, seed=seed, learning_rate=learning_rate, spread=spread
    ).run()


def main() -> None:
    """Print test accuracy (mean and spread of the seeds) and staleness."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staleness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--workers", type=int, nargs="+", default=[12])
    parser.add_argument("--modes", nargs="+", default=MODES, metavar="MODE")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument(
        "--rates", type=float, nargs="*", help="learning rates; without any, from 0.001 to 0.5"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = task(args.task)
    rates = [chosen.learning_rate] if args.rates is None else args.rates or RATES
    print(f"{'workers':>7}  {'mode':24}  {'rate':>6}  {'accuracy':>14}  staleness  cpu s")
    for workers in args.workers:
        for mode in args.modes:
            for rate in rates:
                start = time.process_time()
                found = [
                    simulate(chosen, mode, workers=workers, seed=seed, learning_rate=rate)
                    for seed in range(args.seeds)
                ]
                cpu_s = (time.process_time() - start) / args.seeds
                scores = [outcome.accuracy for outcome in found]
                stale = statistics.fmean(outcome.mean_staleness for outcome in found)
                most = max(outcome.max_staleness for outcome in found)
                print(
                    f"{workers:7}  {mode:24}  {rate:6g}  {statistics.fmean(scores):6.3f} ± "
                    f"{statistics.pstdev(scores):.3f}  {stale:5.1f}/{most:<3}  {cpu_s:5.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
