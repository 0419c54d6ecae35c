"""What limited a run, in one sentence, and what to change.

A worker's time is its own computing, or it is lost: to loading data, to waiting for a slower worker, to work
that came too late and was dropped, to the servers' updates, to the network, to checkpoints. The largest loss
names the limit; if none is worth a word, the workers do. A run that failed or diverged has no such limit:
that it did is what there is to say.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from paceline.observe.analyse import wording
from paceline.observe.analyse.facts import Facts, WorkerFacts
from paceline.observe.record.phase import PHASES
from paceline.observe.record.status import RunStatus

__all__ = ["LOSSES", "Diagnosis", "diagnose", "diagnose_run"]

WORTH_A_WORD = 0.15
"""A loss below this share of the workers' time is not what limits a run."""
CLEARLY_SLOWER = 1.3
_MOST = 0.5
"""If more than this share of a worker's pushes was dropped, its work is lost."""

LOSSES = ("straggler", "dropped", "data", "server", "network", "checkpoint")
"""What a worker's time can be lost to; each is a share in the Diagnosis."""

_FREE = frozenset({"asp", "downpour", "easgd", "eamsgd", "hogwild", "dogwild"})
"""Modes in which a worker waits for others only at the end of an epoch."""


@dataclass(frozen=True)
class Diagnosis:
    """The limit, and the shares of the workers' time that say so."""

    limit: str
    """One of LOSSES, `worker`, `unknown` without spans, or what matters more: `failure`, `divergence`."""
    sentence: str
    advice: str
    computing: float = 0.0
    data: float = 0.0
    straggler: float = 0.0
    server: float = 0.0
    network: float = 0.0
    checkpoint: float = 0.0
    dropped: float = 0.0
    """Share of the time spent on gradients that came too late and were dropped (backup:b)."""
    modes: tuple[str, ...] = ()
    """Modes that the advice recommends; never the mode of the run itself."""

    @property
    def text(self) -> str:
        """Both, as the first line of a report."""
        return f"{self.sentence} {self.advice}".strip()


def diagnose_run(
    status: RunStatus, facts: Facts, mode: str, cores: int | None = None, using: Collection[str] = ()
) -> Diagnosis:
    """The diagnosis of a run: why it failed, that it diverged, or else what limited it."""
    if status.state == "failed" or status.error:
        said = (status.error or "nobody said why").strip().partition("\n")[0]
        return Diagnosis("failure", f"The run failed. {said}", "")
    if status.diverged:
        return Diagnosis("divergence", status.diverged, "")
    return diagnose(facts, mode, cores, using)


def diagnose(
    facts: Facts, mode: str = "bsp", cores: int | None = None, using: Collection[str] = ()
) -> Diagnosis:
    """What limited a run that neither failed nor diverged.

    Args:
        mode: that it was in, as in `ssp:3`.
        cores: of its host, if it was one.
        using: which of `overlap`, `compress` and `prefetch` it has already.
    """
    total = sum(worker.total_s for worker in facts.workers)
    if not total:
        return Diagnosis(
            "unknown",
            "There are no spans, so nothing can be said about what limited this run.",
            "Run it without --no-spans, and until it has made a step.",
        )
    losses = _losses(facts, total)
    shares = {**losses, "computing": max(0.0, 1.0 - sum(losses.values()))}
    limit = max(losses, key=lambda name: losses[name])
    if losses[limit] < WORTH_A_WORD:
        sentence, advice, modes = _by_workers(facts, shares["computing"], cores)
        limit = "worker"
    else:
        say = {
            "straggler": _by_straggler,
            "dropped": _by_dropped,
            "data": _by_data,
            "server": _by_server,
            "checkpoint": _by_checkpoint,
        }
        if limit == "network":
            sentence, advice, modes = _by_network(facts, losses[limit], mode, using)
        else:
            sentence, advice, modes = say[limit](facts, losses[limit], mode)
    if limit != "dropped":
        sentence += _dropped(facts, mode)
    return Diagnosis(limit, sentence, advice, modes=modes, **shares)


Said = tuple[str, str, tuple[str, ...]]
"""A sentence, advice, and the modes that the advice recommends."""


def _losses(facts: Facts, total: float) -> dict[str, float]:
    blocked = facts.blocked
    server = max(0.0, min(_server_share(facts, total), facts.share("wait") - blocked))
    dropped = sum(_wasted(worker) for worker in facts.workers) / total
    return {
        "straggler": blocked,
        "dropped": dropped,
        "data": facts.share("load"),
        "server": server,
        "network": max(0.0, facts.communication - blocked - server),
        "checkpoint": facts.share("checkpoint"),
    }


