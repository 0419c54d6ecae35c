"""What commands and roles take of a job."""

from typing import Any

from paceline.plan.job import JOB_OPTIONS, Job
from paceline.plan.knobs import KNOBS
from paceline.plan.option import Command, Option, RoleKind

__all__ = ["command_options", "settings_for"]


def command_options(command: Command) -> list[Option]:
    """What a command takes, in the order of `--help`: settings of a job, and the knobs behind `mode`."""
    found: list[Option] = []
    for each in JOB_OPTIONS:
        found += [each, *(KNOBS if each.name == "mode" else ())]
    return [each for each in found if command in each.commands]


def settings_for(role: RoleKind, job: Job) -> dict[str, Any]:
    """The settings that a role gets, as plain data for its ServerConfig or WorkerConfig."""
    plain = job.to_json()
    return {each.name: plain[each.name] for each in JOB_OPTIONS if role in each.roles}
