"""The worlds: modes and options as the plan admits them, with no, one and two deaths."""

import itertools
from collections.abc import Iterator
from typing import Any

from paceline.core.modes import parse_mode, parse_schedule
from paceline.exceptions import UsageError
from paceline.plan import Job
from paceline.plan.rules import check_modes
from tests.explorer.model import World

__all__ = ["MODES", "admitted", "quick_worlds", "worlds"]

MODES = (
    "bsp",
    "bsp+period=2",
    "backup:1",
    "ssp:0",
    "ssp:1",
    "ssp:1+batches=speed",
    "asp",
    "asp+quorum=2",
    "asp+damping=dc",
    "downpour:2,2",
    "easgd:2",
    "eamsgd:2",
    "local:2",
    "diloco:2",
    "hogwild",
    "dogwild",
    "allreduce",
    "hybrid:bsp",
    "hybrid:asp",
    "sandblaster",
)
"""Every name of the table of modes, and knobs that change who waits for whom."""

OPTIONS: dict[str, tuple[Any, ...]] = {
    "replicas": (0, 1),
    "clip_norm": (None, 1.0),
    "checkpoint_every": (0, 1),
    "schedule": ((), ("2=bsp",), ("2=asp",)),
    "compress": ("none", "topk:0.5"),
    "max_updates": (None, 2),
    "groups": (None, 1, 2),
}
"""Options of a job that decide something of what is explored, and their values."""


def admitted(mode: str, **options: Any) -> bool:
    """Whether a plan admits a job with these settings: the plan's own rules say so."""
    workers = options.pop("workers", 2)
    try:
        job = Job(script="train.py", mode=mode, workers=workers, servers=2, **options)
        spec = parse_mode(job.mode)
        schedule = parse_schedule(spec, job.schedule)
        schedule.check(job.workers)
        check_modes(job, schedule)
        if spec.inner is not None:
            spec.inner.check(job.groups or 1)
    except UsageError:
        return False
    return True


def _combinations(mode: str) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*OPTIONS.values()):
        options = dict(zip(OPTIONS, values, strict=True))
        spec = parse_mode(mode)
        if options["groups"] is not None and spec.inner is None:
            continue  # the plan refuses it; it has no meaning there
        if options["groups"] is None and spec.inner is not None:
            continue  # it is one group
        if admitted(mode, **options):
            yield options


def _world(mode: str, options: dict[str, Any], crashes: int) -> World:
    spec = parse_mode(mode)
    groups: tuple[tuple[int, ...], ...] = ()
    if spec.grouped:
        groups = ((0,), (1,)) if options["groups"] == 2 else ((0, 1),)
    # A first-come book deals six batches in any way: four keep the worlds small.
    batches = 6 if spec.in_rounds else 4
    return World(
        mode,
        servers=1 if spec.serverless else 2,
        crashes=crashes,
        batches=batches,
        **{**options, "groups": groups},
    )


def worlds(mode: str | None = None, *, at_once: int = len(OPTIONS)) -> Iterator[World]:
    """All worlds, or those of one mode.

    Args:
        at_once: number of options that differ from what they usually are, at most.
    """
    for each in MODES if mode is None else (mode,):
        for options in _combinations(each):
            unusual = sum(value != OPTIONS[name][0] for name, value in options.items() if name != "groups")
            if unusual > at_once:
                continue
            for crashes in range(3):
                yield _world(each, options, crashes)
        for replicas in (0, 1):
            if admitted(each, replicas=replicas) and not parse_mode(each).grouped:
                # Without a loader: three pushes each; and the start of all processes.
                spec = parse_mode(each)
                if not (spec.by_epoch or spec.deals_by_speed):
                    yield World(each, replicas=replicas, batches=0, crashes=2)
                yield World(each, replicas=replicas, batches=2, crashes=1, started=False)
                yield World(each, replicas=replicas, batches=4, shrinks=True)


def quick_worlds() -> Iterator[World]:
    """A few small ones for the fast suite."""
    for mode in ("bsp", "backup:1", "ssp:1", "asp", "local:2", "sandblaster"):
        yield World(mode, batches=2, servers=2)
    yield World("asp", batches=2, replicas=1)
    yield World("bsp", batches=2, replicas=1, clip_norm=1.0, checkpoint_every=1)
    yield World("bsp", servers=1, batches=2, crashes=1, victims="w")
