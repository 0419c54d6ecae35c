"""What an ERROR frame says of an exception, and the exception that an ERROR frame stands for.

An exception's text may be of any length (a compiler's output, a printed tensor). It is cut here, where the
message is made, so that the frame always fits: the reader of a report needs its beginning and its end.
"""

import json
from typing import Any

from paceline import exceptions
from paceline.causes import explained
from paceline.comm.frames import Body
from paceline.exceptions import PacelineError

__all__ = ["error_body", "error_of", "shortened"]

_NAME_BYTES = 256
_MESSAGE_BYTES = 12 << 10
_TRACEBACK_BYTES = 32 << 10
"""As JSON. Together they fit into an ERROR frame with room to spare."""


def error_body(error: BaseException, traceback: str = "", **more: Any) -> Body:
    """The body of an ERROR frame: never larger than a frame may be, whatever the exception says.

    Args:
        traceback: as text; it is left out of the body if it is empty.
        more: further fields, which must be small.
    """
    try:
        message = explained(error)
    except Exception as failure:  # a user's class, whose __str__ fails
        message = f"(its text cannot be had: {type(failure).__name__})"
    body = {
        "error": shortened(type(error).__name__, _NAME_BYTES),
        "message": shortened(message, _MESSAGE_BYTES),
    }
    if traceback:
        body["traceback"] = shortened(traceback, _TRACEBACK_BYTES)
    return body | more


def error_of(body: Body) -> PacelineError:
    """What an ERROR frame says, as an exception."""
    kind = getattr(exceptions, str(body.get("error")), PacelineError)
    known = isinstance(kind, type) and issubclass(kind, PacelineError)
    return (kind if known else PacelineError)(str(body.get("message")))


def shortened(text: str, limit: int) -> str:
    """The text, cut in its middle if it is longer than `limit` bytes as JSON; says how much was left out.

    Args:
        limit: at least 128.
    """
    # A character is at least one byte as JSON, so what lies further inside cannot stay anyway.
    if len(text) <= limit and _size(text) <= limit:
        return text
    room = (limit - 64) // 2  # for each end; the rest is for the note
    head = _fitting(text[:room], room)
    tail = _fitting(text[-room:][::-1], room)[::-1]
    left_out = len(text) - len(head) - len(tail)
    return f"{head}\n[... {left_out:,} characters left out ...]\n{tail}"


def _fitting(text: str, room: int) -> str:
    """The beginning of a text that fits into `room` bytes as JSON."""
    for at, character in enumerate(text):
        room -= _size(character)
        if room < 0:
            return text[:at]
    return text


def _size(text: str) -> int:
    return len(json.dumps(text)) - 2
