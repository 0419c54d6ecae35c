"""Steps and events as JSON: what is written is read again, and nonsense is refused, not believed."""

import json
import math
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.codec import Codec
from paceline.core.events import Event, Push, event_from_json, event_to_json
from paceline.core.modes import PushId
from paceline.core.modes.lbfgs import Ops
from paceline.core.placement import Placement
from paceline.core.steps import AdmitStep, PlaceStep, Step, step_from_json, step_to_json
from paceline.exceptions import FrameError

PLACEMENTS = st.builds(
    lambda number, holders: Placement(number, frozenset(h for each in holders for h in each), tuple(holders)),
    st.integers(0, 9),
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True).map(tuple), max_size=4),
)
OPS = st.lists(st.lists(st.one_of(st.text(max_size=3), st.integers()), max_size=2).map(lambda a: ["dot", *a]))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def records(kinds: Any) -> st.SearchStrategy[Any]:
    found = []
    for kind in get_args(kinds):
        fields = {}
        for name, wanted in kind.__annotations__.items():
            if wanted == Ops:
                fields[name] = OPS
            elif wanted is float or wanted == float | None:
                fields[name] = FLOATS
        found.append(st.builds(kind, **fields) if kind is not PlaceStep else st.builds(kind, PLACEMENTS))
    return st.one_of(found)


def finite(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


@given(records(Step).filter(finite))
def test_a_step_is_read_as_it_was_written(step: Step) -> None:
    assert step_from_json(json.loads(json.dumps(step_to_json(step)))) == step


@given(records(Event).filter(finite))
def test_an_event_is_read_as_it_was_written(event: Event) -> None:
    assert event_from_json(json.loads(json.dumps(event_to_json(event)))) == event


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("decode", [step_from_json, event_from_json])
@given(data=st.data())
def test_nonsense_is_refused(decode: Any, data: st.DataObject) -> None:
    """Anything at all, and what was sound before one of its values became another."""
    if data.draw(st.booleans()):
        kinds, encode = (Step, step_to_json) if decode is step_from_json else (Event, event_to_json)
        nonsense = json.loads(json.dumps(encode(data.draw(records(kinds).filter(finite)))))
        nonsense[data.draw(st.integers(0, len(nonsense) - 1))] = data.draw(JSON)
    else:
        names = ["apply", "admit", "place", "hold", "push", "take", "vote", "ask"]
        nonsense = [data.draw(st.sampled_from(names)), *data.draw(st.lists(JSON, max_size=6))]
        nonsense = data.draw(st.one_of(st.just(nonsense), JSON))
    try:
        found = decode(nonsense)
    except FrameError:
        return
    assert decode(
        json.loads(json.dumps((step_to_json if decode is step_from_json else event_to_json)(found)))
    )


def test_defaults_at_the_end_are_left_out() -> None:
    assert step_to_json(AdmitStep(1, 7)) == ["admit", 1, 7]
    assert step_to_json(AdmitStep(1, 7, "keep")) == ["admit", 1, 7, "keep"]
    push = Push(PushId(1, 0, 3), 7, 4, (2,), False, None, True)
    assert event_to_json(push) == ["push", 1, 0, 3, 7, 4, (2,), False, None, True]
    assert event_to_json(push._replace(optimizer=1))[-2:] == [1, 0]


def test_a_type_that_a_codec_cannot_read_is_found_when_it_is_built() -> None:
    class Odd(AdmitStep):
        pass

    Odd.__annotations__ = {"worker": set[int], "version": int, "keep": int}
    with pytest.raises(TypeError, match="does not know how to read set"):
        Codec({"odd": Odd})
