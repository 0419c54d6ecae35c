"""A model cut into stages, a batch cut into micro-batches: who computes what, when. Pure.

A pipeline of K stages computes M micro-batches of a batch: stage s passes what it computed of a micro-batch
on to stage s + 1, and begins with the next one. On the way back gradients go from the last stage to the
first. `gpipe` computes all forward passes first; `1f1b` lets each backward pass begin as soon as it can, so
that a stage never holds more than K micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from paceline.exceptions import UsageError

__all__ = [
    "PIPELINE_SCHEDULES",
    "Action",
    "PipelineSpec",
    "bubble",
    "cut_by_cost",
    "parse_pipeline",
    "stage_actions",
]

PIPELINE_SCHEDULES = ("auto", "gpipe", "1f1b")

_MOST_STAGES = 64
_MOST_MICROBATCHES = 1024


class Action(NamedTuple):
    """One thing that a stage does."""

    kind: Literal["F", "B"]
    """A forward or a backward pass …"""
    microbatch: int
    """… of this micro-batch."""

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """How a worker cuts models and batches.

    Raises:
        UsageError: settings that do not go together.
    """

    stages: int = 1
    """Number of stages, K; 1 does not cut the model."""
    microbatches: int | None = None
    """Number of micro-batches, M, of a batch that has as many samples; None takes 4 for each stage."""
    schedule: Literal["auto", "gpipe", "1f1b"] = "auto"
    split_at: tuple[str, ...] = ()
    """Names of the modules that stages begin with, from the second stage on; empty cuts by measured cost."""

    def __post_init__(self) -> None:
        if self.stages > _MOST_STAGES:
            raise UsageError(f"pipeline={self.stages}: a model is cut into at most {_MOST_STAGES} stages")
        if self.stages < 2:
            for name, value in (
                ("microbatches", self.microbatches),
                ("split_at", ",".join(self.split_at)),
                ("pipeline_schedule", self.schedule if self.schedule != "auto" else None),
            ):
                if value:
                    raise UsageError(
                        f"{name}={value} is about a pipeline, and pipeline={self.stages} makes none: give "
                        f"pipeline=K with K of at least 2, or leave {name} out"
                    )
        if self.microbatches is not None and self.microbatches > _MOST_MICROBATCHES:
            raise UsageError(
                f"microbatches={self.microbatches}: a batch is cut into at most {_MOST_MICROBATCHES:,}"
            )
        if self.split_at and len(self.split_at) != self.stages - 1:
            raise UsageError(
                f"split_at={','.join(self.split_at)} names {len(self.split_at)} modules, and "
                f"pipeline={self.stages} has {self.stages - 1} stages that begin with one (every stage but "
                f"the first): name {self.stages - 1}, or give pipeline={len(self.split_at) + 1}"
            )
        twice = sorted({name for name in self.split_at if self.split_at.count(name) > 1})
        if twice:
            raise UsageError(
                f"split_at={','.join(self.split_at)}: {twice[0]} is named twice; name each module once"
            )

    def __str__(self) -> str:
        return f"--pipeline {self.stages}"

    @property
    def splits(self) -> bool:
        """Whether models are cut at all."""
        return self.stages > 1

    @property
    def most_microbatches(self) -> int:
        """Number of micro-batches of a batch with enough samples."""
        return 4 * self.stages if self.microbatches is None else self.microbatches


def stage_actions(
    schedule: Literal["gpipe", "1f1b"], stage: int, stages: int, microbatches: int
) -> list[Action]:
    """What a stage does for one batch, in order."""
    forward = [Action("F", m) for m in range(microbatches)]
    backward = [Action("B", m) for m in range(microbatches)]
    if schedule == "gpipe":
        return forward + backward
    ahead = min(microbatches, stages - stage)  # how many it computes before the first gradient arrives
    actions = forward[:ahead]
    for m in range(microbatches):
        actions.append(backward[m])
        actions += forward[ahead + m : ahead + m + 1]
    return actions


def bubble(stages: int, microbatches: int) -> float:
    """The share of a step in which a stage of an ideal pipeline waits: (K - 1) / (M + K - 1)."""
    return (stages - 1) / (microbatches + stages - 1)


def cut_by_cost(costs: Sequence[float], crossing: Sequence[float], stages: int) -> list[int]:
    """The units that stages begin with, from the second stage on, so that the slowest stage is as fast as
    it can be; among equals, those with the least crossing.

    Args:
        costs: time of each unit, forward and backward. There are as many units as stages at least.
        crossing: time that both neighbours lose by a cut before a unit.
    """
    count = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    edge = [0.0, *crossing[1:], 0.0]  # the ends of the model cost nothing
    best: list[tuple[float, float, list[int]]] = [
        (total[end] + edge[end], edge[end], []) for end in range(count + 1)
    ]  # of the first `end` units in one stage: slowest stage, all crossings, cuts
    for made in range(2, stages + 1):
        grown = best[:]
        for end in range(made, count + 1):
            grown[end] = min(
                (
                    max(best[cut][0], edge[cut] + total[end] - total[cut] + edge[end]),
                    best[cut][1] + edge[end],
                    [*best[cut][2], cut],
                )
                for cut in range(made - 1, end)
            )
        best = grown
    return best[count][2]


def parse_pipeline(
    stages: int, microbatches: int | None, schedule: Any, split_at: Sequence[str]
) -> PipelineSpec:
    """The settings of a job as one value.

    Raises:
        UsageError: they do not go together.
    """
    return PipelineSpec(stages=stages, microbatches=microbatches, schedule=schedule, split_at=tuple(split_at))
