"""What a reader and the run's controller write for each other, as files hold it."""

import json
import math
from dataclasses import asdict

import pytest

from paceline.core.json_types import JsonObject
from paceline.storage.json_files import parse_json
from paceline.storage.run_requests import (
    BadRequest,
    EvaluatedRequest,
    Refused,
    RunAnswer,
    RunHasEnded,
    SnapshotFailed,
    SnapshotRequest,
    SnapshotWritten,
    read_request,
    read_snapshot_answer,
    request_body,
)


def as_in_a_file(body: JsonObject) -> JsonObject:
    value = parse_json(json.dumps(body))
    assert isinstance(value, dict)
    return value


def test_requests_arrive_as_they_were() -> None:
    wanted = SnapshotRequest(at=10, every=5, process=77)
    assert read_request(as_in_a_file(request_body(wanted))) == wanted
    found = EvaluatedRequest(20, {"eval_loss": math.nan, "eval_top": math.inf, "eval_accuracy": 0.1})
    heard = read_request(as_in_a_file(request_body(found)))
    assert isinstance(heard, EvaluatedRequest) and heard.version == 20
    assert math.isnan(heard.values["eval_loss"]) and heard.values["eval_top"] == math.inf
    assert heard.values["eval_accuracy"] == 0.1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"kind": "snapshot", "every": 1, "process": 1}, "at: is missing"),
        ({"kind": "snapshot", "at": True, "every": 1, "process": 1}, "at: True is not a whole number"),
        ({"kind": "snapshot", "at": 1, "every": None, "process": 1}, "every: None is not a whole number"),
        ({"kind": "evaluated", "version": 1, "values": [1]}, "values: a list is not an object"),
        ({"kind": "evaluated", "version": 1, "values": {"a": "x"}}, "values.a: 'x' is not a finite number"),
    ],
)
def test_requests_that_are_none(body: JsonObject, said: str) -> None:
    bad = read_request(body)
    assert isinstance(bad, BadRequest) and said in bad.reason


@pytest.mark.parametrize(
    "answer",
    [
        SnapshotWritten("snapshots/10", 10),
        SnapshotFailed("the disk is full"),
        RunHasEnded("checkpoints/40", 40),
        RunHasEnded(None, 0),
        Refused("no such version"),
    ],
)
def test_answers_are_told_apart_by_their_fields(answer: RunAnswer) -> None:
    assert read_snapshot_answer(as_in_a_file(asdict(answer))) == answer


def test_an_answer_that_is_none() -> None:
    with pytest.raises(ValueError, match="path: is missing"):
        read_snapshot_answer({})
