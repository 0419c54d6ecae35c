"""The tables of figures in the README and in docs/benchmarks.md are those of benchmarks/published."""

from dataclasses import fields

from benchmarks.harness import Row
from benchmarks.table import BLOCK, PAGES, published, with_tables


def test_tables_are_the_published_figures() -> None:
    results = published()
    for page in PAGES:
        text = page.read_text()
        assert BLOCK.search(text), f"{page.name} has no table of figures"
        assert with_tables(text, results) == text, "python -m benchmarks.table --write"


def test_every_published_benchmark_is_in_the_page() -> None:
    named = {block[1] for block in BLOCK.findall(PAGES[1].read_text())}
    assert named == set(published())


def test_published_files_have_the_documented_form() -> None:
    for name, result in published().items():
        assert result["command"].startswith(f"python -m benchmarks.{name}")
        assert {"date", "machine", "rows"} <= set(result)
        for row in result["rows"]:
            assert set(row) >= {field.name for field in fields(Row)}
            if row["ratio"] is not None:
                better = row["peer"] / row["ours"]
                better = 1 / better if row["better"] == "higher" else better
                assert abs(row["ratio"] - better) <= 0.02 * better, row["case"]


def test_a_changed_figure_is_seen() -> None:
    results = published()
    text = PAGES[1].read_text()
    results["exchange"]["rows"][0]["ours"] *= 2
    assert with_tables(text, results) != text
