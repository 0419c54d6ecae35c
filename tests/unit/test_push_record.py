"""The record of applied pushes, which the next leader takes over."""

from pathlib import Path

import pytest

from paceline.core.decider import Decider
from paceline.core.totals import Applied
from paceline.observe.record.thinning import Thinning
from paceline.ps.push_record import PushRecord, open_pushes
from tests.unit.test_lead import Worker, lead_of

ALL = Thinning(1_000)


@pytest.mark.parametrize("written", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("torn", [b"", b"5,0,0"])
def test_a_lead_in_another_ones_place_goes_on_with_its_record(
    tmp_path: Path, written: int, torn: bytes
) -> None:
    """The one before had written fewer rows than it told us of, or more, and may have died within one."""
    lead = lead_of("asp", workers=1).decider
    worker = Worker(lead, 0)
    for _ in range(4):
        worker.take()
        worker.push()
    record = tmp_path / "pushes.csv"
    with open_pushes(record, 0, ALL) as file:
        file.write(b"".join(b"%d,row\n" % (i + 1) for i in range(written)) + torn)
    taken = PushRecord.take_over(record, 4, lead.pushes.applied, ALL)
    kept = min(written, 4)
    assert len(taken.pending) == 4 - kept
    taken.close()
    with record.open("ab") as file:
        file.write(b"next\n")
    rows = record.read_text().splitlines()[1:]
    assert rows == [*(f"{i + 1},row" for i in range(kept)), "next"]


@pytest.mark.parametrize("told", range(0, 31, 3))
def test_a_lead_goes_on_with_a_thinned_record_as_if_it_had_written_all_of_it(
    tmp_path: Path, told: int
) -> None:
    """The one before wrote its first `told` pushes; this one knows the last 20 of 30."""

    def push(lead: Decider, count: int) -> list[Applied]:
        worker = Worker(lead, 0)  # type: ignore[arg-type]
        worker.sequence = lead.totals.pushes
        lead.pushes.applied.clear()
        for _ in range(count):
            worker.take()
            worker.push()
        return [*lead.pushes.applied]

    few = Thinning(12)

    def write(path: Path, *, first: int, remembered: int) -> list[str]:
        lead = lead_of("asp", samples=400, workers=1).decider
        record = PushRecord.begin(path, 0, few)
        early = push(lead, first)
        record.pending += early
        record.write(lead.totals.pushes)
        late = push(lead, 30 - first)
        if first < 30:
            record.close()
            record = PushRecord.take_over(path, 30, late[-remembered:], few)
        record.write(lead.totals.pushes)
        record.close()
        return path.read_text().splitlines()[1:]

    whole = write(tmp_path / "a.csv", first=30, remembered=30)
    assert len(whole) == few.rows_of(30) == 9
    assert write(tmp_path / "b.csv", first=told, remembered=30) == whole
    with open_pushes(tmp_path / "b.csv", 10, few):
        pass
    assert (tmp_path / "b.csv").read_text().splitlines()[1:] == whole[: few.rows_of(10)]
