"""How a request to a run that is going on travels, and its answer (what they say: `run_requests.py`).

A command writes its request into the run directory, and the controller writes the answer beside it. This is
no socket, because users have the run directory on every host that sees it, and its permissions tell which
users may ask.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from paceline.core.json_types import JsonObject
from paceline.exceptions import DeadlineError, LinkError, PlanError
from paceline.storage.atomic import write_text_atomically
from paceline.storage.json_files import read_object
from paceline.storage.plain_files import check_directory, plain_size

__all__ = ["Requests"]

_LOOK_S = 0.05
_LIMIT_BYTES = 64 << 10


class Requests:
    """The requests of one run directory. Both sides use it: `ask` here, `pending` and `answer` there."""

    def __init__(self, run: Path) -> None:
        self._path = run / "requests"

    def ask(self, body: JsonObject, *, alive: Callable[[], bool], within_s: float) -> JsonObject:
        """Send a request and wait for its answer.

        Raises:
            PlanError: the run directory cannot be written.
            LinkError: the run ended before it answered.
            DeadlineError: it did not answer in time.
        """
        name = secrets.token_hex(8)
        request, answer = self._path / f"{name}.json", self._path / f"{name}.answer"
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
            write_text_atomically(request, json.dumps(body), mode=0o600)
        except OSError as error:
            raise PlanError(
                f"{self._path} cannot be written: {error.strerror or error}. Requests to a run go through "
                "its directory: ask as the user whose run it is, and see that its disk has room"
            ) from error
        deadline = time.monotonic() + within_s
        try:
            while True:
                over = not alive()
                with contextlib.suppress(FileNotFoundError):
                    return _read(answer)
                if over:
                    raise LinkError("the run ended before it answered")
                if time.monotonic() > deadline:
                    raise DeadlineError(f"the run's controller did not answer within {within_s:g} s")
                time.sleep(_LOOK_S)
        finally:
            request.unlink(missing_ok=True)
            answer.unlink(missing_ok=True)

    def pending(self) -> dict[str, JsonObject]:
        """Requests that came since the last call, by name, the oldest first. Taken out of the directory.

        What is no request at all is an empty one. Nothing but files is touched: a pipe would never end.
        """
        found = {}
        try:
            check_directory(self._path)
        except OSError:
            return {}
        for path in sorted(self._path.glob("*.json"), key=_age):
            with contextlib.suppress(OSError):  # the command may have given up and removed it
                plain_size(path)
                body = _read(path)
                path.unlink()
                found[path.stem] = body
        return found

    def answer(self, name: str, body: JsonObject) -> None:
        """Answer a request. Raises OSError (a full disk)."""
        write_text_atomically(self._path / f"{name}.answer", json.dumps(body), mode=0o600)


def _age(path: Path) -> tuple[int, str]:
    with contextlib.suppress(OSError):
        return path.lstat().st_mtime_ns, path.name
    return 0, path.name


def _read(path: Path) -> JsonObject:
    """A request or an answer; empty if it is none. Raises FileNotFoundError."""
    try:
        return read_object(path, most=_LIMIT_BYTES)
    except FileNotFoundError:
        raise
    except (OSError, ValueError):
        return {}
