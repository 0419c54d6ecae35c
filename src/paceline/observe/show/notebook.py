"""In a notebook: progress in one place, and a result as a table and plots."""

import sys
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

from paceline.observe.analyse.run_data import RunData
from paceline.observe.analyse.summary import diagnosis_of, key_figures, known_facts
from paceline.observe.show import markup, page_charts
from paceline.observe.show.run_view import RunView

__all__ = ["in_place", "result_page", "result_text"]

_HEIGHT = 760
"""Pixels of a result's plots; what is below can be scrolled to."""


def in_place() -> Callable[[str], None] | None:
    """A function that shows a line in the place of the one before, in a Jupyter notebook; None elsewhere."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None or not hasattr(shell, "kernel"):  # IPython in a terminal
        return None
    from IPython.display import display

    shown = None

    def show(line: str) -> None:
        nonlocal shown
        text = {"text/plain": line, "text/html": f'<pre style="white-space:pre-wrap">{escape(line)}</pre>'}
        if shown is None:
            shown = display(text, raw=True, display_id=True)
        else:
            shown.update(text, raw=True)

    return show


def result_text(figures: Mapping[str, str]) -> str:
    """A short table, for terminals."""
    width = max(map(len, figures))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in figures.items())


def result_page(run: Path) -> str:
    """A run's key figures and plots, as markup that changes nothing around it."""
    data = RunData(run)
    facts = known_facts(data)
    diagnosis = diagnosis_of(data, facts)
    page = RunView(data, facts, diagnosis, data.status.state)
    header = "\n".join(
        [
            markup.tiles(key_figures(data, facts, page.state)),
            markup.paragraph(diagnosis.text),
        ]
    )
    main = "\n".join(section(page) for section in (page_charts.metrics, page_charts.speed))
    whole = markup.document(f"Run {page.name}", header, main)
    # A page of its own: its style must not touch the notebook's, nor the notebook's this one.
    frame = f'width="100%" height="{_HEIGHT}" style="border:1px solid #8884;border-radius:6px"'
    return f'<iframe srcdoc="{escape(whole)}" {frame} title="Run {escape(page.name)}"></iframe>'
