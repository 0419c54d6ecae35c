"""run_reader: the reader of a run, as a process that the run's engine has started."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from paceline.exceptions import PacelineError
from paceline.observe.record.values import EVALUATION, ValueWriter
from paceline.reading.reader_config import ReaderConfig
from paceline.reading.reader_session import ReaderSession
from paceline.reading.snapshots import RunSnapshots, Snapshot
from paceline.worker.program_runner import begin_program, end_program, exit_code, run_program
from paceline.worker.session import enter_session

__all__ = ["run_reader"]

_BEHIND = 5
"""The niceness of this process: on a busy host, training goes first."""


def run_reader(config: ReaderConfig, program: Callable[[], None] | None = None) -> int:
    """Run the script up to prepare(), and evaluate there until the run is over. Returns the exit code.

    What the script writes goes to the log of this process, and so does its error.

    Args:
        program: runs in the place of a script.
    """
    with contextlib.suppress(OSError):
        os.nice(_BEHIND)
    torch.set_num_threads(config.threads)
    values = ValueWriter(
        Path(config.run) / "raw", EVALUATION, config.attempt, rows=config.value_rows, clock_ns=config.clock_ns
    )

    def measured(snapshot: Snapshot, found: Mapping[str, float], seconds: float) -> None:
        values.at_version(snapshot.version)
        values.add(found, snapshot.version, snapshot.samples, -1)

    source = RunSnapshots(Path(config.run), alive=lambda: True, log=_say)  # it ends with the run's engine
    enter_session(ReaderSession(source, workers=config.workers, every=config.every, measured=measured))
    begin_program()
    try:
        if program is not None:
            program()
        else:
            assert config.script is not None and config.search is not None
            run_program(config.script, config.args, search=config.search, module=config.module)
        end_program()
    except SystemExit as error:
        end_program()
        return exit_code(error)
    except PacelineError as error:
        _say(str(error))
        return 1
    except BaseException:
        _say(traceback.format_exc())
        return 1
    finally:
        values.close()
    _say("the script ended without calling paceline.prepare(…): nothing is evaluated.")
    return 1


def _say(text: str) -> None:
    sys.stderr.write(f"reader:0: {text}\n")
