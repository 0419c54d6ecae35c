"""The tables of figures in the README and in docs/benchmarks.md are those of benchmarks/published."""

from dataclasses import asdict, fields

import pytest

from benchmarks import paper2_gpu
from benchmarks.harness import Row
from benchmarks.table import BLOCK, FROM_A_GPU, PAGES, published, table, with_tables


def test_tables_are_the_published_figures() -> None:
    results = published()
    for page in PAGES:
        text = page.read_text()
        assert BLOCK.search(text), f"{page.name} has no table of figures"
        assert with_tables(text, results) == text, "python -m benchmarks.table --write"


def test_every_published_benchmark_is_in_the_page() -> None:
    named = {block[1] for block in BLOCK.findall(PAGES[1].read_text())}
    assert named == set(published()) | set(FROM_A_GPU)


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


@pytest.mark.parametrize("name", FROM_A_GPU)
def test_a_table_of_a_gpu_says_so_while_nothing_is_published(name: str) -> None:
    results = published()
    results.pop(name, None)
    assert "are published yet" in table(name, results)
    for page in PAGES:
        assert with_tables(page.read_text(), results)


@pytest.mark.parametrize("name", FROM_A_GPU)
def test_figures_of_a_gpu_make_a_table_that_names_the_machine(name: str) -> None:
    row = Row(
        case="a/b",
        ours=2.0,
        peer=4.0,
        unit="ms",
        better="lower",
        ratio=2.0,
        target=1.0,
        ok=True,
        note="",
    )
    result = {
        "benchmark": name,
        "command": f"python -m benchmarks.{name}",
        "date": "2026-11-18T21:00:00+00:00",
        "machine": {"cores": 16, "gpu": "a GPU"},
        "rows": [asdict(row)],
    }
    made = table(name, {name: result})
    assert made.startswith(
        f"`python -m benchmarks.{name}`, 2026-11-18 21:00 UTC, cores 16, gpu a GPU.\n\n| case"
    )
    assert "| `a/b` | 2 ms | 4 | 2 | 1 | yes |" in made


def row_of(case: str, ours: float, peer: float) -> Row:
    ratio = peer / ours
    return Row(
        case=case, ours=ours, peer=peer, unit="s", better="lower", ratio=ratio, target=None, ok=None, note=""
    )


def test_paper_2s_figures_are_the_mean_and_the_best_decrease() -> None:
    mean, best = paper2_gpu.decreases([row_of("a", 8.0, 10.0), row_of("b", 1.0, 10.0)])
    assert (mean.ours, best.ours) == (pytest.approx(45.0), pytest.approx(10.0))  # % of the CPU's time
    assert mean.ok and best.ok
    assert mean.ratio == pytest.approx(mean.peer / mean.ours)
    assert not any(row.ok for row in paper2_gpu.decreases([row_of("a", 9.0, 10.0)]))
    assert paper2_gpu.decreases([]) == []
