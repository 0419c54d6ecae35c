"""Every option of a job is declared once, and what follows from the declaration fits together."""

import dataclasses
import inspect

import pytest

from paceline.cli.plan_command import plan
from paceline.cli.resume_command import resume
from paceline.cli.run_command import run
from paceline.cli.study_command import study
from paceline.exceptions import UsageError
from paceline.plan.job import JOB_OPTIONS, Job
from paceline.plan.job_settings import command_options, settings_for
from paceline.plan.knobs import KNOBS
from paceline.plan.option import Command, Option
from paceline.ps.config import ServerConfig
from paceline.worker.main import WorkerConfig


@pytest.mark.parametrize("option", [*JOB_OPTIONS, *KNOBS], ids=lambda option: option.name)
def test_what_a_command_takes_has_a_help_text(option: Option) -> None:
    assert bool(option.help) == bool(option.commands)


def test_no_flag_and_no_key_means_two_things() -> None:
    flags = [flag for option in (*JOB_OPTIONS, *KNOBS) if option.commands for flag in option.flags]
    keys = [key for option in JOB_OPTIONS for key in option.keys]
    assert len(set(flags)) == len(flags)
    assert len(set(keys)) == len(keys)


def test_every_setting_can_be_given_to_run_or_has_an_argument_for_it() -> None:
    assert {option.name for option in JOB_OPTIONS if "run" not in option.commands} == {"script", "args"}


@pytest.mark.parametrize(
    ("command", "function"), [("run", run), ("plan", plan), ("study", study), ("resume", resume)]
)
def test_commands_take_what_is_declared_for_them(command: Command, function: object) -> None:
    taken = inspect.signature(function).parameters  # type: ignore[arg-type]
    for option in (*JOB_OPTIONS, *KNOBS):
        if option.commands:  # the others are arguments
            assert (option.name in taken) == (command in option.commands)
    for option in command_options(command):
        assert taken[option.name].default == (None if command == "resume" or option.many else option.default)


def test_a_role_gets_what_is_declared_for_it_under_the_same_name() -> None:
    server = {field.name for field in dataclasses.fields(ServerConfig)}
    worker = {field.name for field in dataclasses.fields(WorkerConfig)}
    assert set(settings_for("server", Job())) <= server
    assert set(settings_for("worker", Job())) <= worker


@pytest.mark.parametrize("option", JOB_OPTIONS, ids=lambda option: option.name)
def test_defaults_pass_their_own_check(option: Option) -> None:
    assert option.checked(option.default) == option.default
    assert getattr(Job(), option.name) == option.default


@pytest.mark.parametrize(
    "option", [each for each in JOB_OPTIONS if each.check], ids=lambda option: option.name
)
def test_checks_refuse_what_is_of_another_kind(option: Option) -> None:
    with pytest.raises(
        UsageError, match=r"mode|compress" if option.name in ("mode", "compress") else option.name
    ):
        option.checked(object())
