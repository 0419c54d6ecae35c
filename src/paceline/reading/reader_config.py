"""What the reader of a run is told when it starts."""

from dataclasses import dataclass

__all__ = ["ReaderConfig"]


@dataclass(frozen=True, kw_only=True)
class ReaderConfig:
    """Plain data, so that any engine can carry it."""

    run: str
    """The run directory."""
    every: int
    """Number of updates between two evaluations."""
    attempt: int
    """How often this process was started before, in this start of the run."""
    workers: int
    """Number of workers that the run was planned with."""
    threads: int
    value_rows: int
    """The most values that are kept."""
    clock_ns: int = 0
    """From this host's monotonic clock to the run's time."""
    script: str | None = None
    """Its path, or the name of a module; None: the engine has a function in its place."""
    module: bool = False
    search: str | None = None
    """What stands first in the program's `sys.path`."""
    args: tuple[str, ...] | list[str] = ()
