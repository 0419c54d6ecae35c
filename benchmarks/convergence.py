"""What each mode does to accuracy, at equal epochs, when workers are unequal.

Runs are simulated in virtual time (paceline.testing.SimulatedRun): the live mode machines, leases, updates
and local steps, with real gradients of real models; only who finishes when is given, from 1 to 3 times
slower. So staleness is real and repeatable, and twelve workers need no twelve cores. Means of the seeds.

Modes come as a user types them, then with other knobs; among those are the papers' plain rules
(`asp+damping=none`, `diloco:4+outer=nesterov`). On digits every mode as it comes must be within 0.02 of bsp.

dogwild is here as it would be without lost writes and with an exchange after every step. Not here: hogwild,
which is asp with momentum in the workers and lost writes; allreduce, which computes what bsp does; hybrid,
which is its outer mode with as many workers as groups; sandblaster, whose epoch is one step.
"""

import argparse
import concurrent.futures
import itertools
import os
import statistics
import sys
from pathlib import Path

import torch

from benchmarks import tasks
from benchmarks.harness import Options, Row, report
from paceline.testing import SimulatedRun

AS_THEY_COME = (
    *("bsp", "backup:1", "ssp:2", "asp", "downpour:2,2"),
    *("easgd:4", "eamsgd:4", "local:4", "diloco:4", "dogwild"),
)
MODES = (
    *AS_THEY_COME,
    *("asp+damping=none", "ssp:2+damping=none", "downpour:2,2+damping=none", "diloco:4+outer=nesterov"),
    *("asp+quorum=4", "asp+damping=staleness", "asp+damping=dynsgd", "asp+damping=dc", "asp+damping=gap"),
)
WORKERS = (4, 8, 12)
SLOWEST = 3.0
NEAR = 0.02


def accuracy(name: str, workers: int, mode: str, seed: int) -> tuple[float, float]:
    """Test accuracy of the servers' model after a task's epochs, and the mean staleness."""
    torch.set_num_threads(1)
    task = tasks.task(name)
    inputs, labels = task.train
    run = SimulatedRun(
        mode=mode,
        model=task.build,
        optimizer=lambda model: task.optimizer(list(model.parameters()), task.learning_rate),
        backward=lambda model, at: task.backward(model, inputs[at], labels[at]),
        samples=len(labels),
        batch_size=task.batch,
        step_s=[1 + (SLOWEST - 1) * rank / (workers - 1) for rank in range(workers)],
        seed=seed,
    )
    run.train(task.epochs)
    return task.accuracy(run.model), run.staleness


def rows_of(found: dict[tuple[str, int, str], float]) -> list[Row]:
    """Every mode against bsp. On digits those without knobs must be near it."""
    rows = []
    for (name, workers, mode), mean in found.items():
        bsp = found[name, workers, "bsp"]
        if mode == "bsp":
            continue
        promised = name == "digits" and mode in AS_THEY_COME
        rows.append(_row(f"{name}-{workers}workers/{mode}/bsp", mean, bsp, bsp - NEAR if promised else None))
    return rows


def _row(case: str, ours: float, peer: float, least: float | None) -> Row:
    ratio = ours / peer
    target = None if least is None else least / peer
    return Row(
        case=case,
        ours=ours,
        peer=peer,
        unit="accuracy",
        better="higher",
        ratio=ratio,
        target=target,
        ok=None if target is None else ratio >= target,
    )


def plot(found: dict[tuple[str, int, str], float], path: Path) -> None:
    """Accuracy by the number of workers, a line for each mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted({name for name, _, _ in found})
    figure, axes = pyplot.subplots(1, len(names), figsize=(7 * len(names), 5), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for i, mode in enumerate(MODES):
            workers = [w for w in WORKERS if (name, w, mode) in found]
            means = [found[name, w, mode] for w in workers]
            style = {"linewidth": 3.0} if mode in ("bsp", "asp") else {}
            axis.plot(workers, means, marker="o", label=mode, color=pyplot.cm.tab20(i), **style)
        axis.set_title(name)
        axis.set_xlabel("workers, the slowest 3 times slower than the fastest")
        axis.set_ylabel("test accuracy, mean of the seeds")
        axis.set_xticks(WORKERS)
    axes[0][-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Simulate and report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="12 workers and one seed only")
    parser.add_argument("--task", choices=sorted(tasks.TASKS), help="this one only")
    parser.add_argument("--as-they-come", action="store_true", help="only modes without knobs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw accuracy by workers and mode")
    args = parser.parse_args()
    workers = (12,) if args.quick else WORKERS
    seeds = range(1 if args.quick else 3)
    names = tuple(tasks.TASKS) if args.task is None else (args.task,)
    modes = AS_THEY_COME if args.as_they_come else MODES
    wanted = list(itertools.product(names, workers, modes))
    scores: dict[tuple[str, int, str], list[tuple[float, float]]] = {case: [] for case in wanted}
    with concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        futures = {pool.submit(accuracy, *case, seed): case for case in wanted for seed in seeds}
        for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
            scores[futures[future]].append(future.result())
            print(
                f"[{done}/{len(futures)}] {' '.join(map(str, futures[future]))}", file=sys.stderr, flush=True
            )
    found = {case: statistics.fmean(score for score, _ in each) for case, each in scores.items()}
    for (name, count, mode), mean in found.items():
        stale = statistics.fmean(s for _, s in scores[name, count, mode])
        print(f"{name:8} {count:3} workers  {mode:22} accuracy {mean:.4f}  mean staleness {stale:5.2f}")
    options = Options(
        name="convergence", cases=(), quick=args.quick, json=args.json, only="*", repeats=1, rounds=1
    )
    report(options, rows_of(found), {})
    if args.plot is not None:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
