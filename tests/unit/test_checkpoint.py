"""Checkpoints: what is written is what is read, and nothing else ever is."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.exceptions import CheckpointError, UsageError
from paceline.storage import atomic, checkpoint
from paceline.storage.checkpoint import Checkpoint, CheckpointWriter, FileInfo

PART = "server-0.safetensors"


def write(root: Path, version: int, value: float = 1.0) -> Path:
    """A small committed checkpoint: two parts and a JSON file."""
    writer = CheckpointWriter(root, version)
    writer.write_part(PART, {"weight": torch.full((3, 5), value), "step": torch.tensor(version)})
    writer.write_part("server-1.safetensors", {"weight": torch.full((7,), -value)})
    writer.write_json("rng.json", {"seed": version})
    return writer.commit({"mode": "ssp:2", "value": value})


def rewrite_manifest(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Alter a manifest as somebody would who knows how the digest is made."""
    file = path / checkpoint.MANIFEST
    manifest = json.loads(file.read_text())
    change(manifest)
    manifest.pop("digest")
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    file.write_text(json.dumps(manifest))


def leftovers(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if name.startswith(".") or name.endswith(".old")]


# What is written is what is read


def test_round_trip(tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoints", 50)
    assert path == tmp_path / "checkpoints" / "version-000000000050"
    loaded = checkpoint.load(path)
    assert (loaded.path, loaded.version) == (path, 50)
    assert loaded.meta == {"mode": "ssp:2", "value": 1.0}
    assert set(loaded.files) == {PART, "server-1.safetensors", "rng.json"}
    assert loaded.json("rng.json") == {"seed": 50}
    tensors = loaded.tensors(PART)
    assert torch.equal(tensors["weight"], torch.ones(3, 5))
    assert tensors["step"].shape == () and tensors["step"] == 50
    assert leftovers(path.parent) == []


TENSORS: dict[str, dict[str, torch.Tensor]] = {
    "no tensors": {},
    "no elements": {"a": torch.zeros(0, 4), "b": torch.zeros(2, dtype=torch.int64)},
    "zero dimensions": {"a": torch.tensor(2.5, dtype=torch.bfloat16), "b": torch.tensor(True)},
    "transposed": {"a": torch.arange(12.0).reshape(3, 4).t()},
    "strided": {"a": torch.arange(20)[::3], "b": torch.arange(4.0).expand(3, 4)},
    "a view into a larger one": {"a": torch.arange(100.0)[10:20]},
    "tied": dict.fromkeys(("a", "b"), torch.arange(5.0)),
    "a parameter": {"a": torch.nn.Parameter(torch.randn(3))},
    "conjugated": {"a": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()},
    "odd names": {"a.b/c é\n": torch.ones(1), "": torch.ones(2), '"': torch.ones(3)},
    "mixed widths": {
        "bool": torch.tensor([True, False, True]),
        "f16": torch.randn(3).half(),
        "bf16": torch.randn(5).bfloat16(),
        "f32": torch.randn(3),
        "f64": torch.randn(3).double(),
        "i8": torch.tensor([-1], dtype=torch.int8),
        "u8": torch.tensor([255], dtype=torch.uint8),
        "i16": torch.tensor([-5], dtype=torch.int16),
        "i32": torch.tensor([-5], dtype=torch.int32),
        "i64": torch.tensor([-(2**62)]),
    },
    "not finite": {"a": torch.tensor([float("nan"), float("inf"), -0.0])},
}


@pytest.mark.parametrize("case", TENSORS)
def test_parts_are_safetensors(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 8)
    tensors = TENSORS[case]
    info = checkpoint.write_part(tmp_path, PART, tensors)
    data = (tmp_path / PART).read_bytes()
    assert info == FileInfo(PART, hashlib.sha256(data).hexdigest(), len(data))
    loaded = load_file(tmp_path / PART)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        expected = tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), expected)


