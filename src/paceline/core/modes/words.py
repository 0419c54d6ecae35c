"""Modes as people read them: in plans and reports."""

from paceline.core.modes.spec import ModeSpec

__all__ = ["in_words"]


def in_words(spec: ModeSpec, workers: int) -> str:
    """Who waits for whom in this mode, and what an update is, as half a sentence."""
    plain = spec.payload == "gradient" and spec.inner is None and not spec.by_epoch
    if workers == 1 and plain:
        return "the one worker waits for nobody: every gradient is one update"
    steps = _steps(spec.push_every)
    match spec.name:
        case "hybrid":
            assert spec.inner is not None
            return f"workers of a group all-reduce; between groups: {in_words(spec.inner, workers)}"
        case "allreduce":
            return (
                "all wait for all: gradients are averaged among the workers, each updates its own parameters"
            )
        case "hogwild":
            return "nobody waits: workers write into one shared memory without locks"
        case "dogwild":
            part = "" if spec.damping == "none" else "; the staler that is, the less it counts"
            return f"nobody waits: each worker's exchange thread carries what changed, at its own pace{part}"
        case "easgd" | "eamsgd":
            return f"nobody waits: every {steps} a worker and the centre are drawn towards each other"
        case "local" | "diloco":
            return f"all wait for all, every {steps}: one update is the mean of how far they moved"
        case "sandblaster":
            return "an epoch is one gradient of the whole data set, then a step of L-BFGS"
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
