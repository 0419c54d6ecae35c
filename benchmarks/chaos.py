"""The fault matrix: what a fault costs, counted and timed, over seeded runs of real processes.

Rows are numbered as in the reliability page of the design. Each run has 4 workers and 2 servers; a role is
killed or stopped from outside at a moment that the seed chooses. `detected` is from the fault to the
controller's note of it, `blackout` from the fault to the next update of the parameters, both medians;
`duplicated`, `lost` (acknowledged updates) and `missing` (samples, of all epochs) are sums over all runs.

| row | fault | must be |
|---|---|---|
| 1 | a worker is killed in asp | detected within 1 s, nothing missing or lost |
| 2 | a worker is killed in bsp | on again within 2 s, nothing missing or lost |
| 3 | a worker is stopped, and woken after a while | nothing missing; it was not declared dead meanwhile |
| 5 | a server is killed | on again within 10 s, at most as many updates lost as a checkpoint is apart |
| 10 | a bit of a frame is flipped | refused; nothing missing |
| 11 | a worker pushes NaN | refused and replaced; the model is finite |
| 20 | everything is killed | resumed: at most as many updates lost as a checkpoint is apart |
"""

import argparse
import csv
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Options, Row, report
from paceline.api.jobs import latest_checkpoint
from paceline.comm.faults import FAULTS
from paceline.control import Controller, RunDirectory
from paceline.exceptions import RoleFailed
from paceline.observe import RunStatus
from paceline.observe.run_data import RunData
from paceline.plan import Job, make_plan
from paceline.testing import KeptEngine, faulty

SCRIPT = Path(__file__).parent / "scripts" / "chaos.py"
EPOCHS, BATCHES, STEP_MS = 4, 60, 10
EVERY = 20
"""Updates between two checkpoints."""


@dataclass
class Outcome:
    """What one run came to."""

    ok: bool
    detected_s: float | None = None
    blackout_s: float | None = None
    duplicated: int = 0
    lost: int = 0
    missing: int = 0


@dataclass(frozen=True)
class Fault:
    """A row of the matrix."""

    row: int
    name: str
    mode: str
    most_detected_s: float | None = None
    most_blackout_s: float | None = None
    most_lost: int = 0
    """In one run."""
    injected: str = ""
    victim: str = ""
    """`worker` or `server`: killed from outside."""
    stopped_s: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)


MATRIX = (
    Fault(1, "worker-killed-asp", "asp", most_detected_s=1.0, victim="worker"),
    Fault(2, "worker-killed-bsp", "bsp", most_blackout_s=2.0, victim="worker"),
    Fault(3, "worker-stopped", "asp", victim="worker", stopped_s=1.0),
    Fault(
        5,
        "server-killed",
        "bsp",
        most_blackout_s=10.0,
        most_lost=EVERY,
        victim="server",
        settings={"checkpoint_every": EVERY},
    ),
    Fault(10, "bit-flipped", "bsp", injected="flip worker:{worker}@{step}"),
    Fault(11, "nan", "bsp", injected="nan worker:{worker}@{step}-1000000"),
)


class Injector:
    """Kills or stops a role when the run has come so far, and remembers when."""

    def __init__(self, fault: Fault, chance: random.Random) -> None:
        self._fault = fault
        self._after = chance.randint(5, 40)
        self._rank = chance.randrange(4 if fault.victim == "worker" else 2)
        self.at: float | None = None
        self._wake_at = 0.0
        self._pid = 0

    def __call__(self, engine: KeptEngine, status: RunStatus) -> None:
        if self._fault.victim and self.at is None and status.version >= self._after:
            pid = engine.pids().get(f"{self._fault.victim}:{self._rank}")
            if pid is not None:
                self.at, self._pid = time.time(), pid
                self._wake_at = self.at + self._fault.stopped_s
                os.kill(pid, signal.SIGSTOP if self._fault.stopped_s else signal.SIGKILL)
        elif self._fault.stopped_s and self._pid and time.time() >= self._wake_at:
            os.kill(self._pid, signal.SIGCONT)
            self._pid = 0


def one_run(engine: KeptEngine, fault: Fault, seed: int, *, folder: Path) -> Outcome:
    """Run, with a fault, to the end."""
    chance = random.Random(f"{fault.name}/{seed}")
    inject = Injector(fault, chance)
    text = fault.injected.format(worker=chance.randrange(4), step=chance.randint(3, 20))
    settings = {"workers": 4, "servers": 2, "threads": 1, "mode": fault.mode, "deadline_s": 30.0}
    job = Job(
        script=str(SCRIPT),
        args=(str(EPOCHS), str(BATCHES), str(STEP_MS)),
        run_dir=str(folder / f"{fault.name}-{seed}"),
        **{**settings, **fault.settings},
    )
    with faulty(text):
        plan = make_plan(job)
        run = RunDirectory.create(job, plan=plan)
        controller = Controller(plan, engine, run, watch=lambda status, _: inject(engine, status))
        try:
            controller.run()
        except RoleFailed as error:
            print(f"  {fault.name} seed {seed}: {error}", file=sys.stderr)
            return Outcome(ok=False)
    return judged(fault, run.path, controller.status, inject.at)


