"""Run directories that are damaged or hostile: a whole one to begin with, and what can be done to it.

`ATTACKS` are those that once ended a command in a traceback, hung it or filled the memory, by name. What they
do starts from valid files, so a format that changes takes them along. `tests/fuzzed_files.py` makes more.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.engines.streams import paths_of
from paceline.observe.record.output import Stream
from paceline.observe.record.tables import to_parquet
from paceline.observe.record.values import ValueWriter
from paceline.storage.manifest import MANIFEST, FileInfo, manifest_text
from tests.synthetic_run import write_run

GOLDEN = Path(__file__).parent / "golden" / "checkpoints" / "asp" / "version-000000000004"
VERSIONS = ("version-000000000003", GOLDEN.name)
ID = "20261115-081502-digits-4f2a"

Attack = Callable[[Path], None]


def sample_run(path: Path) -> Path:
    """A run that has ended, with every kind of file that a run has."""
    write_run(path, workers=2, steps=20, with_resources=True)
    with_values = ValueWriter(path / "raw", rank=0)
    for step in range(8):
        with_values.stepped()
        with_values.add({"loss": 1.0 / (1 + step), "accuracy": 0.1 * step}, step, 32 * step, 0)
    with_values.close()
    to_parquet(path)
    (path / "raw").mkdir()
    for version in VERSIONS:
        shutil.copytree(GOLDEN, path / "checkpoints" / version)
        rewrite_manifest(path / "checkpoints" / version, {}, version=int(version[8:]))
    log(path / "logs" / "worker-0.log", out=b"epoch 0\nepoch 1\n", err=b"a warning\n")
    (path / "logs" / "server-0.log").write_bytes(b"checkpoint version-000000000004\n")
    (path / "lock").write_bytes(b"1         \n")
    (path / "digits.py").write_text("")
    (path / "summary.json").write_text(json.dumps({"diagnosis": {"limit": "unknown"}}))
    (path / "attempts.json").write_text(json.dumps({"started": {"0": 1}, "since": {"0": 0}}))
    return path


def log(path: Path, *, out: bytes, err: bytes) -> None:
    """A worker's log: its files, and the marks of their order."""
    paths = paths_of(path)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    marks = b""
    for suffix, stream, data in ((".out", Stream.OUT, out), (".err", Stream.ERR, err)):
        paths[suffix].write_bytes(data)
        marks += (len(data) << 2 | stream).to_bytes(8, "little")
    paths[".order"].write_bytes(marks)


def rewrite_manifest(path: Path, meta: dict[str, Any], *, version: int | None = None) -> None:
    """Alter a checkpoint as an attacker does who knows how the digest is made."""
    manifest = json.loads((path / MANIFEST).read_text())
    files = {name: FileInfo(name, each["sha256"], each["bytes"]) for name, each in manifest["files"].items()}
    number = manifest["version"] if version is None else version
    text = manifest_text(number, manifest["created"], files, {**manifest["meta"], **meta})
    (path / MANIFEST).write_text(text)


# What can be done to a file


