"""What stands in the terminal when a run is over."""

import contextlib
import re
import shutil
import signal
import textwrap
from pathlib import Path

import typer

from paceline.cli.printing import complain, say
from paceline.observe import RunStatus
from paceline.observe.analyse import wording
from paceline.observe.record.run_files import read_summary
from paceline.observe.show.visible import in_one_line

__all__ = ["finish", "numbers"]

EXIT_CODES = {"succeeded": 0, "stopped": 128 + signal.SIGINT}
"""Of a run that was stopped by another signal: 128 and its number, as shells have it."""
COLOURS = {"succeeded": "green", "stopped": "yellow"}


def finish(status: RunStatus) -> None:
    """Say how the run ended and where its files are; exit 0 if and only if it succeeded, as its script did:
    also if it diverged, which is said.

    On standard error, as all that is ours: standard output is the script's.
    """
    say(err=True)
    if status.state not in EXIT_CODES:
        complain(status.error or f"the run ended in state {status.state}, and nobody said why")
        say(err=True)
    # Words stay whole; a path below may not, so that it can be copied.
    width = shutil.get_terminal_size().columns
    ended = in_one_line(wording.state(status)).capitalize()
    colour = "yellow" if ended.lower() != status.state else COLOURS.get(status.state, "red")
    comma = "," if "," in ended else ""  # else it would have diverged after so long
    text = textwrap.fill(ended + comma + numbers(status), width)
    say(text[: len(ended)], fg=colour, bold=True, nl=False, err=True)
    say(text[len(ended) :], err=True)
    if status.ended_early is not None:
        say(textwrap.fill(f"  It ended early: {status.ended_early}.", width), err=True)
    if limit := _limit(status):
        say(textwrap.fill(limit, width, initial_indent="  ", subsequent_indent="  "), err=True)
    for name, text in {**_metrics(status), **_places(status)}.items():
        say(f"  {name:14} {text}", err=True)
    code = EXIT_CODES.get(status.state, status.exit_code or 1)
    if status.state == "stopped" and status.stopped_by:
        code = 128 + status.stopped_by
    if code:
        raise typer.Exit(code)


def numbers(status: RunStatus) -> str:
    """How long a run took, and how far it came: the end of a sentence that begins with its state."""
    text = f" after {wording.duration(status.elapsed_s)}"
    if not status.version:
        return f"{text}, before the first update."
    facts = [
        wording.progress(status),
        wording.plural(status.version, "update"),
        *wording.rates(status),
        *wording.trouble(status),
    ]
    return f"{text}: {', '.join(facts)}."


def _limit(status: RunStatus) -> str:
    """What limited the run, as its report says."""
    with contextlib.suppress(OSError, ValueError):
        found = read_summary(Path(status.run_dir))["diagnosis"]
        if found["limit"] not in ("unknown", "failure"):  # why it failed is said already
            return f"{found['sentence']} {found['advice']}"
    return ""


def _metrics(status: RunStatus) -> dict[str, str]:
    if not status.version:
        return {}
    metrics = wording.metrics(status.metrics)
    last = {"last metrics": ", ".join(metrics)} if metrics else {}
    if status.ended_s:
        last["time"] = wording.times(status)
    if status.earlier_s:
        last["all starts"] = wording.all_starts(status)
    return last | {"waiting": f"{wording.percent(status.idleness)} of the workers' time"}


def _places(status: RunStatus) -> dict[str, str]:
    if not status.run_dir:
        return {}
    path = Path(status.run_dir)
    run = status.run_id or str(path)
    places = {}
    if status.state == "failed":
        role = re.match(r"(controller|server|worker)(?::(\d+))?\b", status.error or "")
        log = path / "logs"
        if role is not None:
            log /= "-".join(part for part in role.groups() if part) + ".log"
        places["log"] = str(log)
    places["run directory"] = str(path)
    if (path / "report.html").exists():
        places["report"] = str(path / "report.html")
    if status.checkpoints and status.state == "succeeded":
        places["the model"] = f"paceline export {run} model.safetensors"
        if status.ended_early is not None:
            places["to go on"] = f"paceline resume {run}"
    elif status.checkpoints:
        places["to go on"] = f"paceline resume {run}"
    return places
