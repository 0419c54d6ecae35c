"""Asks a run that is going on for something: another mode, more or fewer roles, an end."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from paceline.control.requests import Requests
from paceline.control.run_record import checkpoint_names
from paceline.control.run_requests import (
    Refused,
    RunRequest,
    Scaled,
    ScaleRequest,
    Stopping,
    StopRequest,
    Switched,
    SwitchRequest,
    read_answer,
    request_body,
)
from paceline.control.rundir import RunDirectory
from paceline.core.json_types import JsonObject
from paceline.core.modes import parse_mode
from paceline.exceptions import DeadlineError, LinkError, UsageError
from paceline.observe.record.run_files import unix_time

T = TypeVar("T")

__all__ = ["RunEnd", "Scaled", "Switched", "run_end", "scale_run", "stop_run", "switch_run", "waiting_for"]

_ANSWER_S = 60.0
_POLL_S = 0.2
_SILENT_S = 10.0
"""A controller that has not written its status for this long hangs: it writes it every second."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    state: str
    version: int
    controller: int | None
    """Process id of its last controller."""
    error: str
    messages: tuple[str, ...]
    checkpoint: str | None
    """Name of its last checkpoint; None: it has none to go on from."""


def switch_run(run: RunDirectory, mode: str) -> Switched:
    """Switch a run that is going on to another mode, without a restart.

    Raises:
        UsageError: it is no mode, the run does not go on, or it cannot go on in this mode.
        LinkError, DeadlineError: the run did not answer.
    """
    wanted = parse_mode(mode)
    if not run.alive():
        raise UsageError(
            f"run {run.id} is {run.state()}, so there is nothing to switch; "
            f"`paceline resume {run.id} --mode {wanted}` goes on from its last checkpoint in {wanted}"
        )
    answer = _ask(run, SwitchRequest(str(wanted)), Switched)
    if isinstance(answer, Refused):
        raise UsageError(f"run {run.id} was not switched and goes on as it was: {answer.refused}")
    return answer


def scale_run(run: RunDirectory, *, workers: int | None = None, servers: int | None = None) -> Scaled:
    """Let workers or servers join or leave a run that is going on. None: as many as there are.

    Raises:
        UsageError: the run does not go on, or cannot have that many.
        LinkError, DeadlineError: the run did not answer.
    """
    sizes = {"workers": workers, "servers": servers}
    wanted = " ".join(f"--{name} {size}" for name, size in sizes.items() if size is not None)
    if not run.alive():
        raise UsageError(
            f"run {run.id} is {run.state()}, so there is nothing to scale; `paceline resume {run.id} "
            f"{wanted}` goes on from its last checkpoint so"
        )
    answer = _ask(run, ScaleRequest(workers, servers), Scaled)
    if isinstance(answer, Refused):
        raise UsageError(f"run {run.id} was not scaled and goes on as it was: {answer.refused}")
    return answer


def stop_run(run: RunDirectory, *, now: bool = False, tell: Callable[[str], None]) -> None:
    """Stop a run that is going on, and wait until every process of it has ended.

    Args:
        now: do not write a checkpoint first.
        tell: called with what the run is at, whenever that changes.

    Raises:
        DeadlineError: the run's controller did not answer.
        KeyboardInterrupt: the waiting was interrupted; the run stops all the same.
    """
    try:
        _ask(run, StopRequest(now), Stopping)
        said = ""
        # The state is written first; then processes end, and the report is written.
        while run.alive() or run.lock.held():
            text = waiting_for(run.read_status(), time.time())
            if text != said:
                tell(text)
                said = text
            time.sleep(_POLL_S)
    except LinkError:
        pass  # it ended by itself, or its controller died, before it could answer
    except DeadlineError as error:
        raise DeadlineError(
            f"run {run.id} was asked to stop, and {error}. It may hang: `kill -9 {run.controller_pid()}` "
            "ends its controller; another one takes over, and can be asked again"
        ) from None


def run_end(run: RunDirectory) -> RunEnd:
    """How a run ended. Of a run that is going on: where it stands."""
    look = run.look()
    there = checkpoint_names(run)
    return RunEnd(
        state=look.state,
        version=look.status.version,
        controller=run.controller_pid(),
        error=look.status.error or "",
        messages=tuple(look.status.messages),
        checkpoint=there[-1] if there else None,
    )


def waiting_for(status: JsonObject, now: float) -> str:
    """What a run that was asked to stop is at, in words.

    Args:
        status: its status.json.
        now: Unix time.
    """
    silent = now - (unix_time(status.get("updated")) or now)
    if silent > _SILENT_S:
        controller = status.get("controller")
        pid = controller.get("pid") if isinstance(controller, dict) else None
        return (
            f"its controller (process {pid}) has written nothing for more than {_SILENT_S:g} s: it is being "
            "replaced, or hangs"
        )
    state = status.get("state")
    if state == "finishing":
        return "its scripts have ended already; its last checkpoint is written"
    if state != "stopping":
        return "its processes end, and its report is written"
    match status.get("saving"):
        case [_, int(total)]:
            from paceline.observe.analyse import wording

            return f"a checkpoint of {wording.size(total)} is written"
    return "workers finish the step that they are at, then a checkpoint is written"


def _ask(run: RunDirectory, request: RunRequest, answer: type[T]) -> T | Refused:
    body = Requests(run.path).ask(request_body(request), alive=run.alive, within_s=_ANSWER_S)
    try:
        return read_answer(answer, body)
    except ValueError as error:
        raise LinkError(f"the run answered what cannot be understood: {error}") from error
