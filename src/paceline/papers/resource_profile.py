"""Paper 4's table II: what synchronous and asynchronous runs use and how long their parts take. Real runs."""

from paceline.papers.published import TABLE_II, Profile
from paceline.papers.results import Check, Experiment, ResultRow
from paceline.papers.scales import Paper4Amounts
from paceline.papers.trials import TrialFacts, Trials
from paceline.plan import Job

__all__ = ["resource_profile"]

SERVERS, WORKERS, BATCH = 4, 8, 128
_NAMES = {"bsp": "Sync-SGD", "asp": "Async-SGD"}


def resource_profile(amounts: Paper4Amounts, data: str, trials: Trials) -> Experiment:
    """Table II: 4 servers, 8 workers, batch 128."""
    found = {
        (mode, network): trials.run(f"table II: {network} {mode}", _job(amounts, data, mode, network))
        for mode, network in TABLE_II
    }
    made = Experiment(
        title="Table II. Profiling statistics",
        how=f"Real runs on this machine: {SERVERS} servers, {WORKERS} workers, batch {BATCH} split over "
        "the workers, "
        f"{amounts.profile_images:,} images"
        + (
            ", first layers for large images: all parameters, 1/7 of the computing."
            if amounts.coarse
            else "."
        ),
        why="All roles share this machine's cores and memory instead of four VMs with 8 CPUs each; a "
        "push moves "
        "nothing here, because the gradients lie in memory that the server shares, and a synchronous "
        "worker waits in "
        "the pull, where the paper's waits in the push.",
    )
    for (mode, network), trial in found.items():
        made.rows += _rows(f"{_NAMES[mode]} {network}", TABLE_II[mode, network], trial)
    for network in ("inception-v1", "resnet18"):
        sync, free = found["bsp", network].facts.updates, found["asp", network].facts.updates
        made.checks.append(
            Check(
                text=f"Asynchronous SGD updates the weights {WORKERS} times as often as synchronous, "
                f"{network}",
                found=f"{free} against {sync}",
                ok=free == WORKERS * sync,
            )
        )
    return made


def _job(amounts: Paper4Amounts, data: str, mode: str, network: str) -> Job:
    arguments = [
        *("--data", data, "--images", str(amounts.profile_images // BATCH * BATCH), "--network", network),
        *("--batch-size", str(BATCH // WORKERS)),
        *(["--coarse"] if amounts.coarse else []),
    ]
    return Job(
        script="paceline.papers.image_training",
        args=tuple(arguments),
        mode=mode,
        workers=WORKERS,
        servers=SERVERS,
        threads=1,
    )


def _rows(case: str, paper: Profile, trial: TrialFacts) -> list[ResultRow]:
    facts = trial.facts
    pull, push = 1e3 * facts.pull.mean, 1e3 * facts.push.mean
    return [
        ResultRow(case=f"{case}: CPU util.", unit="%", paper=paper.cpu_percent, ours=100 * trial.cpu),
        ResultRow(
            case=f"{case}: Memory util.", unit="%", paper=paper.memory_percent, ours=100 * trial.memory
        ),
        ResultRow(
            case=f"{case}: R/W num.",
            unit="requests",
            note=f"the paper: {paper.reads}/{paper.writes}; here {trial.written / 1e6:,.1f} MB written",
        ),
        ResultRow(
            case=f"{case}: WU num.",
            unit="updates",
            paper=paper.updates,
            ours=facts.updates,
            note="fewer images than the paper",
        ),
        ResultRow(case=f"{case}: WU time", unit="ms", paper=paper.update_ms, ours=1e3 * facts.update.mean),
        ResultRow(case=f"{case}: Ave. pull", unit="ms", paper=paper.pull_ms, ours=pull, note="with the wait"),
        ResultRow(case=f"{case}: Ave. push", unit="ms", paper=paper.push_ms, ours=push),
        ResultRow(
            case=f"{case}: pull + push", unit="ms", paper=paper.pull_ms + paper.push_ms, ours=pull + push
        ),
    ]
