"""A run's metrics for other tools: CSV, TensorBoard, Prometheus, MLflow."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from paceline.exceptions import UsageError
from paceline.observe.analyse.run_data import RunData
from paceline.observe.record.status import RunStatus
from paceline.observe.record.tables import ROLES
from paceline.observe.record.values import EVALUATION, standing

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["MetricsServer", "new_metrics", "prometheus", "to_csv", "to_mlflow", "to_tensorboard"]

EXPERIMENT = "paceline"
"""Where MLflow files our runs."""
_BATCH = 1000
"""The most metrics that MLflow takes at once; it takes 100 parameters."""
_WRITTEN = "paceline.json"
"""Beside TensorBoard's files: what of the run is in them."""
_FILED = "paceline.filed"
"""A tag of MLflow's run for each worker: how many values of each of its attempts are filed."""
_PLACE = ("worker", "attempt", "step")
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


# --- CSV ----------------------------------------------------------------------------------------------


def to_csv(run: RunData, file: IO[str]) -> int:
    """Write every logged value with all its columns. Returns how many."""
    frame = run.metrics.copy()
    frame["time"] = frame["time"].map("{:.6f}".format)
    frame["value"] = frame["value"].map(repr)  # all digits; a NaN is no missing value
    frame.to_csv(file, index=False, lineterminator="\n")
    return len(frame)


# --- TensorBoard --------------------------------------------------------------------------------------


