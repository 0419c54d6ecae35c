"""Workers that join and leave while a run goes on: the others stay, and every sample counts once."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.control import Requests
from paceline.observe import RunStatus
from tests.integration.test_faults import TOOLS
from tests.speed import first

SAMPLES = 60
# It trains until the run has been through all its sizes.
SOURCE = (
    TOOLS
    + """
import time
model, optimizer, loader = prepared(samples=60)
for epoch, batches in until_enough(loader):
    # Computing, as it were.
    train((model, optimizer, batches), epochs=1, at_step=lambda step: time.sleep(0.01))
"""
)


class Scaling:
    """A watch that takes a run through these numbers of workers, each once the one before is there."""

    def __init__(self, *sizes: Any) -> None:
        self._sizes = list(sizes)
        self._answers: list[dict[str, Any]] | None = None
        self._thread: threading.Thread | None = None
        self._wanted: int | None = None
        self._since = 0
        self.answers: list[dict[str, Any]] = []
        self.pids: list[dict[str, int]] = []
        """Of the workers, whenever a size was reached."""

    def __call__(self, status: RunStatus, lines: list[str], engine: Any) -> None:
        workers = {name: pid for name, pid in engine.pids().items() if name.startswith("worker:")}
        if self._answers is not None:
            if not self._answers:
                return
            (answer,) = self._answers
            self.answers.append(answer)
            self._answers = None
            if "refused" in answer:
                self._wanted = None
        if self._wanted is not None:
            # Of the present processes: steps go on counting from one to the next.
            stepped = [bool(status.workers[int(name[7:])].phases) for name in workers]
            if len(workers) != self._wanted or not all(stepped) or status.version < self._since + 15:
                return
            self.pids.append(workers)
            self._wanted = None
        if not self.pids and len(workers) == 2 and status.version > 5:
            self.pids.append(workers)
        if self.pids and self._sizes:
            self._ask(status, self._sizes.pop(0))
        elif self.pids:
            (Path(status.run_dir) / "enough").touch()

    def _ask(self, status: RunStatus, workers: Any) -> None:
        answers: list[dict[str, Any]] = []
        requests = Requests(Path(status.run_dir))

        def ask() -> None:
            body = {"kind": "scale", "workers": workers}
            answers.append(requests.ask(body, alive=lambda: True, within_s=60))

        self._answers, self._wanted, self._since = answers, workers, status.version
        self._thread = threading.Thread(target=ask, name="asking")
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join(timeout=65)


def scaled(run: Callable[..., Any], *sizes: Any, **job: Any) -> tuple[Any, Scaling]:
    watch = Scaling(*sizes)
    ran = run(SOURCE, workers=2, threads=1, watch=watch, **job)
    watch.join()
    return ran, watch


def assert_every_sample_once(ran: Any) -> None:
    assert ran.error is None, ran.error
    assert ran.status.state == "succeeded"
    *finished, rest = ran.status.leases
    assert [(a["applied"], a["refused"], a["unused"]) for a in finished] == [(SAMPLES, 0, 0)] * len(finished)
    assert (rest["applied"], rest["refused"]) == (0, 0)
    assert ran.status.samples == SAMPLES * len(finished)
    assert ran.status.lost == 0 and ran.status.restarts == 0


@pytest.mark.parametrize(
    ("mode", "link"),
    first(
        1,
        [
            ("asp", "tcp"),
            ("bsp", "shm"),
            ("ssp:2", "shm"),
            ("bsp", "tcp"),
            ("local:2", "shm"),
            ("easgd:2", "shm"),
        ],
    ),
)
def test_four_workers_then_two_then_three(run, mode, link):
    ran, watch = scaled(run, 4, 2, 3, mode=mode, link=link, servers=2)
    assert_every_sample_once(ran)
    assert [a["workers"] for a in watch.answers] == [4, 2, 3]
    two, four, again, three = watch.pids
    assert set(four) == {f"worker:{r}" for r in range(4)}
    assert set(again) == {"worker:0", "worker:1"} and set(three) == {*again, "worker:2"}
    for name, pid in two.items():
        assert four[name] == again[name] == three[name] == pid  # who stays is the same process
    assert four["worker:2"] != three["worker:2"]
    said = [m for m in ran.status.messages if m.startswith("from ")]
    assert said == [
        "from 2 to 4 workers: worker:2, worker:3 join",
        "from 4 to 2 workers: worker:2, worker:3 leave",
        "from 2 to 3 workers: worker:2 joins",
    ]
    assert ran.run.read_job().workers == 3


def test_what_cannot_be_is_refused_and_the_run_goes_on(run):
    ran, watch = scaled(run, 0, "two", 61, 2, mode="bsp")
    assert_every_sample_once(ran)
    refused = [a["refused"] for a in watch.answers[:3]]
    assert refused[0].startswith("workers=0: a run needs at least one worker")
    assert refused[1].endswith(
        "cannot be understood: workers: 'two' is not a whole number of at most 64 bits"
    )
    assert refused[2] == "61 workers but only 60 samples: every worker needs at least one"
    assert watch.answers[3]["workers"] == 2  # as it was


def test_a_mode_that_needs_more_workers_keeps_them(run):
    ran, watch = scaled(run, 1, mode="backup:1")
    assert ran.error is None
    assert "it needs at least 2 workers" in watch.answers[0]["refused"]


def test_groups_are_agreed_on_when_a_run_begins(run):
    ran, watch = scaled(run, 3, mode="allreduce")
    assert ran.error is None
    assert "resume` it with --workers 3" in watch.answers[0]["refused"]


def test_the_last_leases_of_a_slow_worker_are_done_by_a_fast_one(run):
    """Worker 1 sits on its first batch of each epoch until the epoch is over without it."""
    source = (
        TOOLS
        + """
import time
model, optimizer, loader = prepared(samples=160)
for epoch in range(3):
    for number, (x, y) in enumerate(loader):
        if RANK == 1 and number == 0:
            done = RUN_DIR / f"over-{epoch}"
            until = time.monotonic() + 20
            while not done.exists() and time.monotonic() < until:
                time.sleep(0.002)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    (RUN_DIR / f"over-{epoch}").touch()
"""
    )
    ran = run(source, workers=2, mode="asp")
    assert ran.error is None
    assert [(a["applied"], a["unused"]) for a in ran.status.leases[:3]] == [(160, 0)] * 3
    assert ran.status.samples == 480
    assert ran.status.dropped >= 1, "what it did later was done already"
