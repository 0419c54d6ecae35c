"""What the parts of a world have in common: processes, messages, what a process does, and what goes wrong."""

import json
from typing import Any, NamedTuple

__all__ = ["CONTROLLER", "END", "Broken", "Message", "Output", "Pid", "World", "message", "server", "worker"]


class Pid(NamedTuple):
    """A process: `s` a server, `w` a worker, `c` the controller."""

    role: str
    rank: int
    incarnation: int

    def __str__(self) -> str:
        if self.role == "c":
            return "controller"
        return f"{'server' if self.role == 's' else 'worker'}:{self.rank}" + (
            f".{self.incarnation}" if self.incarnation else ""
        )


CONTROLLER = Pid("c", 0, 0)


def server(rank: int, incarnation: int = 0) -> Pid:
    return Pid("s", rank, incarnation)


def worker(rank: int, incarnation: int = 0) -> Pid:
    return Pid("w", rank, incarnation)


class Message(NamedTuple):
    """A frame on its way: its kind, and its body as JSON."""

    kind: str
    text: str = "{}"

    @property
    def body(self) -> Any:
        return json.loads(self.text)


END = Message("END")
"""The last message of a link: its other end is gone."""


class Output(NamedTuple):
    """What a process does: sends a message; or (`do`) something else than that."""

    to: Pid | None
    message: Message
    do: str = ""
    """`spawn`, `kill`, `restart`, `commit`, `acknowledged`, `exit`, `over`; see `world.py`."""


def message(kind: str, /, **body: Any) -> Message:
    return Message(kind, json.dumps(body, sort_keys=True))


class Broken(AssertionError):
    """A property does not hold."""


class World(NamedTuple):
    """A small run: everything that an exploration of it depends on."""

    mode: str
    servers: int = 2
    workers: int = 2
    replicas: int = 0
    batches: int = 6
    """Number of batches of an epoch, of one sample each; 0: the script has no prepared loader."""
    steps: int = 3
    """Without a loader: steps of each worker."""
    epochs: int = 1
    crashes: int = 0
    """Maximum number of processes that die."""
    victims: str = "sw"
    """Roles that die."""
    clip_norm: float | None = None
    checkpoint_every: int = 0
    schedule: tuple[str, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    compress: str = "none"
    max_updates: int | None = None
    shrinks: bool = False
    """The user asks for a server less."""
    started: bool = True
    """The world begins when all workers have joined; else with the start of their processes."""

    def __str__(self) -> str:
        usual = World("")._asdict()
        more = [f"{k}={v}" for k, v in self._asdict().items() if v != usual[k] and k != "mode"]
        return " ".join([self.mode, *more]).replace(", ", ",")
