"""control.json: what a controller knows that no role could tell the next one.

Written before what was decided is done: who reads it does what is missing, and asks the roles for the rest.
"""

import json
from pathlib import Path
from typing import Any

from paceline.exceptions import UsageError
from paceline.storage.atomic import write_text_atomically

__all__ = ["Journal"]


class Journal:
    """The file of one run directory."""

    def __init__(self, run: Path) -> None:
        self._path = run / "control.json"
        self._written = ""

    def write(self, knowledge: dict[str, Any]) -> None:
        """Keep this, if it is not what is kept already. Raises OSError (a full disk)."""
        text = json.dumps(knowledge)
        if text != self._written:
            write_text_atomically(self._path, text + "\n", mode=0o600)
            self._written = text

    def read(self) -> dict[str, Any]:
        """What was kept last. Raises UsageError if that cannot be read."""
        try:
            knowledge = json.loads(self._path.read_text())
            if not isinstance(knowledge, dict):
                raise ValueError("not an object")
        except (OSError, ValueError) as error:
            raise UsageError(f"{self._path} cannot be read: {error}") from error
        return knowledge
