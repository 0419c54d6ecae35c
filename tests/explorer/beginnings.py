"""What the servers of a world begin with: layout, decider, and the contents of slices, also as JSON."""

from typing import Any

from paceline.core.decider import Decider
from paceline.core.descent import Descent
from paceline.core.layout import Layout, TensorInfo
from paceline.core.leases import LeaseBook
from paceline.core.modes import parse_mode, parse_schedule
from paceline.core.modes.lbfgs import Lbfgs
from tests.explorer.model import Pid, World
from tests.explorer.shards import Contents, Slice

__all__ = ["Disk", "contents_from_json", "contents_to_json", "layout_of", "new_decider", "place_of"]


class Disk:
    """The last committed checkpoint."""

    def __init__(self, lead: dict[str, Any], contents: Contents) -> None:
        self.lead, self.contents = lead, contents


def layout_of(world: World) -> Layout:
    """A slice for each server that the run begins with."""
    return Layout.build(
        TensorInfo(name=f"tensor {group}", shape=(4,), stride=(1,), dtype="float32", group=group)
        for group in range(world.servers)
    )


def place_of(pid: Pid) -> dict[str, Any]:
    """Where a server listens: the explorer's links read the process from it."""
    return {"host": "explored", "port": 1000 * pid.rank + pid.incarnation + 1}


def new_decider(world: World) -> Decider:
    mode = parse_mode(world.mode)
    decider = Decider(
        mode,
        clip_norm=world.clip_norm,
        schedule=parse_schedule(mode, world.schedule),
        groups=world.groups,
        max_updates=world.max_updates,
    )
    book = None
    if world.batches:
        book = LeaseBook(
            samples=world.batches, batch_size=1, drop_last=False, by_round=mode.by_round, copies=mode.copies
        )
    decider.begin(book, 1, Descent(Lbfgs(history=mode.history)) if mode.by_epoch else None)
    return decider


def contents_to_json(contents: Contents) -> Any:
    return [
        [i, each.version, sorted([*each_push[:3], list(each_push[3])] for each_push in each.pushes)]
        for i, each in sorted(contents.items())
    ]


def contents_from_json(data: Any) -> Contents:
    return {
        i: Slice(version, frozenset((w, inc, n, tuple(at)) for w, inc, n, at in pushes))
        for i, version, pushes in data
    }
