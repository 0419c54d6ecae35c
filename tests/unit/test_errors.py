"""What an ERROR frame says of an exception."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm import Kind, frames
from paceline.comm.errors import error_body, error_of, shortened
from paceline.exceptions import PacelineError, PlanError


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("character", ["x", "\n", "\u20ac", "\U0001f525", "\ud800", "\0"])
@pytest.mark.parametrize("length", [100, 70_000, 5_000_000])
def test_an_error_of_any_length_fits_into_a_frame(character: str, length: int) -> None:
    text = "begins here" + character * length + "ends here"
    body = error_body(ValueError(text), "Traceback\n" + text, secondary=False, version=10**12)
    frames.check(Kind.ERROR, body)
    for key in ("message", "traceback"):
        assert "begins here" in body[key]
        assert body[key].endswith("ends here")
    if length > 50_000:
        assert "characters left out" in body["message"]
    else:
        assert body["message"] == text


@given(st.text(alphabet=st.characters(exclude_categories=())), st.integers(128, 400))
def test_a_text_is_cut_only_if_it_must_be_and_says_how_much_is_missing(text: str, limit: int) -> None:
    short = shortened(text, limit)
    if len(json.dumps(text)) - 2 <= limit:
        assert short == text
        return
    assert len(json.dumps(short)) - 2 <= limit
    head, note, tail = short.rpartition("[... ")[0], short.rpartition("[... ")[2], ""
    number, _, tail = note.partition(" characters left out ...]\n")
    head = head[:-1]
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + int(number.replace(",", "")) + len(tail) == len(text)


def test_an_exception_without_a_text_is_reported_all_the_same() -> None:
    assert error_body(Wordless()) == {
        "error": "Wordless",
        "message": "(its text cannot be had: RuntimeError)",
    }


def test_an_error_of_ours_is_the_same_at_the_other_end() -> None:
    found = error_of(error_body(PlanError("too much")))
    assert type(found) is PlanError and str(found) == "too much"
    assert type(error_of({"error": "ValueError", "message": "x"})) is PacelineError
