"""Schedules: which mode is due at which version, and what is refused."""

import pytest

from paceline.core.modes import Schedule, parse_mode, parse_schedule
from paceline.exceptions import UsageError

BSP = parse_mode("bsp")


def test_what_is_due() -> None:
    schedule = parse_schedule(BSP, ("500=ssp:4", " 2000=asp+damping=dc "))
    assert str(schedule) == "bsp, 500=ssp:4, 2000=asp+damping=dc"
    assert schedule.due(0) is schedule.due(499) is None
    assert str(schedule.due(500)) == str(schedule.due(1999)) == "ssp:4"
    assert str(schedule.due(2000)) == str(schedule.due(10**9)) == "asp+damping=dc"


def test_only_turns_since_a_version() -> None:
    schedule = parse_schedule(BSP, ("500=ssp:4", "2000=asp"))
    assert str(schedule.due(510, since=499)) == "ssp:4"
    assert schedule.due(510, since=500) is None
    assert str(schedule.due(2500, since=100)) == "asp"
    assert schedule.due(2500, since=2000) is None


def test_no_schedule_is_a_schedule() -> None:
    assert parse_schedule(parse_mode("local:8"), ()).due(10) is None
    assert Schedule(BSP) == parse_schedule(BSP, [])


@pytest.mark.parametrize(
    ("start", "texts", "reason"),
    [
        ("bsp", ["asp"], "schedule 'asp': it needs a version and a mode, as in 500=ssp:4"),
        ("bsp", ["=asp"], "needs a version"),
        ("bsp", ["-5=asp"], "needs a version"),
        ("bsp", ["1e3=asp"], "needs a version"),
        ("bsp", ["٣=asp"], "needs a version"),
        ("bsp", ["9" * 50 + "=asp"], "needs a version"),
        ("bsp", ["500="], "there is no such mode"),
        ("bsp", ["500=fast"], "mode 'fast': there is no such mode"),
        (
            "bsp",
            ["0=asp"],
            "schedule 0=asp: the first version is 1; to begin in asp, use it as the run's mode",
        ),
        ("bsp", ["500=asp", "400=bsp"], "schedule 400=bsp: it comes after 500"),
        ("bsp", ["500=asp", "500=bsp"], "rising order, each once"),
        ("bsp", ["500=local:8"], "a run that begins in bsp cannot go on in local:8: workers of local:8 hold"),
        ("local:8", ["500=asp"], "a run that begins in local:8 cannot go on in asp"),
    ],
)
def test_refused_schedules(start: str, texts: list[str], reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_schedule(parse_mode(start), texts)
    assert reason in str(refused.value)


def test_check_of_the_number_of_workers() -> None:
    schedule = parse_schedule(BSP, ["10=backup:3", "20=asp"])
    schedule.check(4)
    with pytest.raises(UsageError, match="backup:3"):
        schedule.check(3)
