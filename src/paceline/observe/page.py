"""A run as one HTML page, for people who have never seen Paceline: what limited it, then why that is so."""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

import numpy as np

from paceline.observe import curves, markup, plots, words
from paceline.observe.diagnosis import Diagnosis
from paceline.observe.facts import Facts, Series, Times
from paceline.observe.pace import pace_of
from paceline.observe.phases import COMMUNICATION, COMPUTATION, PHASES
from paceline.observe.run_data import RunData
from paceline.observe.status import ENDED
from paceline.observe.tables import ROLES

__all__ = ["key_figures", "run_page"]

MOST_ROWS = 100
"""Of a table that grows with the run; the page says what it leaves out."""
MOST_METRICS = 12
_FATES = ("applied", "refused", "skipped", "unused")
"""What can become of a sample in an epoch."""

ORDER = (
    *("forward", "backward", "update", "other", "load", "lease"),
    *("compress", "push", "wait", "pull", "checkpoint", "idle"),
)
"""Phases as plots stack them: computing, loading, exchanging."""


def run_page(run: RunData, facts: Facts, diagnosis: Diagnosis, *, state: str | None = None) -> str:
    """The page. What cannot be shown is left out and named in a box; it does not raise for damaged data.

    Args:
        state: as somebody sees it who knows whether the run's process lives (`running`, `crashed`); else as
            the run wrote it down last.
    """
    return _Page(run, facts, diagnosis, state or run.status.state).markup()


def key_figures(run: RunData, facts: Facts, state: str | None = None) -> list[tuple[str, str]]:
    """The few numbers that matter most, for the page's tiles and for the terminal."""
    status = run.status
    lasted = status.elapsed_s or facts.seconds
    figures = [("state", words.state(status, state)), ("duration", words.duration(lasted))]
    if not status.loader:
        figures.append(("steps a second", words.count(status.steps_per_s)))
    if status.loader or status.samples:
        figures.append(("samples a second", words.count(status.samples_per_s)))
    if status.earlier_s:
        total = pace_of(status, total=True)
        name, rate = ("samples", total.samples_per_s) if status.loader else ("steps", total.steps_per_s)
        figures.append((f"{name} a second, all starts", words.count(rate)))
    if status.ended_s:
        figures.append(("start-up", words.duration(status.startup_s)))
    if status.first_step_s >= words.WORTH_SAYING_S:
        figures.append(("first step, extra", words.duration(status.first_step_s)))
    figures += [(name, words.metric(value)) for name, value in list(status.metrics.items())[:4]]
    figures.append(("idleness", words.percent(facts.idleness if _timed(facts) else status.idleness)))
    staleness = facts.staleness or Counter(status.staleness)
    figures.append(("mean staleness", f"{mean_staleness(staleness):.2g}" if staleness else "–"))
    figures.append(("updates", words.count(facts.updates or status.version)))
    return figures


def mean_staleness(staleness: Counter[int]) -> float:
    """Mean over all pushes."""
    pushes = sum(staleness.values())
    return sum(each * n for each, n in staleness.items()) / pushes if pushes else 0.0


