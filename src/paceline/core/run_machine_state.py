"""RunMachineState: all that a RunMachine knows, as the controller's journal has it."""

from typing import TypedDict

__all__ = ["RunMachineState"]


class _Always(TypedDict):
    state: str
    error: list[str] | None
    """Role, message and traceback of the first error."""
    incarnations: dict[str, int]
    """Numbers by rank, as those below: keys of JSON are texts."""
    restarts: dict[str, int]
    server_incarnations: dict[str, int]
    gone_servers: dict[str, int]
    server_restarts: int
    lead: int
    covered: bool
    missing: list[int]
    going_back: bool
    coming: list[int]
    leaving: list[int]
    finished: list[int]
    trained: bool
    retired: list[int]
    ready: list[int]
    suspects: dict[str, list[str]]
    """Message and traceback, by role."""
    broken: list[str]
    errors: dict[str, str]


class RunMachineState(_Always, total=False):
    """The fields of RunMachine with their names, and what older versions did not write."""

    ended: dict[str, str]