def gone(path: Path) -> Path:
    """Remove what is there, so that another thing can take its place."""
    path.parent.mkdir(exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def pipe(name: str) -> Attack:
    return lambda run: os.mkfifo(gone(run / name))


def directory(name: str) -> Attack:
    return lambda run: gone(run / name).mkdir()


def link(name: str, to: str) -> Attack:
    return lambda run: gone(run / name).symlink_to(to)


def endless(name: str, nbytes: int = 8 << 30) -> Attack:
    """A file of so many zeros, which take no room on the disk."""

    def attack(run: Path) -> None:
        gone(run / name).touch()
        os.truncate(run / name, nbytes)

    return attack


def listening(name: str) -> Attack:
    def attack(run: Path) -> None:
        gone(run / name)
        before = os.getcwd()
        os.chdir((run / name).parent)  # its whole path may be too long
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind((run / name).name)
        finally:
            os.chdir(before)

    return attack


def write(name: str, data: bytes | str) -> Attack:
    content = data.encode() if isinstance(data, str) else data
    return lambda run: void(gone(run / name).write_bytes(content))


def append(name: str, data: bytes | str) -> Attack:
    content = data.encode() if isinstance(data, str) else data

    def attack(run: Path) -> None:
        with (run / name).open("ab") as file:
            file.write(content)

    return attack


def cut(name: str, share: float) -> Attack:
    return lambda run: os.truncate(run / name, int((run / name).stat().st_size * share))


def put(name: str, *place: str, value: Any) -> Attack:
    """Another value at a place of a JSON file."""

    def attack(run: Path) -> None:
        content = json.loads((run / name).read_text())
        put_into(content, place, value)
        (run / name).write_text(json.dumps(content))

    return attack


def meta(*place: str, value: Any) -> Attack:
    """Another value at a place of the last checkpoint's meta; `...`: none."""

    def attack(run: Path) -> None:
        path = run / "checkpoints" / VERSIONS[-1]
        content = json.loads((path / MANIFEST).read_text())["meta"]
        put_into(content, place, value)
        rewritten = {name: content[name] for name in content}
        manifest = json.loads((path / MANIFEST).read_text())
        manifest["meta"] = {}
        (path / MANIFEST).write_text(json.dumps(manifest))
        rewrite_manifest(path, rewritten)

    return attack


def put_into(content: Any, place: Sequence[str], value: Any) -> None:
    for key in place[:-1]:
        content = content[key]
    if value is ...:
        del content[place[-1]]
    else:
        content[place[-1]] = value


def void(_: object) -> None:
    """A result that nobody wants."""


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def deep_object(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = {"a": found}
    return found


def table(name: str, change: Callable[[Any], Any]) -> Attack:
    """Another table in a Parquet file."""

    def attack(run: Path) -> None:
        import pyarrow.parquet as pq

        pq.write_table(change(pq.read_table(run / name)), run / name)

    return attack


def as_text(found: Any) -> Any:
    import pyarrow as pa

    return pa.table({name: pa.array(["x"] * len(found)) for name in found.column_names})


def as_nothing(found: Any) -> Any:
    import pyarrow as pa

    return pa.table({name: pa.nulls(len(found), pa.int64()) for name in found.column_names})


def half_of_it(found: Any) -> Any:
    return found.select(found.column_names[: len(found.column_names) // 2])


def bomb(run: Path) -> None:
    """A small file that claims to hold 400 MB in a column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pa.table({"start": pa.array(np.zeros(1_000_000, "i8"))})
    with pq.ParquetWriter(run / "spans.parquet", rows.schema, compression="zstd") as writer:
        for _ in range(50):
            writer.write_table(rows)


def bad_starts(found: Any) -> Any:
    return found.replace_schema_metadata({"paceline": '[{"worker": "x", "attempt": [], "began": null}]'})


def link_of_a_version(run: Path) -> None:
    path = run / "checkpoints" / VERSIONS[-1]
    shutil.move(path, run.parent / "outside")
    path.symlink_to(run.parent / "outside")


STEERING = "\x1b]0;owned\x07\x1b[2J\x1b[8mhidden\x9b31m\u202e[red]markup[/red]"
"""What a terminal must not get."""


def steering_status(run: Path) -> None:
    content = json.loads((run / "status.json").read_text())
    content["workers"]["0"]["metrics"] = {f"loss{STEERING}": 1.0}
    content |= {"mode": STEERING, "error": f"boom {STEERING}\n{STEERING}", "messages": [STEERING]}
    (run / "status.json").write_text(json.dumps(content))


def steering_record(run: Path) -> None:
    content = json.loads((run / "run.json").read_text())
    content["job"] |= {"mode": STEERING, "script": f"{STEERING}.py", "args": [STEERING]}
    content["command"] = [STEERING]
    (run / "run.json").write_text(json.dumps(content))


BIG = 10**400
STATUS, RECORD, EVENTS, PUSHES = "status.json", "run.json", "events.jsonl", "pushes.csv"
CHECKPOINT = f"checkpoints/{VERSIONS[-1]}"
INF = float("inf")

WRONG_STATUS: dict[str, list[Any]] = {
    "workers": [[], {"x": {}}, {"0": 5}, {"0": {"rank": "a"}}, {"0": {"rank": 0, "clock": "x"}}],
    "elapsed_s": ["x", INF, 1e308, None],
    "version": ["abc", None, BIG, -5],
    "state": [5, [], {}, None, "\x1b[31m"],
    "messages": ["text", [1, None], {"a": 1}],
    "staleness": [{"a": 1}, {"0": "x"}, [], {"0": BIG}],
    "leases": [[1], {"a": 1}, [{"samples": "x"}]],
    "checkpoints": [5, [5]],
    "controller": [5, {"pid": "x", "started": 1}, {"pid": 10**30, "started": 1}, {"pid": 1, "started": INF}],
    "updated": ["0001-01-01T00:00:00", 5, "9999-12-31T23:59:59+00:00"],
    "run_dir": ["a\0b", 5],
    "error": ["\ud800 x", 5],
    "saving": ["ab", [1]],
    "samples": [BIG, -(10**17), "x"],
    "mode": [5, "nope"],
    "servers": [{"0": {"rank": 0, "updates": "x"}}],
}
WRONG_RECORD: dict[str, list[Any]] = {
    "id": [5, [], "../../x", "a\0b"],
    "created": [5, "9999-12-31T23:59:59", "0001-01-01T00:00:00", "x"],
    "directory": ["a\0b", 5, None],
    "job": [[], 5, {}],
    "resumes": [5, [5]],
    "command": [5, [5]],
    "plan": [5, {"roles": 5}, {"roles": [5]}],
    "mode_defaults": ["x"],
    "task": [5, {"hyperparameters": 5}],
}
WRONG_JOB: dict[str, list[Any]] = {
    "workers": ["x", BIG, -1],
    "mode": [5, "nope", ["a"]],
    "args": ["x", [5]],
    "script": [5, None, "a\0b"],
    "records_mb": ["x", 10**30],
    "schedule": [5, [5]],
    "unknown": [5],
}
WRONG_META: list[tuple[tuple[str, ...], Any]] = [
    *(((name,), ...) for name in ("lead", "layout", "state_keys", "optimizer")),
    *(((name,), 5) for name in ("lead", "layout", "state_keys", "optimizer")),
    *((("models",), value) for value in ("x", 10**9, -1)),
    (("lead", "machine"), {}),
    (("lead", "machine", "version"), "x"),
    (("lead", "machine", "clocks"), 5),
    (("lead", "samples"), "x"),
    (("lead", "mode"), "nope"),
    (("lead", "leases"), 5),
    (("lead", "staleness"), 5),
    (("layout", "tensors"), [[1]]),
    (("state_keys",), [5]),
    (("lead", "x"), deep_object(700)),
]
READS = ("top RUN --once", "report RUN -o OUT", "metrics RUN")


def _attacks() -> dict[str, tuple[Attack, tuple[str, ...]]]:
    found: dict[str, tuple[Attack, tuple[str, ...]]] = {}
    for name, commands in (
        (STATUS, ("top RUN --once", "stop RUN")),
        (RECORD, ("report RUN -o OUT", "resume RUN")),
    ):
        for what, attack in {
            "is not JSON": write(name, "{nope"),
            "is a list": write(name, "[1]"),
            "is deep": write(name, deep(100_000)),
            "is rather deep": put(name, "error" if name == STATUS else "plan", value=deep_object(700)),
            "is a pipe": pipe(name),
            "is a directory": directory(name),
            "is a socket": listening(name),
            "is a device": link(name, "/dev/zero"),
            "has no end": endless(name),
            "is not UTF-8": write(name, b'{"a": "\xff\xfe"}'),
        }.items():
            found[f"{name} {what}"] = (attack, commands)
    for key, values in WRONG_STATUS.items():
        for value in values:
            found[f"{STATUS} {key}={value!r:.30}"] = (
                put(STATUS, key, value=value),
                ("top RUN --once", "stop RUN"),
            )
    for key, values in WRONG_RECORD.items():
        for value in values:
            found[f"{RECORD} {key}={value!r:.30}"] = (
                put(RECORD, key, value=value),
                ("compare RUN GOOD", "resume RUN"),
            )
    for key, values in WRONG_JOB.items():
        for value in values:
            attack = put(RECORD, "job", key, value=value)
            found[f"{RECORD} job.{key}={value!r:.30}"] = (attack, ("report RUN -o OUT", "resume RUN"))
    for place, value in WRONG_META:
        said = "missing" if value is ... else f"{value!r:.30}"
        found[f"meta {'.'.join(place)}={said}"] = (
            meta(*place, value=value),
            ("export RUN MODEL", "resume RUN"),
        )
    for what, attack in {
        "manifest is a pipe": pipe(f"{CHECKPOINT}/{MANIFEST}"),
        "manifest is deep": write(f"{CHECKPOINT}/{MANIFEST}", deep(100_000)),
        "manifest is cut": cut(f"{CHECKPOINT}/{MANIFEST}", 0.5),
        "part is cut": cut(f"{CHECKPOINT}/server-0.safetensors", 0.5),
        "part is a pipe": pipe(f"{CHECKPOINT}/server-0.safetensors"),
        "version is a file": write(CHECKPOINT, b"x"),
        "version is a link": link_of_a_version,
        "checkpoints is a file": write("checkpoints", b"x"),
    }.items():
        found[what] = (attack, ("export RUN MODEL", "resume RUN"))
    for what, attack in {
        "lock is a pipe": pipe("lock"),
        "lock is a directory": directory("lock"),
        "lock is a device": link("lock", "/dev/zero"),
        "requests is a pipe": pipe("requests"),
        "attempts is deep": write("attempts.json", deep(100_000)),
    }.items():
        found[what] = (attack, ("stop RUN", "resume RUN"))
    for what, attack in {
        "events is a pipe": pipe(EVENTS),
        "events is deep": append(EVENTS, f"\n{deep(100_000)}\n"),
        "events has no end": endless(EVENTS),
        "events: metrics": append(
            EVENTS, '\n{"at": "2026-11-18T07:44", "kind": "metrics", "metrics": {"a": "x"}}\n'
        ),
        "events: a time": append(
            EVENTS, '\n{"at": "nope", "kind": "metrics", "metrics": {"a": 1}, "clock": "x"}\n'
        ),
        "events: kinds": append(EVENTS, '\n{"at": [], "kind": []}\n{"at": "", "kind": "note", "text": 5}\n'),
        "raw: a large rank": write("raw/worker-99999999999999999999.0.values", b"pl-vals1" + bytes(56)),
        "raw: a pipe of values": pipe("raw/worker-0.0.values"),
        "raw: endless values": endless("raw/worker-0.0.values"),
        "values: attempts": table("values.parquet", bad_starts),
    }.items():
        found[what] = (attack, ("metrics RUN --csv -", "report RUN -o OUT"))
    for what, attack in {
        "pushes is a pipe": pipe(PUSHES),
        "pushes is cut": cut(PUSHES, 0.55),
        "pushes: nines": append(PUSHES, "9" * 20 + ",0,0,0,0,0,0\n"),
        "pushes: negative": append(PUSHES, "-5,-5,-5,-5,-5,-5,-5\n"),
        "pushes has no end": endless(PUSHES),
        "raw is a file": write("raw", b"x"),
        "raw: a pipe of spans": pipe("raw/worker-0.0.spans"),
        "raw: a device": link("raw/worker-0.0.spans", "/dev/zero"),
        "raw: endless spans": endless("raw/worker-0.0.spans"),
        "raw: noise": write("raw/worker-0.0.spans", bytes(range(250)) * 16),
        "raw: a rank of spans": write("raw/worker-99999999999999999999.0.spans", bytes(400)),
        "raw: a pipe of a ledger": pipe("raw/worker-0.0.ledger"),
        "spans: a bomb": bomb,
    }.items():
        found[what] = (attack, ("report RUN -o OUT", "compare RUN GOOD"))
    for name in ("spans", "totals", "resources", "values"):
        file = f"{name}.parquet"
        for what, attack in {
            "is cut": cut(file, 0.7),
            "is empty": write(file, b""),
            "is a pipe": pipe(file),
            "is a directory": directory(file),
            "is noise": write(file, b"PAR1" + bytes(range(250)) + b"PAR1"),
            "is text": table(file, as_text),
            "is nothing": table(file, as_nothing),
            "is half of it": table(file, half_of_it),
        }.items():
            found[f"{file} {what}"] = (attack, ("report RUN -o OUT", "metrics RUN"))
    for suffix in (".log", ".out", ".order"):
        file = f"logs/worker-0{suffix}"
        found[f"{file} is a pipe"] = (pipe(file), ("logs RUN", "resume RUN"))
        found[f"{file} is a directory"] = (directory(file), ("logs RUN",))
        found[f"{file} is a link"] = (link(file, "/etc/passwd"), ("logs RUN",))
    for what, attack in {
        "logs: a noisy order": write("logs/worker-0.order", bytes(range(250)) * 4),
        "logs: an endless order": endless("logs/worker-0.order", 64 << 30),
        "logs is a file": write("logs", b"x"),
        "logs is a link": link("logs", "/etc"),
        "logs: a large rank": write(f"logs/worker-{'9' * 30}.log", b"x\n"),
    }.items():
        found[what] = (attack, ("logs RUN", "resume RUN"))
    return found


ATTACKS = _attacks()
"""What is done, and the commands that read it. `paceline runs` reads all."""
