"""A run's metrics for TensorBoard, Prometheus and MLflow, and on the command line."""

import csv
import json
import math
import re
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.metrics_command import metrics
from paceline.control.rundir import RunDirectory
from paceline.exceptions import UsageError
from paceline.observe import RunStatus, ServerStatus, WorkerStatus
from paceline.observe.analyse.run_data import RunData
from paceline.observe.record.tables import RESOURCES, ROLES, RawTable, to_parquet
from paceline.observe.record.values import ValueWriter
from paceline.observe.show import exports
from paceline.observe.show.exports import MetricsServer, prometheus, to_mlflow, to_tensorboard
from paceline.plan import Job


def status() -> RunStatus:
    return RunStatus(
        state="running",
        run_id='odd "name"\\',
        mode="ssp:3",
        elapsed_s=12.0,
        version=100,
        samples=3200,
        workers={
            0: WorkerStatus(
                rank=0,
                clock=60,
                metrics={"loss": math.nan, "a\nb": math.inf},
                logged_at={"step": 60, "attempt": 1},
                phases={"forward": 4.5},
                bytes_out=5,
                cpu=0.5,
                memory=4096,
            ),
            1: WorkerStatus(rank=1, clock=40),
        },
        servers={0: ServerStatus(rank=0, updates=100, update_s=1.5)},
        staleness={0: 5, 3: 4, 500: 1},
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("PACELINE_RUNS", str(tmp_path / "runs"))
    found = RunDirectory.create(Job(script="train.py", mode="asp"))
    found.write_status({**status().to_json(), "state": "succeeded", "run_id": found.id})
    for worker, step, value in ((0, 10, 0.5), (1, 11, 0.75), (0, 20, 0.25), (1, 21, math.nan)):
        found.append_event({"kind": "metrics", "worker": worker, "clock": step, "metrics": {"loss": value}})
    table = RawTable(found.path / "raw", "controller", RESOURCES)
    row = (10**18, ROLES.index("server"), 0, 0.5, 2 * 10**6, 3, *[0] * 4, 0.0, np.nan, 0)
    table.append(np.array([row, (row[0] + 2 * 10**9, *row[1:])], RESOURCES.record))
    table.close()
    return found


def invoke(*words: str, columns: int = 100) -> str:
    app = typer.Typer()
    app.command()(metrics)
    result = CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.stdout


# --- Prometheus ---------------------------------------------------------------------------------------

SAMPLE = re.compile(r'(paceline_\w+)(\{(?:\w+="(?:[^"\\\n]|\\["\\n])*",?)*\})? (NaN|[+-]Inf|-?[\d.e+-]+)')


def parsed(text: str) -> dict[str, str]:
    """Every line is one that Prometheus reads, and lines of a metric stand together under their type."""
    assert text.endswith("\n")
    kinds: dict[str, str] = {}
    found: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert current not in kinds
            kinds[current] = kind
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            name = re.sub("_(bucket|sum|count)$", "", match[1]) if kinds[current] == "histogram" else match[1]
            assert name == current
            assert (kinds[current] == "counter") == name.endswith("_total")
            assert match[1] + match[2] not in found, "twice"
            found[match[1] + match[2]] = match[3]
    return found


def test_prometheus() -> None:
    found = parsed(prometheus(status()))
    run = r'run="odd \"name\"\\"'
    assert found[f"paceline_updates_total{{{run}}}"] == "100"
    assert found[f'paceline_worker_steps_total{{{run},worker="1"}}'] == "40"
    assert found[f'paceline_worker_metric{{{run},worker="0",name="loss"}}'] == "NaN"
    assert found[f'paceline_worker_metric{{{run},worker="0",name="a\\nb"}}'] == "+Inf"
    assert found[f'paceline_worker_logged_at{{{run},worker="0",of="attempt"}}'] == "1"
    assert found[f'paceline_worker_phase_seconds_total{{{run},worker="0",phase="forward"}}'] == "4.5"
    assert found[f'paceline_server_update_seconds_total{{{run},server="0"}}'] == "1.5"
    assert found[f'paceline_staleness_bucket{{{run},le="2"}}'] == "5"
    assert found[f'paceline_staleness_bucket{{{run},le="128"}}'] == "9"
    assert found[f'paceline_staleness_bucket{{{run},le="+Inf"}}'] == "10"
    assert found[f"paceline_staleness_sum{{{run}}}"] == "512"


def test_prometheus_of_a_run_that_did_nothing() -> None:
    assert parsed(prometheus(RunStatus()))['paceline_running{run=""}'] == "1"


@contextmanager
def served(server: MetricsServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_served() -> None:
    pages = iter(["first\n", "second\n"])
    with served(MetricsServer(lambda: next(pages))) as address:
        with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert answer.read() == b"first\n"
        with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
            assert answer.read() == b"second\n"
        for path, code in (("/metrics", 503), ("/run.json", 404)):
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(f"{address}{path}", timeout=10)
            assert error.value.code == code
            error.value.close()


def test_a_port_that_is_taken() -> None:
    with MetricsServer(str) as one, pytest.raises(UsageError, match="Address already in use. Name another"):
        MetricsServer(str, port=one.server_port)


# --- TensorBoard --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard(run: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert to_tensorboard(RunData(run.path), tmp_path / "board") == 8
    read = EventAccumulator(str(tmp_path / "board" / run.id / "worker-0"))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("loss")] == [(10, 0.5), (20, 0.25)]
    read = EventAccumulator(str(tmp_path / "board" / run.id / "worker-1"))
    read.Reload()
    assert math.isnan(read.Scalars("loss")[-1].value)
    read = EventAccumulator(str(tmp_path / "board" / run.id / "server-0"))
    read.Reload()
    cores = read.Scalars("resources/CPU cores")
    assert [(each.step, each.value) for each in cores] == [(0, 0.5), (2, 0.5)]
    assert to_tensorboard(RunData(run.path), tmp_path / "board") == 0, "nothing is written twice"
    log_more(run)
    assert to_tensorboard(RunData(run.path), tmp_path / "board") == 2
    read = EventAccumulator(str(tmp_path / "board" / run.id / "worker-0"))
    read.Reload()
    assert [each.step for each in read.Scalars("loss")] == [10, 20, 25]
    (tmp_path / "board" / run.id / "paceline.json").unlink()
    with pytest.raises(UsageError, match="all values would be in it twice. Remove it"):
        to_tensorboard(RunData(run.path), tmp_path / "board")


class Board:
    """As torch's SummaryWriter: keeps what it is told, and makes a file."""

    told: ClassVar[list[tuple[str, str, float, int]]] = []

    def __init__(self, where: str) -> None:
        Path(where).mkdir(parents=True, exist_ok=True)
        (Path(where) / "events.out.tfevents.1").touch()
        self._who = Path(where).name

    def add_scalar(self, tag: str, value: float, step: int, at: float) -> None:
        self.told.append((self._who, tag, value, step))

    def close(self) -> None:
        pass


def test_tensorboard_gets_what_is_new(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.__dict__["SummaryWriter"] = Board
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Board, "told", [])
    assert to_tensorboard(RunData(run.path), tmp_path / "board") == 8
    assert to_tensorboard(RunData(run.path), tmp_path / "board") == 0, "nothing is written twice"
    log_more(run)
    assert to_tensorboard(RunData(run.path), tmp_path / "board") == 2
    to_parquet(run.path)
    assert to_tensorboard(RunData(run.path), tmp_path / "board") == 0
    assert Board.told[-2:] == [("worker-0", "loss", 0.125, 25), ("worker-0", "again", 3.0, 25)]
    assert len(Board.told) == 10
    (tmp_path / "board" / run.id / "paceline.json").unlink()
    with pytest.raises(UsageError, match="all values would be in it twice. Remove it"):
        to_tensorboard(RunData(run.path), tmp_path / "board")
    assert to_tensorboard(RunData(run.path), tmp_path / "other") == 10


def log_more(run: RunDirectory) -> None:
    """Worker 0 is resumed from step 24."""
    writer = ValueWriter(run.path / "raw", 0, 1, began=24)
    writer.stepped()
    writer.add({"loss": 0.125, "again": 3.0}, 40, 1280, 1)
    writer.close()


def test_without_tensorboard(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        to_tensorboard(RunData(run.path), tmp_path / "board")


# --- MLflow -------------------------------------------------------------------------------------------


class Filed:
    """What a client of MLflow was asked to do."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.tags: dict[str, str] = {}

    def __call__(self, tracking_uri: str) -> "Filed":
        self.calls.append(("uri", tracking_uri))
        return self

    def get_experiment_by_name(self, name: str) -> None:
        assert name == "paceline"

    def create_experiment(self, name: str) -> str:
        return "7"

    def search_runs(self, experiments: list[str], mine: str, max_results: int) -> list[Any]:
        assert experiments == ["7"] and mine.startswith("tags.`paceline.run` = '2")
        data, info = type("Data", (), {"tags": self.tags}), type("Info", (), {"run_id": "abc"})
        return [type("Run", (), {"data": data, "info": info})] if self.tags else []

    def set_tag(self, run_id: str, name: str, text: str) -> None:
        self.tags[name] = text

    def create_run(self, experiment: str, start_time: int, run_name: str, tags: dict[str, str]) -> Any:
        self.calls.append(("run", (experiment, run_name)))
        info = type("Info", (), {"run_id": "abc"})
        return type("Run", (), {"info": info})

    def log_batch(self, run_id: str, **batch: list[Any]) -> None:
        self.calls += [(kind, entries) for kind, entries in batch.items()]

    def set_terminated(self, run_id: str, state: str) -> None:
        self.calls.append(("end", state))


@pytest.fixture
def filed(monkeypatch: pytest.MonkeyPatch) -> Filed:
    client = Filed()
    entities, errors, tracking = (
        ModuleType(f"mlflow.{name}") for name in ("entities", "exceptions", "tracking")
    )

    class Metric(tuple[Any, ...]):
        def __new__(cls, *values: Any) -> "Metric":
            return super().__new__(cls, values)

        timestamp = property(lambda self: self[2])

    for module, contents in (
        (ModuleType("mlflow"), {}),
        (entities, {"Metric": Metric, "Param": lambda name, value: (name, value)}),
        (errors, {"MlflowException": type("MlflowException", (Exception,), {})}),
        (tracking, {"MlflowClient": client}),
    ):
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return client


def test_mlflow(run: RunDirectory, filed: Filed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "_BATCH", 3)
    assert to_mlflow(RunData(run.path), "http://there") == "abc"
    assert filed.calls[:2] == [("uri", "http://there"), ("run", ("7", run.id))]
    assert ("mode", "asp") in dict(filed.calls)["params"]
    batches = [entries for kind, entries in filed.calls if kind == "metrics"]
    assert [len(batch) for batch in batches] == [3, 1]
    assert [(each[0], each[1], each[3]) for each in batches[0]] == [
        ("loss/worker-0", 0.5, 10),
        ("loss/worker-1", 0.75, 11),
        ("loss/worker-0", 0.25, 20),
    ]
    assert filed.calls[-1] == ("end", "FINISHED")
    filed.calls.clear()
    assert to_mlflow(RunData(run.path), "http://there") == "abc"
    assert [kind for kind, _ in filed.calls] == ["uri", "end"], "nothing is filed twice"
    log_more(run)
    filed.calls.clear()
    to_mlflow(RunData(run.path), "http://there")
    assert [(kind, len(what)) for kind, what in filed.calls if kind == "metrics"] == [("metrics", 2)]
    assert filed.tags["paceline.filed.0"] == "0:2 1:2"


def test_without_mlflow(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UsageError, match="pip install mlflow"):
        to_mlflow(RunData(run.path), "x")


# --- the command --------------------------------------------------------------------------------------


def test_shown_as_a_table(run: RunDirectory) -> None:
    lines = invoke(run.id).splitlines()
    assert lines[0].split() == ["metric", "worker", "values", "step", "first", "lowest", "highest", "last"]
    assert lines[1].split() == ["loss", "0", "2", "20", "0.5", "0.25", "0.5", "0.25"]
    assert lines[2].split() == ["loss", "1", "2", "21", "0.75", "0.75", "0.75", "nan"]


def test_as_csv(run: RunDirectory, tmp_path: Path) -> None:
    log_more(run)
    assert invoke("last", "--csv", str(tmp_path / "all.csv")).endswith("all.csv: 6 values\n")
    text = (tmp_path / "all.csv").read_text()
    assert invoke("last", "--csv", "-") == text
    rows = [*csv.DictReader(text.splitlines())]
    assert list(rows[0]) == [
        "time",
        "worker",
        "attempt",
        "step",
        "version",
        "epoch",
        "samples",
        "name",
        "value",
    ]
    new = next(row for row in rows if row["name"] == "again")
    labels = {name: new[name] for name in ("worker", "attempt", "step", "version", "epoch", "samples")}
    assert labels == dict(worker="0", attempt="1", step="25", version="40", epoch="1", samples="1280")
    old = [row for row in rows if row["name"] == "loss" and row["attempt"] == "0"]
    assert [(row["step"], row["value"], row["version"]) for row in old][-1] == ("21", "nan", "")
    with pytest.raises(UsageError, match="--csv .*No such file or directory"):
        invoke("last", "--csv", str(tmp_path / "not" / "there"))


@pytest.mark.parametrize("columns", [40, 60, 76, 100])
def test_the_table_fits(run: RunDirectory, columns: int) -> None:
    writer = ValueWriter(run.path / "raw", 0, 1)
    for n in range(12_345):
        writer.stepped()
        writer.add({"validation_accuracy_top5": -1 / (n + 1)}, 0, 0, 0)
    writer.close()
    lines = invoke("last", columns=columns).splitlines()
    assert all(len(line.rstrip()) <= columns for line in lines)
    assert {"metric", "worker", "step", "last"} <= set(lines[0].split())
    assert "…" not in "".join(lines), "no number is cut short"


def test_a_run_without_metrics(run: RunDirectory) -> None:
    (run.path / "events.jsonl").unlink()
    assert "has no metrics" in invoke("last")


def test_prometheus_file(run: RunDirectory, tmp_path: Path) -> None:
    assert parsed(invoke("last", "--prometheus", "-"))[f'paceline_running{{run="{run.id}"}}'] == "0"
    assert invoke("last", "--prometheus", str(tmp_path / "run.prom")) == ""
    assert parsed((tmp_path / "run.prom").read_text())
    with pytest.raises(UsageError, match="--prometheus .*No such file or directory"):
        invoke("last", "--prometheus", str(tmp_path / "not" / "there"))


def test_a_crashed_run_is_not_running(run: RunDirectory) -> None:
    data = {**status().to_json(), "controller": {"pid": 2**22 - 1, "started": 0.0}}
    (run.path / "status.json").write_text(json.dumps(data))
    found = parsed(invoke("last", "--prometheus", "-"))
    assert found[f'paceline_running{{run="{run.id}"}}'] == "0"


@pytest.mark.parametrize("text", ["", "x", "99999", "localhost:", "host:1x"])
def test_bad_addresses(text: str, run: RunDirectory) -> None:
    with pytest.raises(UsageError, match="expected a port"):
        invoke("last", "--serve", text)


def test_serve(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: MetricsServer) -> None:
        assert self.server_address[0] == "127.0.0.1"
        assert f'run="{run.id}"' in self.page()
        raise KeyboardInterrupt

    monkeypatch.setattr(MetricsServer, "serve_forever", interrupted)
    assert re.match(
        rf"http://127\.0\.0\.1:\d+/metrics serves run {run.id} until Ctrl-C", invoke("last", "--serve", "0")
    )
