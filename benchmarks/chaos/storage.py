"""Row 12: a kill, a full disk or a flipped bit while checkpoints are written; the one before it loads.

A process writes one checkpoint after the other, as server 0 does (parts, JSON, commit, prune), and says
which are committed. It is forked, so that two hundred of them cost seconds: it gets SIGKILL before or after
its n-th system call that changes something, or at a random time; or that call fails with ENOSPC; or, when it
is dead, a bit of what it wrote last is flipped. What is found then must be whole, and of the last commit that
was said or later; but one earlier if that one was damaged.
"""

import errno
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.chaos.outcome import Outcome, Trial, leftovers
from benchmarks.chaos.running import Bench, counted, run
from paceline.exceptions import CheckpointError
from paceline.storage.checkpoint import MANIFEST, CheckpointWriter, clean_temporary, latest, prune

POINTS = 204
"""At least, of all runs together."""
CALLS = ("mkdir", "open", "write", "fsync", "close", "rename", "replace", "unlink", "rmdir")
"""What changes something on a disk, or makes it last."""
CALLS_OF_ONE = 60
"""About so many of those does a checkpoint take."""
KEPT = 2
KINDS = ("before", "after", "anytime", "full", "flipped")


def trials(bench: Bench) -> Iterator[Trial]:
    """These rows."""
    yield Trial(
        row="12",
        name="checkpoint-interrupted",
        wanted=f"the one before loads, at ≥ {POINTS} points",
        run=partial(interrupted, bench),
    )
    yield Trial(
        row="12",
        name="disk-full",
        wanted="said, the run goes on, the next one is kept",
        run=partial(disk_full, bench),
    )


def interrupted(bench: Bench, seed: int) -> Outcome:
    """A share of the points."""
    chance = random.Random(f"storage {seed}")
    points = -(-POINTS // bench.seeds)
    failed = []
    for point in range(points):
        kind = KINDS[(seed * points + point) % len(KINDS)]
        root = bench.folder / f"storage-{seed}-{point}"
        if why := _one(root, kind, chance):
            failed.append(f"{kind}: {why}")
    return Outcome(why="; ".join(failed[:2]), figure=float(points), note=f"{points} points a run")


def _one(root: Path, kind: str, chance: random.Random) -> str:
    """One point; what was wrong."""
    said, ended_by = _write_until(root, kind, chance)
    if kind != "full" and ended_by != signal.SIGKILL:
        return f"it was not killed, but ended with {ended_by}"
    least = said[-1] if said else 0
    newest = latest(root)
    if kind == "flipped" and newest is not None:
        flipped = _flip(newest.path, chance)
        least = newest.version - 1
        found = latest(root)
        # A bit of the manifest may be one that nobody reads, as in the case of a hexadecimal letter.
        if flipped != MANIFEST and found is not None and found.version == newest.version:
            return f"version {found.version} loads with a flipped bit in {flipped}"
    found = latest(root)
    if found is None:
        return f"nothing loads, and {said[-1:]} was committed" if said else ""
    if found.version < least:
        return f"version {found.version} loads, and {least} was committed"
    if not torch.equal(found.tensors("server-0.safetensors")["w"], _tensor(found.version)):
        return f"version {found.version} holds something else"
    clean_temporary(root)
    hidden = [name for name in leftovers(root) if name.startswith(".")]
    return f"{hidden} is left" if hidden else ""


def _write_until(root: Path, kind: str, chance: random.Random) -> tuple[list[int], int]:
    """Committed versions, and the signal that ended the writer (0: none)."""
    reader, writer = os.pipe()
    point = chance.randrange(CALLS_OF_ONE * 3)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            if kind in ("before", "after", "full"):
                _trap(point, kind)
            _write_for_ever(root, writer)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    said = b""
    if kind in ("anytime", "flipped"):
        # After its second commit, within the time of a few.
        while said.count(b"\n") < 2:
            said += os.read(reader, 1 << 16)
        time.sleep(chance.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
    while more := os.read(reader, 1 << 16):
        said += more
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    return [int(v) for v in said.split(b"\n")[:-1]], os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _write_for_ever(root: Path, announce: int) -> None:
    """Write checkpoints; a full disk costs the one that it hits, and a few more are written after it."""
    failures = 0
    for version in range(1, 10_000):
        try:
            checkpoint = CheckpointWriter(root, version)
        except CheckpointError:
            failures += 1
            continue
        try:
            checkpoint.write_part("server-0.safetensors", {"w": _tensor(version)})
            checkpoint.write_json("states.json", {"version": version})
            checkpoint.commit({"lead": {}})
            _REAL_WRITE(announce, f"{version}\n".encode())
            prune(root, KEPT)
        except CheckpointError:
            checkpoint.abort()
            failures += 1
        if failures and version > failures + 2:
            return


_REAL_WRITE = os.write


def _trap(point: int, kind: str) -> None:
    """The n-th call is the last one, or fails."""
    count = iter(range(1 << 30))

    def wrapped(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hit = next(count) == point
        if hit and kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if hit and kind == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if hit and kind == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    names = ("mkdir", "write", "fsync", "rename", "replace") if kind == "full" else CALLS
    for name in names:
        setattr(os, name, partial(wrapped, getattr(os, name)))


def _tensor(version: int) -> torch.Tensor:
    return torch.full((3000,), float(version))


def _flip(directory: Path, chance: random.Random) -> str:
    """A bit of one of its files; returns which."""
    file = chance.choice(sorted(directory.iterdir()))
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    return file.name


def disk_full(bench: Bench, seed: int) -> Outcome:
    """In a run: a server finds the disk full at one of its checkpoints."""
    chance = random.Random(f"full {seed}")
    number = chance.randint(1, 3)
    text = f"full server:{chance.randrange(2)}@{number}"
    ran = run(bench, f"full-{seed}", faults=text, mode="bsp", checkpoint_every=20, keep_checkpoints=100)
    outcome = counted(ran)
    if outcome.why:
        return outcome
    said = [m for m in ran.status.messages if m.startswith("a checkpoint failed: ") and "No space left" in m]
    names = ran.status.checkpoints
    if len(said) != 1:
        outcome.why = f"it said {ran.status.messages}"
    elif f"version-{20 * number:012d}" in names or f"version-{20 * (number + 1):012d}" not in names:
        outcome.why = f"its checkpoints are {names}"
    elif ran.status.restarts or not ran.is_bitwise(bench.undisturbed()):
        outcome.why = "it did harm"
    return outcome
