"""How a worker does, told to the controller now and then."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from paceline.comm import Connection
from paceline.comm.messages import LoggedMetrics, UserNote, WorkerReport
from paceline.core.modes import is_loss
from paceline.exceptions import LinkError, UsageError
from paceline.observe.record.phase import PHASES
from paceline.observe.record.spans import Recorder
from paceline.observe.record.values import ValueWriter

__all__ = ["NormSampling", "Reporter"]

LOG_S = 0.1
STATS_S = 0.5
_MOST_LOSSES = 32
_MESSAGE_BYTES = 2 << 20
"""Of the metrics in one message to the controller, about."""
_PART = 1 / 200
"""Of the time, at most, in which norms are worked out that nobody asked for."""


class NormSampling:
    """When to tell the norm of a gradient: now and then, in scripts that log no loss, so that it is seen when
    they diverge. It takes a pass over the whole gradient."""

    def __init__(self) -> None:
        self._next = 0.0
        self._known: set[str] = set()
        """Names that the script has logged."""

    @property
    def due(self) -> bool:
        """Whether it is time for one."""
        return time.perf_counter() >= self._next

    def measured(self, norm: Callable[[], float]) -> float:
        """Work one out."""
        began = time.perf_counter()
        value = norm()
        ended = time.perf_counter()
        if self._next < math.inf:
            self._next = ended + (ended - began) / _PART
        return value

    def logged(self, metrics: Iterable[str]) -> None:
        """The script logged these: if there is a loss among them, norms are not needed."""
        if self._next < math.inf and not self._known.issuperset(metrics):
            self._known.update(metrics)
            if any(map(is_loss, metrics)):
                self._next = math.inf


class Reporter:
    """A worker's side of the progress display. A controller that is gone misses some of it; logged values are
    written down here, all of them."""

    def __init__(self, controller: Connection, spans: Recorder, values: ValueWriter) -> None:
        self._controller = controller
        self._spans = spans
        self._values = values
        self._started = self._reported = time.monotonic()
        self._metrics: dict[str, float] = {}
        self._losses: deque[float] = deque(maxlen=_MOST_LOSSES)
        """Values of `loss` since the last report: whether a run diverges shows in values in a row."""
        self._logged_at = (0, 0, 0, -1)
        self._logged = 0.0

    def log(self, metrics: dict[str, float], clock: int, version: int, samples: int, epoch: int) -> None:
        """Write values down with where the worker is. The display gets the latest ones now and then."""
        try:
            numbers = {name: float(value) for name, value in metrics.items()}
        except (TypeError, ValueError, RuntimeError):
            raise _not_a_number(metrics) from None
        self._values.add(numbers, version, samples, epoch)
        self._metrics.update(numbers)
        if "loss" in numbers:
            self._losses.append(numbers["loss"])
        self._logged_at = (self._values.steps, version, samples, epoch)
        if time.monotonic() - self._logged > LOG_S:
            self._send_metrics(clock)

    @property
    def due(self) -> bool:
        """Whether the last report is some time ago."""
        return time.monotonic() - self._reported > STATS_S

    def report(self, clock: int, *, wait_s: float, ledger: list[int]) -> None:
        """Where this worker is, and how its time was spent.

        Args:
            wait_s: seconds that it has waited for others so far.
            ledger: `LedgerKeeper.told()`.
        """
        self._send_metrics(clock)
        self._reported = time.monotonic()
        spans, values = self._spans, self._values
        self._tell(
            WorkerReport(
                clock=clock,
                wait_s=round(wait_s, 6),
                step_s=round(self._reported - self._started - wait_s, 6),
                ledger=tuple(ledger),
                phases={PHASES[phase]: round(s, 6) for phase, s in spans.flush().items()},
                spans_broken=None if spans.broken is None else str(spans.broken),
                values_broken=None if values.broken is None else str(values.broken),
            )
        )

    def note(self, text: str) -> None:
        """Tell the user something that training does not stop for."""
        self._tell(UserNote(text))

    def _send_metrics(self, clock: int) -> None:
        self._logged = time.monotonic()
        metrics, self._metrics = self._metrics, {}
        if metrics:
            at = dict(zip(("step", "version", "samples", "epoch"), self._logged_at, strict=True))
            at["attempt"] = self._values.attempt
            losses = tuple(self._losses)
            self._losses.clear()
            for part in _parts(metrics):
                self._tell(LoggedMetrics(part, at, losses, clock))
                losses = ()

    def _tell(self, said: WorkerReport | LoggedMetrics | UserNote) -> None:
        with contextlib.suppress(LinkError):
            self._controller.tell(said)


def _parts(metrics: dict[str, float]) -> Iterator[dict[str, float]]:
    """As many metrics at a time as a message can carry."""
    part: dict[str, float] = {}
    room = _MESSAGE_BYTES
    for name, value in metrics.items():
        size = 40 + 6 * len(name)  # as JSON, at most
        if size > room and part:
            yield part
            part, room = {}, _MESSAGE_BYTES
        part[name] = value
        room -= size
    yield part


def _not_a_number(metrics: dict[str, float]) -> UsageError:
    for name, value in metrics.items():
        try:
            float(value)
        except (TypeError, ValueError, RuntimeError):
            shown = f"{type(value).__name__} {value!r:.60}"
            return UsageError(
                f"paceline.log({name}=…) got a {shown}: a metric is one number. Log a mean or an element, as "
                f"in `paceline.log({name}=values.mean())`."
            )
    return UsageError("paceline.log() got a value that is no number.")
