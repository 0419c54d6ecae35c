"""Histories as values: drawn from a seed, printed, and the same again from the same seed."""

import random
from dataclasses import dataclass, field
from typing import Any

from paceline.core.modes import parse_mode
from paceline.exceptions import PacelineError
from paceline.plan import Job, make_plan

__all__ = ["Event", "History", "draw"]

MODES = (
    *("bsp", "backup:1", "ssp:0", "ssp:2", "asp", "asp+quorum=2", "asp+damping=none", "bsp+period=2"),
    *("downpour:2", "easgd:2", "local:2", "diloco:3", "hogwild", "allreduce", "hybrid:asp", "hybrid:bsp"),
)
SWITCHES = ("bsp", "backup:1", "ssp:1", "asp")
BATCH = 2
SAMPLES = 48
STEP_MS = 4.0
_MEANWHILE = 20
"""Steps that a worker may make while an event happens."""


@dataclass(frozen=True)
class Event:
    """Something that happens to the run, so many steps after the event before."""

    kind: str
    """kill, stop, scale, switch, interrupt or crash."""
    target: str = ""
    """A role (`worker:1`, `server:0`, `lead`, `controller`), a mode, or sizes (`workers=3`)."""
    after: int = 0
    seconds: float = 0.0
    """How long a stopped process stays stopped."""

    def __str__(self) -> str:
        seconds = f" for {self.seconds:g} s" if self.seconds else ""
        return f"after {self.after} steps: {' '.join(filter(None, (self.kind, self.target)))}{seconds}"


@dataclass(frozen=True)
class History:
    """A run and what happens to it."""

    seed: int
    settings: dict[str, Any]
    """Of the job."""
    events: tuple[Event, ...]
    faults: str = ""
    """Injected ones: of links and disks."""
    epochs: int = 0
    batch: int = BATCH
    samples: int = SAMPLES
    step_ms: float = STEP_MS
    options: tuple[str, ...] = field(default=())
    """The settings as words of `paceline run`."""

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: paceline run {' '.join(self.options)} ({self.epochs} epochs)"]
        lines += [f"  faults: {self.faults}"] if self.faults else []
        return "\n".join([*lines, *(f"  {event}" for event in self.events)])


def draw(seed: int) -> History:
    """The history of this seed; settings that the plan refuses together are drawn again."""
    for attempt in range(1000):
        rng = random.Random(f"{seed}/{attempt}")
        settings = _settings(rng)
        try:
            make_plan(Job(**settings))
        except PacelineError:
            continue
        return _history(seed, rng, settings)
    raise AssertionError(f"no history for seed {seed}")


def _settings(rng: random.Random) -> dict[str, Any]:
    servers = rng.randint(1, 3)
    return {
        "workers": rng.randint(1, 4),
        "servers": servers,
        "mode": rng.choice(MODES),
        "link": rng.choice(["shm", "tcp"]),
        "replicas": rng.choice([0, 0, *range(1, servers)]) if servers > 1 else 0,
        "checkpoint_every": rng.choice([0, 5, 20]),
        "clip_norm": 1e9 if rng.random() < 0.1 else None,
        "compress": "fp16" if rng.random() < 0.05 else "none",
        "max_restarts": 40,
        "deadline_s": 20.0,
        "threads": 1,
    }


def _history(seed: int, rng: random.Random, settings: dict[str, Any]) -> History:
    events = tuple(_event(rng, settings) for _ in range(rng.randint(3, 12)))
    # Steps that the workers make while the player looks for a process or waits for an answer: else the
    # events behind come too late. Workers that die make steps twice, and those that go back even more.
    meanwhile = _MEANWHILE * settings["workers"]
    steps = 30 + sum(meanwhile + event.after for event in events)
    epochs = 2 + -(-steps * BATCH // SAMPLES)
    options = []
    for name, value in settings.items():
        if value not in (None, 0, "none"):
            option = {"deadline_s": "deadline"}.get(name, name.replace("_", "-"))
            options += [f"--{option}", f"{value:g}" if isinstance(value, float) else str(value)]
    return History(
        seed, settings, events, faults=_faults(rng, settings), epochs=epochs, options=tuple(options)
    )


def _event(rng: random.Random, settings: dict[str, Any]) -> Event:
    after = rng.choice([0, 1, 5, 10, 20, 30])
    roles = [f"worker:{r}" for r in range(settings["workers"])]
    roles += [f"server:{r}" for r in range(settings["servers"])] + ["lead", "controller"]
    kind = rng.choices(
        ["kill", "stop", "scale", "switch", "interrupt", "crash"], weights=[10, 4, 3, 2, 2, 1]
    )[0]
    if kind == "kill":
        return Event(kind, rng.choice(roles), after)
    if kind == "stop":
        return Event(kind, rng.choice(roles), after, seconds=rng.choice([0.05, 0.3, 1.0, 2.0]))
    if kind == "scale":
        what, most = rng.choice([("workers", 4), ("servers", 3)])
        return Event(kind, f"{what}={rng.randint(1, most)}", after)
    if kind == "switch":
        return Event(kind, rng.choice(SWITCHES), after)
    return Event(kind, "", after)


def _faults(rng: random.Random, settings: dict[str, Any]) -> str:
    found = []
    for _ in range(rng.choice([0, 0, 1, 2, 4])):
        kind = rng.choice(
            ["cut", "hangup", "flip", "drop", "duplicate", "reorder", "delay", "full", "slowdisk"]
        )
        step, time = rng.randint(1, 60), ":50ms" if kind in ("delay", "slowdisk") else ""
        if kind in ("full", "slowdisk"):
            found.append(f"{kind} server:{rng.randrange(settings['servers'])}@{rng.randint(1, 4)}{time}")
        else:
            role = rng.choice(["worker", "server"])
            rank = rng.randrange(settings[f"{role}s"])
            found.append(f"{kind} {role}:{rank}@{step}{time}")
    return "; ".join(found)


def is_normalised(mode: str) -> bool:
    """Whether the servers' optimizer takes steps of equal length (Adagrad)."""
    spec = parse_mode(mode)
    return (spec.inner or spec).outer == "adagrad"
