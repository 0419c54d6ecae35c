"""Conditions of a link that is made worse on purpose, for tests and benchmarks: latency and a limited rate.

`paceline.testing.impaired_links` makes them happen; it is loaded only if there are such conditions.
"""

import math
import os
import re
import socket
from dataclasses import dataclass

from paceline.comm.loading import load
from paceline.exceptions import UsageError

__all__ = ["LINK_CONDITIONS", "LinkConditions"]

LINK_CONDITIONS = "PACELINE_LINK_CONDITIONS"
"""The environment variable: conditions of all links from workers to servers, as `LinkConditions.parse`
reads them."""

_IMPAIRED = "paceline.testing.impaired_links:impaired"
_MAX_LATENCY_S = 60.0
_MIN_BITS_PER_S = 1e3

_SECONDS = {"ms": 1e-3, "s": 1.0}
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_FORMS = "latency=200ms,rate=100mbit, or one of the two; units are ms, s and kbit, mbit, gbit (per second)"


@dataclass(frozen=True, kw_only=True)
class LinkConditions:
    """How a link is, the same in both directions. `str()` is what `parse` reads."""

    latency_s: float = 0.0
    """One way: a round trip takes twice as long."""
    bits_per_s: float | None = None
    """Of each direction by itself; None is as fast as the host can."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s <= _MAX_LATENCY_S:
            raise UsageError(
                f"a link's latency must be from 0 to {_MAX_LATENCY_S:g} s, got {self.latency_s:g} s"
            )
        rate = self.bits_per_s
        if rate is not None and not _MIN_BITS_PER_S <= rate < math.inf:
            raise UsageError(f"a link's rate must be at least 1 kbit per second, got {rate:g} bit")

    @classmethod
    def parse(cls, text: str) -> "LinkConditions":
        """The conditions that a user's text means.

        Args:
            text: `latency=200ms,rate=100mbit`, or one of the two.

        Raises:
            UsageError: with the text, what is wrong with it, and how it should look.
        """
        values: dict[str, float] = {}
        for part in text.strip().lower().split(","):
            name, _, value = part.strip().partition("=")
            units = {"latency": _SECONDS, "rate": _BITS}.get(name)
            if units is None:
                raise _refusal(text, f"{part.strip()!r} is neither latency=… nor rate=…")
            if name in values:
                raise _refusal(text, f"{name} is given twice")
            found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,12})?) ?([a-z]+)", value)
            if found is None or found[2] not in units:
                raise _refusal(text, f"{name} needs a number and one of {', '.join(units)}, got {value!r}")
            values[name] = float(found[1]) * units[found[2]]
        try:
            return cls(latency_s=values.get("latency", 0.0), bits_per_s=values.get("rate"))
        except UsageError as error:
            raise _refusal(text, str(error)) from None

    @classmethod
    def from_environment(cls) -> "LinkConditions | None":
        """What PACELINE_LINK_CONDITIONS says; None if it is empty or not set."""
        text = os.environ.get(LINK_CONDITIONS, "").strip()
        return cls.parse(text) if text else None

    def wrap(self, sock: socket.socket) -> socket.socket:
        """A socket to use in place of this one, which has these conditions."""
        worse: socket.socket = load(_IMPAIRED)(sock, self)
        return worse

    def __str__(self) -> str:
        latency = f"latency={self.latency_s * 1e3:.12g}ms"
        if self.bits_per_s is None:
            return latency
        unit = max((u for u in _BITS if _BITS[u] <= self.bits_per_s), key=_BITS.__getitem__)
        return f"{latency},rate={self.bits_per_s / _BITS[unit]:.12g}{unit}"


def _refusal(text: str, reason: str) -> UsageError:
    return UsageError(f"{LINK_CONDITIONS} {text!r}: {reason}. Write it as {_FORMS}")
