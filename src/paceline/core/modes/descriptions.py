"""Modes as people read them: in plans and reports."""

from paceline.core.modes.mode_spec import ModeSpec
from paceline.core.modes.presets import PRESETS

__all__ = ["in_words"]


def in_words(spec: ModeSpec, workers: int) -> str:
    """Who waits for whom in this mode, and what an update is, as half a sentence."""
    plain = spec.payload == "gradient" and spec.inner is None and not spec.by_epoch
    if workers == 1 and plain:
        return "the one worker waits for nobody: every gradient is one update"
    steps = _steps(spec.push_every)
    if spec.inner is not None:
        return f"workers of a group all-reduce; between groups: {in_words(spec.inner, workers)}"
    if text := PRESETS[spec.name].in_words:
        part = "" if spec.damping == "none" else "; the staler that is, the less it counts"
        return text.format(steps=steps, damping=part)
    one, several = "gradient", "gradients"
    if spec.payload == "sum":
        one, several = f"sum of {steps}' gradients", f"sums of {steps}' gradients"
    damped = {
        "none": "",
        "momentum": ", with less momentum and a shorter step the staler it is",
    }.get(spec.damping, f" ({spec.damping} damping)")
    if spec.spare == 0:
        return f"all wait for all: one update is the mean of {workers} {several}"
    if spec.spare is not None:
        return (
            f"one update is the mean of the first {workers - spec.spare} of {workers} {several}; "
            "those that come later are dropped"
        )
    applied = f"every {one} is applied when it arrives"
    if spec.quorum > 1:
        applied = f"an update is the mean of {spec.quorum} {several}"
    if spec.bound is None:
        return f"nobody waits: {applied}{damped}"
    smaller = "" if spec.batches == "equal" else ", whose batches get smaller"
    return (
        f"{applied}{damped}; a worker waits while it is more than {_steps(spec.bound)} ahead of the "
        f"slowest{smaller}"
    )


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"
