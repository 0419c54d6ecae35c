"""Marks in the order of a device's work, which tell when it came to them: CUDA events with times."""

from collections.abc import Callable
from typing import Self

import torch

from paceline.comm.device import is_stand_in
from paceline.comm.loading import load
from paceline.observe.record.device_lane import TimeMark

__all__ = ["CudaTimeMark", "time_marks_of"]


class CudaTimeMark:
    """See TimeMark. A timing event, on whatever stream the calling thread uses at the time."""

    __slots__ = ("_event", "_where")

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._event = torch.cuda.Event(enable_timing=True)

    def record(self) -> bool:
        """See TimeMark. Not in a CUDA graph or a compiled function, whose part it would be."""
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return False
        self._event.record(torch.cuda.current_stream(self._where))
        return True

    def passed(self) -> bool:
        """See TimeMark."""
        # A query would spoil a graph that is being captured.
        return not torch.cuda.is_current_stream_capturing() and bool(self._event.query())

    def ms_since(self, earlier: Self) -> float:
        """See TimeMark."""
        return float(earlier._event.elapsed_time(self._event))


def time_marks_of(where: torch.device, asked: str | None = None) -> Callable[[], TimeMark] | None:
    """Makes marks on the device where a tensor is; None: the CPU does the work itself.

    Args:
        asked: the job's device; `module:function` names one that takes the place of the CPU, for tests.
    """
    if where.type == "cuda":
        return lambda: CudaTimeMark(where)
    if asked is not None and is_stand_in(asked):
        made: Callable[[], TimeMark] | None = getattr(load(asked)(), "time_mark", None)
        return made
    return None
