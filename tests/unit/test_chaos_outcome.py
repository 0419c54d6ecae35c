"""The fault matrix's verdicts: a row is held to all that it promises."""

from dataclasses import replace

import pytest

from benchmarks.chaos.outcome import Outcome, Skipped, Trial, judged, row_of, table

WELL = Outcome(detected_s=0.1, blackout_s=0.5)
TRIAL = Trial(
    row="4",
    name="server-killed",
    wanted="on again ≤ 1 s",
    run=lambda seed: WELL,
    measure="blackout_s",
    limit=1.0,
    most_lost=2,
)


def test_a_row_that_keeps_its_promise():
    row = row_of(TRIAL, 3)
    assert (row.ok, row.ours, row.ratio, row.runs, row.well) == (True, 0.5, 2.0, 3, 3)
    assert "4-server-killed  3     0.10 s    0.50 s" in table([row])


@pytest.mark.parametrize(
    "bad",
    [
        replace(WELL, why="it failed"),
        replace(WELL, duplicated=1),
        replace(WELL, missing=1),
        replace(WELL, lost=3),
    ],
)
def test_one_bad_run_is_enough(bad):
    row = judged(TRIAL, [WELL, WELL, bad])
    assert row.ok is False and "MISSED" in table([row])


def test_the_median_is_held_to_the_limit():
    slow = replace(WELL, blackout_s=1.5)
    assert judged(TRIAL, [WELL, WELL, slow]).ok
    assert judged(TRIAL, [WELL, slow, slow]).ok is False
    more = replace(TRIAL, better="higher", measure="figure", limit=0.9)
    assert judged(more, [Outcome(figure=0.95)]).ok
    assert judged(more, [Outcome(figure=0.85)]).ok is False


def test_a_row_whose_measure_is_missing_is_not_passed():
    assert judged(TRIAL, [replace(WELL, blackout_s=None)]).ok is False


def test_a_row_that_cannot_be_run_says_why():
    def run(seed: int) -> Outcome:
        raise Skipped("no replicas here")

    row = row_of(replace(TRIAL, run=run), 3)
    assert (row.ok, row.runs, row.note) == (None, 0, "skipped: no replicas here")
