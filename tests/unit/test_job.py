"""A job checks every setting by itself; a refusal names the setting, its value and a way out."""

import json
from dataclasses import replace
from typing import Any

import pytest

from paceline.exceptions import UsageError
from paceline.plan import Job


def test_defaults_are_a_job() -> None:
    job = Job(script="train.py")
    assert (job.workers, job.servers, job.mode, job.link) == (2, 1, "bsp", "auto")
    assert job.deadline_s == 300
    assert job.threads is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"workers": 0}, "workers=0 is too small: give at least 1"),
        ({"workers": -3}, "workers=-3"),
        ({"workers": True}, "workers=True is not a whole number"),
        ({"workers": "4"}, "workers='4' is not a whole number"),
        ({"workers": 2.0}, "workers=2.0 is not a whole number"),
        ({"servers": 0}, "servers=0 is too small"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed=9223372036854775808 is too large"),
        ({"checkpoint_every": -1}, "checkpoint_every=-1"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"threads": 0}, "threads=0"),
        ({"deadline_s": 0}, "deadline_s=0 is not a finite number above 0"),
        ({"deadline_s": float("nan")}, "deadline_s=nan"),
        ({"deadline_s": float("inf")}, "deadline_s=inf"),
        ({"deadline_s": "5"}, "deadline_s='5' is not a number"),
        ({"clip_norm": -1.0}, "clip_norm=-1"),
        ({"norm_bound": 0.0}, "norm_bound=0"),
        ({"norm_bound": 2.0}, "norm_bound=2 is too small"),
        ({"mode": "fast"}, "mode 'fast': there is no such mode. Valid modes: bsp, backup:B"),
        ({"mode": "ssp:-1"}, "at least 0, got '-1'"),
        ({"link": "udp"}, "link='udp': there is no such link. Valid: auto, shm, tcp"),
        ({"optimizers": ["Lamb"]}, "'Lamb' is not of the form module:Class"),
        ({"optimizers": ["os;rm:Lamb"]}, "not of the form module:Class"),
        ({"optimizers": "a:B"}, "optimizers='a:B' is not a list of strings"),
        ({"args": ["--lr", 0.1]}, "args=['--lr', 0.1] is not a list of strings"),
        ({"script": ""}, "script='' is not a path"),
        ({"run_dir": "a\0b"}, "is not a path"),
    ],
)
def test_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refusal:
        Job(**settings)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("asked", "kept"), [("0", "bsp"), ("-1", "asp"), ("3", "ssp:3"), (" SSP:2 ", "ssp:2")]
)
def test_mode_is_kept_in_one_form(asked: str, kept: str) -> None:
    assert Job(mode=asked).mode == kept


def test_json_round_trip() -> None:
    job = Job(
        script="a/train.py",
        args=("--lr", "0.1"),
        workers=4,
        mode="ssp:3",
        clip_norm=1.5,
        optimizers=("mine.optim:Lamb",),
        threads=2,
    )
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job
    assert Job.from_json({}) == Job()


def test_unknown_setting_is_named() -> None:
    with pytest.raises(UsageError, match="no setting 'wokers'. Known: script, module, args, workers"):
        Job.from_json({"wokers": 3})


def test_replacing_checks_again() -> None:
    with pytest.raises(UsageError, match="workers=0"):
        replace(Job(), workers=0)


@pytest.mark.parametrize(
    ("script", "name"), [("a/b/digits.py", "digits"), ("x", "x"), (None, "fit"), (".py", "script")]
)
def test_name(script: str | None, name: str) -> None:
    assert Job(script=script).name == name
