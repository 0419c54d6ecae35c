"""What limited a run, in one sentence, and what to change.

A worker's time is its own computing, or it is lost: to loading data, to waiting for a slower worker, to the
servers' updates, to the network. The largest loss names the limit; if none is worth a word, the workers do.
"""

from dataclasses import dataclass

import numpy as np

from paceline.observe import words
from paceline.observe.facts import Facts, WorkerFacts
from paceline.observe.phases import PHASES

__all__ = ["Diagnosis", "diagnose"]

WORTH_A_WORD = 0.15
"""A loss below this share of the workers' time is not what limits a run."""
CLEARLY_SLOWER = 1.3


@dataclass(frozen=True)
class Diagnosis:
    """The limit, and the shares of the workers' time that say so."""

    limit: str
    """`worker`, `server`, `network`, `straggler`, `data`, or `unknown` without spans."""
    sentence: str
    advice: str
    computing: float = 0.0
    data: float = 0.0
    straggler: float = 0.0
    server: float = 0.0
    network: float = 0.0

    @property
    def text(self) -> str:
        """Both, as the first line of a report."""
        return f"{self.sentence} {self.advice}"


def diagnose(facts: Facts, mode: str = "bsp", cores: int | None = None) -> Diagnosis:
    """What limited this run.

    Args:
        mode: that it was in, as in `ssp:3`.
        cores: of its host, if it was one.
    """
    total = sum(worker.total_s for worker in facts.workers)
    if not total:
        return Diagnosis(
            "unknown",
            "There are no spans, so nothing can be said about what limited this run.",
            "Run it without --no-spans, and until it has made a step.",
        )
    blocked = facts.blocked
    data = facts.share("load")
    server = min(_server_share(facts, total), facts.share("wait") - blocked)
    network = max(0.0, facts.communication - blocked - server)
    computing = max(0.0, 1.0 - blocked - data - server - network)
    shares = {
        "computing": computing,
        "data": data,
        "straggler": blocked,
        "server": server,
        "network": network,
    }
    losses = {"straggler": blocked, "data": data, "server": server, "network": network}
    limit = max(losses, key=lambda name: losses[name])
    if losses[limit] < WORTH_A_WORD:
        return _by_workers(facts, shares, cores)
    say = {"straggler": _by_straggler, "data": _by_data, "server": _by_server, "network": _by_network}[limit]
    sentence, advice = say(facts, losses[limit], mode)
    return Diagnosis(limit, sentence, advice, **shares)


def _server_share(facts: Facts, total: float) -> float:
    """The part of the workers' time in which the answer they waited for was being computed.

    An update serves everybody who waits for it. Where pushes come one by one, a push also waits for those
    before it: the busier the server, the longer (as in a queue).
    """
    if not facts.servers or not facts.seconds:
        return 0.0
    slowest = max(facts.servers, key=lambda server: server.update_s)
    pushes = facts.writes or slowest.updates
    if not slowest.updates or not pushes:
        return 0.0
    each = slowest.update_s / slowest.updates
    together = pushes / slowest.updates
    busy = min(0.95, slowest.update_s / facts.seconds)
    queued = 1.0 if together > 1.5 or len(facts.workers) == 1 else 1.0 / (1.0 - busy)
    return pushes * each * queued / total


def _by_workers(facts: Facts, shares: dict[str, float], cores: int | None) -> Diagnosis:
    sentence = (
        f"Worker-bound: the workers computed for {words.percent(shares['computing'])} of their time, and "
        "nothing else held them up."
    )
    advice = "More workers, or faster ones, make it faster."
    if cores is not None and len(facts.workers) >= cores:
        advice = (
            f"This host's {words.plural(cores, 'core')} are taken: more workers help on more cores or hosts, "
            "a GPU helps each of them."
        )
    return Diagnosis("worker", sentence, advice, **shares)


def _by_straggler(facts: Facts, share: float, mode: str) -> tuple[str, str]:
    culprits = {
        worker.rank: sum(other.blocked_on.get(worker.rank, 0.0) for other in facts.workers)
        for worker in facts.workers
    }
    rank = max(culprits, key=lambda r: culprits[r])
    part = culprits[rank] / (sum(culprits.values()) or 1.0)
    slowest = facts.straggler
    if slowest is not None and slowest[0].rank == rank and slowest[1] >= CLEARLY_SLOWER:
        why = _excess(facts, slowest[0])
        sentence = (
            f"Straggler-bound: worker:{rank} takes {slowest[1]:.1f} times as long for a step as the others"
            f"{why}, and the workers spent {words.percent(share)} of their time waiting for it."
        )
        advice = (
            f"See what is different about worker:{rank}; or use a mode that does not wait for it, backup:1 "
            f"or asp instead of {mode}."
        )
        return sentence, advice
    sentence = (
        f"Straggler-bound: the workers spent {words.percent(share)} of their time waiting for each other, "
        f"most often for worker:{rank} ({words.percent(part)} of it), though no worker is much slower: their "
        "steps vary."
    )
    return sentence, f"Larger batches even steps out; ssp:2 or asp instead of {mode} waits less."


def _excess(facts: Facts, slow: WorkerFacts) -> str:
    """In which phase the slow worker is slow."""
    others = [worker for worker in facts.workers if worker is not slow and worker.steps]
    if not others or not slow.steps:
        return ""
    excess = {
        phase: slow.seconds.get(phase, 0.0) / slow.steps
        - float(np.median([w.seconds.get(phase, 0.0) / w.steps for w in others]))
        for phase in PHASES
        if phase not in ("wait", "pull", "idle")
    }
    phase = max(excess, key=lambda name: excess[name])
    where = {"load": "loading data", "other": "its script outside the model"}.get(phase, f"its {phase}")
    return f" ({where})" if excess[phase] > 0 else ""


def _by_data(facts: Facts, share: float, mode: str) -> tuple[str, str]:
    return (
        f"Data-bound: the workers spent {words.percent(share)} of their time waiting for their DataLoader.",
        "Give it num_workers (more of them, if it has some), cache what is slow to read, or prepare it once "
        "before training.",
    )


def _by_server(facts: Facts, share: float, mode: str) -> tuple[str, str]:
    busiest = max(facts.servers, key=lambda server: server.update_s)
    return (
        f"Server-bound: the workers spent {words.percent(share)} of their time waiting for updates; "
        f"server:{busiest.rank} took {1e3 * busiest.update_s / max(1, busiest.updates):.3g} ms for each.",
        "An exchange every few steps (local:4, or period=4) asks for fewer updates; more --servers share "
        "them, if there are cores for them.",
    )


def _by_network(facts: Facts, share: float, mode: str) -> tuple[str, str]:
    carried = sum(link.bytes_out + link.bytes_in for link in facts.links)
    amount = f" for {words.size(carried)}" if carried else ""
    if not carried:
        return (
            f"Network-bound: the workers spent {words.percent(share)} of their time exchanging gradients and "
            "parameters, though memory is shared: on a busy host, processes wait for a core.",
            "Let workers and servers have cores of their own (fewer --workers or --threads), or exchange "
            "every few steps (local:4).",
        )
    advice = "--overlap hides transfers, --compress makes them smaller, local:8 makes them rarer"
    if not mode.startswith(("bsp", "backup", "local", "diloco")):
        advice += ", --prefetch 2 does not wait for the reply"
    return (
        f"Network-bound: the workers spent {words.percent(share)} of their time sending gradients and "
        f"waiting for parameters on their way{amount}.",
        f"{advice}.",
    )
