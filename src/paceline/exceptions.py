"""The one tree of errors.

PacelineError
├── UsageError (also ValueError)   an option, argument or file of the user is invalid
│   ├── RunNotFound                no run of that name
│   └── DataError                  a data set is missing, incomplete or broken; names the file
├── PlanError                      the job is valid, but this machine cannot run it
├── LinkError                      a connection between roles failed
│   ├── AuthError                  the peer failed to prove that it knows the run's secret
│   │   └── PeerBusy               the peer closed the connection before either side had authenticated
│   └── FrameError                 the bytes received do not follow the protocol
├── MessageError                   this role made an invalid message; the link is intact
├── LayoutMismatch                 a worker's model is not the run's model
├── DeadlineError                  a role did not answer within the deadline
├── UpdateOverflow                 an update left NaN or Inf in a parameter
├── ScriptExit                     a script ended by itself with an exit code other than 0
├── RoleFailed                     a role ended in error; carries its name and traceback
└── CheckpointError                a checkpoint is incomplete, altered or cannot be written
    └── StoreError                 a store does not have a blob, or cannot keep it

Every one of them pickles (they cross process boundaries inside one engine).
"""

__all__ = [
    "AuthError",
    "CheckpointError",
    "DataError",
    "DeadlineError",
    "FrameError",
    "LayoutMismatch",
    "LinkError",
    "MessageError",
    "PacelineError",
    "PeerBusy",
    "PlanError",
    "RoleFailed",
    "RunNotFound",
    "ScriptExit",
    "StoreError",
    "UpdateOverflow",
    "UsageError",
]


class PacelineError(Exception):
    """Base of everything Paceline raises on purpose."""


class UsageError(PacelineError, ValueError):
    """An option, argument or file of the user is invalid; the message says what is valid."""


class RunNotFound(UsageError):
    """No run of that name in the runs directory."""


class DataError(UsageError):
    """A data set is missing, incomplete or broken; names the file, and the line if there is one."""


class PlanError(PacelineError):
    """The job is valid, but this machine cannot run it; the message has the numbers."""


class LinkError(PacelineError):
    """A connection between two roles failed."""


class AuthError(LinkError):
    """The peer failed to prove that it knows the run's secret."""


class PeerBusy(AuthError):
    """The peer closed the connection before either side had authenticated: it has too many newcomers, or it
    ended just now. Dialling again may help."""


class FrameError(LinkError):
    """The bytes received on a link do not follow the protocol."""


class MessageError(PacelineError):
    """A message that cannot be sent: too large for its kind, or not JSON. Nothing of it was sent; a retry
    over another socket would fail in the same way."""


class LayoutMismatch(PacelineError):
    """A worker's model differs from the model of the run."""


class DeadlineError(PacelineError):
    """A role did not answer within the run's deadline."""


class UpdateOverflow(PacelineError):
    """An update of finite gradients left NaN or Inf in a parameter: the training has diverged."""


class CheckpointError(PacelineError):
    """A checkpoint is incomplete, altered, of another model, or cannot be written."""


class StoreError(CheckpointError):
    """A store does not have a blob, or cannot keep it."""


class ScriptExit(PacelineError):
    """A script ended by itself with an exit code other than 0."""


class RoleFailed(PacelineError):
    """A role ended in error. `role` names it, `traceback` is what it printed last."""

    def __init__(self, role: str, message: str, traceback: str = "") -> None:
        super().__init__(role, message, traceback)
        self.role = role
        self.message = message
        self.traceback = traceback

    def __str__(self) -> str:
        tail = f"\n{self.traceback.rstrip()}" if self.traceback else ""
        return f"{self.role}: {self.message}{tail}"
