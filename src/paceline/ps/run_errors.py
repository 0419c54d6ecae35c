"""EndsRun: errors in one worker's message that concern the whole run; blaming: errors that do not."""

import contextlib
import logging
from collections.abc import Callable, Iterator

from paceline.core.out_of_step import OutOfStep
from paceline.exceptions import CheckpointError, FrameError, PacelineError, PlanError

__all__ = ["EndsRun", "blaming"]

log = logging.getLogger("paceline.server")


@contextlib.contextmanager
def blaming(peer: str) -> Iterator[None]:
    """Context manager around what a worker offers before the run has a model. Nothing trains on it yet, so an
    offer that makes the server stumble ends the connection of that worker only."""
    try:
        yield
    except PacelineError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        log.exception("%s offered what this server cannot use", peer)
        raise FrameError(f"{peer} offered what a server cannot use: {error!r:.200}") from error


class EndsRun:
    """Context manager that ends the run on errors that concern the whole run: workers out of step, an
    impossible plan, an unusable checkpoint. All but the first also go to the worker whose message it was.

    Args:
        fail: tells the controller that the run cannot go on.
    """

    def __init__(self, fail: Callable[[PacelineError], None]) -> None:
        self._fail = fail

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, OutOfStep | PlanError | CheckpointError):
            self._fail(error)
        return isinstance(error, OutOfStep)
