"""Paper 4's figure 9: what the number of servers does to accuracy and training time. Real runs."""

from paceline.papers.results import Chart, Check, Experiment, ResultRow
from paceline.papers.scales import Paper4Amounts
from paceline.papers.step_times import score_of
from paceline.papers.trials import Trials
from paceline.plan import Job

__all__ = ["server_counts"]

WORKERS, BATCH = 2, 64
_NAMES = {"bsp": "synchronous", "asp": "asynchronous"}


def server_counts(amounts: Paper4Amounts, data: str, trials: Trials) -> Experiment:
    """Figure 9."""
    found = {
        (mode, servers): trials.run(f"figure 9: {servers} servers {mode}", _job(amounts, data, mode, servers))
        for mode in ("bsp", "asp")
        for servers in amounts.servers
    }
    scores = {case: score_of(trial.workers) for case, trial in found.items()}
    made = Experiment(
        title="Figure 9. Impacts of parameter distribution on accuracy and training time (ResNet-18)",
        how=f"Real runs on this machine: {WORKERS} workers, batch {BATCH} split over them, ResNet-18 of "
        f"{amounts.batch_width:g} of its width, {amounts.servers_epochs} epochs of "
        f"{amounts.servers_images:,} images. "
        "The paper's text has no numbers for this figure.",
        why="Servers are processes of one machine here, too, so more of them cost time without giving "
        "any; the "
        "average of a synchronous update does not depend on where its parts lie, so its accuracy is the "
        "same.",
    )
    for (mode, servers), trial in found.items():
        case = f"{servers} servers, {_NAMES[mode]}"
        made.rows.append(ResultRow(case=f"training time, {case}", unit="s", ours=trial.train_s))
        made.rows.append(ResultRow(case=f"final accuracy, {case}", unit="top-1", ours=scores[mode, servers]))
    tied = [scores["bsp", servers] for servers in amounts.servers]
    made.checks.append(
        Check(
            text="Synchronous accuracy does not depend on the number of servers",
            found=" = ".join(f"{score:.4f}" for score in tied),
            ok=max(tied) == min(tied),
        )
    )
    counts = amounts.servers
    made.charts = [
        Chart(
            title="Training time",
            x_label="servers",
            y_label="s",
            curves=tuple((name, counts, [found[m, n].train_s for n in counts]) for m, name in _NAMES.items()),
        ),
        Chart(
            title="Synchronous training time, by part",
            x_label="servers",
            y_label="s",
            curves=(
                ("computation", counts, [found["bsp", n].computing_s for n in counts]),
                (
                    "communication",
                    counts,
                    [max(0.0, found["bsp", n].train_s - found["bsp", n].computing_s) for n in counts],
                ),
            ),
        ),
    ]
    return made


def _job(amounts: Paper4Amounts, data: str, mode: str, servers: int) -> Job:
    arguments = (
        *("--data", data, "--images", str(amounts.servers_images), "--network", "resnet18"),
        *("--width", str(amounts.batch_width), "--batch-size", str(BATCH // WORKERS), "--tested"),
        *("--epochs", str(amounts.servers_epochs)),
    )
    return Job(
        script="paceline.papers.image_training",
        args=arguments,
        mode=mode,
        workers=WORKERS,
        servers=servers,
        threads=1,
    )
