"""The one tree of errors.

PacelineError
├── UsageError (also ValueError)   what the user asked for makes no sense
│   └── RunNotFound                no run of that name
├── PlanError                      the job makes sense but cannot be had here
├── LinkError                      a connection between roles failed
│   ├── AuthError                  the other side does not know the run's secret
│   └── FrameError                 what arrived is not the protocol
├── MessageError                   this role made a message that no role would accept; the link is fine
├── LayoutMismatch                 a worker's model is not the run's model
├── DeadlineError                  somebody was waited for too long
├── UpdateOverflow                 an update left NaN or Inf in a parameter
├── ScriptExit                     a script ended by itself with an exit code other than 0
├── RoleFailed                     a role ended in error; carries its name and traceback
└── CheckpointError                a checkpoint is incomplete, altered or cannot be written

Every one of them pickles (they cross process boundaries inside one engine).
"""

__all__ = [
    "AuthError",
    "CheckpointError",
    "DeadlineError",
    "FrameError",
    "LayoutMismatch",
    "LinkError",
    "MessageError",
    "PacelineError",
    "PlanError",
    "RoleFailed",
    "RunNotFound",
    "ScriptExit",
    "UpdateOverflow",
    "UsageError",
]


class PacelineError(Exception):
    """Base of everything Paceline raises on purpose."""


class UsageError(PacelineError, ValueError):
    """What the user asked for makes no sense; the message says what would."""


class RunNotFound(UsageError):
    """No run of that name in the runs directory."""


class PlanError(PacelineError):
    """The job makes sense but cannot be had here; the message has the numbers."""


class LinkError(PacelineError):
    """A connection between two roles failed."""


class AuthError(LinkError):
    """The other side does not know the run's secret."""


class FrameError(LinkError):
    """What arrived on a link is not the protocol."""


class MessageError(PacelineError):
    """A message that cannot be sent: too large for its kind, or not JSON. Nothing of it was sent, and sending
    it again over another socket would not help."""


class LayoutMismatch(PacelineError):
    """A worker's model differs from the model of the run."""


class DeadlineError(PacelineError):
    """Somebody was waited for longer than the run's deadline."""


class UpdateOverflow(PacelineError):
    """An update of finite gradients left NaN or Inf in a parameter: the training has diverged."""


class CheckpointError(PacelineError):
    """A checkpoint is incomplete, altered, of another model, or cannot be written."""


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
