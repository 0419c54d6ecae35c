"""The section of a run's page on its GPUs."""

from collections.abc import Sequence

from paceline.observe.analyse import wording
from paceline.observe.analyse.device_facts import WorkerDevice
from paceline.observe.show import markup, plots
from paceline.observe.show.page_charts import ORDER
from paceline.observe.show.run_view import MOST_ROWS, RunView

__all__ = ["device"]


def device(page: RunView) -> str:
    """Time on the GPU by phase, beside the CPU's."""
    facts = page.facts.device
    if not facts.marked:
        return ""
    workers = list(facts.workers.items())[:MOST_ROWS]
    rows = [row for rank, each in workers for row in _rows(f"worker:{rank}", each)]
    updates = [
        (f"server:{server.rank}", "update", _ms(server.update.p50), _ms(facts.updates[server.rank]))
        for server in page.facts.servers
        if server.rank in facts.updates
    ]
    return markup.section(
        "On the GPU",
        "What the device did in each phase of a usual step, beside what the worker's thread did in it. The "
        "thread hands work over and goes on, so its forward may be short and the device's long; the device's "
        "time has the gaps in which it had nothing to do. On the device, wait is for the servers' update, "
        "and load for work that the CPU has yet to give.",
        markup.paragraph(_text(page)),
        markup.table(("", "phase", "CPU, ms a step", "GPU, ms a step"), [*rows, *updates]),
        markup.plot_grid(
            plots.share_bars(
                "milliseconds of a step on the GPU, by worker",
                [
                    (f"worker:{rank}", {p: 1e3 * each.gpu[p] for p in ORDER if p in each.gpu})
                    for rank, each in workers
                ],
                x_label="milliseconds",
            )
        )
        if workers
        else "",
    )


def _rows(name: str, worker: WorkerDevice) -> Sequence[tuple[str, str, str, str]]:
    rows = [
        (name, phase, _ms(worker.cpu.get(phase, 0.0)), _ms(worker.gpu.get(phase, 0.0)))
        for phase in ORDER
        if phase in worker.cpu or phase in worker.gpu
    ]
    whole = (name, "the step", _ms(sum(worker.cpu.values())), _ms(worker.gpu_s))
    return [*rows, whole]


def _text(page: RunView) -> str:
    facts = page.facts.device
    marked = sum(each.steps for each in facts.workers.values())
    text = f"Medians of {wording.plural(marked, 'step')}; short steps are sampled." if marked else ""
    if facts.share is not None:
        text += (
            f" The host's GPUs computed in {wording.percent(facts.share)} of the run's time, start-up "
            f"included; at most {wording.size(facts.memory)} of their memory were in use."
        )
    if len(facts.workers) > MOST_ROWS:
        text += f" The first {MOST_ROWS} of {len(facts.workers)} workers are shown."
    return text.strip()


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
