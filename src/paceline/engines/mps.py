"""Mps: NVIDIA's Multi-Process Service, for as long as a fork server lives.

Without it processes use a GPU in turn; with it their work runs side by side. Its control process is a child
of the fork server, so it ends with the run, however that ends. A service that is there already is used as it
is.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from paceline.plan.host import mps_program, mps_runs

__all__ = ["Mps"]

_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_START_S, _STOP_S = 5.0, 1.5
_PR_SET_PDEATHSIG = 1


class Mps:
    """A running service. `start` makes one."""

    def __init__(self, program: str, directory: str, process: subprocess.Popen[bytes]) -> None:
        self._program = program
        self._directory = directory
        self._process = process

    @classmethod
    def start(cls) -> "Mps | None":
        """Start the service, and let processes that are forked from now on use it. None: there is none."""
        program = mps_program()
        if program is None or mps_runs():
            return None
        directory = tempfile.mkdtemp(prefix="paceline-mps-")
        with open(Path(directory) / "service.log", "wb") as log:
            process = subprocess.Popen(
                [program, "-f"],
                env={**os.environ, _PIPES: directory, _LOGS: directory},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,
            )
        service = cls(program, directory, process)
        deadline = time.monotonic() + _START_S
        while not (Path(directory) / "control").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                service.stop()
                return None
            time.sleep(0.01)
        os.environ[_PIPES] = os.environ[_LOGS] = directory
        return service

    def stop(self) -> None:
        """End the service. Processes that use it must have ended."""
        for name in (_PIPES, _LOGS):
            os.environ.pop(name, None)
        if self._process.poll() is None:
            environment = {**os.environ, _PIPES: self._directory}
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    [self._program],
                    env=environment,
                    input=b"quit\n",
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=_STOP_S,
                )
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.setsid()  # Ctrl-C in the terminal is for the controller