@pytest.mark.parametrize("name", checkpoint.DTYPES)
def test_every_dtype_it_names_is_one_safetensors_reads(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name.removeprefix("torch."))
    tensor = torch.tensor([[0, 1, 1]]).to(dtype)
    checkpoint.write_part(tmp_path, PART, {"a": tensor})
    loaded = load_file(tmp_path / PART)["a"]
    assert loaded.dtype == dtype and loaded.shape == (1, 3)
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_numbers_are_aligned_in_the_file(tmp_path: Path) -> None:
    tensors = TENSORS["mixed widths"]
    checkpoint.write_part(tmp_path, PART, tensors)
    data = (tmp_path / PART).read_bytes()
    length = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8 : 8 + length]).items():
        assert (8 + length + entry["data_offsets"][0]) % tensors[name].element_size() == 0


def test_changing_loaded_tensors_does_not_change_the_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    checkpoint.load(path).tensors(PART)["weight"].fill_(9)
    assert torch.equal(checkpoint.load(path).tensors(PART)["weight"], torch.ones(3, 5))


def test_meta_survives_as_json_does(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 1)
    meta = {"layout": {"z": [1], "a": [2]}, "clocks": {2: 5, 10: 6}, "é": 0.1, "none": None}
    loaded = checkpoint.load(writer.commit(meta))
    assert loaded.meta == {**meta, "clocks": {"2": 5, "10": 6}}
    assert list(loaded.meta["layout"]) == ["z", "a"], "the order of a layout means something"


def test_parts_from_threads_and_other_processes(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 1)
    threads = [
        threading.Thread(target=writer.write_part, args=(f"s-{i}.safetensors", {"a": torch.full((100,), i)}))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.add(checkpoint.write_part(writer.dir, "other.safetensors", {"a": torch.ones(2)}))
    loaded = checkpoint.load(writer.commit({}))
    for i in range(8):
        assert torch.equal(loaded.tensors(f"s-{i}.safetensors")["a"], torch.full((100,), i))
    assert torch.equal(loaded.tensors("other.safetensors")["a"], torch.ones(2))


def test_importing_storage_does_not_import_torch() -> None:
    code = "import sys, paceline.storage; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


# What was damaged is refused


def truncate(path: Path) -> None:
    os.truncate(path / PART, os.path.getsize(path / PART) - 1)


def empty(path: Path) -> None:
    os.truncate(path / PART, 0)


def lengthen(path: Path) -> None:
    with open(path / PART, "ab") as file:
        file.write(b"\0")


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / PART).read_bytes())
    data[-1] ^= 1
    (path / PART).write_bytes(data)


def replace_a_part(path: Path) -> None:
    save_file({"weight": torch.zeros(3, 5), "step": torch.tensor(0)}, path / PART)


def remove_a_part(path: Path) -> None:
    (path / PART).unlink()


def remove_json(path: Path) -> None:
    (path / "rng.json").unlink()


def remove_manifest(path: Path) -> None:
    (path / checkpoint.MANIFEST).unlink()


def truncate_manifest(path: Path) -> None:
    os.truncate(path / checkpoint.MANIFEST, 100)


def alter_meta(path: Path) -> None:
    file = path / checkpoint.MANIFEST
    file.write_text(file.read_text().replace("ssp:2", "ssp:3"))


def drop_a_file_from_manifest(path: Path) -> None:
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    del manifest["files"][PART]
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))


def claim_another_file(path: Path) -> None:
    entry = {"sha256": "0" * 64, "bytes": 0}
    rewrite_manifest(path, lambda manifest: manifest["files"].update({"more.json": entry}))


def link_a_part_elsewhere(path: Path) -> None:
    shutil.move(path / PART, path.parent / "elsewhere")
    (path / PART).symlink_to(path.parent / "elsewhere")


