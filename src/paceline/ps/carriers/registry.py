"""The kinds of carriers, by the names that workers ask for when they attach."""

from collections.abc import Callable

from paceline.exceptions import FrameError
from paceline.ps.carriers.carrier import Attaching, Carrier
from paceline.ps.carriers.device_carrier import DeviceCarrier
from paceline.ps.carriers.inline_carrier import InlineCarrier
from paceline.ps.carriers.mirrored_carrier import MirroredCarrier
from paceline.ps.carriers.shared_carrier import SharedCarrier

__all__ = ["CARRIERS", "make_carrier"]

CARRIERS: dict[str, Callable[[Attaching], Carrier]] = {
    "device": DeviceCarrier,
    "inline": InlineCarrier,
    "mirrored": MirroredCarrier,
    "shared": SharedCarrier,
}


def make_carrier(attaching: Attaching) -> Carrier:
    """The carrier that an attaching worker asks for. FrameError if there is no such carrier."""
    kind = attaching.message.carrier
    if kind not in CARRIERS:
        raise FrameError(f"carrier {kind!r:.40} is not known here; known: {', '.join(CARRIERS)}")
    return CARRIERS[kind](attaching)
