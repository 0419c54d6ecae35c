"""The harness, with a place for scripts that fail."""

import os
from pathlib import Path

import pytest

from paceline.testing import KeptEngine
from tests.differential.harness import Harness


@pytest.fixture
def harness(engine: KeptEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Harness:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    kept = os.environ.get("PACELINE_ARTIFACTS")
    artifacts = tmp_path if kept is None else Path(kept).resolve() / "differential" / tmp_path.name
    return Harness(engine, tmp_path / "case", artifacts)
