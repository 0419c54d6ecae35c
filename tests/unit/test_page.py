"""The page says first what limited the run, shows the rest, and survives runs that are not whole."""

import re
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paceline.observe.analyse import curves
from paceline.observe.analyse.diagnosis import diagnose
from paceline.observe.analyse.facts import Facts, Series, Times, facts_of
from paceline.observe.analyse.run_data import RunData
from paceline.observe.analyse.summary import key_figures
from paceline.observe.record.tables import to_parquet
from paceline.observe.show.page import run_page
from paceline.observe.show.page_charts import histogram, step_times
from paceline.observe.show.run_report import write_html
from paceline.observe.show.run_view import RunView
from tests.synthetic_run import write_run

VOID = {"meta", "line", "rect", "circle", "br"}


class Reader(HTMLParser):
    """The page's texts, and whether its tags match."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "body" in self.open and data.strip():
            self.texts.append(" ".join(data.split()))


def page_of(path: Path, state: str | None = None) -> str:
    run = RunData(path)
    facts = facts_of(run)
    return run_page(run, facts, diagnose(facts, "asp", 2), state=state)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "a")


def test_first_line_is_the_diagnosis(finished: Path) -> None:
    texts = Reader(page_of(finished)).texts
    assert texts[0] == "Run 20261115-081502-digits-4f2a"
    assert texts[1] == diagnose(facts_of(RunData(finished)), "asp", 2).text


def test_every_section_is_there(finished: Path) -> None:
    page = page_of(finished)
    assert re.findall("<h2>(.*?)</h2>", page) == [
        "What it learned",
        "Throughput",
        "Where the workers&#x27; time went",
        "How long a step took",
        "A few steps, side by side",
        "Who waited for whom",
        "Staleness",
        "Resources",
        "Bytes",
        "Profile",
        "Workers and servers",
        "Samples",
        "Incidents",
        "The command and the plan",
        "Files",
        "Words",
    ]
    texts = Reader(page).texts
    for text in (
        "paceline run --mode asp digits.py --note 'two <b>words</b>'",
        "worker:1 was killed by signal 9 <replaced>",
        "worker:0 waited",
    ):
        assert any(text in each for each in texts), text
    assert '<div class="box">' not in page, "nothing is missing"


def test_page_asks_the_network_for_nothing(finished: Path) -> None:
    page = page_of(finished)
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert not re.findall(r"(?:src|href)=|url\(|@import|https?://", page)


def test_key_figures(finished: Path) -> None:
    run = RunData(finished)
    figures = dict(key_figures(run, facts_of(run)))
    assert figures["state"] == "succeeded" and figures["updates"] == "600" and figures["loss"] == "0.07"
    assert figures["idleness"] == "18 %"


@pytest.mark.parametrize(
    ("state", "said"), [("running", "still going on (running)"), ("crashed", "did not end: it was killed")]
)
def test_unfinished_run_says_so_and_until_when(tmp_path: Path, state: str, said: str) -> None:
    texts = Reader(page_of(write_run(tmp_path / "a", state="running", steps=20), state)).texts
    assert said in texts[2] and re.search(r"until \d\d:\d\d:\d\d", texts[2])


def test_parquet_gives_the_same_page(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", steps=50)
    before = page_of(path)
    to_parquet(path)
    assert not (path / "raw").exists()
    drop = re.compile(r"<footer>.*?</footer>")
    assert drop.sub("", page_of(path)) == drop.sub("", before)


@pytest.mark.parametrize("workers", [1, 2, 64])
def test_any_number_of_workers(tmp_path: Path, workers: int) -> None:
    page = page_of(write_run(tmp_path / "a", workers=workers, steps=30))
    Reader(page)
    assert len(page) < 2_000_000
    assert ("highest of 64" in page) == (workers == 64)
    assert ("Who waited for whom" in page) == (workers > 1)


def test_empty_directory(tmp_path: Path) -> None:
    run = RunData(tmp_path)
    texts = Reader(run_page(run, facts_of(run), diagnose(Facts()))).texts
    assert texts[0] == f"Run {tmp_path.name}"
    assert "There are no spans" in texts[1]
    assert any("run.json cannot be read" in each for each in texts)


@pytest.mark.parametrize(
    "name", ["run.json", "status.json", "pushes.csv", "events.jsonl", "raw/worker-0.0.spans"]
)
@pytest.mark.parametrize("damage", [None, b"", b"\xff\x00{[", b'{"job": 5, "plan": [1], "command": 3}\n'])
def test_damaged_files(tmp_path: Path, name: str, damage: bytes | None) -> None:
    path = write_run(tmp_path / "a", steps=10)
    (path / name).unlink()
    if damage is not None:
        (path / name).write_bytes(damage)
    target = tmp_path / "page.html"
    write_html(RunData(path), target)
    assert Reader(target.read_text()).texts[0].startswith("Run ")


def test_what_fails_is_left_out_and_said(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(curves, "timeline_lanes", broken)
    page = page_of(finished)
    assert "A few steps" not in page and "Who waited for whom" in page
    assert any("section on timeline could not be made" in each for each in Reader(page).texts)


def test_throughput_is_what_was_done(finished: Path) -> None:
    run = RunData(finished)
    facts = facts_of(run)
    curve = curves.throughput(run, facts)
    assert curve is not None
    width = facts.seconds / len(curve.values)
    assert sum(curve.values) * width == pytest.approx(32 * 600, rel=0.02)


def test_timeline_is_of_the_middle(finished: Path) -> None:
    run = RunData(finished)
    lanes, seconds = curves.timeline_lanes(run, facts_of(run))
    assert [lane.name for lane in lanes] == ["worker:0", "worker:1", "worker:2", "server:0"]
    assert 0.05 < seconds < 0.2
    for lane in lanes[:3]:
        covered = sum(min(seconds, bar.end) - max(0.0, bar.start) for bar in lane.bars)
        assert covered == pytest.approx(seconds, rel=0.01)


def test_of_many_lanes_the_slowest_worker_and_the_servers_are_shown(tmp_path: Path) -> None:
    run = RunData(write_run(tmp_path / "a", workers=50, servers=2, steps=20))
    lanes, _ = curves.timeline_lanes(run, facts_of(run))
    names = [lane.name for lane in lanes]
    assert len(names) == curves.MOST_LANES
    assert names[0] == "worker:0" and names[-3:] == ["worker:49", "server:0", "server:1"]


def test_many_curves_become_three() -> None:
    many = [Series(f"worker:{i}", [0.0, 10.0], [i, i]) for i in range(20)]
    highest, mean, lowest = curves.few(many)
    assert (set(highest.values), set(mean.values), set(lowest.values)) == ({19.0}, {9.5}, {0.0})
    assert curves.few(many[:3]) == many[:3]


def test_uneven_steps_are_pointed_out(finished: Path) -> None:
    run = RunData(finished)
    facts = facts_of(run)
    even = step_times(RunView(run, facts, diagnose(facts, "asp", 2), "succeeded"))
    assert "99th percentile" in even and "Uneven" not in even
    facts.workers[1].step = Times(100, 0.1, 0.1, 0.45)
    uneven = step_times(RunView(run, facts, diagnose(facts, "asp", 2), "succeeded"))
    assert "one in a hundred steps of worker:1 took at least 4.5 times" in uneven


def test_wide_histograms_have_few_bars() -> None:
    staleness = Counter({0: 5, 99: 1, 50: 2})
    labels, counts = histogram(staleness)
    assert len(labels) <= 30 and sum(counts) == staleness.total()
    assert labels[0] == "0–3"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ten_million_spans(tmp_path: Path) -> None:
    _page_of_many(tmp_path, 10_000_000, limit_s=30)


def test_a_million_spans(tmp_path: Path) -> None:
    _page_of_many(tmp_path, 1_000_000, limit_s=30)


def _page_of_many(tmp_path: Path, spans: int, limit_s: float) -> None:
    path = write_run(tmp_path / "a", workers=8, steps=spans // 64, with_resources=False)
    began = time.perf_counter()
    run = RunData(path)
    target = tmp_path / "page.html"
    write_html(run, target)
    took = time.perf_counter() - began
    assert len(run.columns("spans")["ns"]) >= spans and run.missing == []
    assert took < limit_s
    assert target.stat().st_size < 2_000_000
