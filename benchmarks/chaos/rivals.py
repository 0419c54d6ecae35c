"""The same kills on peers: what they do, how long until the next step, and what they lose."""

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.chaos import roles
from benchmarks.chaos.outcome import FaultRow, row_of
from benchmarks.chaos.running import Bench
from benchmarks.harness import MissingPeer, Row
from benchmarks.peers import killed
from benchmarks.peers.killed import Killed
from benchmarks.peers.killed_torchft import torchft

QUICK_RUNS = 2
RUNS = 5
WORKER = ("2-worker-killed-bsp",)
SERVER = ("4-server-with-replica-killed-asp", "5-server-killed")
"""Our side, the first of these that was run."""

PEERS: list[tuple[str, str, Sequence[str], Callable[[int], Killed], str]] = [
    (
        *("worker-killed", "torchrun", WORKER, killed.torchrun),
        "DDP: all processes are killed and start again from their own checkpoint, every 20 steps",
    ),
    *(
        (
            *("worker-killed", f"torchft-{groups}-groups", WORKER),
            partial(torchft, groups=groups),
            f"{groups} replica groups over gloo, lighthouse with a heartbeat timeout of 1 s (default 5): the "
            "others go on without the dead one",
        )
        for groups in (2, 4)
    ),
    (
        *("server-killed", "ray-actor", SERVER, lambda seed: killed.ray_actor(seed, restarts=False)),
        "the call fails; the program makes a new actor, with new parameters",
    ),
    (
        *("server-killed", "ray-actor-restarts", SERVER, lambda seed: killed.ray_actor(seed, restarts=True)),
        "max_restarts: Ray makes a new actor, with new parameters, and nobody is told",
    ),
]


def rows(bench: Bench, so_far: Sequence[FaultRow]) -> list[Row]:
    """A line for each peer; our side is taken from the matrix, or run now."""
    ours = {row.case.removesuffix("/ours/limit"): row for row in so_far if row.blackout_s is not None}
    found: list[Row] = []
    for what, peer, sides, run, does in PEERS:
        print(f"peers, {what}, {peer}", file=sys.stderr, flush=True)
        side = _ours(bench, ours, sides)
        seconds, note = None, does
        try:
            ended = [run(seed) for seed in range(QUICK_RUNS if bench.quick else RUNS)]
            seconds = statistics.median(each.seconds for each in ended)
            note = f"{does}; {_medians(ended)}"
        except MissingPeer as missing:
            note = f"skipped: {missing}"
        except (RuntimeError, TimeoutError) as error:
            note = f"failed: {str(error).splitlines()[-1]:.200}"
        found.append(
            Row(
                case=f"{what}/paceline/{peer}",
                ours=side.blackout_s if side else None,
                peer=seconds,
                unit="s",
                better="lower",
                ratio=seconds / side.blackout_s if seconds and side and side.blackout_s else None,
                target=None,
                ok=None,
                note=f"{note}; ours: {side.case.removesuffix('/ours/limit')}, {side.lost} lost"
                if side
                else note,
            )
        )
    return found


def _medians(ended: Sequence[Killed]) -> str:
    """What was lost, and when all were back, in words."""
    text = f"{statistics.median(each.lost for each in ended):g} steps"
    samples = [each.samples for each in ended if each.samples is not None]
    text += f" ({statistics.median(samples):g} samples)" if samples else ""
    back = [each.back_s for each in ended if each.back_s is not None]
    return f"{text} lost (median)" + (f"; all back after {statistics.median(back):.1f} s" if back else "")


def _ours(bench: Bench, known: dict[str, FaultRow], titles: Sequence[str]) -> FaultRow | None:
    for title in titles:
        if title not in known:
            (trial,) = [trial for trial in roles.trials(bench) if trial.title == title]
            known[title] = row_of(trial, bench.seeds)
        if known[title].blackout_s is not None:
            return known[title]
    return None
