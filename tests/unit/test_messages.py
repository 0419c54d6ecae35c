"""The messages of the controller's links: valid ones round-trip, any other body is a FrameError."""

import itertools
import math
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.comm import frames
from paceline.comm.message_codec import Catalogue, body_of
from paceline.comm.messages import (
    FROM_CONTROLLER,
    SAID_ONCE,
    TO_CONTROLLER,
    FromController,
    LetWorkerGo,
    LoggedMetrics,
    RoleError,
    ToController,
    UserNote,
)
from paceline.core.json_types import JsonObject
from paceline.exceptions import FrameError

CLASSES = [*get_args(ToController), *get_args(FromController)]
NUMBERS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(max_size=20)
NASTY: list[Any] = [
    *(None, True, 0, -1, 2**63, 10**400, 1.5, 1e300, "", "nan", "1", "Infinity", "½"),
    *([], [1], [[]], [[1, 10**400]], ["nan"], [None], [{}], [{"a": 10**400}], [1, 2, 3]),
    *({}, {"a": 1}, {"1": 1}, {"01": 1}, {"½": 1}, {"-1": None}, {"a": 10**400}, {"1": "nan"}, {"a": {}}),
]
JSON = st.one_of(
    st.sampled_from(NASTY),
    st.lists(st.sampled_from([None, 1, "a", [1, 2.5], {"1": 1}]), max_size=3),
    st.dictionaries(TEXTS, st.sampled_from([None, 1, "a", [1], {"a": None}]), max_size=2),
)


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Valid values of a field."""
    if annotation in (int, float, bool, str):
        return {int: NUMBERS, float: st.floats(), bool: st.booleans(), str: TEXTS}[annotation]
    if annotation == JsonObject:
        return st.dictionaries(TEXTS, JSON, max_size=3)
    inner = [each for each in get_args(annotation) if each not in (type(None), ...)]
    origin = getattr(annotation, "__origin__", None)
    if origin is dict:
        return st.dictionaries(values_of(inner[0]), values_of(inner[1]), max_size=3)
    if origin is tuple and ... in get_args(annotation):
        return st.lists(values_of(inner[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, inner))
    return st.none() | values_of(inner[0])


def said(cls: type) -> st.SearchStrategy[Any]:
    """Valid messages of a class."""
    return st.builds(cls, **{name: values_of(kind) for name, kind in get_type_hints(cls).items()})


MESSAGES = st.one_of(*map(said, CLASSES))


def catalogue_of(message: Any) -> Catalogue[Any]:
    return TO_CONTROLLER if isinstance(message, ToController) else FROM_CONTROLLER


def over_the_wire(body: dict[str, Any]) -> dict[str, Any]:
    data = frames.encode(frames.Kind.STATS, body, sequence=0, payload_bytes=0, key=b"k" * 32)
    return frames.decode_body(data[frames.HEADER_BYTES :])


@settings(deadline=None, max_examples=200)
@given(MESSAGES)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    kind, body = body_of(message)
    got = catalogue_of(message).read(kind, over_the_wire(body))
    assert type(got) is type(message)
    assert repr(got) == repr(message)  # NaN is not equal to itself


@settings(deadline=None, max_examples=300)
@given(MESSAGES, st.data())
def test_a_damaged_body_is_a_frame_error_or_another_valid_message(message: Any, data: st.DataObject) -> None:
    kind, body = body_of(message)
    way = data.draw(st.sampled_from(["value", "field", "missing", "inside"]))
    names = sorted(body)
    if way == "field" or not names:
        body[data.draw(TEXTS)] = data.draw(JSON)
    elif way == "missing":
        del body[data.draw(st.sampled_from(names))]
    elif way == "value":
        body[data.draw(st.sampled_from(names))] = data.draw(JSON)
    else:
        name = data.draw(st.sampled_from(names))
        body[name] = data.draw(st.sampled_from([[body[name]], {"a": body[name]}, str(body[name])]))
    body = over_the_wire(body)
    try:
        got = catalogue_of(message).read(kind, body)
    except FrameError as error:
        assert 0 < len(str(error)) < 300
    else:  # what was drawn is valid, too: it means one thing
        assert repr(catalogue_of(message).read(*body_of(got))) == repr(got)


def plain(annotation: Any) -> Any:
    """One valid value of a field."""
    if annotation in (int, float, bool, str):
        return annotation()
    origin, inner = getattr(annotation, "__origin__", None), get_args(annotation)
    if annotation == JsonObject or origin is dict:
        return {}
    if origin is tuple:
        return () if ... in inner else tuple(map(plain, inner))
    return None


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_refuses_every_value_of_another_type(cls: Any) -> None:
    hints = get_type_hints(cls)
    message = cls(**{name: plain(hint) for name, hint in hints.items()})
    kind, valid = body_of(message)
    for name, value in itertools.product(hints, NASTY):
        try:
            got = catalogue_of(message).read(kind, {**valid, name: value})
        except FrameError as error:
            assert name in str(error)
        else:
            assert repr(catalogue_of(message).read(*body_of(got))) == repr(got)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(frames.Kind), st.dictionaries(TEXTS, JSON, max_size=4))
def test_any_body_of_any_kind_gives_a_message_or_a_frame_error(
    kind: frames.Kind, body: dict[str, Any]
) -> None:
    for catalogue in (TO_CONTROLLER, FROM_CONTROLLER):
        try:
            catalogue.read(kind, body)
        except FrameError as error:
            assert 0 < len(str(error)) < 300


@pytest.mark.parametrize(
    ("kind", "body", "problem"),
    [
        (frames.Kind.NOTE, {}, "a NOTE without the field 'text'"),
        (frames.Kind.NOTE, {"text": 1}, "field 'text' of a NOTE is 1"),
        (frames.Kind.NOTE, {"text": "a", "more": 1}, "a NOTE with an unknown field 'more'"),
        (frames.Kind.SAVE_CUT, {"version": True}, "field 'version' of a SAVE_CUT is True"),
        (frames.Kind.LEAVE, {"worker": 1}, "LEAVE is no message to the controller"),
        (frames.Kind.METRICS, {"log": {"a": "x"}, "log_at": {}, "losses": [], "clock": 1}, "field 'log'"),
    ],
)
def test_a_refusal_names_the_kind_and_the_field(kind: frames.Kind, body: Any, problem: str) -> None:
    with pytest.raises(FrameError, match=problem):
        TO_CONTROLLER.read(kind, body)


def test_every_message_has_a_kind_of_its_own_and_fits_into_its_frame() -> None:
    kinds = [body_of(cls(*[None] * len(cls._fields)))[0] for cls in CLASSES if not cls._fields]
    assert len(set(kinds)) == len(kinds)
    assert {body_of(UserNote("a"))[0], body_of(LetWorkerGo(1))[0]} == {frames.Kind.NOTE, frames.Kind.LEAVE}
    assert frames.Kind.STATS not in SAID_ONCE and frames.Kind.NOTE in SAID_ONCE


def test_values_that_json_lacks_arrive() -> None:
    kind, body = body_of(LoggedMetrics({"loss": math.nan, "a": -math.inf}, {"step": 1}, (math.inf,), 3))
    got = TO_CONTROLLER.read(kind, over_the_wire(body))
    assert isinstance(got, LoggedMetrics)
    assert math.isnan(got.log["loss"]) and got.log["a"] == -math.inf and got.losses == (math.inf,)


def test_defaults_are_left_out_of_the_body() -> None:
    assert body_of(RoleError("LinkError", "gone"))[1] == {"error": "LinkError", "message": "gone"}
