"""A run as one HTML page, for people who have never seen Paceline: what limited it, then why that is so."""

from collections.abc import Callable
from datetime import datetime
from html import escape

from paceline.observe.analyse.diagnosis import Diagnosis
from paceline.observe.analyse.facts import Facts
from paceline.observe.analyse.run_data import RunData
from paceline.observe.analyse.summary import key_figures
from paceline.observe.record.status import ENDED
from paceline.observe.show import markup, page_charts, page_device, page_setting, page_tables
from paceline.observe.show.run_view import RunView

__all__ = ["run_page"]

SECTIONS: tuple[Callable[[RunView], str], ...] = (
    page_charts.metrics,
    page_charts.speed,
    page_charts.time,
    page_device.device,
    page_charts.step_times,
    page_charts.timeline,
    page_charts.waiting,
    page_charts.staleness,
    page_charts.resources,
    page_tables.links,
    page_tables.profile,
    page_tables.workers,
    page_tables.samples,
    page_tables.incidents,
    page_setting.setting,
    page_setting.files,
    page_setting.glossary,
)
"""The page from top to bottom. A section that has nothing to show returns an empty string."""


def run_page(run: RunData, facts: Facts, diagnosis: Diagnosis, *, state: str | None = None) -> str:
    """The page. What cannot be shown is left out and named in a box; it does not raise for damaged data.

    Args:
        state: the run's state from a caller that knows whether its process lives (`running`, `crashed`); by
            default the state that the run wrote last.
    """
    page = RunView(run, facts, diagnosis, state or run.status.state)
    main = [_or_left_out(page, section) for section in SECTIONS]
    header = _header(page)  # last: only now is it known what is missing
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    versions = run.record.get("versions")
    by = versions.get("paceline") if isinstance(versions, dict) else None
    footer = f"Run {page.name}{f', Paceline {by}' if by else ''}. This page was made at {made}."
    return markup.document(
        f"Run {page.name}", header, "\n".join(part for part in main if part), escape(footer)
    )


def _or_left_out(page: RunView, section: Callable[[RunView], str]) -> str:
    try:
        return section(page)
    except Exception as error:  # damaged data can be wrong in any way, and the rest is worth reading
        text = f"the section on {section.__name__} could not be made ({type(error).__name__}: {error})"
        page.run.missing.append(text[:200])
        return ""


def _header(page: RunView) -> str:
    parts = [
        f"<h1>Run {escape(page.name)}</h1>",
        f'<p class="verdict">{escape(page.diagnosis.text, quote=False)}</p>',
    ]
    if page.state not in ENDED:
        parts.append(markup.box(_unfinished(page)))
    if page.run.missing:
        title = "Not everything could be read; what follows is without it:"
        parts.append(markup.box(title, page.run.missing))
    if page.status.error:
        why = f"<pre>{escape(page.status.error)}</pre>"
        parts.append(f"<details open><summary>Why it failed</summary>{why}</details>")
    parts.append(markup.tiles(key_figures(page.run, page.facts, page.state)))
    return "\n".join(parts)


def _unfinished(page: RunView) -> str:
    last = page.facts.began + page.facts.seconds
    until = f" until {datetime.fromtimestamp(last).astimezone():%H:%M:%S %Z}" if last else " until now"
    if page.state == "crashed":
        return f"This run did not end: it was killed. What follows is what it did{until}."
    return f"This run is still going on ({page.state}). What follows is what it did{until}."
