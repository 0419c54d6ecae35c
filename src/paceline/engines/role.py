"""What a started process does: send its output to its log, reach the controller, be its role."""

import ctypes
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.causes import cause_of
from paceline.comm import Address, Certificate, Kind, Secret
from paceline.comm.clocks import ask_clock
from paceline.comm.errors import error_body
from paceline.comm.lasting import LastingLink
from paceline.engines.forkserver import outlive_sigterm
from paceline.engines.streams import log_to, role_streams, script_streams
from paceline.exceptions import LinkError
from paceline.ps import ServerConfig, serve
from paceline.reading import ReaderConfig, run_reader
from paceline.worker import WorkerConfig, run_worker

__all__ = ["become"]

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def become(
    spec: dict[str, Any], program: Callable[[], None] | None = None, *, parent: int | None = None
) -> int:
    """Be the role that a RoleSpec (as JSON) describes, in this fresh process. Returns the exit code.

    Args:
        parent: process that forked this one: the role ends with it.
    """
    os.setsid()  # Ctrl-C in the terminal is for the controller; and so a role dies with its children
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        return 1  # it died before we asked to be told
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    outlive_sigterm()
    _keep_freed_memory()
    if spec["role"] == "server":
        os.umask(0o077)  # it writes nothing but files of the run; a worker's files are its script's
    name = f"{spec['role']}:{spec['rank']}"
    log = (script_streams if spec["role"] == "worker" else role_streams)(Path(spec["log"]))
    log_to(log, name)
    if spec["role"] == "reader":
        return run_reader(ReaderConfig(**spec["config"]), program)
    shown = spec.get("certificate")
    secret = Secret(bytes.fromhex(spec["secret"]), None if shown is None else Certificate.from_json(shown))
    try:
        address = Address.from_json(spec["controller"])
        controller = LastingLink(address, secret, patience_s=spec["patience_s"])
        if not controller.local:
            spec["config"]["clock_ns"] = ask_clock(controller)
        hello = {key: spec[key] for key in ("role", "rank", "incarnation")}
        controller.hello({**hello, "pid": os.getpid()})
        config: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in spec["config"].items()
        }
        if spec["role"] == "worker":
            return run_worker(WorkerConfig(**config), secret, controller, program, log=log)
    except LinkError as error:
        log.write(f"{name}: {error}\n")
        return 1
    try:
        serve(ServerConfig(**config), secret, controller)
    except Exception as error:
        text = traceback.format_exc()
        log.write(text)
        body = error_body(error, text, cause=cause_of(error).value)
        try:
            controller.say_last(Kind.ERROR, body)
        except (LinkError, OSError):
            log.write(f"{name}: the controller is gone\n")
        return 1
    finally:
        controller.close()
    return 0


def _keep_freed_memory() -> None:
    """Let glibc keep what is freed. A training step frees and takes the same buffers again and again, and
    getting 47 MB from the system anew costs as much as copying them (page faults)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # not glibc
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
