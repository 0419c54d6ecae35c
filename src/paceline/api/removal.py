"""Removes runs that are over. What may be removed is decided in `paceline.control.removing`."""

import time
from collections.abc import Sequence

from paceline.control.known_runs import find_run, list_runs
from paceline.control.removing import KEPT_STATES, Candidate, candidate, choose, refusal, remove
from paceline.exceptions import UsageError

__all__ = ["Candidate", "old_runs", "removable_runs", "remove_run"]


def removable_runs(runs: Sequence[str], *, trust: bool = False) -> list[Candidate]:
    """The named runs, each once, with their states and sizes.

    Args:
        trust: they may be other users'.

    Raises:
        RunNotFound: one of them is not there.
        UsageError: one of them is going on, or another user's, so that none may be removed.
    """
    found = {run.path: run for run in (find_run(each, trust=trust) for each in runs)}
    chosen = [candidate(run) for run in found.values()]
    for each in chosen:
        if each.alive:
            raise refusal(each.run)
    return chosen


def old_runs(
    *,
    older_than_s: float | None = None,
    larger_than: int | None = None,
    states: Sequence[str] = (),
    keep: int = 0,
) -> tuple[list[Candidate], int]:
    """This user's runs that fulfil all conditions, and how many there are. One that is going on never does.

    Args:
        older_than_s: since it ended.
        larger_than: bytes.
        states: only runs in these; empty: in any state.
        keep: this many of the newest stay, whatever they are.

    Raises:
        UsageError: there is no such state.
    """
    if unknown := sorted(set(states) - set(KEPT_STATES)):
        raise UsageError(f"--state {unknown[0]}: there is no such state. Valid: {', '.join(KEPT_STATES)}")
    found = [candidate(run) for run in list_runs()]
    chosen = choose(
        found,
        now=time.time(),
        older_than_s=older_than_s,
        larger_than=larger_than,
        states=states or KEPT_STATES,
        keep=keep,
    )
    return chosen, len(found)


def remove_run(chosen: Candidate) -> list[str]:
    """Delete a run's files. Returns the names of what is left in its directory, because it is not the run's.

    Raises:
        UsageError: the run is going on.
        PlanError: a file cannot be deleted.
    """
    return remove(chosen.run)