def to_tensorboard(run: RunData, directory: Path) -> int:
    """Write what the script logged and what roles used, as event files. Returns how many values are new.

    One subdirectory a worker, `DIRECTORY/RUN/worker-1`: TensorBoard then draws a metric's curves of all
    workers in one plot. Resources are by seconds since the first sample. What an earlier call has written
    there is not written again. Values of steps that the run made again, from a checkpoint, are left out.

    Raises:
        UsageError: the tensorboard package is not there, or the directory cannot be written.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError("--tensorboard needs TensorBoard's package: pip install tensorboard") from error

    where = directory / run.path.name
    written = _written_before(where)
    count = 0
    writers: dict[str, Any] = {}

    def add(who: str, tag: str, value: float, step: int, at: float) -> None:
        if who not in writers:
            writers[who] = SummaryWriter(str(where / who))
        writers[who].add_scalar(tag, value, step, at)

    new, told = new_metrics(run, written.get("values", {}))
    try:
        for row in new.itertuples(index=False):
            add(_curve_of(row.worker), str(row.name), row.value, int(row.step), row.time)
            count += 1
        samples = len(run.columns("resources")["time"])
        for who, tag, value, seconds, at in _usage(run, int(written.get("resources", 0))):
            add(who, f"resources/{tag}", value, seconds, at)
            count += 1
        for writer in writers.values():
            writer.close()
        if writers:
            (where / _WRITTEN).write_text(json.dumps({"values": told, "resources": samples}))
    except OSError as error:
        raise UsageError(f"{directory} cannot be written: {error.strerror or error}") from error
    finally:
        for writer in writers.values():
            writer.close()
    return count


def _written_before(where: Path) -> dict[str, Any]:
    """What an earlier export has written there."""
    if not any(where.glob("*/events.out.tfevents.*")):
        return {}
    try:
        written = json.loads((where / _WRITTEN).read_text())
        return written if isinstance(written, dict) else {}
    except (OSError, ValueError):
        raise UsageError(
            f"{where} has event files, and nothing there says what is in them ({_WRITTEN}): all values would "
            "be in it twice. Remove it, or name another directory"
        ) from None


def new_metrics(run: RunData, written: Mapping[str, int]) -> "tuple[pd.DataFrame, dict[str, int]]":
    """Logged values that are not among those that were exported before, and what is exported with them.

    Args:
        written: how many values of each attempt of each worker (`1.0`) were exported before.
    """
    frame = run.metrics
    place = frame.groupby(["worker", "attempt"]).cumcount()
    owner = frame["worker"].astype(str) + "." + frame["attempt"].astype(str)
    told = {str(name): int(n) for name, n in owner.value_counts().items()}
    stands = standing({name: frame[name].to_numpy() for name in _PLACE}, run.values.starts)
    before = owner.map(lambda name: int(written.get(name, 0)))
    return frame[stands & (place >= before).to_numpy()], {**written, **told}


def _usage(run: RunData, skip: int = 0) -> Iterator[tuple[str, str, float, int, float]]:
    """Role, what, how much, seconds since the first sample, Unix time; without the first `skip` records."""
    table = run.columns("resources")
    if not len(table["time"]):
        return
    first = int(table["time"].min())
    names = ("time", "role", "rank", "cpu", "memory", "gpu")
    for at, role, rank, cpu, memory, gpu in zip(
        *(table[name][skip:].tolist() for name in names), strict=True
    ):
        who = f"{ROLES[role]}-{rank}" if ROLES[role] in ("server", "worker") else ROLES[role]
        used = {"CPU cores": cpu, "memory MB": memory / 1e6, "GPU share": gpu}
        for tag, value in used.items():
            if not math.isnan(value):
                yield who, tag, value, round((at - first) / 1e9), at / 1e9


# --- Prometheus ---------------------------------------------------------------------------------------


def prometheus(status: RunStatus) -> str:
    """A run at this moment in Prometheus's text format."""
    run = {"run": status.run_id or Path(status.run_dir).name}
    page = _MetricsText()
    page.add("info", "gauge", "What runs; always 1.", 1, run | {"mode": status.mode, "state": status.state})
    going = not status.ended and status.state != "crashed"
    page.add("running", "gauge", "1 while the run goes on.", int(going), run)
    for name, kind, text, value in (
        ("elapsed_seconds", "gauge", "Since this start of the run.", status.elapsed_s),
        ("updates_total", "counter", "Updates applied: the version of the parameters.", status.version),
        ("samples_total", "counter", "Samples applied.", status.samples),
        ("samples_per_second", "gauge", "Mean since this start's first step.", status.samples_per_s),
        ("steps_per_second", "gauge", "The same of all workers' steps.", status.steps_per_s),
        ("startup_seconds", "gauge", "Until this start's first step began.", status.startup_s),
        ("training_seconds", "gauge", "From there to the last step's end.", status.pace.seconds),
        ("epoch", "gauge", "Counted from 0.", status.epoch),
        ("idleness_ratio", "gauge", "Part of the workers' time spent waiting.", status.idleness),
        ("restarts_total", "counter", "Workers replaced.", status.restarts),
        ("takeovers_total", "counter", "Controllers replaced.", status.takeovers),
        ("skipped_samples_total", "counter", "Samples read without a step.", status.skipped),
        ("refused_pushes_total", "counter", "Pushes refused for NaN or Inf.", status.refused),
        ("dropped_pushes_total", "counter", "Pushes not applied.", status.dropped),
        ("lost_pushes_total", "counter", "Pushes lost with who held them.", status.lost),
    ):
        page.add(name, kind, text, value, run)
    page.histogram("staleness", "Of applied pushes, in versions.", status.staleness, run)
    memory = "Resident bytes." if status.memory_kind == "rss" else "Its own bytes, its part of shared ones."
    for _, worker in sorted(status.workers.items()):
        who = run | {"worker": str(worker.rank)}
        page.add("worker_steps_total", "counter", "Steps finished.", worker.clock, who)
        for phase, seconds in sorted(worker.phases.items()):
            text = "Time in each phase."
            page.add("worker_phase_seconds_total", "counter", text, seconds, who | {"phase": phase})
        text = "Payload that its sockets carried."
        for way, nbytes in (("out", worker.bytes_out), ("in", worker.bytes_in)):
            page.add("worker_bytes_total", "counter", text, nbytes, who | {"direction": way})
        text = "Logical bytes that its steps moved, whatever carried them."
        for way, nbytes in (("out", worker.moved_out), ("in", worker.moved_in)):
            page.add("worker_moved_bytes_total", "counter", text, nbytes, who | {"direction": way})
        for name, value in worker.metrics.items():
            page.add("worker_metric", "gauge", "What the script logged last.", value, who | {"name": name})
        for of, number in worker.logged_at.items():
            text = "Where the worker was when it logged last."
            page.add("worker_logged_at", "gauge", text, number, who | {"of": of})
        page.add("worker_cpu_cores", "gauge", "Cores in use.", worker.cpu, who)
        page.add("worker_memory_bytes", "gauge", memory, worker.memory, who)
    for _, server in sorted(status.servers.items()):
        who = run | {"server": str(server.rank)}
        page.add("server_updates_total", "counter", "Updates applied.", server.updates, who)
        page.add("server_update_seconds_total", "counter", "Time spent updating.", server.update_s, who)
        page.add("server_cpu_cores", "gauge", "Cores in use.", server.cpu, who)
        page.add("server_memory_bytes", "gauge", memory, server.memory, who)
    return page.text()


