"""The tables of figures in README.md and docs/benchmarks.md, made from benchmarks/published/*.json.

    python -m benchmarks.table            say which tables differ from the published figures
    python -m benchmarks.table --write    write them anew

A published file is the one that `python -m benchmarks.NAME --json FILE` writes; those of a machine with a GPU
lie in published/gpu. A table stands between `<!-- figures: NAME -->` and `<!-- end -->`. One of a GPU that is
not published yet says so.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PUBLISHED = Path(__file__).parent / "published"
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.S)

FROM_A_GPU = ("overhead_gpu", "paper2_gpu")
"""Benchmarks that need a CUDA device: their figures may not be published yet."""
README = (
    ("push + update + pull of 47 MB, parameters read in place (bsp)", "exchange", "resnet18/shm-bsp/floor"),
    ("the same, parameters copied out (asp)", "exchange", "resnet18/shm/torch-rpc-tuned"),
    ("the same", "exchange", "resnet18/shm/gloo-allreduce"),
    ("the same", "exchange", "resnet18/shm/ray"),
    ("the same over TCP", "exchange", "resnet18/tcp/gloo-sendrecv"),
    ("the same, two bsp workers", "exchange", "resnet18/shm-2workers-bsp/mpi-allreduce"),
    ("a training step, ResNet-18, two workers", "overhead", "resnet18/2workers-bsp/ddp"),
    ("a training step, ResNet-18, one worker", "overhead", "resnet18/1worker/plain"),
    ("a training step, small CNN, one worker", "overhead", "digits/1worker/plain"),
    ("command to first step, two workers", "startup", "digits/first-step/torchrun"),
    ("memory of a worker at its first step", "startup", "digits/memory/worker:0"),
)
"""The rows of the README's table: what is measured, the benchmark, the case."""
PEERS = {
    "floor": "one update and one copy pass over memory",
    "torch-rpc-tuned": "torch RPC, tuned",
    "gloo-allreduce": "gloo all-reduce",
    "gloo-sendrecv": "gloo send/recv",
    "ray": "Ray actor",
    "mpi-allreduce": "Open MPI all-reduce + step",
    "ddp": "DDP (gloo)",
    "plain": "plain loop",
    "torchrun": "torchrun",
    "worker:0": "torchrun",
}


def published() -> dict[str, dict[str, Any]]:
    """What is published, by the benchmark's name."""
    files = [*PUBLISHED.glob("*.json"), *(PUBLISHED / "gpu").glob("*.json")]
    found = (json.loads(file.read_text()) for file in sorted(files))
    return {each["benchmark"]: each for each in found}


def table(name: str, results: dict[str, dict[str, Any]]) -> str:
    """The table `name`: a benchmark's own, or `readme`."""
    if name in FROM_A_GPU and name not in results:
        return f"No figures of `{name}` are published yet: they need a machine with a GPU.\n"
    head = _made_by(results[name]) if name in FROM_A_GPU else ""
    lines = _readme_lines(results) if name == "readme" else _lines(results[name]["rows"])
    return head + "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


def with_tables(text: str, results: dict[str, dict[str, Any]]) -> str:
    """A page with all its tables made anew."""
    return BLOCK.sub(lambda block: block[1] + table(block[2], results) + block[3], text)


def _made_by(result: dict[str, Any]) -> str:
    """How and where: these come from another machine than the rest of the page."""
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    return f"`{result['command']}`, {result['date'][:16].replace('T', ' ')} UTC, {machine}.\n\n"


def _lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    lines = [["case", "ours", "peer", "ratio", "reach", "reached"], ["---"] * 6]
    for row in rows:
        most = row["note"].partition("ours at most ")[2]
        target = _number(row["target"]) + (f" and {most}" if most else "")
        reached = {True: "yes", False: "**no**", None: ""}[row["ok"]]
        ours = f"{_number(row['ours'])} {row['unit']}"
        lines.append([f"`{row['case']}`", ours, _number(row["peer"]), _number(row["ratio"]), target, reached])
    return lines


def _readme_lines(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    lines = [["", "Paceline", "peer", "ratio"], ["---"] * 4]
    for what, benchmark, case in README:
        (row,) = (row for row in results[benchmark]["rows"] if row["case"] == case)
        unit, peer = row["unit"], PEERS[case.rpartition("/")[2]]
        cells = [f"{_number(row['ours'])} {unit}", f"{_number(row['peer'])} {unit}, {peer}"]
        lines.append([what, *cells, _number(row["ratio"])])
    return lines


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def main() -> None:
    """Compare, or write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables anew")
    write = parser.parse_args().write
    results = published()
    differing = [page for page in PAGES if with_tables(page.read_text(), results) != page.read_text()]
    for page in differing:
        if write:
            page.write_text(with_tables(page.read_text(), results))
        print(f"{page.name}: {'written' if write else 'differs from the published figures'}")
    sys.exit(bool(differing) and not write)


if __name__ == "__main__":
    main()