def link_it_all_elsewhere(path: Path) -> None:
    shutil.move(path, path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def make_a_part_a_pipe(path: Path) -> None:
    (path / PART).unlink()
    os.mkfifo(path / PART)


def make_manifest_a_pipe(path: Path) -> None:
    (path / checkpoint.MANIFEST).unlink()
    os.mkfifo(path / checkpoint.MANIFEST)


def make_manifest_huge(path: Path) -> None:
    os.truncate(path / checkpoint.MANIFEST, 1 << 30)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (truncate, r"server-0.safetensors was truncated: it has \d+ bytes, the manifest says \d+"),
    (empty, "truncated: it has 0 bytes"),
    (lengthen, r"server-0.safetensors was altered: it has \d+ bytes, the manifest says \d+"),
    (flip_a_bit, "server-0.safetensors was altered: its sha256 is .* the manifest says"),
    (replace_a_part, "server-0.safetensors was (altered|truncated)"),
    (remove_a_part, "cannot read .*server-0.safetensors: No such file"),
    (remove_json, "cannot read .*rng.json: No such file"),
    (remove_manifest, "cannot read .*manifest.json: No such file.*never finished"),
    (truncate_manifest, "manifest.json is not JSON"),
    (alter_meta, "manifest.json was altered: its content has digest .* it says"),
    (drop_a_file_from_manifest, "manifest.json was altered"),
    (claim_another_file, "cannot read .*more.json: No such file"),
    (link_a_part_elsewhere, "server-0.safetensors: it is a link, not a plain file"),
    (make_a_part_a_pipe, "server-0.safetensors: it is a pipe, not a plain file"),
    (make_manifest_a_pipe, "manifest.json: it is a pipe, not a plain file"),
    (make_manifest_huge, "manifest.json: it has more than 67,108,864 bytes"),
    (link_it_all_elsewhere, "version-000000000050: it is a link, not a directory"),
    (shutil.rmtree, "cannot read .*No such file"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damage_is_refused_and_the_one_before_is_used(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    write(tmp_path, 40, value=4.0)
    path = write(tmp_path, 50, value=5.0)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path)

    refused: list[tuple[Path, CheckpointError]] = []
    loaded = checkpoint.latest(tmp_path, on_refused=lambda *args: refused.append(args))
    assert loaded is not None and loaded.version == 40 and loaded.meta["value"] == 4.0
    if path.exists():
        [(refused_path, error)] = refused
        assert refused_path == path
        assert str(path) in str(error) and str(pickle.loads(pickle.dumps(error))) == str(error)


def test_every_flipped_byte_of_a_manifest_is_refused_or_harmless(tmp_path: Path) -> None:
    path = write(tmp_path, 50)
    original = checkpoint.load(path)
    file = path / checkpoint.MANIFEST
    data = file.read_bytes()
    refusals = 0
    for position in range(len(data)):
        for bit in (0x01, 0x20, 0x80):
            changed = bytearray(data)
            changed[position] ^= bit
            file.write_bytes(changed)
            try:
                assert checkpoint.load(path) == original  # the case of an escape, for example
            except CheckpointError:
                refusals += 1
    assert refusals > 2.9 * len(data)


@pytest.mark.parametrize("number", [0, 2, 1.0, "1", True, None])
def test_unknown_format_is_refused(tmp_path: Path, number: Any) -> None:
    path = write(tmp_path, 1)
    rewrite_manifest(path, lambda manifest: manifest.update(format=number))
    with pytest.raises(CheckpointError, match=r"has format .*, this Paceline reads format 1"):
        checkpoint.load(path)


BAD_NAMES = [
    *("", ".", "..", "../evil.json", "/etc/passwd", "a/b.json", "a\\b.json", ".hidden.json"),
    *("a b.json", "é.json", "a\0.json", "a.json\n", "x" * 300 + ".json", "manifest.json"),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_could_escape_are_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "root", 1)
    (tmp_path / "evil.json").write_text("{}")
    entry = {"sha256": hashlib.sha256(b"{}").hexdigest(), "bytes": 2}
    rewrite_manifest(path, lambda manifest: manifest["files"].update({name: entry}))
    with pytest.raises(CheckpointError, match=r"manifest.json does not describe.*file name"):
        checkpoint.load(path)

    writer = CheckpointWriter(tmp_path / "root", 2)
    part = name.replace(".json", ".safetensors")
    with pytest.raises(CheckpointError, match="cannot be a file of a checkpoint"):
        writer.write_json(name, {})
    with pytest.raises(CheckpointError, match="cannot be a file of a checkpoint"):
        writer.add(FileInfo(name, "0" * 64, 0))
    if name != checkpoint.MANIFEST:
        with pytest.raises(CheckpointError, match="cannot be a file of a checkpoint"):
            writer.write_part(part, {})
    assert os.listdir(writer.dir) == []


MALFORMED: list[Callable[[dict[str, Any]], Any]] = [
    lambda manifest: manifest.pop("version"),
    lambda manifest: manifest.update(version=-1),
    lambda manifest: manifest.update(version="1"),
    lambda manifest: manifest.update(version=True),
    lambda manifest: manifest.update(version=2),
    lambda manifest: manifest.update(created=None),
    lambda manifest: manifest.update(meta=[]),
    lambda manifest: manifest.update(files=[]),
    lambda manifest: manifest["files"].update({PART: None}),
    lambda manifest: manifest["files"].update({PART: {}}),
    lambda manifest: manifest["files"][PART].update(bytes=-1),
    lambda manifest: manifest["files"][PART].update(bytes=True),
    lambda manifest: manifest["files"][PART].update(bytes=1.5),
    lambda manifest: manifest["files"][PART].update(sha256=None),
    lambda manifest: manifest["files"][PART].update(sha256="00"),
]


@pytest.mark.parametrize("change", MALFORMED)
def test_malformed_manifest_with_a_right_digest_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    path = write(tmp_path, 1)
    rewrite_manifest(path, change)
    with pytest.raises(CheckpointError, match=r"manifest\.json (does not describe|is of version 2)"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "7", '{"format": 1}', "[" * 100_000, "9" * 10_000, "\udc80", "NaN"]
)
def test_manifest_that_is_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, 1)
    (path / checkpoint.MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpoint.load(path)


def test_deep_manifests_are_refused_or_read_but_never_crash(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    for depth in range(900, 1000):
        text = '{"format":1,"meta":' + '{"a":' * depth + "1" + "}" * depth + "}"
        (path / checkpoint.MANIFEST).write_text(text)
        with pytest.raises(CheckpointError):
            checkpoint.load(path)


def test_a_part_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    data = b"\xff" * 64
    (path / PART).write_bytes(data)
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    rewrite_manifest(path, lambda manifest: manifest["files"].update({PART: entry}))
    loaded = checkpoint.load(path)
    with pytest.raises(CheckpointError, match=r"server-0.safetensors is not safetensors"):
        loaded.tensors(PART)


def test_a_file_that_is_not_in_the_manifest_cannot_be_read(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / "stray.json").write_text("{}")
    loaded = checkpoint.load(path)
    with pytest.raises(CheckpointError, match=r"no file 'stray.json'; its files: rng.json, server"):
        loaded.json("stray.json")
    with pytest.raises(CheckpointError, match="no file"):
        loaded.tensors("../version-000000000001/" + PART)


# Latest, prune, clean


def test_latest_of_nothing(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "absent") is None
    assert checkpoint.latest(tmp_path) is None
    (tmp_path / "version-1").mkdir()
    (tmp_path / "notes.txt").touch()
    assert checkpoint.latest(tmp_path) is None


def test_latest_goes_by_version_and_reports_all_it_passes(tmp_path: Path) -> None:
    for version in (3, 10**12, 20):
        write(tmp_path, version)
    refused: list[str] = []
    for version in (10**12, 20):
        truncate(tmp_path / f"version-{version:012d}")
    loaded = checkpoint.latest(tmp_path, on_refused=lambda path, error: refused.append(path.name))
    assert loaded is not None and loaded.version == 3
    assert refused == ["version-1000000000000", "version-000000000020"]
    truncate(loaded.path)
    assert checkpoint.latest(tmp_path) is None


def test_a_checkpoint_copied_under_a_name_of_its_own_loads(tmp_path: Path) -> None:
    shutil.copytree(write(tmp_path, 50), tmp_path / "best")
    assert checkpoint.load(tmp_path / "best").version == 50
    shutil.copytree(tmp_path / "best", tmp_path / "version-000000000051")
    with pytest.raises(CheckpointError, match=r"is of version 50, its directory's name says 0*51"):
        checkpoint.load(tmp_path / "version-000000000051")


def versions(root: Path) -> list[int]:
    return [int(name.removeprefix("version-")) for name in sorted(os.listdir(root))]


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for version in range(1, 6):
        write(tmp_path, version)
    checkpoint.prune(tmp_path, keep=5)
    assert versions(tmp_path) == [1, 2, 3, 4, 5]
    checkpoint.prune(tmp_path, keep=2)
    assert versions(tmp_path) == [4, 5]
    checkpoint.prune(tmp_path / "absent", keep=2)
    with pytest.raises(UsageError, match="at least 1, got 0"):
        checkpoint.prune(tmp_path, keep=0)


def test_prune_does_not_count_what_is_incomplete(tmp_path: Path) -> None:
    for version in range(1, 6):
        write(tmp_path, version)
    truncate(tmp_path / "version-000000000005")
    truncate(tmp_path / "version-000000000003")
    checkpoint.prune(tmp_path, keep=2)
    assert versions(tmp_path) == [2, 3, 4, 5]
    checkpoint.prune(tmp_path, keep=1)
    assert versions(tmp_path) == [4, 5]


def test_prune_never_removes_the_work_done_after_falling_back(tmp_path: Path) -> None:
    write(tmp_path, 40)
    flip_a_bit(write(tmp_path, 50))
    write(tmp_path, 45)
    checkpoint.prune(tmp_path, keep=1)
    loaded = checkpoint.latest(tmp_path)
    assert loaded is not None and loaded.version == 45
    assert versions(tmp_path) == [45, 50]


def test_clean_temporary_removes_only_what_is_ours(tmp_path: Path) -> None:
    write(tmp_path, 1)
    for version in (1, 2):
        CheckpointWriter(tmp_path, version).write_part(PART, {"a": torch.ones(3)})
    shutil.copytree(tmp_path / "version-000000000001", tmp_path / "version-000000000001.old")
    shutil.copytree(tmp_path / "version-000000000001", tmp_path / "version-000000000000.old")
    others = {".keep", ".version-1.tmp", "notes"}
    for name in others:
        (tmp_path / name).mkdir()
    checkpoint.clean_temporary(tmp_path)
    kept = {"version-000000000001", "version-000000000000.old"}
    assert set(os.listdir(tmp_path)) == others | kept
    checkpoint.clean_temporary(tmp_path / "absent")


def test_abort_leaves_nothing_and_ends_the_writer(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 1)
    info = writer.write_part(PART, {"a": torch.ones(3)})
    writer.abort()
    writer.abort()
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointError, match="already aborted"):
        writer.commit({})
    with pytest.raises(CheckpointError, match="already aborted"):
        writer.add(info)
    with pytest.raises(CheckpointError, match="removed, aborted"):
        checkpoint.write_part(writer.dir, PART, {"a": torch.ones(3)})


def test_abort_after_commit_changes_nothing(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 1)
    path = writer.commit({})
    writer.abort()
    assert checkpoint.load(path).version == 1
    with pytest.raises(CheckpointError, match="already committed"):
        writer.commit({})


def test_commit_refuses_what_is_not_whole(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 1)
    checkpoint.write_part(writer.dir, "forgotten.safetensors", {})
    with pytest.raises(CheckpointError, match=r"forgotten.safetensors: 16, expected not added"):
        writer.commit({})
    writer.add(FileInfo("forgotten.safetensors", "0" * 64, 99))
    writer.add(FileInfo("never.json", "0" * 64, 5))
    with pytest.raises(CheckpointError, match=r": 16, expected 99; never.json: missing, expected 5"):
        writer.commit({})
    assert checkpoint.latest(tmp_path) is None


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 1)
    for tensor in (torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex128)):
        with pytest.raises(CheckpointError, match=r"server-0.safetensors: tensor 'a' \(torch"):
            writer.write_part(PART, {"a": tensor})
    with pytest.raises(CheckpointError, match="__metadata__"):
        writer.write_part(PART, {"__metadata__": torch.ones(1)})
    for value in (float("nan"), torch.ones(1), {(1, 2): 3}):
        with pytest.raises(CheckpointError, match=r"rng.json: the value is not JSON"):
            writer.write_json("rng.json", value)
        with pytest.raises(CheckpointError, match=r"manifest.json: the value is not JSON"):
            writer.commit({"value": value})
    writer.write_part(PART, {})  # the names are free again
    with pytest.raises(CheckpointError, match="File exists"):
        writer.write_part(PART, {})
    with pytest.raises(UsageError, match="got -1"):
        CheckpointWriter(tmp_path, -1)


