"""Studies: many runs of one script, over a grid of settings and several seeds, compared on one page."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from paceline.control import RunDirectory
from paceline.control.lock import RunLock
from paceline.control.removing import remove
from paceline.control.run_owner import check_trust, make_parents
from paceline.exceptions import PacelineError, UsageError
from paceline.observe import ENDED
from paceline.observe.analyse import wording
from paceline.observe.analyse.study_data import StudyData
from paceline.observe.show.study_page import write_study_page
from paceline.observe.show.visible import visible
from paceline.plan import Job, make_plan
from paceline.plan.grid import BUDGETS, Axis, StudyPlan, Trial, left, startable
from paceline.storage.atomic import write_text_atomically
from paceline.storage.plain_files import open_plain, read_bytes

__all__ = ["load_study", "print_line", "resume_study", "run_study", "study", "study_path"]

POLL_S = 0.1
_TAIL = 5
"""Lines of a refused run's output that are repeated."""
_MOST_OUTPUT = 1 << 20
_NOT_BY_OTHERS = 0o644
"""Job files say what to run: whatever the umask, other users cannot write them."""


def study(
    script: str,
    *,
    grid: Mapping[str, Sequence[Any] | str],
    args: Sequence[str] = (),
    seeds: int | Sequence[int] = 1,
    budget: Mapping[str, float] | None = None,
    directory: str | Path | None = None,
    at_once: int | Literal["fit"] = 1,
    seed_argument: str | None = None,
    retry_failed: bool = False,
    quiet: bool = False,
    trust: bool = False,
    **settings: Any,
) -> StudyData:
    """Run a script over a grid of settings, each combination with several seeds, and compare the runs.

    What was interrupted goes on when it is called again in the same way: runs that have ended are not
    repeated.

    Args:
        grid: settings of `paceline.Job` and their values, `{"mode": ["bsp", "asp"], "workers": [2, 4]}`; or,
            as `arg:lr`, of the script's argument `--lr`.
        args: the script's own arguments, the same for all.
        seeds: how many, or which.
        budget: what ends each run early: `samples`, `updates` or `seconds`.
        directory: of the study. None: `study-…` in the present one, named by script and settings.
        at_once: how many runs at the same time; `fit`: as many as have a core for each worker.
        seed_argument: the script's argument that gets the seed, too.
        retry_failed: run those again that failed.
        trust: the directory, if it exists, may be another user's.
        settings: other fields of `paceline.Job`, the same for all runs.

    Returns:
        The study's data frames, `.runs` and `.values`; the page is at `.page_path`.

    Raises:
        UsageError, PlanError: refused before anything started.
        KeyboardInterrupt: it was interrupted; the runs that were going on have ended in order.
    """
    limits = {}
    for name, amount in (budget or {}).items():
        if name not in BUDGETS:
            raise UsageError(f"budget {name}: give one of {', '.join(BUDGETS)}")
        limits[BUDGETS[name]] = float(amount) if BUDGETS[name] == "max_time_s" else int(amount)
    first = settings.get("seed", Job.seed)
    chosen = range(first, first + seeds) if isinstance(seeds, int) else seeds
    plan = StudyPlan(
        job=Job.from_json({**settings, **limits, "script": script, "args": list(args)}),
        axes=tuple(
            Axis.parse(f"{key}={values}") if isinstance(values, str) else Axis(key, tuple(map(str, values)))
            for key, values in grid.items()
        ),
        seeds=tuple(chosen),
        seed_argument=seed_argument,
        directory=os.getcwd(),
    )
    tell = (lambda _: None) if quiet else print_line
    number = None if at_once == "fit" else at_once
    return run_study(plan, directory, at_once=number, again=retry_failed, tell=tell, trust=trust)


def load_study(directory: str | Path, *, trust: bool = False) -> StudyData:
    """A study's runs as data frames: `.runs`, one row each, and `.values`, every logged value.

    Args:
        trust: it may be another user's.

    Raises:
        UsageError: it is not a study's directory, or another user's.
    """
    path = Path(directory).absolute()
    if not trust:
        check_trust(path, "the study")
    return StudyData(path)


