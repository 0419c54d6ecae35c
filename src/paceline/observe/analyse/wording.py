"""Numbers, modes and statuses as people read them: one form each, everywhere.

Any number has a form, also one that no run can have and a damaged file holds: `1e+300`, `inf`.
"""

import itertools
import math
from collections.abc import Mapping

from paceline.observe.analyse.window import Window
from paceline.observe.record.pace import pace_of
from paceline.observe.record.status import RunStatus

__all__ = [
    "ago",
    "clock",
    "count",
    "duration",
    "metric",
    "metrics",
    "percent",
    "plural",
    "progress",
    "size",
    "staleness",
    "state",
    "trouble",
]

WORTH_SAYING_S = 0.1
"""A first step that took less than this longer than the others is like them."""
_LEAST_WINDOW_S = 1.0
_ABSURD = 1e15
"""From here on a number is written with its exponent."""


def _absurd(number: float) -> bool:
    return not math.isfinite(number) or abs(number) >= _ABSURD


def count(number: float) -> str:
    """`12,345`; fractions only where they matter, below ten."""
    if _absurd(number):
        return f"{number:.3g}"
    return f"{number:.1f}" if number < 9.95 and number != int(number) else f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """`12 %` of a share of 1."""
    if _absurd(share):
        return f"{share:.3g}"
    return f"{100 * share:.0f} %"


def metric(value: float) -> str:
    """Four significant digits: `0.07125`, `1234`, `3.2e-07`."""
    return f"{value:.4g}"


def metrics(values: Mapping[str, float], most: int = 12) -> list[str]:
    """`loss 0.07125` of each; of very many the first ones, and how many more there are."""
    found = [f"{name} {metric(value)}" for name, value in itertools.islice(values.items(), most)]
    return [*found, *([f"… and {len(values) - most:,} more metrics"] if len(values) > most else [])]


def size(nbytes: float) -> str:
    """Decimal units as in disk and network figures: `46.8 MB`."""
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while nbytes >= 999.5 and unit != "TB":
        nbytes, unit = nbytes / 1000, next(units)
    return f"{nbytes:.3g} {unit}" if nbytes < 999.5 or _absurd(nbytes) else f"{nbytes:,.0f} {unit}"


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 20 s`, `2 h 05 min`."""
    if _absurd(seconds):
        return f"{seconds:.3g} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min"


def clock(seconds: float) -> str:
    """A running clock, which keeps its width: `0:42`, `1:02:03`."""
    if _absurd(seconds):
        return f"{seconds:.3g} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def ago(seconds: float) -> str:
    """The age of something, in its largest unit: `5 min`, `3 days`."""
    if _absurd(seconds):
        return f"{seconds:.3g} s"
    for unit, length in (("day", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            number = int(seconds // length)
            return plural(number, unit) if unit == "day" else f"{number} {unit}"
    return f"{max(0, int(seconds))} s"


def progress(status: RunStatus) -> str:
    """`epoch 2, 64 %`, or how many epochs there were when the run is over."""
    share = status.epoch_share
    if share is None:
        return f"{count(status.samples)} samples" if status.loader else plural(status.steps, "step")
    if status.ended and share == 0 and status.epoch:
        return plural(status.epoch, "epoch")
    return f"epoch {status.epoch + 1}, {percent(share)}"


def state(status: RunStatus, known: str | None = None) -> str:
    """`running`, `succeeded`; of a run that ended well and learned nothing `succeeded, but diverged`.

    Args:
        known: the state, from a caller that knows whether the run's process lives.
    """
    known = known or status.state
    if not status.diverged or known not in ("succeeded", "stopped"):
        return known
    return "succeeded, but diverged" if known == "succeeded" else f"{known}, diverged"


def saving(status: RunStatus) -> list[str]:
    """`checkpoint 1.2 of 4.8 GB`, while the run waits for its last one."""
    if status.saving is None or status.ended:
        return []
    done, total = status.saving
    return [f"checkpoint {percent(done / max(1, total))} of {size(total)}"]


def rates(status: RunStatus, window: Window | None = None) -> list[str]:
    """`3,104 samples/s`: the mean of this start of the run. While it goes on `(last 5 s: 3,290)` comes
    behind it. Without a prepared loader `12 steps/s`, and samples if the script logs them."""

    def rate(noun: str, mean: float, lately: float) -> str:
        text = f"{count(mean)} {noun}/s"
        if window is None or window.whole or status.ended or window.seconds < _LEAST_WINDOW_S:
            return text
        return f"{text} (last {window.seconds:.0f} s: {count(lately)})"

    pace = status.pace
    samples = rate("samples", pace.samples_per_s, window.samples_per_s if window is not None else 0.0)
    if status.loader:
        return [samples]
    steps = rate("steps", pace.steps_per_s, window.steps_per_s if window is not None else 0.0)
    return [steps, *([samples] if status.samples else [])]


def times(status: RunStatus) -> str:
    """`start-up 4.1 s, training 62.0 s (the first step took 6.2 s longer than the others)`."""
    text = f"start-up {duration(status.startup_s)}, training {duration(status.pace.seconds)}"
    if status.first_step_s >= WORTH_SAYING_S:
        text += f" (the first step took {duration(status.first_step_s)} longer than the others)"
    return text


def all_starts(status: RunStatus) -> str:
    """Of a resumed run: `305 samples/s in 2 min 10 s of training`, with the time of its earlier starts."""
    pace = pace_of(status, total=True)
    rate = f"{count(pace.samples_per_s)} samples/s" if status.loader else f"{count(pace.steps_per_s)} steps/s"
    return f"{rate} in {duration(pace.seconds)} of training"


def staleness(status: RunStatus) -> str:
    """`staleness 0.4 mean, 2 max`."""
    return f"staleness {status.staleness_mean:.2g} mean, {status.staleness_max} max"


def trouble(status: RunStatus) -> list[str]:
    """What went wrong and was dealt with; empty for most runs."""
    found = {
        "diverges": bool(status.diverged) and not status.ended,
        plural(status.restarts, "restart"): status.restarts,
        f"{plural(status.takeovers, 'controller')} replaced": status.takeovers,
        f"{count(status.refused)} refused": status.refused,
        f"{plural(status.skipped, 'sample')} skipped": status.skipped,
        f"{count(status.dropped)} dropped": status.dropped,
        f"{count(status.lost)} lost": status.lost,
        f"{plural(status.lost_updates, 'update')} lost": status.lost_updates,
    }
    return [text for text, number in found.items() if number]
