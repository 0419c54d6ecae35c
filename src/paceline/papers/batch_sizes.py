"""Paper 4's figure 10: training time and accuracy of Inception-v1 by the batch size. Real runs."""

from paceline.papers.published import BATCH_ACCURACY, FASTER_AT_32
from paceline.papers.results import Chart, Check, Experiment, ResultRow
from paceline.papers.scales import Paper4Amounts
from paceline.papers.step_times import score_of
from paceline.papers.trials import Trials
from paceline.plan import Job

__all__ = ["batch_sizes"]

SERVERS = WORKERS = 4
EPOCHS = 3
_NAMES = {"bsp": "synchronous", "asp": "asynchronous"}


def batch_sizes(amounts: Paper4Amounts, data: str, trials: Trials) -> Experiment:
    """Figure 10."""
    sizes = amounts.batch_sizes
    found = {
        (mode, size): trials.run(f"figure 10: batch {size} {mode}", _job(amounts, data, mode, size))
        for mode in ("bsp", "asp")
        for size in sizes
    }
    scores = {case: score_of(trial.workers) for case, trial in found.items()}
    made = Experiment(
        title="Figure 10. Training time and accuracy of Inception-v1",
        how=f"Real runs on this machine: {WORKERS} workers and {SERVERS} servers, batch split over the "
        "workers, "
        f"Inception-v1 of {amounts.batch_width:g} of its width, {EPOCHS} epochs of "
        f"{amounts.batch_images:,} images.",
        why="Fewer images than CIFAR-10's 50,000 give fewer updates in three epochs, which costs large "
        "batches most; "
        "the four workers share this machine's cores.",
    )
    for mode, name in _NAMES.items():
        for size in sizes:
            made.rows.append(
                ResultRow(
                    case=f"training time, batch {size}, {name}", unit="s", ours=found[mode, size].train_s
                )
            )
            made.rows.append(
                ResultRow(
                    case=f"accuracy after {EPOCHS} epochs, batch {size}, {name}",
                    unit="top-1",
                    paper=BATCH_ACCURACY.get((mode, size)),
                    ours=scores[mode, size],
                )
            )
        if 16 in sizes and 32 in sizes:
            saved = 100 * (1 - found[mode, 32].train_s / found[mode, 16].train_s)
            made.rows.append(
                ResultRow(
                    case=f"time saved from batch 16 to 32, {name}",
                    unit="%",
                    paper=FASTER_AT_32[mode],
                    ours=saved,
                )
            )
        first, last = found[mode, sizes[0]].train_s, found[mode, sizes[-1]].train_s
        made.checks.append(
            Check(
                text=f"Training time falls from batch {sizes[0]} to {sizes[-1]}, {name}",
                found=f"{first:.1f} s → {last:.1f} s",
                ok=last < first,
            )
        )
    made.charts = [
        Chart(
            title="Training time",
            x_label="batch size",
            y_label="s",
            curves=tuple((name, sizes, [found[m, n].train_s for n in sizes]) for m, name in _NAMES.items()),
        ),
        Chart(
            title=f"Accuracy after {EPOCHS} epochs",
            x_label="batch size",
            y_label="top-1",
            curves=tuple((name, sizes, [scores[m, n] for n in sizes]) for m, name in _NAMES.items()),
        ),
    ]
    return made


def _job(amounts: Paper4Amounts, data: str, mode: str, size: int) -> Job:
    arguments = (
        *("--data", data, "--images", str(amounts.batch_images // size * size), "--network", "inception-v1"),
        *("--width", str(amounts.batch_width), "--batch-size", str(size // WORKERS), "--tested"),
        *("--epochs", str(EPOCHS)),
    )
    return Job(
        script="paceline.papers.image_training",
        args=arguments,
        mode=mode,
        workers=WORKERS,
        servers=SERVERS,
        threads=1,
    )
