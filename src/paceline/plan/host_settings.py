"""What the settings of a run on several hosts mean. Pure."""

__all__ = ["PLACEMENTS", "host_silence_s"]

PLACEMENTS = ("round-robin", "blocks")
_LEAST_SILENCE_S, _MOST_SILENCE_S = 2.0, 60.0


def host_silence_s(deadline_s: float) -> float:
    """A host that says nothing for this long is lost: a fifteenth of the deadline, from 2 to 60 s."""
    return min(max(deadline_s / 15, _LEAST_SILENCE_S), _MOST_SILENCE_S)
