"""The tables of a run's page: bytes, the profile, workers and servers, samples, incidents."""

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from paceline.observe.analyse import wording
from paceline.observe.analyse.facts import Times, mean_staleness
from paceline.observe.record.phase import COMMUNICATION, COMPUTATION, PHASES
from paceline.observe.record.tables import ROLES
from paceline.observe.show import markup
from paceline.observe.show.run_view import MOST_ROWS, RunView

__all__ = ["incidents", "links", "profile", "samples", "workers"]

_FATES = ("applied", "refused", "skipped", "unused")
"""What can become of a sample in an epoch."""


def links(page: RunView) -> str:
    """Bytes that workers moved, and bytes of each link."""
    links, workers = page.facts.links, page.status.workers
    moved = [(worker.moved_out, worker.moved_in) for worker in workers.values()]
    if not page.facts.timed_s and not any(map(any, moved)):
        return ""
    table = ""
    if not links:
        text = (
            "Nothing went over a link between a worker and a server: they shared memory, or workers "
            "all-reduced among themselves."
        )
    else:
        out, back = sum(link.bytes_out for link in links), sum(link.bytes_in for link in links)
        text = f"{wording.size(out)} of gradients went out, {wording.size(back)} of parameters came back."
        if len(links) > MOST_ROWS:
            text += f" The {MOST_ROWS} busiest of {len(links)} links:"
        busiest = sorted(links, key=lambda link: -(link.bytes_out + link.bytes_in))[:MOST_ROWS]
        seconds = page.facts.seconds or 1.0
        table = markup.table(
            ("link", "gradients out", "parameters back", "bytes a second"),
            [
                (
                    f"worker:{link.worker} – server:{link.server}",
                    wording.size(link.bytes_out),
                    wording.size(link.bytes_in),
                    wording.size((link.bytes_out + link.bytes_in) / seconds),
                )
                for link in sorted(busiest, key=lambda link: (link.worker, link.server))
            ],
        )
    each = markup.table(
        ("", "moved out", "moved in", "on the wire: out", "in"),
        [
            (
                f"worker:{rank}",
                *(wording.size(n) for n in (worker.moved_out, worker.moved_in)),
                *(wording.size(n) for n in (worker.bytes_out, worker.bytes_in)),
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


def profile(page: RunView) -> str:
    """Totals and percentiles in the shape of the paper's Table II."""
    facts, status = page.facts, page.status
    if not facts.timed_s and not facts.writes:
        return ""
    rows: list[tuple[str, str, str, str]] = [*_utilisation(page)]
    rows += [
        ("reads / writes of parameters", f"{facts.reads:,} / {facts.writes:,}", "", ""),
        ("weight updates", wording.count(facts.updates or status.version), "", ""),
        ("update time, ms", *_ms(facts.update)),
        ("pull, ms", *_ms(facts.pull)),
        ("push, ms", *_ms(facts.push)),
    ]
    if facts.timed_s:
        each = facts.timed_s / max(1, sum(1 for worker in facts.workers if worker.seconds))
        rows += [
            ("computation time, a worker", wording.duration(each * facts.computation), "", ""),
            ("communication time, a worker", wording.duration(each * facts.communication), "", ""),
            ("idleness", wording.percent(facts.idleness), "", ""),
        ]
    mode = page.status.mode or str(page.run.job.get("mode", "?"))
    return markup.section(
        "Profile",
        "In the shape of Table II of the paper that Paceline's measuring comes from, so that runs and "
        "published numbers can be compared. p50 is the median, p99 what only 1 of 100 exceeds. A push "
        "is collecting, compressing and sending; a pull is from the request to the parameters in place, "
        "so waiting for others counts there.",
        markup.table(
            (f"{mode}, {_sizes(page)}", "total or mean", "p50", "p99"),
            rows,
        ),
    )


def _sizes(page: RunView) -> str:
    return (
        f"{wording.plural(len(page.facts.servers), 'server')}, "
        f"{wording.plural(len(page.facts.workers), 'worker')}"
    )


def _utilisation(page: RunView) -> list[tuple[str, str, str, str]]:
    table = page.run.columns("resources")
    host = table["role"] == ROLES.index("host")
    if not host.any():
        return []
    rows = []
    for name, column, text in (
        ("CPU utilisation of the host, cores", "cpu", _short),
        ("memory utilisation of the host", "memory", wording.size),
        ("GPU utilisation of the host", "gpu", wording.percent),
        ("GPU memory in use", "gpu_memory", wording.size),
    ):
        values = table[column][host].astype(float)
        values = values[np.isfinite(values)]
        if len(values) and (values.any() or not column.startswith("gpu")):
            p50, p99 = np.percentile(values, (50, 99))
            rows.append((name, text(float(values.mean())), text(float(p50)), text(float(p99))))
    spent = [int(table[c][host].max() - table[c][host].min()) for c in ("read", "written")]
    rows.append(("disk reads / writes", f"{wording.size(spent[0])} / {wording.size(spent[1])}", "", ""))
    return rows


def workers(page: RunView) -> str:
    """One row a worker and one a server."""
    status = page.status
    names = list(status.metrics)[:6]
    facts = {worker.rank: worker for worker in page.facts.workers}
    ranks = sorted(set(facts) | set(status.workers))
    rows = []
    for rank in ranks:
        fact, worker = facts.get(rank), status.workers.get(rank)
        spans = fact is not None and fact.total_s > 0
        row = [f"worker:{rank}", worker.state if worker else "–"]
        row.append(wording.count((fact.steps if fact and spans else 0) or (worker.clock if worker else 0)))
        if fact is not None and spans:
            row += [*_ms(fact.step)]
            row += [wording.percent(fact.share(*(PHASES[p] for p in COMPUTATION)))]
            row += [wording.percent(fact.share(*(PHASES[p] for p in COMMUNICATION)))]
            row += [wording.percent(fact.idleness)]
        else:
            row += ["–"] * 5 + [wording.percent(worker.idleness) if worker else "–"]
        staleness = fact.staleness if fact is not None else Counter()
        row.append(f"{mean_staleness(staleness):.2g} / {max(staleness)}" if staleness else "–")
        row.append(str(worker.restarts) if worker else "–")
        logged = worker.metrics if worker else {}
        row += [wording.metric(logged[name]) if name in logged else "–" for name in names]
        rows.append(row)
    head = ("", "state", "steps", "step, ms: mean", "p50", "p99", "computing", "exchanging", "idle")
    servers = markup.table(
        ("", "updates", "update, ms: mean", "p50", "p99", "seconds updating", "received", "sent"),
        [
            (
                f"server:{server.rank}",
                wording.count(server.updates),
                *_ms(server.update),
                f"{server.update_s:.3g}",
                wording.size(server.bytes_in),
                wording.size(server.bytes_out),
            )
            for server in page.facts.servers
        ],
    )
    return markup.section(
        "Workers and servers",
        "Computing, exchanging and idle are shares of a worker's time; idle is the part of exchanging in "
        "which it waited for parameters. Staleness is mean / highest.",
        markup.table((*head, "staleness", "restarts", *names), rows),
        servers,
    )


def samples(page: RunView) -> str:
    """What became of the samples of each epoch."""
    accounts = [
        account
        for account in page.status.leases
        # The epoch that begins as the last one ends: nothing happened in it.
        if len(page.status.leases) == 1 or any(account.get(what) for what in _FATES)
    ]
    rows = [
        (
            account.get("epoch", 0) + 1,
            *(wording.count(account.get(w, 0)) for w in ("samples", *_FATES)),
        )
        for account in accounts[-MOST_ROWS:]
    ]
    table = markup.table(("epoch", "samples", *_FATES), rows)
    earlier = page.status.earlier_epochs
    epochs = len(accounts) + earlier.get("epochs", 0)
    if len(rows) > 12:
        title = f"{wording.count(epochs)} epochs"
        if len(rows) < epochs:
            title = f"The last {len(rows)} of {title}"
        table = f"<details><summary>{title}</summary>{table}</details>"
    return markup.section(
        "Samples",
        "Every sample of an epoch is applied once, refused with a NaN or Inf gradient, skipped (the "
        "script read it and made no step with it), or left unused (a short last batch, or a loop that "
        "ended early).",
        _sums([earlier, *accounts], epochs),
        table,
    )


def _sums(accounts: Sequence[Mapping[str, Any]], epochs: int) -> str:
    """What became of the samples of all epochs together."""
    if epochs < 2:
        return ""
    said = ", ".join(
        f"{wording.count(sum(int(each.get(what, 0)) for each in accounts))} {what}" for what in _FATES
    )
    return markup.paragraph(f"In all {wording.count(epochs)} epochs: {said}.")


def incidents(page: RunView) -> str:
    """Failures that the run recovered from, and its messages."""
    status = page.status
    rows = [
        ("workers replaced", wording.count(status.restarts)),
        ("controllers replaced", wording.count(status.takeovers)),
        ("pushes refused (NaN or Inf)", wording.count(status.refused)),
        ("pushes dropped (late or repeated)", wording.count(status.dropped)),
        ("pushes lost with a role that died", wording.count(status.lost)),
    ]
    rows += [
        (f"{what} left out of the records (--records-mb)", wording.count(number))
        for what, number in sorted(page.run.left_out.items())
    ]
    said = status.messages[-MOST_ROWS:]
    messages = "".join(f"<li>{escape(message)}</li>" for message in said)
    return markup.section(
        "Incidents",
        "What went wrong and was dealt with, and what the run said about it. Zeros are good.",
        markup.table(("what", "how often"), rows),
        f"<ul>{messages}</ul>" if messages else "",
    )


def _ms(times: Times) -> tuple[str, str, str]:
    if not times.count:
        return ("–", "–", "–")
    return (_short(1e3 * times.mean), _short(1e3 * times.p50), _short(1e3 * times.p99))


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
