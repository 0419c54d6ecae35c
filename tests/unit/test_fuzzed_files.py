"""Mutated files of a run directory: every reader gives plain data or one of our errors, and nothing hangs.

`tests/hostile_files.py` has attacks that once worked, against whole commands; this makes more, against the
readers themselves. `PACELINE_SEED=n` repeats them.
"""

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.api import jobs
from paceline.control import RunDirectory
from paceline.exceptions import CheckpointError, PacelineError
from paceline.observe.analyse.run_data import RunData
from paceline.observe.record.tables import cut_torn
from paceline.observe.record.values import ValueWriter
from paceline.storage.checkpoint_meta import check_meta
from paceline.storage.manifest import MANIFEST
from tests.hostile_files import CHECKPOINT, rewrite_manifest, sample_run
from tests.mutations import mutated

FAST, SLOW = 1000, 200_000
JSON_FILES = ("status.json", "run.json", "summary.json", "attempts.json", "events.jsonl", "meta")
RAW_FILES = ("raw", "pushes.csv", "values.parquet", "spans.parquet", "part")


def reads(run: Path, name: str) -> list[Callable[[], object]]:
    """What reads such a file."""
    where, data = RunDirectory(run), RunData(run)
    return {
        "status.json": [where.look, where.state, lambda: data.status],
        "run.json": [where.record, where.read_job, lambda: (data.job, data.hyperparameters)],
        "summary.json": [where.look],
        "attempts.json": [where.look],
        "events.jsonl": [where.read_events, lambda: data.events],
        "meta": [lambda: jobs.latest_checkpoint(where, check=check_meta)],
        "raw": [
            lambda: data.values,
            lambda: cut_torn(run / "raw"),
        ],
        "pushes.csv": [lambda: data.push_columns],
        "values.parquet": [lambda: data.values],
        "spans.parquet": [lambda: data.columns("spans")],
        "part": [lambda: jobs.latest_checkpoint(where)],
    }[name]


class Files:
    """A whole run, of which one file at a time is spoiled."""

    def __init__(self, root: Path) -> None:
        self.whole = sample_run(root / "whole")
        values = ValueWriter(self.whole / "raw", rank=1)
        for step in range(4):
            values.stepped()
            values.add({"loss": 1.0 / (1 + step)}, step, 32 * step, 0)
        values.close()
        self.run = root / "run"
        shutil.copytree(self.whole, self.run)

    def spoil(self, name: str, randoms: random.Random) -> tuple[Path, str]:
        """Spoil a file. Returns its path, and what was done, in words."""
        if name == "meta":
            path = self.run / CHECKPOINT / MANIFEST
            meta = mutated(json.loads(path.read_text())["meta"], randoms)
            path.write_text(json.dumps({**json.loads(path.read_text()), "meta": {}}))
            with contextlib.suppress(CheckpointError):  # NaN has no digest: then it has no meta at all
                rewrite_manifest(path.parent, meta if isinstance(meta, dict) else {})
            return path, f"meta {json.dumps(meta)[:300]}"
        if name in JSON_FILES:
            path = self.run / name
            lines = path.read_text().splitlines() if name == "events.jsonl" else [path.read_text()]
            whole = [
                at for at, line in enumerate(lines) if line.endswith("}")
            ]  # the sample's last one is torn
            at = randoms.choice(whole)
            lines[at] = json.dumps(mutated(json.loads(lines[at]), randoms))
            path.write_text("\n".join(lines))
            return path, f"{name}: {lines[at][:300]}"
        if name == "raw":
            path = randoms.choice(sorted(each for each in (self.run / "raw").iterdir() if each.is_file()))
        else:
            path = self.run / (f"{CHECKPOINT}/server-0.safetensors" if name == "part" else name)
        data = bytearray(path.read_bytes())
        for _ in range(randoms.randrange(1, 9)):
            if data and (what := randoms.randrange(3)) == 0:
                data[randoms.randrange(len(data))] = randoms.randrange(256)
            elif data and what == 1:
                del data[randoms.randrange(len(data)) :]
            else:
                data += randoms.randbytes(randoms.randrange(64))
        path.write_bytes(data)
        return path, f"{path.name}: {len(data)} bytes"

    def mend(self, path: Path) -> None:
        shutil.copy2(self.whole / path.relative_to(self.run), path)


def assault(root: Path, cases: int, seed: int) -> None:
    files, randoms = Files(root), random.Random(seed)
    refused = 0
    for number in range(cases):
        # Tables are read by libraries that take milliseconds.
        name = randoms.choice(JSON_FILES if randoms.random() < 0.95 else RAW_FILES)
        path, what = files.spoil(name, randoms)
        for read in reads(files.run, name):
            try:
                read()
            except PacelineError:
                refused += 1
            except Exception as error:
                pytest.fail(f"PACELINE_SEED={seed}, case {number}: {what}: {error!r}")
        files.mend(path)
    assert refused > cases / 20, "the cases are not hostile"


def test_1000_spoiled_files_are_read_or_refused(tmp_path: Path) -> None:
    assault(tmp_path, FAST, int(os.environ.get("PACELINE_SEED", "1")))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_200_000_spoiled_files_are_read_or_refused(tmp_path: Path) -> None:
    assault(tmp_path, SLOW, int(os.environ.get("PACELINE_SEED", "2")))


def test_the_files_are_whole_before(tmp_path: Path) -> None:
    """Otherwise refusals would prove nothing."""
    files = Files(tmp_path)
    for name in (*JSON_FILES, *RAW_FILES):
        found: list[Any] = [read() for read in reads(files.run, name)]
        assert found
