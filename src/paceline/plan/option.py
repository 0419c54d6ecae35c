"""How a setting of a job is declared: once, beside its field in `Job`.

    workers: int = option(2, check=whole_number(1, "…"), flags=("-n",), help="Processes that …")

Everything else follows from that declaration: the flags of `paceline run`, `plan`, `study` and `resume` with
their help, the keys of job files and of a study's grid, the check in `Job`, and the fields of
`ServerConfig` and `WorkerConfig` that carry the setting to the roles.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

__all__ = [
    "COMMUNICATION",
    "CONSISTENCY",
    "EVERY_COMMAND",
    "FAULTS",
    "NEW_RUNS",
    "ONE_NEW_RUN",
    "ONE_RUN",
    "PROCESSES",
    "Check",
    "Command",
    "Option",
    "RoleKind",
    "ends_early",
    "for_servers",
    "in_worker",
    "option",
    "options_of",
    "over_hosts",
]

Check = Callable[[str, Any], Any]
"""Takes a setting's name and its value, and returns the value in the form in which a job keeps it.
Raises UsageError."""

Command = Literal["run", "plan", "study", "resume"]
RoleKind = Literal["server", "worker"]

NEW_RUNS: tuple[Command, ...] = ("run", "plan", "study")
ONE_NEW_RUN: tuple[Command, ...] = ("run", "plan")
ONE_RUN: tuple[Command, ...] = ("run", "plan", "resume")
EVERY_COMMAND: tuple[Command, ...] = ("run", "plan", "study", "resume")

PROCESSES = "Processes"
CONSISTENCY = "Consistency"
COMMUNICATION = "Hiding communication"
FAULTS = "Faults and checkpoints"

_KEY = "option"


@dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of one setting."""

    name: str = ""
    """Of the field in `Job`."""
    kind: Any = None
    """Its type: `int`, `str | None`, `tuple[str, ...]`, …"""
    default: Any = None
    check: Check | None = None
    """What its value must be by itself. None allows everything. What it must be together with other settings
    is in `rules.py`."""
    help: str = ""
    """For `--help`, with rich's markup."""
    flags: tuple[str, ...] = ()
    """As typed, the usual flag first: `("--workers", "-n")`."""
    metavar: str | None = None
    """What stands for the value in `--help`."""
    panel: str | None = None
    """The part of `--help` that shows it."""
    parse: Callable[[str], Any] | None = None
    """Reads the value as typed, where the type alone does not."""
    commands: tuple[Command, ...] = ()
    """The commands that take it. None: it is an argument, which each command declares by itself."""
    roles: tuple[RoleKind, ...] = ()
    """The roles that get it, as the field of the same name in `ServerConfig` or `WorkerConfig`."""
    not_in_grid: str | None = None
    """Why a study cannot vary it; None: it can."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Its names in a study's grid: that of the field, and those of its long flags."""
        long = [flag.partition("/")[0] for flag in self.flags if flag.startswith("--")]
        return tuple(dict.fromkeys([self.name, *(flag[2:].replace("-", "_") for flag in long)]))

    @property
    def many(self) -> bool:
        """Whether it can be repeated: its value is a tuple of texts."""
        return bool(self.kind == tuple[str, ...])

    @property
    def shows_default(self) -> bool:
        """Whether `--help` shows the default. That of a flag, or none at all, is told by the help text."""
        return not isinstance(self.default, bool) and self.default not in (None, ())

    def checked(self, value: Any) -> Any:
        """The value in the form in which a job keeps it. Raises UsageError if it is wrong by itself."""
        if self.check is None or (value is None and self.default is None):
            return value
        return self.check(self.name, value)


def option(default: Any, *, flags: tuple[str, ...] = (), **declared: Any) -> Any:
    """A field of `Job` with its declaration. See the fields of `Option`.

    Args:
        flags: the usual one, `--name`, may be left out where short or further ones are given.
    """
    return dataclasses.field(
        default=default, metadata={_KEY: Option(default=default, flags=flags, **declared)}
    )


in_worker = functools.partial(option, panel=PROCESSES, commands=EVERY_COMMAND, roles=("worker",))
"""An option about what each worker does."""
ends_early = functools.partial(
    option, panel=FAULTS, commands=ONE_RUN, roles=("server",), not_in_grid="use the budget"
)
"""An option that ends a run early and in order."""
for_servers = functools.partial(option, panel=FAULTS, commands=EVERY_COMMAND, roles=("server",))
"""An option about what servers keep."""
over_hosts = functools.partial(
    option, panel=PROCESSES, commands=ONE_RUN, not_in_grid="a study runs on one host"
)
"""An option of runs on several hosts."""


def options_of(job: type) -> tuple[Option, ...]:
    """The declarations of a dataclass's fields, in their order."""
    kinds = get_type_hints(job)
    return tuple(
        dataclasses.replace(
            field.metadata[_KEY],
            name=field.name,
            kind=kinds[field.name],
            flags=_flags(field.name, field.metadata[_KEY].flags),
        )
        for field in dataclasses.fields(job)
    )


def _flags(name: str, flags: tuple[str, ...]) -> tuple[str, ...]:
    usual = f"--{name.replace('_', '-')}"
    # A first flag that is long stands instead of the usual one.
    return flags if flags and flags[0].startswith("--") else (usual, *flags)
