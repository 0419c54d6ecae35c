"""Plays a history on a real `paceline run`, and says what went wrong."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from paceline.api import export_run
from paceline.control import Requests, RunDirectory
from paceline.exceptions import PacelineError
from tests.histories.history import Event, History, is_normalised
from tests.histories.witness import problems

__all__ = ["Verdict", "play"]

SCRIPT = Path(__file__).with_name("script.py")
STUCK_S = 90.0
"""A run that makes no step for so long, and does not end, hangs. Its deadline is much shorter."""
STATUS_S = 2.0
"""How long the status may name a process that has been replaced."""
_MARK = "PACELINE_HISTORY"


@dataclass
class Verdict:
    """How a history ended."""

    history: History
    problems: list[str] = field(default_factory=list)
    """Empty: all is as it must be."""
    effective: int = 0
    """Number of events that did something to the run."""
    fired: list[str] = field(default_factory=list)
    """What happened, in order, with the time since the start and what came of it."""
    seconds: float = 0.0
    folder: Path | None = None

    def __str__(self) -> str:
        lines = [str(self.history), *(f"  + {line}" for line in self.fired)]
        lines += [f"  WRONG: {problem}" for problem in self.problems]
        if self.problems:
            lines.append(f"  replay: python -m tests.histories --seeds {self.history.seed} --keep")
        return "\n".join(lines)


class _Stuck(Exception):
    """The run neither goes on nor ends."""


class _InVain(str):
    """Why an event had no effect."""


class _Player:
    """One run, and the processes that it had so far."""

    def __init__(self, history: History, folder: Path) -> None:
        self.history = history
        self.directory = folder / "run"
        self.run = RunDirectory(self.directory)
        self.verdict = Verdict(history, folder=folder)
        self._folder = folder
        self._started = time.monotonic()
        self._mark = f"{os.getpid()}-{history.seed}-{time.monotonic_ns()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._first = True
        self._thaws: list[tuple[float, psutil.Process]] = []

    # --- the command ------------------------------------------------------------------------------

    def start(self) -> None:
        """`paceline run`, or `paceline resume` where there is something to resume."""
        words = [sys.executable, "-m", "paceline"]
        faults = ""
        if self._first or not self._has_checkpoint():
            if not self._first:  # it was interrupted before it had anything to go on from
                self._rename_away()
            h = self.history
            words += ["run", "--run-dir", str(self.directory), *h.options, str(SCRIPT), str(self.directory)]
            words += [str(h.samples), str(h.batch), str(h.epochs), str(h.step_ms)]
            faults = h.faults if self._first else ""
            self._first = False
        else:
            words += ["resume", str(self.directory)]
        environment = {
            **os.environ,
            "PACELINE_RUNS": str(self._folder / "runs"),
            "PACELINE_FAULTS": faults,
            _MARK: self._mark,
        }
        with (self._folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                words, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def _has_checkpoint(self) -> bool:
        return any(self.directory.glob("checkpoints/version-*"))

    def _rename_away(self) -> None:
        self.directory.rename(self._folder / f"run-before-{time.monotonic_ns()}")

    @property
    def over(self) -> bool:
        """Whether neither the command nor a controller that took over is there any more."""
        assert self._process is not None
        return self._process.poll() is not None and not self.run.lock.held() and not self._processes()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Raises _Stuck when nothing moves for long."""
        steps, since = self.steps(), time.monotonic()
        while not done():
            self._thaw()
            if (now := self.steps()) != steps:
                steps, since = now, time.monotonic()
            elif time.monotonic() - since > STUCK_S:
                raise _Stuck(f"no step for {STUCK_S:g} s, and it has not ended; state {self.run.state()}")
            time.sleep(0.01)

    def steps(self) -> int:
        """Steps of all workers, by their own records."""
        return sum(
            len(path.read_bytes().splitlines())
            for path in self.directory.glob("steps-*.csv")
            if path.exists()
        )

    def let_go(self) -> None:
        """Let the workers step, once the status knows every process: an event needs to find its target."""

        def known() -> bool:
            status = self._status()
            roles = [*status.get("workers", {}).values(), *status.get("servers", {}).values()]
            return bool(roles) and all(role.get("pid") for role in roles)

        self.wait_until(lambda: known() or self.over)
        (self._folder / "go").touch()

    # --- events -----------------------------------------------------------------------------------

    def happen(self, event: Event) -> None:
        """Let it happen, once enough steps are made; or nothing, if the run is over before."""
        target = self.steps() + event.after
        self.wait_until(lambda: self.steps() >= target or self.over)
        if self.over:
            self._say(event, "not any more: the run is over")
            return
        outcome = getattr(self, f"_{event.kind}")(event)
        self._say(event, outcome)
        self.verdict.effective += not isinstance(outcome, _InVain)

    def _say(self, event: Event, outcome: str) -> None:
        at = time.monotonic() - self._started
        self.verdict.fired.append(f"{at:.1f} s, {self.steps()} steps: {event.kind} {event.target}: {outcome}")

    def _kill(self, event: Event) -> str:
        pid = self._pid_of(event.target)
        return self._signal(pid, signal.SIGKILL)

    def _stop(self, event: Event) -> str:
        pid = self._pid_of(event.target)
        if pid is None:
            return _InVain("there is none")
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            process.suspend()
            self._thaws.append((time.monotonic() + event.seconds, process))
            return f"process {pid}"
        return _InVain("it was gone")

    def _thaw(self, *, all_of_them: bool = False) -> None:
        for until, process in [*self._thaws]:
            if all_of_them or time.monotonic() > until:
                self._thaws.remove((until, process))
                with contextlib.suppress(psutil.Error):
                    process.resume()

    def _scale(self, event: Event) -> str:
        name, _, size = event.target.partition("=")
        return self._ask({"kind": "scale", "workers": None, "servers": None, name: int(size)})

    def _switch(self, event: Event) -> str:
        return self._ask({"kind": "switch", "mode": event.target})

    def _ask(self, body: dict[str, Any]) -> str:
        until = time.monotonic() + 20

        def alive() -> bool:
            self._thaw()
            return time.monotonic() < until and not self.over

        try:
            answer = Requests(self.directory).ask(body, alive=alive, within_s=30)
        except PacelineError as error:
            return _InVain(f"{error}")
        return _InVain(str(answer["refused"])) if answer.get("refused") else str(answer)

    def _interrupt(self, event: Event) -> str:
        """Ctrl-C, and `paceline resume`."""
        self._thaw(all_of_them=True)
        outcome = self._signal(self._pid_of("controller"), signal.SIGINT)
        self.wait_until(lambda: self.over)
        if self.run.state() == "succeeded":
            return _InVain(f"{outcome}; it had just ended")
        self.start()
        return f"{outcome}; state {self.run.state()}, resumed"

    def _crash(self, event: Event) -> str:
        """The whole machine goes down, and the run is resumed."""
        for _ in range(100):  # a parent may be about to start another child
            processes = self._processes()
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(processes, timeout=5)
            if not processes:
                break
        assert self._process is not None
        self._process.wait(timeout=30)
        self._thaws.clear()
        self.start()
        return "resumed"

    def _signal(self, pid: int | None, number: int) -> str:
        if pid is None:
            return _InVain("there is none")
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return _InVain("it was gone")
        return f"process {pid}"

    def _pid_of(self, role: str) -> int | None:
        if role == "controller":
            return self.run.controller_pid()
        until = time.monotonic() + STATUS_S
        while time.monotonic() < until:
            status = self._status()
            name = _lead(status) if role == "lead" else role
            kind, _, rank = name.partition(":")
            pid: int | None = status.get(f"{kind}s", {}).get(rank, {}).get("pid")
            if pid in {process.pid for process in self._processes()}:
                return pid
            self._thaw()
            time.sleep(0.02)
        return None

    def _status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, json.JSONDecodeError):
            return self.run.read_status()
        return {}

    def _processes(self) -> list[psutil.Process]:
        """All that this history started, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    # --- the end ----------------------------------------------------------------------------------

    def judge(self) -> None:
        """What the run left: a state, a model, and nothing else."""
        wrong = self.verdict.problems
        if not self.verdict.effective:
            wrong.append("no event took effect: the history tried nothing (its run must last longer)")
        state = self.run.state()
        if state != "succeeded":
            error = self._status().get("error") or "no error is given"
            wrong.append(f"the run ended as {state}: {error}"[:2000])
            return
        target = self._folder / "model.safetensors"
        try:
            export_run(self.run, target)
        except PacelineError as error:
            wrong.append(f"the model cannot be exported: {error}")
            return
        h = self.history
        wrong += problems(
            load_file(target),
            samples=h.samples,
            epochs=h.epochs,
            normalised=is_normalised(h.settings["mode"]),
            lossy=h.settings["mode"] == "hogwild",
        )
        for left in self.directory.glob("checkpoints/.*"):
            wrong.append(f"{left.name} was left in the run's checkpoints")

    def end(self) -> None:
        """Leave nothing behind."""
        self._thaw(all_of_them=True)
        left = self._processes()
        if left and not self.verdict.problems:
            self.verdict.problems.append(f"{len(left)} processes were left behind")
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=10)
        if self._process is not None:
            self._process.wait(timeout=10)
        self.verdict.seconds = time.monotonic() - self._started


def _lead(status: dict[str, Any]) -> str:
    """The server that leads, by what the run said last."""
    led = re.findall(r"led by (server:\d+)", "\n".join(status.get("messages", [])))
    return str(led[-1]) if led else "server:0"


def play(history: History, folder: Path) -> Verdict:
    """Play a history in a folder of its own.

    The verdict holds what went wrong; nothing is raised for that.
    """
    player = _Player(history, folder)
    try:
        player.start()
        player.let_go()
        for event in history.events:
            player.happen(event)
        player.wait_until(lambda: player.over)
        player.judge()
    except _Stuck as stuck:
        player.verdict.problems.append(str(stuck))
    finally:
        player.end()
    return player.verdict
