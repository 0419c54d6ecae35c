"""A follower's decider hears the same events, knows the same, and decides the same."""

import contextlib
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.decider import Decider
from paceline.core.decider_state import decider_state_from_json, decider_state_to_json
from paceline.core.events import event_from_json
from paceline.core.leases import LeaseBook
from paceline.core.modes import parse_mode
from paceline.core.server.standby import Standby
from paceline.exceptions import FrameError
from tests.deciding import copied, replay

MODES = ["bsp", "backup:1", "ssp:1", "ssp:1+batches=speed", "asp", "asp+quorum=2"]


def new_lead(mode: str) -> Decider:
    lead = Decider(parse_mode(mode), norm_bound=1000)
    lead.book = LeaseBook(samples=40, batch_size=4, drop_last=False, by_round=lead.mode.by_round)
    return lead


def happen(lead: Decider, rng: random.Random, steps: int, tell, sequences, leases) -> None:
    """Workers come, take leases, push, rest and go, as they do."""
    for _ in range(steps):
        here = sorted(lead.machine.members)
        if len(here) < 3 and rng.random() < 0.4:
            worker = min({0, 1, 2} - {*here})
            tell(["join", worker, sequences.get(worker, 0)])
            leases[worker] = []
            continue
        if not here:
            continue
        worker = rng.choice(here)
        if worker in lead.machine.waiting:
            continue
        if rng.random() < 0.05:
            incarnation = lead.roster.incarnations[worker]
            tell(["leave", worker, incarnation, False])
            sequences[worker] = sequences.get(worker, 0) + 1000
        elif not leases[worker]:
            found, _ = tell(["take", worker, lead.epoch, 2, False, 1])
            leases[worker] = [lease.id for lease in found or ()]
            if not leases[worker]:
                tell(["take", worker, lead.epoch, 2, True, 2])
                for who, given_, _ in tell(["granted", 2])[0]:
                    leases[who] = [lease.id for lease in given_]
        else:
            sequences[worker] = sequences.get(worker, 0) + 1
            incarnation = lead.roster.incarnations[worker]
            norm = rng.choice([0.5, 1.0, 1e6])
            facts = [lead.version, 4, [leases[worker].pop()], rng.random() < 0.1, norm, rng.random() < 0.8]
            tell(["push", worker, incarnation, sequences[worker], *facts])
            if lead.parks:
                for who, given_, _ in tell(["granted", 2])[0]:
                    leases[who] = [lease.id for lease in given_]


@given(st.sampled_from(MODES), st.integers(0, 10**6))
def test_it_knows_and_decides_the_same_from_any_moment_on(mode, seed):
    rng = random.Random(seed)
    lead, early = new_lead(mode), Standby(new_lead(mode))
    late: list[Decider] = []

    def tell(event):
        event = json.loads(json.dumps(event))  # as it travels
        early.hear([], [event_from_json(event)], [])
        said = replay(lead, event)
        for other in late:
            assert replay(other, event) == said
        return said

    sequences: dict[int, int] = {}
    leases: dict[int, list[int]] = {}
    happen(lead, rng, 40, tell, sequences, leases)
    late.append(copied(lead))
    happen(lead, rng, 40, tell, sequences, leases)
    for other in (early.decider, *late):
        assert decider_state_to_json(other.state()) == decider_state_to_json(lead.state())


@pytest.mark.parametrize("data", [None, {}, {"machine": 3}, {"os": {}}, {"dict": []}, {"Totals": {}}])
def test_nonsense_is_refused(data):
    with pytest.raises(FrameError):
        decider_state_from_json(data)


def test_an_unknown_event_is_refused():
    with pytest.raises(FrameError, match="'__init__' is none of push, take"):
        replay(new_lead("bsp"), ["__init__", 3])


@given(st.sampled_from(MODES), st.integers(0, 10**6), st.data())
def test_a_state_with_one_odd_value_is_refused_or_harmless(mode, seed, data):
    """Whatever stands where: it is refused as a FrameError, or it is of the right type."""
    lead = new_lead(mode)
    happen(lead, random.Random(seed), 30, lambda event: replay(lead, event), {}, {})
    state = json.loads(json.dumps(decider_state_to_json(lead.state())))
    at = state
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(st.sampled_from([None, True, -3, 0.5, "x", [], {}, [[]], [1, 2], {"a": 1}]))
    with contextlib.suppress(FrameError):
        decider_state_to_json(decider_state_from_json(state))
