"""Limits: what strangers or scripts say too much of costs no disk, no message and no run."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.comm.frames import Kind, encode
from paceline.comm.message_codec import body_of
from paceline.comm.messages import LoggedMetrics
from paceline.core.limited_lines import LimitedLines
from paceline.observe.record.spans import NO_SPANS
from paceline.observe.record.values import ValueWriter
from paceline.worker.reporter import Reporter


def test_a_flood_of_refusals_is_a_few_lines_with_a_count() -> None:
    lines, written = LimitedLines(first=10, every_s=1.0), []
    for at in range(14_000):  # a thousand a second, for 14 s
        written += lines.said("a port scan", at / 1000)
    assert 20 <= len(written) <= 25
    assert written[:10] == ["a port scan"] * 10
    assert all("more before it" in line for line in written[10:])
    counted = sum(int(line.split("(and ")[1].split(" more")[0].replace(",", "")) for line in written[10:])
    assert 12_900 < counted + len(written) <= 14_000


def test_refusals_that_come_now_and_then_are_all_written() -> None:
    lines = LimitedLines(first=2, every_s=1.0)
    assert [lines.said("x", float(at)) for at in range(50)] == [["x"]] * 50


@pytest.mark.parametrize("name", [lambda n: f"metric {n}", lambda n: f"{n} \x1b" + "½" * 2000])
def test_metrics_of_any_number_reach_the_controller(tmp_path: Path, name: Callable[[int], str]) -> None:
    """Each message fits into its frame, and together they have every metric."""
    told: list[LoggedMetrics] = []

    class Controller:
        def tell(self, said: LoggedMetrics) -> None:
            encode(*body_of(said), sequence=0, payload_bytes=0, key=b"k" * 32)
            told.append(said)

    controller: Any = Controller()
    reporter = Reporter(controller, NO_SPANS, ValueWriter(tmp_path, rank=0))
    count = 120_000 if len(name(0)) < 100 else 2_000
    reporter.log({name(n): float(n) for n in range(count)} | {"loss": 1.0}, 1, 1, 4, 0)
    assert len(told) > 1
    assert sum(len(each.log) for each in told) == count + 1
    assert [each.losses for each in told] == [(1.0,), *[()] * (len(told) - 1)]
    assert body_of(told[0])[0] is Kind.METRICS


def test_a_run_with_twelve_file_descriptors_is_refused_with_the_numbers(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--workers", "1", "x.py"],
        cwd=tmp_path,
        env={**os.environ, "PACELINE_RUNS": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12)),
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "open files: a server needs" in done.stderr and "12 are allowed (ulimit -n is 12)" in done.stderr