def _wasted(worker: WorkerFacts) -> float:
    """Seconds of a worker's computing whose result was dropped."""
    pushes = worker.dropped + sum(worker.staleness.values())
    computing = sum(worker.seconds.get(phase, 0.0) for phase in ("forward", "backward"))
    return computing * worker.dropped / pushes if pushes else 0.0


def _server_share(facts: Facts, total: float) -> float:
    """The part of the workers' time in which the answer they waited for was being computed.

    An update serves all workers that wait for it. Where pushes come one by one, a push also waits for those
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


def _by_workers(facts: Facts, computing: float, cores: int | None) -> Said:
    sentence = (
        f"Worker-bound: the workers computed for {wording.percent(computing)} of their time, and nothing "
        "else held them up much."
    )
    advice = "More workers, or faster ones, make it faster."
    if (outside := facts.share("other")) > facts.share("forward", "backward", "update"):
        advice = (
            f"{wording.percent(outside)} were spent in the script outside the model (loss, metrics, "
            "evaluation, printing): more of that than in it. Do it less often, or on one worker only."
        )
        return sentence, advice, ()
    if cores is not None and len(facts.workers) >= cores:
        advice = (
            f"This host's {wording.plural(cores, 'core')} are taken: more workers help on more cores or "
            "hosts, a GPU helps each of them."
        )
    return sentence, advice, ()


def _by_straggler(facts: Facts, share: float, mode: str) -> Said:
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
            f"{why}, and the workers spent {wording.percent(share)} of their time waiting for it."
        )
        if _name(mode) == "ssp":
            sentence += (
                " ssp gains nothing against a worker that is always slower: once the others lead it by the "
                "bound, all go at its pace."
            )
        return sentence, *_without(f"See what is different about worker:{rank}", mode, len(facts.workers))
    sentence = (
        f"Straggler-bound: the workers spent {wording.percent(share)} of their time waiting for each other, "
        f"most often for worker:{rank} ({wording.percent(part)} of it), though no worker is much slower: "
        "their steps vary."
    )
    if _is_free(mode):
        return sentence, f"In {mode} that is the end of epochs: longer epochs, or smaller batches.", ()
    modes = _looser(mode)
    return sentence, f"Larger batches even steps out; {_either(modes)} instead of {mode} waits less.", modes


def _without(begin: str, mode: str, workers: int) -> tuple[str, tuple[str, ...]]:
    """Advice against a worker that is always slower than the others."""
    if _is_free(mode):
        return (
            f"{begin}. In {mode} workers wait at an epoch's end only: longer epochs, or smaller batches.",
            (),
        )
    name, number = _name(mode), _number(mode)
    modes = ["asp"]
    if name == "backup" and number + 1 < workers:
        modes = [f"backup:{number + 1}", "asp"]
    elif name == "hybrid":
        modes = ["hybrid:asp"]
    elif name == "ssp":
        modes = ["asp", *([] if "batches=speed" in mode else [f"{mode}+batches=speed"])]
    elif name == "sandblaster":
        return f"{begin}; smaller batches even it out.", ()
    elif name not in ("backup", "local", "diloco"):
        modes = ["backup:1", "asp"]
    advice = f"{begin}; or use a mode that does not wait for it, {_either(modes)} instead of {mode}."
    if name == "ssp" and len(modes) > 1:
        advice = (
            f"{begin}; or use asp, which does not wait for it, or {modes[1]}, which gives it smaller batches."
        )
    return advice, tuple(modes)


def _looser(mode: str) -> tuple[str, ...]:
    """Modes in which workers whose steps vary wait less than in this one."""
    name, number = _name(mode), _number(mode)
    if name == "ssp":
        return f"ssp:{2 * max(1, number)}", "asp"
    if name in ("local", "diloco"):
        return f"{name}:{2 * max(1, number)}", "asp"
    if name == "hybrid":
        return ("hybrid:asp",)
    return "ssp:2", "asp"


def _by_dropped(facts: Facts, share: float, mode: str) -> Said:
    rank = max(facts.workers, key=_wasted).rank
    modes = ("asp", "ssp:2+batches=speed")
    return (
        f"Straggler-bound: {wording.percent(share)} of the workers' time went into gradients that came too "
        f"late.{_dropped(facts, mode)}",
        f"See what is different about worker:{rank}; asp uses what it computes, {modes[1]} gives it smaller "
        "batches; or leave it out: without it bsp is as fast.",
        modes,
    )


def _dropped(facts: Facts, mode: str) -> str:
    """Sentence about the workers whose pushes are mostly dropped in backup:b; empty if there are none."""
    if _name(mode) != "backup":
        return ""
    text = ""
    for worker in facts.workers:
        pushes = worker.dropped + sum(worker.staleness.values())
        if worker.dropped and worker.dropped >= _MOST * pushes:
            every = worker.dropped == pushes
            which = (
                f"All {wording.count(pushes)}"
                if every
                else f"{wording.count(worker.dropped)} of {wording.count(pushes)}"
            )
            text += f" {which} pushes of worker:{worker.rank} were dropped."
    return text


def _by_data(facts: Facts, share: float, mode: str) -> Said:
    return (
        f"Data-bound: the workers spent {wording.percent(share)} of their time waiting for their DataLoader.",
        "Give it num_workers (more of them, if it has some), cache what is slow to read, or prepare it once "
        "before training.",
        (),
    )


def _by_checkpoint(facts: Facts, share: float, mode: str) -> Said:
    return (
        f"Checkpoint-bound: the workers spent {wording.percent(share)} of their time taking part in "
        "checkpoints.",
        "Write them less often: a larger --checkpoint-every.",
        (),
    )


def _by_server(facts: Facts, share: float, mode: str) -> Said:
    busiest = max(facts.servers, key=lambda server: server.update_s)
    modes = _rarer(mode, 4)
    fewer = f"An exchange every few steps ({_either(modes)}) asks for fewer updates; " if modes else ""
    more = "more --servers share them, if there are cores for them."
    return (
        f"Server-bound: the workers spent {wording.percent(share)} of their time waiting for updates; "
        f"server:{busiest.rank} took {1e3 * busiest.update_s / max(1, busiest.updates):.3g} ms for each.",
        fewer + more if fewer else more[0].upper() + more[1:],
        modes,
    )


def _by_network(facts: Facts, share: float, mode: str, using: Collection[str]) -> Said:
    carried = sum(link.bytes_out + link.bytes_in for link in facts.links)
    modes = _rarer(mode, 8 if carried else 4)
    if not carried:
        rarer = f", or exchange every few steps ({_either(modes)})" if modes else ""
        return (
            f"Network-bound: the workers spent {wording.percent(share)} of their time exchanging gradients "
            "and parameters, though memory is shared: on a busy host, processes wait for a core.",
            f"Let workers and servers have cores of their own (fewer --workers or --threads){rarer}.",
            modes,
        )
    advice = []
    if "overlap" not in using:
        advice.append("--overlap hides transfers")
    if "compress" not in using:
        advice.append("--compress makes them smaller")
    if modes:
        advice.append(f"{_either(modes)} makes them rarer")
    if "prefetch" not in using and _name(mode) in ("ssp", "asp"):
        advice.append("--prefetch 2 does not wait for the reply")
    return (
        f"Network-bound: the workers spent {wording.percent(share)} of their time sending gradients and "
        f"waiting for parameters on their way for {wording.size(carried)}.",
        f"{', '.join(advice) or 'A faster network, or fewer workers for each server, would help'}.",
        modes,
    )


# --- modes, as the run's text names them ----------------------------------------------------------------


def _name(mode: str) -> str:
    return re.split(r"[:+]", mode, maxsplit=1)[0]


def _number(mode: str) -> int:
    """Its first number; 1 if there is none."""
    found = re.match(r"\w+:(\d+)", mode)
    return int(found[1]) if found else 1


def _is_free(mode: str) -> bool:
    """Whether workers never wait for each other within an epoch."""
    name, _, inner = mode.partition(":")
    return _name(mode) in _FREE or (name == "hybrid" and _name(inner) in _FREE)


def _rarer(mode: str, steps: int) -> tuple[str, ...]:
    """Modes like this one that exchange less often."""
    name = _name(mode)
    if name in ("local", "diloco", "easgd", "eamsgd", "downpour"):
        return (f"{name}:{2 * _number(mode)}" if _number(mode) > 1 else f"{name}:{steps}",)
    if period := re.search(r"\+period=(\d+)", mode):
        return (mode.replace(period[0], f"+period={2 * int(period[1])}"),)
    return () if name in ("hogwild", "dogwild", "sandblaster", "hybrid") else (f"local:{steps}",)


def _either(modes: Collection[str]) -> str:
    return " or ".join(modes)