def resume_study(
    directory: str | Path,
    *,
    at_once: int | None = 1,
    again: bool = False,
    tell: Callable[[str], None] | None = None,
    trust: bool = False,
) -> StudyData:
    """Go on with a study that was interrupted. See `study`."""
    path = Path(directory).absolute()
    if not trust:
        check_trust(path, "the study")
    plan = read_plan(path)
    return run_study(plan, path, at_once=at_once, again=again, tell=tell or print_line, trust=trust)


def read_plan(path: Path) -> StudyPlan:
    """The plan in a study's directory."""
    try:
        return StudyPlan.from_json(StudyData(path).plan)
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path / 'study.json'} cannot be understood: {error}") from error


def study_path(plan: StudyPlan, directory: str | Path | None = None) -> Path:
    """Where a study is: the same for the same study, unless `directory` says where."""
    name = f"study-{plan.job.name}-{plan.fingerprint}"
    return Path(directory).absolute() if directory is not None else Path(plan.directory) / name


def run_study(
    plan: StudyPlan,
    directory: str | Path | None,
    *,
    at_once: int | None,
    again: bool,
    tell: Callable[[str], None],
    trust: bool = False,
) -> StudyData:
    """Run what is left of a study, and write its page."""
    if at_once is not None and at_once < 1:
        raise UsageError(f"at_once={at_once}: give at least 1, or fit")
    path = study_path(plan, directory)
    if path.exists() and not trust:
        check_trust(path, "the study")
    jobs = {trial.name: plan.job_of(trial, str(path / "runs" / trial.name)) for trial in plan.trials}
    with _working_in(plan.directory):
        for trial in plan.trials:
            try:
                make_plan(jobs[trial.name])
            except PacelineError as error:
                raise type(error)(f"{trial.label}: {error}") from None
    _write_plan(plan, path)
    lock = RunLock(path)
    if not lock.take():
        raise UsageError(f"process {lock.holder()} runs the study in {path} already")
    try:
        runner = _Runner(plan, path, jobs, at_once=at_once, again=again, tell=tell)
        with _stopping_in_order(runner.stop):
            runner.run()
    finally:
        lock.give_back()
    found = StudyData(path)
    write_study_page(found)
    if runner.stopped:
        raise KeyboardInterrupt
    return found


