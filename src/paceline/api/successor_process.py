"""Goes on with a run whose controller was killed: what `paceline run` does, without a terminal."""

import logging
import os
import socket
import sys
from pathlib import Path

from paceline.api.jobs import write_last
from paceline.comm import Listener
from paceline.control import Controller, RunDirectory, taken_over
from paceline.engines import Handover, LocalEngine
from paceline.engines.streams import log_to
from paceline.exceptions import RoleFailed
from paceline.observe import RunStatus
from paceline.observe.record.output import OutputPiece
from paceline.plan import Plan

__all__ = ["take_over"]

log = logging.getLogger("paceline.controller")


def take_over(handover: Handover) -> int:
    """Be the run's controller from now on, to its end. Returns the exit code of the process."""
    log_to(sys.stderr, "controller")
    succession = handover.succession
    run = RunDirectory(Path(succession.run))
    run.lock.inherit(succession.lock)
    record = run.record()
    assert record["plan"] is not None  # a run has one before it has a controller
    plan = Plan.from_json(record["plan"])
    said = 0

    def watch(status: RunStatus, pieces: list[OutputPiece]) -> None:
        nonlocal said
        for message in status.messages[said:]:
            log.info("%s", message)
        said = len(status.messages)

    def finish(status: RunStatus) -> None:
        write_last(run, status, plan.job, record.get("command") or ())

    log.info("process %s takes over run %s", os.getpid(), run.id)
    listener = Listener.inherited(socket.socket(fileno=succession.listener))
    controller = Controller(
        plan,
        LocalEngine(handover=handover),
        run,
        watch=watch,
        finish=finish,
        heir=succession.call,
        beginning=taken_over(plan, run, handover, listener),
    )
    said = len(controller.status.messages)
    try:
        controller.run()
    except RoleFailed as error:
        log.error("%s", error)
        return 1
    log.info("the run %s", controller.status.state)
    return 0
