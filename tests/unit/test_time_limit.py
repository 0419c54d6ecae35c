"""The time limit asks whichever server leads, once each."""

from typing import Any

import pytest

from paceline.comm.messages import EndEarly
from paceline.control.time_limit import TimeLimit
from paceline.exceptions import LinkError


class Link:
    """Stands for the link to a server."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.sent: list[Any] = []

    def tell(self, said: EndEarly) -> None:
        if self.broken:
            raise LinkError("gone")
        self.sent.append(said)


@pytest.mark.parametrize(("limit", "elapsed"), [(None, 1e9), (10.0, 9.9)])
def test_before_the_limit_nobody_is_asked(limit, elapsed):
    link = Link()
    TimeLimit(limit).check(elapsed, link)  # type: ignore[arg-type]
    assert link.sent == []


def test_the_lead_is_asked_once_and_so_is_the_next_one():
    limit, first, second = TimeLimit(10), Link(), Link()
    limit.check(11, None)
    for link in (first, first, second):
        limit.check(11, link)  # type: ignore[arg-type]
    asked = [EndEarly("its time was up (10 s, --max-time)")]
    assert first.sent == second.sent == asked


def test_a_lead_whose_link_is_broken_is_asked_again():
    limit, link = TimeLimit(10), Link(broken=True)
    limit.check(11, link)  # type: ignore[arg-type]
    link.broken = False
    limit.check(11, link)  # type: ignore[arg-type]
    assert len(link.sent) == 1
