"""How a worker does, told to the controller now and then."""

import contextlib
import time
from typing import Any

from paceline.comm import Connection, Kind
from paceline.exceptions import LinkError
from paceline.observe.phases import PHASES
from paceline.observe.spans import Recorder

__all__ = ["Reporter"]

LOG_S = 0.1
STATS_S = 0.5


class Reporter:
    """A worker's side of the progress display. A controller that is gone misses some of it."""

    def __init__(self, controller: Connection, spans: Recorder) -> None:
        self._controller = controller
        self._spans = spans
        self._started = self._reported = time.monotonic()
        self._metrics: dict[str, float] = {}
        self._logged = 0.0

    def log(self, metrics: dict[str, float], clock: int) -> None:
        """A fast loop logs more often than anybody reads: the latest are sent now and then."""
        self._metrics.update({str(k): float(v) for k, v in metrics.items()})
        if time.monotonic() - self._logged > LOG_S:
            self._send_metrics(clock)

    @property
    def due(self) -> bool:
        """Whether the last report is some time ago."""
        return time.monotonic() - self._reported > STATS_S

    def report(self, clock: int, *, wait_s: float, bytes_out: int, bytes_in: int) -> None:
        """Where this worker is, and how its time was spent.

        Args:
            wait_s: seconds that it has waited for others so far.
        """
        self._send_metrics(clock)
        self._reported = time.monotonic()
        body = {
            "clock": clock,
            "wait_s": round(wait_s, 6),
            "step_s": round(self._reported - self._started - wait_s, 6),
            "bytes_out": bytes_out,
            "bytes_in": bytes_in,
            "phases": {PHASES[phase]: round(s, 6) for phase, s in self._spans.flush().items()},
        }
        if self._spans.broken is not None:
            body["spans_broken"] = str(self._spans.broken)
        self._tell(body)

    def note(self, text: str) -> None:
        """Tell the user something that training does not stop for."""
        self._tell({"note": text})

    def _send_metrics(self, clock: int) -> None:
        self._logged = time.monotonic()
        metrics, self._metrics = self._metrics, {}
        if metrics:
            self._tell({"log": _json_safe(metrics), "clock": clock})

    def _tell(self, body: dict[str, Any]) -> None:
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, body)


def _json_safe(metrics: dict[str, float]) -> dict[str, Any]:
    """JSON has no NaN or infinity: send them as text."""
    return {k: v if v == v and abs(v) != float("inf") else str(v) for k, v in metrics.items()}