class _MetricsText:
    """Metrics by name: all lines of one have to stand together."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def add(self, name: str, kind: str, text: str, value: float, labels: Mapping[str, str]) -> None:
        self._under(name, kind, text).append(f"paceline_{name}{_labels(labels)} {_number(value)}")

    def histogram(self, name: str, text: str, counts: Mapping[int, int], labels: Mapping[str, str]) -> None:
        """A count of each whole number, as cumulative buckets of powers of two: few, and always the same."""
        lines = self._under(name, "histogram", text)
        total = sum(counts.values())
        for bound in (0, 1, 2, 4, 8, 16, 32, 64, 128):
            below = sum(n for each, n in counts.items() if each <= bound)
            lines.append(f"paceline_{name}_bucket{_labels({**labels, 'le': str(bound)})} {below}")
        lines.append(f"paceline_{name}_bucket{_labels({**labels, 'le': '+Inf'})} {total}")
        lines.append(f"paceline_{name}_sum{_labels(labels)} {sum(each * n for each, n in counts.items())}")
        lines.append(f"paceline_{name}_count{_labels(labels)} {total}")

    def text(self) -> str:
        return "\n".join(line for lines in self._lines.values() for line in lines) + "\n"

    def _under(self, name: str, kind: str, text: str) -> list[str]:
        head = [f"# HELP paceline_{name} {text}", f"# TYPE paceline_{name} {kind}"]
        return self._lines.setdefault(name, head)


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(value) if isinstance(value, int) else repr(float(value))


class MetricsServer(ThreadingHTTPServer):
    """Serves `/metrics` for Prometheus to scrape; every other path is answered with 404.

    Args:
        page: makes the text, anew for each request.
        port: 0 is any free one; `server_port` says which.

    Raises:
        UsageError: the address cannot be had.
    """

    daemon_threads = True

    def __init__(self, page: Callable[[], str], host: str = "127.0.0.1", port: int = 0) -> None:
        self.page = page
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError(
                f"--serve {host}:{port}: {why}. Name another port, or 0 for any that is free"
            ) from error


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        """Answer one request."""
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            body = self.server.page().encode()
        except Exception as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", _CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a scrape every few seconds is no news."""


# --- MLflow -------------------------------------------------------------------------------------------


def to_mlflow(run: RunData, uri: str) -> str:
    """File a run with MLflow: its job as parameters, its metrics with their steps. Returns MLflow's run id.

    A run that is there already gets what is new.

    Raises:
        UsageError: mlflow is not there, or its server does not take it.
    """
    try:
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise UsageError("--mlflow needs MLflow's package: pip install mlflow") from error

    asked = {**run.hyperparameters, **run.job}
    parameters = [Param(_key(name), str(value)[:500]) for name, value in asked.items()]
    try:
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(EXPERIMENT)
        where = experiment.experiment_id if experiment else client.create_experiment(EXPERIMENT)
        name = run.path.name
        quote = '"' if "'" in name else "'"
        mine = f"tags.`paceline.run` = {quote}{name}{quote}"
        there = client.search_runs([where], mine, max_results=1)
        tags = dict(there[0].data.tags) if there else {}
        new, told = new_metrics(run, _filed_before(tags))
        metrics = [
            Metric(
                _key(f"{row.name}/{_curve_of(row.worker)}"), row.value, int(row.time * 1000), int(row.step)
            )
            for row in new.itertuples(index=False)
        ]
        if there:
            mlflow_id = str(there[0].info.run_id)
        else:
            started = metrics[0].timestamp if metrics else None
            filed = client.create_run(where, start_time=started, run_name=name, tags={"paceline.run": name})
            mlflow_id = str(filed.info.run_id)
            for at in range(0, len(parameters), 100):
                client.log_batch(mlflow_id, params=parameters[at : at + 100])
        for at in range(0, len(metrics), _BATCH):
            client.log_batch(mlflow_id, metrics=metrics[at : at + _BATCH])
        for worker, text in _filed_tags(told).items():
            client.set_tag(mlflow_id, f"{_FILED}.{worker}", text)
        if run.status.ended:
            ended = {"failed": "FAILED", "stopped": "KILLED", "succeeded": "FINISHED"}
            client.set_terminated(mlflow_id, ended[run.status.state])
    except (MlflowException, OSError) as error:
        raise UsageError(f"--mlflow {uri}: {str(error).splitlines()[0][:200]}") from error
    return mlflow_id


def _filed_before(tags: Mapping[str, str]) -> dict[str, int]:
    """As `new_metrics` wants it, of tags as in `paceline.filed.1`: `0:120 1:33`."""
    found = {}
    for name, text in tags.items():
        if name.startswith(f"{_FILED}."):
            for part in text.split():
                attempt, _, number = part.partition(":")
                found[f"{name.removeprefix(f'{_FILED}.')}.{attempt}"] = int(number)
    return found


def _filed_tags(told: Mapping[str, int]) -> dict[str, str]:
    """The tags of what is filed now, by worker."""
    found: dict[str, list[str]] = {}
    for name, number in told.items():
        worker, _, attempt = name.partition(".")
        found.setdefault(worker, []).append(f"{attempt}:{number}")
    return {worker: " ".join(parts) for worker, parts in found.items()}


def _key(text: str) -> str:
    """A name that MLflow takes."""
    return re.sub(r"[^\w\-. /]", "_", text, flags=re.ASCII)[:250]


def _curve_of(worker: int) -> str:
    return "evaluation" if worker == EVALUATION else f"worker-{worker}"