# A kill at any point


class Snapshots:
    """Copies a directory before every system call that changes it: what a kill there leaves."""

    CALLS = ("open", "write", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir")

    def __init__(self, root: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.target = target
        self.labels: list[str] = []
        self.busy = False
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.take(name)
            return call(*args, **kwargs)

        return wrapped

    def take(self, label: str) -> None:
        if self.busy:
            return
        self.busy = True
        shutil.copytree(self.root, self.target / str(len(self.labels)))
        self.labels.append(label)
        self.busy = False

    def __iter__(self) -> Iterator[Path]:
        return (self.target / str(i) for i in range(len(self.labels)))


def assert_whole(loaded: Checkpoint | None, version: int, value: float) -> None:
    assert loaded is not None
    assert (loaded.version, loaded.meta["value"]) == (version, value)
    assert torch.equal(loaded.tensors(PART)["weight"], torch.full((3, 5), value))
    assert torch.equal(loaded.tensors("server-1.safetensors")["weight"], torch.full((7,), -value))


def fail_on_refused(path: Path, error: CheckpointError) -> None:
    pytest.fail(f"a kill is no damage, nothing is to be reported: {error}")


@pytest.mark.parametrize("version", [40, 50], ids=["same version again", "next version"])
def test_a_kill_before_any_system_call_leaves_a_checkpoint(
    tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    write(root, 40, value=4.0)
    monkeypatch.setattr(checkpoint, "_CHUNK_BYTES", 1)  # as many points as there are bytes
    monkeypatch.setattr(os, "fsync", lambda _: None)  # slow, and of use in a power cut only
    with monkeypatch.context() as patch:
        snapshots = Snapshots(root, tmp_path / "snapshots", patch)
        write(root, version, value=5.0)
        snapshots.take("end")

    outcomes = []
    for copy in snapshots:
        loaded = checkpoint.latest(copy, on_refused=fail_on_refused)
        assert loaded is not None
        outcomes.append(loaded.meta["value"])
        assert_whole(loaded, version if outcomes[-1] == 5.0 else 40, outcomes[-1])

        # The next process cleans up, and can write the same version.
        checkpoint.clean_temporary(copy)
        again = checkpoint.latest(copy)
        assert_whole(again, loaded.version, outcomes[-1])
        write(copy, version, value=6.0)
        assert_whole(checkpoint.latest(copy), version, 6.0)
        assert leftovers(copy) == []

    assert len(outcomes) > 100
    assert outcomes == sorted(outcomes) and set(outcomes) == {4.0, 5.0}
    assert snapshots.labels.count("write") > 10 and snapshots.labels.count("rename") >= 1


def test_a_kill_while_pruning_leaves_nothing_half_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    for version in (1, 2, 3):
        write(root, version, value=float(version))
    with monkeypatch.context() as patch:
        snapshots = Snapshots(root, tmp_path / "snapshots", patch)
        checkpoint.prune(root, keep=1)
    for copy in snapshots:
        checkpoint.clean_temporary(copy)
        for path in copy.iterdir():
            checkpoint.load(path)
        assert_whole(checkpoint.latest(copy), 3, 3.0)


def test_everything_is_on_the_disk_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[int | str] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(os.fstat(descriptor).st_ino)

    def recorded_rename(source: Path, target: Path) -> None:
        rename(source, target)
        events.append("rename")

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    root = tmp_path / "root"
    path = write(root, 1)
    split = events.index("rename")
    written = {entry.inode() for entry in os.scandir(path)} | {path.stat().st_ino}
    assert len(written) == 5 and written <= set(events[:split])
    assert tmp_path.stat().st_ino in events[:split], "the name of a new root"
    assert events[split + 1 :] == [root.stat().st_ino]


# What the operating system refuses


@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename", "replace"])
@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "No space left on device. Free space there, or choose a run directory"),
        (errno.EDQUOT, "Free space there"),
        (errno.EACCES, "Permission denied. Give user .* permission there"),
        (errno.EROFS, "Give user .* permission there"),
        (errno.EIO, "Check the disk"),
    ],
)
def test_refused_writes_say_what_to_do(
    tmp_path: Path, call: str, number: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    writer = CheckpointWriter(tmp_path, 2)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(CheckpointError, match=rf"cannot (write|commit) .*{advice}.*") as raised:
            writer.write_part(PART, {"a": torch.ones(3)})
            writer.commit({})
    assert "--run-dir" in str(raised.value) and isinstance(raised.value.__cause__, OSError)
    writer.abort()
    assert versions(tmp_path) == [1]
    loaded = checkpoint.latest(tmp_path)
    assert loaded is not None and loaded.version == 1


def test_a_disk_that_fills_up_part_way_frees_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(tmp_path, 2)
    real_write = os.write
    room = [100]

    def small_disk(descriptor: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real_write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", small_disk)
        with pytest.raises(CheckpointError, match=r"cannot write .*server-0.safetensors: No space"):
            writer.write_part(PART, {"a": torch.ones(1000)})
    assert room == [0] and os.listdir(writer.dir) == []
    writer.write_part(PART, {"a": torch.ones(1000)})  # space was made, and it goes on
    assert checkpoint.load(writer.commit({})).tensors(PART)["a"].sum() == 1000


def test_commit_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = CheckpointWriter(tmp_path, 2)
    writer.write_part(PART, {"a": torch.ones(3)})

    def refuse(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(CheckpointError, match="No space left"):
            writer.commit({})
    assert checkpoint.load(writer.commit({})).version == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission(tmp_path: Path) -> None:
    path = write(tmp_path / "root", 1)
    (tmp_path / "root").chmod(0o500)
    (path / PART).chmod(0)
    try:
        with pytest.raises(CheckpointError, match=r"cannot create .*Give user \d+ permission"):
            CheckpointWriter(tmp_path / "root", 2)
        with pytest.raises(CheckpointError, match=r"cannot create .*Give user \d+ permission"):
            CheckpointWriter(tmp_path / "root" / "below", 2)
        with pytest.raises(CheckpointError, match=r"cannot read .*Give user \d+ permission"):
            checkpoint.load(path)
    finally:
        (tmp_path / "root").chmod(0o700)


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot create .*file"):
        CheckpointWriter(tmp_path / "file", 1)
    with pytest.raises(CheckpointError, match=r"cannot create .*file"):
        CheckpointWriter(tmp_path / "file" / "below", 1)
    with pytest.raises(CheckpointError, match=r"cannot list .*file"):
        checkpoint.latest(tmp_path / "file")


# write_text_atomically


def test_text_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    atomic.write_text_atomically(path, "old é")
    atomic.write_text_atomically(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["status.json"]


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_text_gets_its_mode(tmp_path: Path, mode: int) -> None:
    umask = os.umask(0o022)
    try:
        atomic.write_text_atomically(tmp_path / "file", "secret", mode=mode)
        atomic.write_text_atomically(tmp_path / "plain", "text")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "plain").stat().st_mode) == 0o644


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_text_that_cannot_be_written_leaves_the_old(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status.json"
    atomic.write_text_atomically(path, "old")

    def refuse(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(OSError, match="full"):
            atomic.write_text_atomically(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["status.json"]
