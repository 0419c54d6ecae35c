"""JoinToken: what a host must know to join a run, in a file of mode 0600.

    paceline-join-1 RUN FINGERPRINT SECRET        one line of text

The fingerprint says which certificate the controller shows: an impostor has none of the kind. The secret
proves to the controller that the host was given the token. Both are new at every start of a run.
"""

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from paceline.exceptions import UsageError

__all__ = ["JoinToken"]

_FORM = re.compile(r"paceline-join-1 (\S{1,200}) ([0-9a-f]{64}) ([0-9a-f]{64})\n?")
_MOST_BYTES = 4096


@dataclass(frozen=True)
class JoinToken:
    """The token of one start of a run."""

    run: str
    """The run's id."""
    fingerprint: str
    secret: bytes = field(repr=False)

    def write(self, path: Path) -> None:
        """Write the file, which is never readable by other users. Raises OSError."""
        path.unlink(missing_ok=True)
        text = f"paceline-join-1 {self.run} {self.fingerprint} {self.secret.hex()}\n"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)

    @classmethod
    def read(cls, path: Path) -> "JoinToken":
        """The token in a file. Raises UsageError if it has none, or other users may read it."""
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            with path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise UsageError(
                f"--token-file {path} cannot be read: {error.strerror or error}. `paceline run --listen …` "
                "says "
                "where it wrote the token; copy that file here"
            ) from None
        if mode & 0o077:
            raise UsageError(
                f"--token-file {path} may be read by other users (mode {mode:04o}), and whoever has the "
                "token "
                f"can join the run: chmod 600 {path}, and start the run again if it may have been read"
            )
        match = _FORM.fullmatch(data.decode("ascii", "replace"))
        if match is None:
            raise UsageError(
                f"--token-file {path} does not hold a token of `paceline run --listen …`: one line that "
                "begins "
                "with paceline-join-1. Copy the file again"
            )
        return cls(match[1], match[2], bytes.fromhex(match[3]))
