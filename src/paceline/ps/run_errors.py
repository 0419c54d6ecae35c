"""EndsRun: errors in one worker's message that concern the whole run."""

from collections.abc import Callable

from paceline.core.out_of_step import OutOfStep
from paceline.exceptions import CheckpointError, PacelineError, PlanError

__all__ = ["EndsRun"]


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