class _Page:
    def __init__(self, run: RunData, facts: Facts, diagnosis: Diagnosis, state: str) -> None:
        self.run = run
        self.facts = facts
        self.diagnosis = diagnosis
        self.status = run.status
        self.state = state
        self.name = self.status.run_id or str(run.record.get("id", "")) or run.path.name

    def markup(self) -> str:
        sections: list[Callable[[], str]] = [
            self.metrics,
            self.speed,
            self.time,
            self.timeline,
            self.waiting,
            self.staleness,
            self.resources,
            self.links,
            self.profile,
            self.workers,
            self.samples,
            self.incidents,
            self.setting,
            self.files,
            self.glossary,
        ]
        main = [self._or_left_out(section) for section in sections]
        header = self.header()  # last: only now is it known what is missing
        made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        versions = self.run.record.get("versions")
        by = versions.get("paceline") if isinstance(versions, dict) else None
        footer = f"Run {self.name}{f', Paceline {by}' if by else ''}. This page was made at {made}."
        return markup.document(
            f"Run {self.name}", header, "\n".join(part for part in main if part), escape(footer)
        )

    def _or_left_out(self, section: Callable[[], str]) -> str:
        try:
            return section()
        except Exception as error:  # damaged data can be wrong in any way, and the rest is worth reading
            text = f"the section on {section.__name__} could not be made ({type(error).__name__}: {error})"
            self.run.missing.append(text[:200])
            return ""

    # --- the top ------------------------------------------------------------------------------------

    def header(self) -> str:
        parts = [
            f"<h1>Run {escape(self.name)}</h1>",
            f'<p class="verdict">{escape(self.diagnosis.text, quote=False)}</p>',
        ]
        if self.state not in ENDED:
            parts.append(markup.box(self._unfinished()))
        if self.run.missing:
            title = "Not everything could be read; what follows is without it:"
            parts.append(markup.box(title, self.run.missing))
        if self.status.error:
            why = f"<pre>{escape(self.status.error)}</pre>"
            parts.append(f"<details open><summary>Why it failed</summary>{why}</details>")
        parts.append(markup.tiles(key_figures(self.run, self.facts, self.state)))
        return "\n".join(parts)

    def _unfinished(self) -> str:
        last = self.facts.began + self.facts.seconds
        until = f" until {datetime.fromtimestamp(last).astimezone():%H:%M:%S %Z}" if last else " until now"
        if self.state == "crashed":
            return f"This run did not end: it was killed. What follows is what it did{until}."
        return f"This run is still going on ({self.state}). What follows is what it did{until}."

    # --- what it learned, and how fast --------------------------------------------------------------

    def metrics(self) -> str:
        found = curves.metric_curves(self.run, self.facts)
        by_step = curves.metric_curves(self.run, self.facts, over="step")
        figures = []
        for name in list(found)[:MOST_METRICS]:
            for series, label in ((found[name], "seconds since training began"), (by_step[name], "step")):
                figures.append(plots.line_chart(name, curves.few(series), x_label=label))
        note = ""
        if len(found) > MOST_METRICS:
            note = markup.paragraph(
                f"{len(found) - MOST_METRICS} more metrics: `paceline metrics --csv FILE` has all."
            )
        return markup.section(
            "What it learned",
            "What the script logged, by worker, over time and over its steps. A loss should fall and an "
            "accuracy rise; a gap is a NaN. Steps made again after the run went back are shown once.",
            markup.plot_grid(*figures),
            note,
        )

    def speed(self) -> str:
        curve = curves.throughput(self.run, self.facts)
        if curve is None:
            return ""
        return markup.section(
            "Throughput",
            "How many samples all workers together trained on in a second. A dip is a moment when something "
            "held them up.",
            markup.plot_grid(plots.line_chart(curve.name, [curve], from_zero=True)),
        )

    # --- where the time went ------------------------------------------------------------------------

    def time(self) -> str:
        facts = self.facts
        rows = [
            (f"worker:{worker.rank}", {p: worker.seconds[p] for p in ORDER if p in worker.seconds})
            for worker in facts.workers[:MOST_ROWS]
            if worker.seconds
        ]
        over_time = {series.name: series for series in facts.phases_over_time}
        shares = [over_time[p] for p in ORDER if p in over_time]
        text = ""
        if _timed(facts):
            text = (
                f"Computing: {words.percent(facts.computation)}. Exchanging parameters, which includes "
                f"waiting: {words.percent(facts.communication)}. Loading data: "
                f"{words.percent(facts.share('load'))}."
            )
            if len(facts.workers) > MOST_ROWS:
                text += f" The first {MOST_ROWS} of {len(facts.workers)} workers are drawn."
        return markup.section(
            "Where the workers' time went",
            "Each bar is a worker's whole time. Blue and green are computing, yellow is waiting for data, "
            "orange and purple are the exchange of parameters: wait is time in which it could do nothing.",
            markup.paragraph(text) if text else "",
            markup.plot_grid(
                plots.share_bars("seconds in each phase, by worker", rows, x_label="seconds"),
                plots.area_chart("share of all workers' time", shares),
            ),
        )

    def timeline(self) -> str:
        lanes, seconds = curves.timeline_lanes(self.run, self.facts)
        if not lanes:
            return ""
        note = ""
        if len(lanes) == curves.MOST_LANES:
            note = markup.paragraph(
                f"There are more than these {curves.MOST_LANES} lanes: the slowest worker and the servers "
                "are among them."
            )
        return markup.section(
            "A few steps, side by side",
            "One lane a role, time from left to right, from the middle of the run; (1), (2), … are helper "
            "threads. Point at a piece to see how long it took. Where a lane is empty the role had nothing "
            "to do, or the step was not kept in detail. paceline trace shows the whole run.",
            plots.timeline("what every role did", lanes, seconds),
            note,
        )

    def waiting(self) -> str:
        facts = self.facts
        if len(facts.workers) < 2 or not _timed(facts):
            return ""
        names = [str(worker.rank) for worker in facts.workers]
        place = {worker.rank: i for i, worker in enumerate(facts.workers)}
        values = {
            (place[worker.rank], place[other]): seconds
            for worker in facts.workers
            for other, seconds in worker.blocked_on.items()
            if other in place
        }
        text = f"Waiting for other workers took {words.percent(facts.blocked)} of the workers' time."
        if facts.straggler is not None and facts.straggler[1] >= 1.1:
            slowest, times = facts.straggler
            text += (
                f" The slowest is worker:{slowest.rank}: without what it waits, a step takes it "
                f"{times:.1f} times as long as the others."
            )
        return markup.section(
            "Who waited for whom",
            "A row is the worker that waited, a column the one it waited for; the stronger the colour, the "
            "longer. A column that stands out is a worker that holds the others up.",
            markup.paragraph(text),
            markup.plot_grid(
                plots.matrix(
                    "seconds that a worker waited, and for whom",
                    [f"worker:{name}" for name in names],
                    names,
                    values,
                    text=lambda seconds: f"{seconds:.3g}",
                    says="{row} waited {value} s for worker:{column}",
                )
            ),
        )

    # --- staleness ----------------------------------------------------------------------------------

    def staleness(self) -> str:
        facts = self.facts
        found = facts.staleness or Counter(self.status.staleness)
        if not found:
            return ""
        labels, counts = histogram(found)
        over_time = [
            plots.thinned(Series(series.name, [100 * at for at in series.at], series.values), 60)
            for series in facts.staleness_over_time
        ]
        means = {str(w.rank): mean_staleness(w.staleness) for w in facts.workers if w.staleness}
        return markup.section(
            "Staleness",
            "How many updates by others came between a worker's reading of the parameters and the applying "
            "of what it computed from them. 0 is what one process would do; the higher, the older the "
            "parameters a gradient was computed on.",
            markup.paragraph(f"Mean {mean_staleness(found):.2g}, at most {max(found)}."),
            markup.plot_grid(
                plots.bar_chart("pushes at each staleness", labels, {"pushes": counts}, x_label="staleness"),
                plots.line_chart(
                    "mean staleness during the run",
                    curves.few(over_time),
                    x_label="% of all updates",
                    from_zero=True,
                ),
                plots.bar_chart(
                    "mean staleness of each worker",
                    list(means),
                    {"mean staleness": list(means.values())},
                    x_label="worker",
                )
                if len(means) > 1
                else "",
            ),
        )

    # --- resources ----------------------------------------------------------------------------------

    def resources(self) -> str:
        found = curves.resource_curves(self.run, self.facts)
        figures = []
        for what, series in found.items():
            text: Callable[[float], str] = plots.number
            if "bytes" in what or "memory" in what:
                text = words.size
            elif what == "GPU in use":
                text = words.percent
            label = "seconds since training began"
            figures.append(plots.line_chart(what, series, x_label=label, y_text=text, from_zero=True))
        return markup.section(
            "Resources",
            "What each role used over time, and the whole host with everything else that ran on it. CPU is "
            "in cores: 2 means that two cores were busy all the time. Before 0 the run was starting up.",
            markup.plot_grid(*figures),
        )

    def links(self) -> str:
        links, workers = self.facts.links, self.status.workers
        moved = [(worker.moved_out, worker.moved_in) for worker in workers.values()]
        if not _timed(self.facts) and not any(map(any, moved)):
            return ""
        table = ""
        if not links:
            text = (
                "Nothing went over a link between a worker and a server: they shared memory, or workers "
                "all-reduced among themselves."
            )
        else:
            out, back = sum(link.bytes_out for link in links), sum(link.bytes_in for link in links)
            text = f"{words.size(out)} of gradients went out, {words.size(back)} of parameters came back."
            if len(links) > MOST_ROWS:
                text += f" The {MOST_ROWS} busiest of {len(links)} links:"
            busiest = sorted(links, key=lambda link: -(link.bytes_out + link.bytes_in))[:MOST_ROWS]
            seconds = self.facts.seconds or 1.0
            table = markup.table(
                ("link", "gradients out", "parameters back", "bytes a second"),
                [
                    (
                        f"worker:{link.worker} – server:{link.server}",
                        words.size(link.bytes_out),
                        words.size(link.bytes_in),
                        words.size((link.bytes_out + link.bytes_in) / seconds),
                    )
                    for link in sorted(busiest, key=lambda link: (link.worker, link.server))
                ],
            )
        each = markup.table(
            ("", "moved out", "moved in", "on the wire: out", "in"),
            [
                (
                    f"worker:{rank}",
                    *(words.size(n) for n in (worker.moved_out, worker.moved_in)),
                    *(words.size(n) for n in (worker.bytes_out, worker.bytes_in)),
                )
                for rank, worker in sorted(workers.items())[:MOST_ROWS]
            ],
        )
        return markup.section(
            "Bytes",
            "What its steps moved, whatever carried it (gradients out, parameters in, a group's all-reduce "
            "both ways); and what sockets carried, with the worker's parts of checkpoints. Through shared "
            "memory nothing is on the wire. A link is one worker's connection to one server.",
            each if any(map(any, moved)) else "",
            markup.paragraph(text),
            table,
        )

    # --- tables -------------------------------------------------------------------------------------

    def profile(self) -> str:
        facts, status = self.facts, self.status
        if not _timed(facts) and not facts.writes:
            return ""
        rows: list[tuple[str, str, str, str]] = [*self._utilisation()]
        rows += [
            ("reads / writes of parameters", f"{facts.reads:,} / {facts.writes:,}", "", ""),
            ("weight updates", words.count(facts.updates or status.version), "", ""),
            ("update time, ms", *_ms(facts.update)),
            ("pull, ms", *_ms(facts.pull)),
            ("push, ms", *_ms(facts.push)),
        ]
        if _timed(facts):
            each = _timed(facts) / max(1, sum(1 for worker in facts.workers if worker.seconds))
            rows += [
                ("computation time, a worker", words.duration(each * facts.computation), "", ""),
                ("communication time, a worker", words.duration(each * facts.communication), "", ""),
                ("idleness", words.percent(facts.idleness), "", ""),
            ]
        mode = self.status.mode or str(self.run.job.get("mode", "?"))
        return markup.section(
            "Profile",
            "In the shape of Table II of the paper that Paceline's measuring comes from, so that runs and "
            "published numbers can be compared. p50 is the median, p99 what only 1 of 100 exceeds. A push "
            "is collecting, compressing and sending; a pull is from the request to the parameters in place, "
            "so waiting for others counts there.",
            markup.table(
                (f"{mode}, {self._sizes()}", "total or mean", "p50", "p99"),
                rows,
            ),
        )

    def _sizes(self) -> str:
        return (
            f"{words.plural(len(self.facts.servers), 'server')}, "
            f"{words.plural(len(self.facts.workers), 'worker')}"
        )

    def _utilisation(self) -> list[tuple[str, str, str, str]]:
        table = self.run.columns("resources")
        host = table["role"] == ROLES.index("host")
        if not host.any():
            return []
        rows = []
        for name, column, text in (
            ("CPU utilisation of the host, cores", "cpu", _short),
            ("memory utilisation of the host", "memory", words.size),
        ):
            values = table[column][host].astype(float)
            values = values[np.isfinite(values)]
            if len(values):
                p50, p99 = np.percentile(values, (50, 99))
                rows.append((name, text(float(values.mean())), text(float(p50)), text(float(p99))))
        spent = [int(table[c][host].max() - table[c][host].min()) for c in ("read", "written")]
        rows.append(("disk reads / writes", f"{words.size(spent[0])} / {words.size(spent[1])}", "", ""))
        return rows

    def workers(self) -> str:
        status = self.status
        names = list(status.metrics)[:6]
        facts = {worker.rank: worker for worker in self.facts.workers}
        ranks = sorted(set(facts) | set(status.workers))
        rows = []
        for rank in ranks:
            fact, worker = facts.get(rank), status.workers.get(rank)
            spans = fact is not None and fact.total_s > 0
            row = [f"worker:{rank}", worker.state if worker else "–"]
            row.append(words.count((fact.steps if fact and spans else 0) or (worker.clock if worker else 0)))
            if fact is not None and spans:
                row += [*_ms(fact.step)]
                row += [words.percent(fact.share(*(PHASES[p] for p in COMPUTATION)))]
                row += [words.percent(fact.share(*(PHASES[p] for p in COMMUNICATION)))]
                row += [words.percent(fact.idleness)]
            else:
                row += ["–"] * 5 + [words.percent(worker.idleness) if worker else "–"]
            staleness = fact.staleness if fact is not None else Counter()
            row.append(f"{mean_staleness(staleness):.2g} / {max(staleness)}" if staleness else "–")
            row.append(str(worker.restarts) if worker else "–")
            logged = worker.metrics if worker else {}
            row += [words.metric(logged[name]) if name in logged else "–" for name in names]
            rows.append(row)
        head = ("", "state", "steps", "step, ms: mean", "p50", "p99", "computing", "exchanging", "idle")
        servers = markup.table(
            ("", "updates", "update, ms: mean", "p50", "p99", "seconds updating", "received", "sent"),
            [
                (
                    f"server:{server.rank}",
                    words.count(server.updates),
                    *_ms(server.update),
                    f"{server.update_s:.3g}",
                    words.size(server.bytes_in),
                    words.size(server.bytes_out),
                )
                for server in self.facts.servers
            ],
        )
        return markup.section(
            "Workers and servers",
            "Computing, exchanging and idle are shares of a worker's time; idle is the part of exchanging in "
            "which it waited for parameters. Staleness is mean / highest.",
            markup.table((*head, "staleness", "restarts", *names), rows),
            servers,
        )

    def samples(self) -> str:
        accounts = [
            account
            for account in self.status.leases
            # The epoch that begins as the last one ends: nothing happened in it.
            if len(self.status.leases) == 1 or any(account.get(what) for what in _FATES)
        ]
        rows = [
            (
                account.get("epoch", 0) + 1,
                *(words.count(account.get(w, 0)) for w in ("samples", *_FATES)),
            )
            for account in accounts[-MOST_ROWS:]
        ]
        table = markup.table(("epoch", "samples", *_FATES), rows)
        earlier = self.status.earlier_epochs
        epochs = len(accounts) + earlier.get("epochs", 0)
        if len(rows) > 12:
            title = f"{words.count(epochs)} epochs"
            if len(rows) < epochs:
                title = f"The last {len(rows)} of {title}"
            table = f"<details><summary>{title}</summary>{table}</details>"
        return markup.section(
            "Samples",
            "Every sample of an epoch is applied once, refused with a NaN or Inf gradient, skipped (the "
            "script read it and made no step with it), or left unused (a short last batch, or a loop that "
            "ended early).",
            self._sums([earlier, *accounts], epochs),
            table,
        )

    @staticmethod
    def _sums(accounts: Sequence[Mapping[str, Any]], epochs: int) -> str:
        """What became of the samples of all epochs together."""
        if epochs < 2:
            return ""
        said = ", ".join(
            f"{words.count(sum(int(each.get(what, 0)) for each in accounts))} {what}" for what in _FATES
        )
        return markup.paragraph(f"In all {words.count(epochs)} epochs: {said}.")

    def incidents(self) -> str:
        status = self.status
        rows = [
            ("workers replaced", words.count(status.restarts)),
            ("controllers replaced", words.count(status.takeovers)),
            ("pushes refused (NaN or Inf)", words.count(status.refused)),
            ("pushes dropped (late or repeated)", words.count(status.dropped)),
            ("pushes lost with a role that died", words.count(status.lost)),
        ]
        rows += [
            (f"{what} left out of the records (--records-mb)", words.count(number))
            for what, number in sorted(self.run.left_out.items())
        ]
        said = status.messages[-MOST_ROWS:]
        messages = "".join(f"<li>{escape(message)}</li>" for message in said)
        return markup.section(
            "Incidents",
            "What went wrong and was dealt with, and what the run said about it. Zeros are good.",
            markup.table(("what", "how often"), rows),
            f"<ul>{messages}</ul>" if messages else "",
        )

    # --- what was asked for -------------------------------------------------------------------------

    def setting(self) -> str:
        job, record, status = self.run.job, self.run.record, self.status
        asked = str(job.get("mode", "?"))
        mode = f"{asked}, at the end {status.mode}" if status.mode not in ("", asked) else asked
        rows = [("mode", f"{mode} ({status.rule})" if status.rule else mode)]
        rows += [(name, str(job[name])) for name in ("workers", "servers") if name in job]
        rows.append(("parameters", words.count(status.parameters)))
        kept = ("link", "compress", "overlap", "prefetch", "seed", "checkpoint_every", "max_restarts")
        rows += [(name.replace("_", " "), str(job[name])) for name in kept if name in job]
        if status.samples_before:
            rows.append(("samples before the resume", words.count(status.samples_before)))
        if status.startup_s:
            rows.append(("starting up", words.duration(status.startup_s)))
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

    def files(self) -> str:
        status = self.status
        kept = ", ".join(status.checkpoints) or "none"
        rows = [
            ("checkpoints/", f"checkpoints: {kept}"),
            ("logs/", "what each role printed"),
            ("spans.parquet, totals.parquet, resources.parquet", "what this page is made from"),
            ("pushes.csv, events.jsonl", "applied pushes; what happened when"),
            ("summary.json", "the numbers of this page"),
        ]
        if status.checkpoints:
            rows.append((f"paceline export {self.name} model.safetensors", "the model for plain PyTorch"))
            # What `paceline.fit` started has no script to start again.
            if self.state in ("failed", "stopped", "crashed") and self.run.job.get("script"):
                rows.append((f"paceline resume {self.name}", "goes on from the last checkpoint"))
        return markup.section(
            "Files",
            f"What else there is in {self.run.path}, and what can be done with it.",
            markup.table(("", ""), rows, classes="words"),
        )

    def glossary(self) -> str:
        words_ = "".join(f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in GLOSSARY)
        return markup.section("Words", "What they mean here.", f'<dl class="words">{words_}</dl>')


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
    ("mode", "The rule that says who waits for whom."),
    ("bsp", "All step together: nobody begins a step before everybody's gradients are in. No staleness."),
    ("ssp:n", "A worker may be up to n steps ahead of the slowest."),
    ("asp", "Nobody waits: every gradient is applied when it arrives."),
    ("backup:b", "As bsp, but each step goes on without the b slowest workers."),
    ("local:h", "Each worker takes h steps of its own between exchanges."),
    ("p50, p99", "The median; the value that only one in a hundred exceeds."),
)


def histogram(staleness: Counter[int], most: int = 30) -> tuple[list[str], list[float]]:
    """Labels and pushes of at most so many bars; of a wide range a bar holds several values."""
    width = -(-(max(staleness) + 1) // most)
    counts = [0.0] * (max(staleness) // width + 1)
    for each, pushes in staleness.items():
        counts[max(0, each) // width] += pushes
    labels = [str(i) if width == 1 else f"{i * width}–{(i + 1) * width - 1}" for i in range(len(counts))]
    return labels, counts


def _timed(facts: Facts) -> float:
    """Seconds of all workers that there are spans of; 0 without spans."""
    return sum(worker.total_s for worker in facts.workers)


def _ms(times: Times) -> tuple[str, str, str]:
    if not times.count:
        return ("–", "–", "–")
    return (_short(1e3 * times.mean), _short(1e3 * times.p50), _short(1e3 * times.p99))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
