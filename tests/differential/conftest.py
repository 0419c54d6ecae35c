"""One fork server for all cases of a process, and a place for scripts that fail."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.testing import KeptEngine
from tests.differential.harness import Harness


@pytest.fixture(scope="session")
def engine() -> Iterator[KeptEngine]:
    kept = KeptEngine()
    yield kept
    kept.shut_down()


@pytest.fixture
def harness(engine: KeptEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    kept = os.environ.get("PACELINE_ARTIFACTS")
    artifacts = tmp_path if kept is None else Path(kept).resolve() / "differential" / tmp_path.name
    return Harness(engine, tmp_path / "case", artifacts)
