"""Paper 4's figure 11: idleness by the share of servers, the batch size and the network's latency.

Real servers, workers, parameters and exchanges; computing and the links' latency are emulated, because this
machine has neither the paper's 32 cores nor its network.
"""

import itertools
from typing import NamedTuple

from paceline.papers.published import IDLENESS_BY_LATENCY
from paceline.papers.results import Chart, Check, Experiment, ResultRow
from paceline.papers.scales import Paper4Amounts
from paceline.papers.trials import Trials
from paceline.plan import Job

__all__ = ["idleness"]

IMAGE_MS = 3.5
"""Inception-v1 takes 28 ms of one core for a CIFAR-10 image (an AMD EPYC of 2026); the paper's VMs had 8."""
MODES = ("bsp", "asp")
_NAMES = {"bsp": "synchronous", "asp": "asynchronous"}


class _Setup(NamedTuple):
    servers: int = 2
    workers: int = 2
    batch: int = 128
    latency_ms: int = 10


SHARES = (_Setup(1, 3), _Setup(2, 2), _Setup(3, 1))
BATCHES = tuple(_Setup(batch=size) for size in (32, 64, 128))
LATENCIES = tuple(_Setup(latency_ms=latency) for latency in (10, 100, 200))


def idleness(amounts: Paper4Amounts, trials: Trials) -> Experiment:
    """Figure 11."""
    found: dict[tuple[str, _Setup], float] = {}
    for setup in dict.fromkeys((*SHARES, *BATCHES, *LATENCIES)):
        for mode in MODES:
            shape = f"{setup.servers}:{setup.workers}, batch {setup.batch}, {setup.latency_ms} ms"
            name = f"figure 11, emulated: {shape} {mode}"
            trial = trials.run(name, _job(amounts, setup, mode), conditions=f"latency={setup.latency_ms}ms")
            found[mode, setup] = 100 * trial.idle
    made = Experiment(
        title="Figure 11. Impact of configurations on idleness (Inception-v1)",
        how=f"Emulated computing ({IMAGE_MS:g} ms an image ± 10 %) and emulated latency of every link, "
        "one way; "
        f"servers, workers and the exchange of all 5.6 million parameters are real; "
        f"{amounts.idle_rounds} steps of "
        "each worker. Where a setting is not varied: 2 servers, 2 workers, batch 128, 10 ms.",
        why="The paper does not say which batch and which numbers of servers and workers it varied the "
        "latency with, "
        "nor how long its computing took; a round trip costs two latencies here.",
        emulated=True,
    )
    axes = (
        ("servers to workers", SHARES, [f"{each.servers}:{each.workers}" for each in SHARES]),
        ("batch size", BATCHES, [str(each.batch) for each in BATCHES]),
        ("latency, ms", LATENCIES, [str(each.latency_ms) for each in LATENCIES]),
    )
    for what, setups, labels in axes:
        for mode in MODES:
            for setup, label in zip(setups, labels, strict=True):
                known = IDLENESS_BY_LATENCY.get(setup.latency_ms) if setups is LATENCIES else None
                made.rows.append(
                    ResultRow(
                        case=f"{what} {label}, {_NAMES[mode]}", unit="%", paper=known, ours=found[mode, setup]
                    )
                )
        xs = (
            [setup.servers / setup.workers for setup in setups]
            if setups is SHARES
            else [float(x) for x in labels]
        )
        label = "servers for each worker" if setups is SHARES else what
        made.charts.append(
            Chart(
                title=f"Idleness by {what}",
                x_label=label,
                y_label="%",
                curves=tuple((_NAMES[m], xs, [found[m, each] for each in setups]) for m in MODES),
            )
        )
    for text, setups, rises in (
        ("Idleness falls as the share of servers rises (1:3, 2:2, 3:1)", SHARES, False),
        ("Idleness falls as the batch grows (32, 64, 128)", BATCHES, False),
        ("Idleness rises with latency (10, 100, 200 ms)", LATENCIES, True),
    ):
        for mode in MODES:
            values = [found[mode, setup] for setup in setups]
            made.checks.append(
                Check(
                    text=f"{text}, {_NAMES[mode]}",
                    found=" → ".join(f"{value:.1f} %" for value in values),
                    ok=_ordered(values if rises else values[::-1]),
                )
            )
    return made


def _ordered(values: list[float]) -> bool:
    return all(earlier < later for earlier, later in itertools.pairwise(values))


def _job(amounts: Paper4Amounts, setup: _Setup, mode: str) -> Job:
    share = max(1, round(setup.batch / setup.workers))
    arguments = (
        *("--images", str(share * setup.workers * amounts.idle_rounds), "--network", "inception-v1"),
        *("--batch-size", str(share), "--emulated-ms", str(IMAGE_MS)),
    )
    return Job(
        script="paceline.papers.image_training",
        args=arguments,
        mode=mode,
        workers=setup.workers,
        servers=setup.servers,
        threads=1,
    )
