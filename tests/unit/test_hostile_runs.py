"""Attacks on a run directory that once worked: an answer or one clear error, and no effect on other runs."""

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.api import jobs
from paceline.cli.app import app
from paceline.control.attempts import Attempts
from paceline.control.beginning import new_run
from paceline.control.rundir import RunDirectory
from paceline.control.tail import Outputs
from paceline.exceptions import CheckpointError
from paceline.observe import RunStatus
from paceline.observe.record.tables import cut_torn
from tests.hostile_files import ATTACKS, ID, VERSIONS, link, meta, sample_run, write

GOOD = "20261101-000000-good-0000"
MEMORY_MB = 400
GROUPS = sorted({name.split(" ")[0].rstrip(":") for name in ATTACKS})


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pandas  # noqa: F401 - what commands load later is not what an attack takes
    import safetensors.torch  # noqa: F401

    import paceline.ps.saving  # noqa: F401

    return sample_run(tmp_path_factory.mktemp("sample") / ID)


@pytest.fixture
def attacked(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """attacked(): a fresh copy of the sample, and another run beside it. `resume` starts no process."""
    root = tmp_path / "runs"
    monkeypatch.setenv("PACELINE_RUNS", str(root))
    monkeypatch.chdir(tmp_path)

    def execute(plan: Any, run: RunDirectory, *, resume: Path, **_: Any) -> RunStatus:
        """What a controller reads before it starts anything."""
        beginning = new_run(plan, run, resume)
        beginning.listener.close()
        Attempts(run.path).start(0)
        Outputs(run.logs_path, None).new([0], final=True)
        run.cut_torn_event()
        cut_torn(run.path / "raw")
        run.lock.give_back()
        return RunStatus(state="succeeded", version=1, run_dir=str(run.path))

    monkeypatch.setattr(jobs, "execute", execute)

    def fresh() -> Path:
        for path in (root, tmp_path / "outside"):
            if path.exists():
                shutil.rmtree(path)
        shutil.copytree(sample, root / ID)
        shutil.copytree(sample, root / GOOD)
        record = json.loads((root / GOOD / "run.json").read_text()) | {"id": GOOD}
        (root / GOOD / "run.json").write_text(json.dumps(record))
        return root / ID

    return fresh


def check(words: str, run: Path, what: str) -> str:
    """Run a command: it must end in order. Returns what it said."""
    places = {"RUN": str(run), "GOOD": GOOD, "OUT": "page.html", "MODEL": "model.pt"}
    before = os.getcwd()
    result = CliRunner().invoke(
        app, [places.get(word, word) for word in words.split()], env={"COLUMNS": "200"}
    )
    os.chdir(before)
    where = f"{what}: paceline {words}: {result.exit_code}: {result.output[-600:]}"
    assert result.exception is None or isinstance(result.exception, SystemExit), (
        f"{where} {result.exception!r}"
    )
    assert result.exit_code in (0, 1, 2), where
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == (result.exit_code != 0), where
    assert "\x1b" not in result.output and "\x9b" not in result.output, where
    return result.output


@pytest.mark.timeout(60)
@pytest.mark.parametrize("group", GROUPS)
def test_no_attack_works(attacked: Callable[[], Path], group: str) -> None:
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    number = 0
    for what, (attack, commands) in ATTACKS.items():
        if what.split(" ")[0].rstrip(":") != group:
            continue
        number += 1
        run = attacked()
        attack(run)
        listed = [line.split() for line in check("runs", run, what).splitlines()]
        assert [GOOD, "succeeded"] in [words[:2] for words in listed], f"{what}: {listed}"
        assert len(listed) == 3 or not (run / "run.json").is_file(), "one line each"
        for words in commands:
            check(words, run, what)
    assert number
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) // 1024
    assert used < MEMORY_MB, f"{group} took {used} MB"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group", GROUPS)
def test_no_attack_works_on_any_command(attacked: Callable[[], Path], group: str) -> None:
    every = [
        *("runs --json", "top RUN --once", "report RUN -o OUT", "compare RUN GOOD", "metrics RUN"),
        *("metrics RUN --csv -", "metrics RUN --prometheus -", "trace RUN trace.json", "export RUN MODEL"),
        *("stop RUN", "switch RUN bsp", "scale RUN --workers 3", "rm RUN --dry-run", "resume RUN"),
        *("prune --keep 0 --larger-than 1B --dry-run", "logs RUN"),
    ]
    for what, (attack, _) in ATTACKS.items():
        if what.split(" ")[0].rstrip(":") == group:
            run = attacked()
            attack(run)
            for words in every:
                check(words, run, what)


def test_the_sample_itself_is_whole(attacked: Callable[[], Path]) -> None:
    """Otherwise the attacks would prove nothing."""
    run = attacked()
    for words in ("runs", "top RUN --once", "compare RUN GOOD", "metrics RUN --csv -", "logs RUN"):
        assert "error" not in check(words, run, "whole") and "damaged" not in check(words, run, "whole")
    assert "missing" not in check("report RUN -o OUT", run, "whole")
    assert "at version 4" in check("export RUN MODEL", run, "whole")
    check("resume RUN", run, "whole")
    assert RunDirectory(run).record()["resumes"], "it got as far as the controller"


def test_a_damaged_run_is_one_line_that_says_so(attacked: Callable[[], Path]) -> None:
    run = attacked()
    write("status.json", '{"version": "many"}')(run)
    lines = sorted(line.split()[:2] for line in check("runs", run, "damaged").splitlines())
    assert lines[:2] == [[GOOD, "succeeded"], [ID, "damaged"]]
    listed = {each["id"]: each for each in json.loads(check("runs --json", run, "damaged"))}
    said = "status.json cannot be understood: version: 'many' is not a whole number of at most 64 bits"
    assert listed[ID]["damage"] == said
    assert said in check("top RUN --once", run, "damaged")
    assert "damaged" in check("prune --state damaged --dry-run", run, "damaged")
    assert "Removed run" in check("rm RUN", run, "damaged")


@pytest.mark.parametrize("words", ["export RUN MODEL", "resume RUN"])
def test_a_checkpoint_with_wrong_meta_is_passed_over_and_named(
    attacked: Callable[[], Path], words: str
) -> None:
    run = attacked()
    meta("lead", "samples", value="x")(run)
    said = " ".join(check(words, run, "meta").split())
    reason = "meta: lead.samples: 'x' is not a whole number"
    assert "checkpoint refused, the one before it is used" in said and reason in said
    if words.startswith("export"):
        assert "at version 3" in said
    with pytest.raises(CheckpointError, match="has no checkpoint to go on from"):
        shutil.rmtree(run / "checkpoints" / VERSIONS[0])
        jobs.latest_checkpoint(RunDirectory(run))


@pytest.mark.parametrize("suffix", [".log", ".out", ".err", ".order"])
def test_a_log_that_is_a_link_is_not_followed(
    attacked: Callable[[], Path], tmp_path: Path, suffix: str
) -> None:
    (tmp_path / "secret").write_text("the secret\n")
    run = attacked()
    link(f"logs/worker-0{suffix}", str(tmp_path / "secret"))(run)
    said = check("logs RUN", run, "link")
    assert "the secret" not in said
    assert f"logs/worker-0{suffix} is not read: it is a link, not a plain file" in said
    assert "checkpoint version-000000000004" in said, "other logs are shown"