def judged(fault: Fault, path: Path, status: RunStatus, at: float | None) -> Outcome:
    """Count, from what the run left behind."""
    data = RunData(path)
    accounts = [a for a in status.leases if a["applied"] or a["refused"]]
    missing = sum(abs(a["samples"] - a["applied"] - a["refused"]) for a in accounts)
    missing += 8 * BATCHES * abs(EPOCHS - len(accounts))
    with (path / "pushes.csv").open() as file:
        rows = list(csv.DictReader(file))
    ids = {(r["worker"], r["incarnation"], r["sequence"]) for r in rows}
    repeated = len(rows) - len(ids)
    if fault.row == 20:  # the workers of a resumed run count anew
        repeated = max(0, sum(int(r["samples"]) for r in rows) - EPOCHS * BATCHES * 8)
    outcome = Outcome(
        ok=status.state == "succeeded",
        duplicated=repeated,
        lost=status.lost_updates + status.lost,
        missing=missing,
    )
    if at is not None:
        notes = [e for e in data.events if e.get("kind") == "note"]
        times = [datetime.fromisoformat(e["at"]).timestamp() for e in notes]
        outcome.detected_s = min((t - at for t in times if t >= at - 0.01), default=None)
        spans = data.spans
        updates = spans[(spans.role == "server") & (spans.phase == "update")].start / 1e9
        outcome.blackout_s = float(min((t - at for t in updates if t > at), default=float("nan")))
    if fault.row == 11:
        outcome.ok = outcome.ok and status.restarts == 1 and status.refused >= 5
    if fault.row == 10:
        outcome.ok = outcome.ok and status.restarts == 1
    if fault.row == 3:
        outcome.ok = outcome.ok and status.restarts == 0
    return outcome


def kill_everything(seed: int, *, folder: Path) -> Outcome:
    """Row 20: a whole `paceline run`, killed, and resumed."""
    chance = random.Random(f"everything/{seed}")
    where = folder / f"everything-{seed}"
    command = [sys.executable, "-m", "paceline", "run", "--quiet", "--workers", "4", "--servers", "2"]
    command += ["--threads", "1", "--mode", "bsp", "--checkpoint-every", str(EVERY), "--run-dir", str(where)]
    environment = {**os.environ, "PACELINE_RUNS": str(folder)}
    arguments = [str(SCRIPT), str(EPOCHS), str(BATCHES), str(STEP_MS)]
    process = subprocess.Popen([*command, *arguments], env=environment)
    after, version = EVERY + chance.randint(1, 30), 0
    while version < after and process.poll() is None:
        try:
            version = json.loads((where / "status.json").read_text())["version"]
        except (OSError, ValueError):
            version = 0
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)  # it would start another fork server, which would replace it
    for role in psutil.Process(process.pid).children(recursive=True):
        role.kill()
    process.kill()
    process.wait()
    run = RunDirectory(where)
    lost = run.read_status()["version"] - latest_checkpoint(run).version
    resume = [sys.executable, "-m", "paceline", "resume", "--quiet", str(where)]
    done = subprocess.run(resume, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode:
        print(f"  everything seed {seed}: {done.stderr[-2000:]}", file=sys.stderr)
        return Outcome(ok=False)
    status = RunStatus.from_json(run.read_status())
    found = judged(Fault(20, "everything-killed", "bsp"), where, status, None)
    found.lost = max(0, lost)
    return found


def row_of(fault: Fault, outcomes: list[Outcome]) -> Row:
    """A line of the result: times against their limits, counts as a note."""
    kept = max((o.lost for o in outcomes), default=0) <= fault.most_lost
    sound = all(o.ok and not o.duplicated and not o.missing for o in outcomes) and kept
    detected = _median([o.detected_s for o in outcomes])
    blackout = _median([o.blackout_s for o in outcomes])
    measured, limit = (
        (detected, fault.most_detected_s) if fault.most_detected_s else (blackout, fault.most_blackout_s)
    )
    within = limit is None or (measured is not None and measured <= limit)
    sums = {name: sum(getattr(o, name) for o in outcomes) for name in ("duplicated", "lost", "missing")}
    note = f"{len(outcomes)} runs, {sum(o.ok for o in outcomes)} ended well"
    note += f", detected {_shown(detected)}, blackout {_shown(blackout)}, "
    note += ", ".join(f"{name} {number}" for name, number in sums.items())
    return Row(
        case=f"{fault.row}-{fault.name}/ours/limit",
        ours=measured,
        peer=limit,
        unit="s",
        better="lower",
        ratio=limit / measured if limit and measured else None,
        target=1.0 if limit else None,
        ok=sound and within,
        note=note,
    )


def _median(values: list[float | None]) -> float | None:
    found = [v for v in values if v is not None and v == v]
    return statistics.median(found) if found else None


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def main() -> None:
    """Run the matrix and report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="3 runs a row instead of 20")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with this in their name")
    args = parser.parse_args()
    runs = 3 if args.quick else 20
    os.environ.pop(FAULTS, None)
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        os.environ["PACELINE_RUNS"] = name
        engine = KeptEngine()
        try:
            for fault in MATRIX:
                if args.only in fault.name:
                    rows.append(_row(fault, runs, partial(one_run, engine, fault, folder=folder)))
        finally:
            engine.shut_down()
        if args.only in "everything-killed":
            everything = Fault(20, "everything-killed", "bsp", most_lost=EVERY + 10)
            rows.append(_row(everything, runs, partial(kill_everything, folder=folder)))
    options = Options(
        name="chaos", cases=(), quick=args.quick, json=args.json, only="*", repeats=runs, rounds=1
    )
    report(options, rows, {})


def _row(fault: Fault, runs: int, run: Callable[[int], Outcome]) -> Row:
    print(f"row {fault.row}, {fault.name}", file=sys.stderr, flush=True)
    return row_of(fault, [run(seed) for seed in range(runs)])


if __name__ == "__main__":
    main()