class _Runner:
    """Runs the trials that are left, each by a `paceline run` of its own."""

    def __init__(
        self,
        plan: StudyPlan,
        path: Path,
        jobs: Mapping[str, Job],
        *,
        at_once: int | None,
        again: bool,
        tell: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._path = path
        self._jobs = jobs
        self._at_once = at_once
        self._tell = tell
        self._trials = {trial.name: trial for trial in plan.trials}
        self._numbers = {name: number for number, name in enumerate(self._trials, 1)}
        states = {name: self._state(name) for name in self._trials}
        self._waiting = left(states, again=again)
        self._running: dict[str, subprocess.Popen[bytes] | None] = {}
        """None: a process runs it that an earlier process of the study started."""
        self.stopped = False
        done = len(states) - len(self._waiting)
        before = f"; {done} of them have ended already" if done else ""
        tell(f"{wording.plural(len(states), 'run')} in {path}{before}")

    def run(self) -> None:
        """To the end, or until `stop`."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        try:
            while self._running or (self._waiting and not self.stopped):
                self._look()
                if not self.stopped:
                    number = startable(
                        [self._jobs[name].workers for name in self._waiting],
                        [self._jobs[name].workers for name in self._running],
                        at_once=self._at_once,
                        cores=cores,
                    )
                    for name in self._waiting[:number]:
                        self._start(name)
                    del self._waiting[:number]
                time.sleep(POLL_S)
        except BaseException:
            self.stop(signal.SIGTERM)
            for process in self._running.values():
                if process is not None:
                    process.wait()
            raise

    def stop(self, number: int) -> None:
        """End what runs, in order; the second time at once."""
        what = ", ".join(self._trials[name].label for name in self._running)
        if what and not self.stopped:
            self._tell(f"stopping {what} …")
        self.stopped = True
        for process in self._running.values():
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGINT)

    def _start(self, name: str) -> None:
        run = RunDirectory(self._path / "runs" / name)
        if self._state(name) not in ("new", *ENDED, "crashed"):
            self._say(name, f"goes on, started by process {run.controller_pid()}")
            self._running[name] = None
            return
        if (run.path / "run.json").exists():
            remove(run)
        self._say(name, "started")
        command = [sys.executable, "-m", "paceline", "run", "--quiet", str(self._job_file(name))]
        said = open_plain(self._path / "output" / f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(said, "wb") as output:
            self._running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._plan.directory,
                start_new_session=True,  # Ctrl-C is for the study, which passes it on once
            )

    def _job_file(self, name: str) -> Path:
        """All settings that are not as they would be anyway; absolute, since it may be run from anywhere."""
        job, usual = self._jobs[name].to_json(), Job().to_json()
        content = {key: value for key, value in job.items() if value != usual[key]}
        if not self._jobs[name].module:
            content["script"] = str(Path(self._plan.directory) / content["script"])
        path = self._path / "trials" / f"{name}.yaml"
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_text_atomically(path, text, mode=_NOT_BY_OTHERS)
        return path

    def _look(self) -> None:
        """See which have ended."""
        for name, process in list(self._running.items()):
            if process is not None and process.poll() is None:
                continue
            if process is None and RunDirectory(self._path / "runs" / name).alive() and not self.stopped:
                continue
            del self._running[name]
            self._say(name, self._outcome(name))

    def _outcome(self, name: str) -> str:
        state = self._state(name)
        if state == "new":
            said = b""
            with contextlib.suppress(OSError):
                said = read_bytes(self._path / "output" / f"{name}.txt", most=_MOST_OUTPUT)
            return "was refused: " + " ".join(said.decode(errors="replace").splitlines()[-_TAIL:])
        status = RunDirectory(self._path / "runs" / name).known_status()
        if state == "failed":
            return f"failed: {(status.error or '').splitlines()[0] if status.error else 'nobody said why'}"
        metrics = "".join(
            f", {key} {wording.metric(value)}" for key, value in list(status.metrics.items())[:3]
        )
        return f"{state} after {wording.duration(status.elapsed_s)}{metrics}"

    def _state(self, name: str) -> str:
        run = RunDirectory(self._path / "runs" / name)
        return run.state() if (run.path / "run.json").exists() else "new"

    def _say(self, name: str, text: str) -> None:
        trial: Trial = self._trials[name]
        place = f"{self._numbers[name]:{len(str(len(self._trials)))}}/{len(self._trials)}"
        self._tell(f"{place}  {trial.label}, seed {trial.seed}: {text}")


def _write_plan(plan: StudyPlan, path: Path) -> None:
    """Write study.json, unless it says the same already. UsageError if it says something else."""
    file = path / "study.json"
    if file.exists():
        if read_plan(path) != plan:
            raise UsageError(
                f"{path} holds another study. `paceline study --resume {path}` goes on with it; name another "
                "directory for this one"
            )
    elif path.exists() and any(path.iterdir()):
        raise UsageError(f"{path} is not empty, and no study's directory: name another one")
    try:
        make_parents(path)
        for part in (path, path / "trials", path / "runs", path / "output"):
            part.mkdir(mode=0o755, exist_ok=True)
        if not file.exists():
            write_text_atomically(file, json.dumps(plan.to_json(), indent=2) + "\n", mode=_NOT_BY_OTHERS)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _working_in(directory: str) -> Iterator[None]:
    before = os.getcwd()
    try:
        os.chdir(directory)
    except OSError as error:
        raise UsageError(
            f"the study was begun in {directory}, which cannot be entered now: {error.strerror or error}"
        ) from error
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _stopping_in_order(stop: Callable[[int], None]) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP call `stop` meanwhile; elsewhere than in the main thread they cannot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda which, _: stop(which)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_line(text: str) -> None:
    """Say how a study goes."""
    sys.stdout.write(f"{visible(text)}\n")
    sys.stdout.flush()
