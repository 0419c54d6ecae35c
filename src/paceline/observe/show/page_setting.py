"""The end of a run's page: the command and the plan, the files, the words."""

import json
import shlex
from html import escape
from typing import Any

from paceline.observe.analyse import wording
from paceline.observe.show import markup
from paceline.observe.show.run_view import MOST_ROWS, RunView

__all__ = ["files", "glossary", "setting"]

GLOSSARY = (
    ("worker", "A process that computes gradients on its share of the data."),
    ("server", "A process that owns a part of the model's parameters and applies gradients to it."),
    ("push, pull", "Sending gradients to the servers; getting fresh parameters from them."),
    ("version", "How many updates the parameters have had."),
    (
        "staleness",
        "Versions that the parameters gained between a worker's reading of them and the applying of what it "
        "computed from that reading.",
    ),
    ("idleness", "The part of a worker's time in which it waits for parameters."),
    ("straggler", "A worker that is slower than the others."),
    ("mode", "The rule that says which worker waits for which."),
    ("bsp", "All workers step together: none begins a step before all gradients are in. No staleness."),
    ("ssp:n", "A worker may be up to n steps ahead of the slowest."),
    ("asp", "No worker waits: every gradient is applied when it arrives."),
    ("backup:b", "As bsp, but each step goes on without the b slowest workers."),
    ("local:h", "Each worker takes h steps of its own between exchanges."),
    ("p50, p99", "The median; the value that only one in a hundred exceeds."),
)


def setting(page: RunView) -> str:
    """The command, the job's settings and where each role ran."""
    job, record, status = page.run.job, page.run.record, page.status
    asked = str(job.get("mode", "?"))
    mode = f"{asked}, at the end {status.mode}" if status.mode not in ("", asked) else asked
    rows = [("mode", f"{mode} ({status.rule})" if status.rule else mode)]
    rows += [(name, str(job[name])) for name in ("workers", "servers") if name in job]
    rows.append(("parameters", wording.count(status.parameters)))
    kept = ("link", "compress", "overlap", "prefetch", "seed", "checkpoint_every", "max_restarts")
    rows += [(name.replace("_", " "), str(job[name])) for name in kept if name in job]
    if status.samples_before:
        rows.append(("samples before the resume", wording.count(status.samples_before)))
    if status.startup_s:
        rows.append(("starting up", wording.duration(status.startup_s)))
    versions = record.get("versions")
    if isinstance(versions, dict):
        rows += [(str(name), str(version)) for name, version in versions.items() if version]
    command = record.get("command")
    typed = ""
    if isinstance(command, list) and command:
        typed = f"<pre>{escape(shlex.join(map(str, command)))}</pre>"
    plan: Any = record.get("plan")
    roles = plan.get("roles") if isinstance(plan, dict) else None
    placed = (
        markup.table(
            ("role", "host", "threads"),
            [
                (f"{r.get('role')}:{r.get('rank')}", r.get("host", "?"), r.get("threads", "?"))
                for r in roles[:MOST_ROWS]
                if isinstance(r, dict)
            ],
        )
        if isinstance(roles, list)
        else ""
    )
    whole = ""
    if plan or job:
        text = json.dumps(plan or job, indent=2)
        whole = f"<details><summary>The whole plan</summary><pre>{escape(text)}</pre></details>"
    return markup.section(
        "The command and the plan",
        "What was asked for, and where each role ran.",
        typed or markup.paragraph("The run was started from Python, without a command."),
        markup.table(("", ""), rows, classes="words"),
        placed,
        whole,
    )


def files(page: RunView) -> str:
    """What else is in the run directory, and the commands that use it."""
    status = page.status
    kept = ", ".join(status.checkpoints) or "none"
    rows = [
        ("checkpoints/", f"checkpoints: {kept}"),
        ("logs/", "what each role printed"),
        ("spans.parquet, totals.parquet, resources.parquet", "what this page is made from"),
        ("pushes.csv, events.jsonl", "applied pushes; what happened when"),
        ("summary.json", "the numbers of this page"),
    ]
    if status.checkpoints:
        rows.append((f"paceline export {page.name} model.safetensors", "the model for plain PyTorch"))
        # What `paceline.fit` started has no script to start again.
        if page.state in ("failed", "stopped", "crashed") and page.run.job.get("script"):
            rows.append((f"paceline resume {page.name}", "goes on from the last checkpoint"))
    return markup.section(
        "Files",
        f"What else there is in {page.run.path}, and what can be done with it.",
        markup.table(("", ""), rows, classes="words"),
    )


def glossary(page: RunView) -> str:
    """The words of the page."""
    words_ = "".join(f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in GLOSSARY)
    return markup.section("Words", "What they mean here.", f'<dl class="words">{words_}</dl>')
