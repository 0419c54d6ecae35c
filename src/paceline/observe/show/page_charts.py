"""The charts of a run's page: what it learned, how fast, where the time went, staleness, resources."""

from collections import Counter
from collections.abc import Callable

from paceline.observe.analyse import curves, wording
from paceline.observe.analyse.facts import Series, mean_staleness
from paceline.observe.show import markup, plots
from paceline.observe.show.run_view import MOST_ROWS, RunView

__all__ = [
    "histogram",
    "metrics",
    "resources",
    "speed",
    "staleness",
    "step_times",
    "time",
    "timeline",
    "waiting",
]

MOST_METRICS = 12
_UNEVEN = 3.0
"""The 99th percentile of step times, in medians, that the page points out."""
ORDER = (
    *("forward", "backward", "update", "other", "load", "lease"),
    *("compress", "push", "wait", "pull", "checkpoint", "idle"),
)
"""Phases as plots stack them: computing, loading, exchanging."""


def metrics(page: RunView) -> str:
    """What the script logged, over time and over steps."""
    found = curves.metric_curves(page.run, page.facts, MOST_METRICS)
    by_step = curves.metric_curves(page.run, page.facts, MOST_METRICS, over="step")
    figures = []
    for name in found:
        for series, label in ((found[name], "seconds since training began"), (by_step[name], "step")):
            figures.append(plots.line_chart(name, curves.few(series), x_label=label))
    note = ""
    if (more := page.run.metrics["name"].nunique() - len(found)) > 0:
        note = markup.paragraph(f"{more} more metrics: `paceline metrics --csv FILE` has all.")
    return markup.section(
        "What it learned",
        "What the script logged, by worker, over time and over its steps. A loss should fall and an "
        "accuracy rise; a gap is a NaN. Steps made again after the run went back are shown once.",
        markup.plot_grid(*figures),
        note,
    )


def speed(page: RunView) -> str:
    """Samples a second over time."""
    curve = curves.throughput(page.run, page.facts)
    if curve is None:
        return ""
    return markup.section(
        "Throughput",
        "How many samples all workers together trained on in a second. A dip is a moment when something "
        "held them up.",
        markup.plot_grid(plots.line_chart(curve.name, [curve], from_zero=True)),
    )


def time(page: RunView) -> str:
    """Each worker's time by phase."""
    facts = page.facts
    rows = [
        (f"worker:{worker.rank}", {p: worker.seconds[p] for p in ORDER if p in worker.seconds})
        for worker in facts.workers[:MOST_ROWS]
        if worker.seconds
    ]
    over_time = {series.name: series for series in facts.phases_over_time}
    shares = [over_time[p] for p in ORDER if p in over_time]
    text = ""
    if facts.timed_s:
        text = (
            f"Computing: {wording.percent(facts.computation)}. Exchanging parameters, which includes "
            f"waiting: {wording.percent(facts.communication)}. Loading data: "
            f"{wording.percent(facts.share('load'))}."
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


def step_times(page: RunView) -> str:
    """How long a step took each worker, usually and at worst."""
    timed = [worker for worker in page.facts.workers if worker.step.count]
    if not timed:
        return ""
    drawn = timed[:MOST_ROWS]
    worst = max(timed, key=lambda worker: worker.step.p99 / (worker.step.p50 or 1.0))
    text = ""
    if worst.step.p99 >= _UNEVEN * worst.step.p50 > 0:
        text = (
            f"Uneven: one in a hundred steps of worker:{worst.rank} took at least "
            f"{worst.step.p99 / worst.step.p50:.1f} times as long as its usual one. Look at the data loader, "
            "at checkpoints, and at what else ran there."
        )
    return markup.section(
        "How long a step took",
        "From the end of one step to the end of the next, with everything that a worker waited for. The "
        "median is the usual step; one step in a hundred takes longer than the 99th percentile.",
        markup.paragraph(text) if text else "",
        markup.plot_grid(
            plots.bar_chart(
                "seconds of a step",
                [str(worker.rank) for worker in drawn],
                {
                    "median": [worker.step.p50 for worker in drawn],
                    "99th percentile": [worker.step.p99 for worker in drawn],
                },
                x_label="worker",
                y_text=lambda seconds: f"{seconds:.3g}",
            )
        ),
    )


def timeline(page: RunView) -> str:
    """What every role did in a few steps."""
    lanes, seconds = curves.timeline_lanes(page.run, page.facts)
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
        "threads, GPU is what its device did. Point at a piece to see how long it took. Where a lane is "
        "empty the role had nothing to do, or the step was not kept in detail. paceline trace shows the "
        "whole run.",
        plots.timeline("what every role did", lanes, seconds),
        note,
    )


def waiting(page: RunView) -> str:
    """How long each worker waited for each other worker."""
    facts = page.facts
    if len(facts.workers) < 2 or not facts.timed_s:
        return ""
    names = [str(worker.rank) for worker in facts.workers]
    place = {worker.rank: i for i, worker in enumerate(facts.workers)}
    values = {
        (place[worker.rank], place[other]): seconds
        for worker in facts.workers
        for other, seconds in worker.blocked_on.items()
        if other in place
    }
    text = f"Waiting for other workers took {wording.percent(facts.blocked)} of the workers' time."
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


def staleness(page: RunView) -> str:
    """How old the parameters were that gradients were computed on."""
    facts = page.facts
    found = facts.staleness or Counter(page.status.staleness)
    if not found:
        return ""
    labels, counts = histogram(found)
    over_time = [
        curves.thinned(Series(series.name, [100 * at for at in series.at], series.values), 60)
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


def resources(page: RunView) -> str:
    """CPU, memory and bytes of each role over time."""
    found = curves.resource_curves(page.run, page.facts)
    figures = []
    for what, series in found.items():
        text: Callable[[float], str] = plots.number
        if "bytes" in what or "memory" in what:
            text = wording.size
        elif what == "GPU in use":
            text = wording.percent
        label = "seconds since training began"
        figures.append(plots.line_chart(what, series, x_label=label, y_text=text, from_zero=True))
    return markup.section(
        "Resources",
        "What each role used over time, and the whole host with everything else that ran on it. CPU is "
        "in cores: 2 means that two cores were busy all the time. Before 0 the run was starting up.",
        markup.plot_grid(*figures),
    )


def histogram(staleness: Counter[int], most: int = 30) -> tuple[list[str], list[float]]:
    """Labels and pushes of at most `most` bars; over a wide range a bar holds several values."""
    width = -(-(max(staleness) + 1) // most)
    counts = [0.0] * (max(staleness) // width + 1)
    for each, pushes in staleness.items():
        counts[max(0, each) // width] += pushes
    labels = [str(i) if width == 1 else f"{i * width}–{(i + 1) * width - 1}" for i in range(len(counts))]
    return labels, counts
