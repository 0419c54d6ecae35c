"""What every store promises: on this disk, and on the controller's from another host."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.comm.certificates import Certificates
from paceline.comm.frames import Kind
from paceline.comm.meeting import connect
from paceline.comm.store_link import RemoteStore, StoreService
from paceline.comm.tls import Secret
from paceline.exceptions import PacelineError, StoreError
from paceline.storage.store import LocalStore, Store
from tests.links import PATIENCE_S, SECRET

KEY = "checkpoints/version-000000000001/server-0.safetensors"


@dataclass
class Made:
    store: Store
    root: Path
    """Where the blobs are files."""


@pytest.fixture(scope="module")
def certificates() -> dict[str, Secret]:
    made = Certificates.for_run("contract").by_role
    return {role: Secret(SECRET, made[role]) for role in ("controller", "server")}


@pytest.fixture(params=["local", "remote", "remote under TLS"])
def made(request: pytest.FixtureRequest, tmp_path: Path, certificates: dict[str, Secret]) -> Iterator[Made]:
    if request.param == "local":
        yield Made(LocalStore(tmp_path), tmp_path)
        return
    tls = "TLS" in request.param
    theirs, mine = (certificates["controller"], certificates["server"]) if tls else (SECRET, SECRET)
    service = StoreService(tmp_path, theirs, host="127.0.0.1", patience_s=PATIENCE_S, refused=lambda _: None)
    address = service.address
    if tls:  # as from another host, which does not meet it on a unix socket
        address = type(address)(unix=None, host=address.host, port=address.port)
    yield Made(RemoteStore(address, mine, ("server", 0), patience_s=PATIENCE_S), tmp_path)
    service.close()


def test_a_blob_comes_back_as_it_was_put(made: Made) -> None:
    data = bytes(range(256)) * 12_345  # several frames
    info = made.store.put(KEY, [data[:7], b"", memoryview(data)[7:]])
    assert (info.name, info.bytes) == ("server-0.safetensors", len(data))
    assert info.sha256 == hashlib.sha256(data).hexdigest()
    assert b"".join(made.store.get(KEY)) == data
    assert b"".join(made.store.get(KEY, at=1_000_003)) == data[1_000_003:]
    assert b"".join(made.store.get(KEY, at=5, size=6)) == data[5:11]
    assert b"".join(made.store.get(KEY, at=len(data))) == b""


def test_an_empty_blob_is_one(made: Made) -> None:
    with pytest.raises(StoreError, match="read"):
        b"".join(made.store.get(KEY))
    if isinstance(made.store, LocalStore):
        assert made.store.put(KEY, []).bytes == 0
    else:
        with pytest.raises(PacelineError):
            b"".join(made.store.get("checkpoints/nothing/x"))


def test_a_blob_is_written_once(made: Made) -> None:
    made.store.put(KEY, [b"first"])
    with pytest.raises(StoreError, match="cannot write checkpoints/.*exists"):
        made.store.put(KEY, [b"second"])
    assert b"".join(made.store.get(KEY)) == b"first"


def test_what_was_not_completed_is_not_there(made: Made) -> None:
    def broken() -> Iterator[bytes]:
        yield b"half"
        raise ValueError("the disk that it came from")

    with pytest.raises(ValueError, match="disk"):
        made.store.put(KEY, broken())
    deadline = threading.Event()
    for _ in range(100):  # another host's end is seen a moment later
        if not [path for path in made.root.rglob("*") if path.is_file()]:
            break
        deadline.wait(0.05)
    assert made.store.list("checkpoints/version-000000000001") == []
    assert not [path for path in made.root.rglob("*") if path.is_file()]
    made.store.put(KEY, [b"whole"])


def test_keys_are_listed_below_a_directory(made: Made) -> None:
    assert made.store.list("checkpoints/none") == []
    for name in ("b", "a", "c.safetensors"):
        made.store.put(f"checkpoints/one/{name}", [b"x"])
    made.store.put("checkpoints/other/a", [b"x"])
    assert made.store.list("checkpoints/one") == [
        f"checkpoints/one/{name}" for name in ("a", "b", "c.safetensors")
    ]


@pytest.mark.parametrize(
    "key",
    ["../x", "checkpoints/../x", "/etc/passwd", "checkpoints//x", "", "checkpoints/a\0b", "a/" * 9 + "b"],
)
def test_a_key_leads_nowhere_else(made: Made, key: str) -> None:
    for use in (lambda: made.store.put(key, [b"x"]), lambda: [*made.store.get(key)]):
        with pytest.raises(StoreError, match="no key"):
            use()
    assert not [path for path in made.root.rglob("*") if path.is_file()]


def test_only_a_disk_has_paths(made: Made) -> None:
    made.store.put(KEY, [b"x"])
    path = made.store.local_path(KEY)
    assert path == (made.root / KEY if isinstance(made.store, LocalStore) else None)
    assert made.store.local_path("checkpoints/none") is None


def test_a_link_in_the_directory_is_not_followed(made: Made, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(StoreError):
        b"".join(made.store.get("checkpoints/link"))


# --- the service ------------------------------------------------------------------------------------------


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[[], StoreService]]:
    made = StoreService(tmp_path, SECRET, host="127.0.0.1", patience_s=PATIENCE_S, refused=lambda _: None)
    yield lambda: made
    made.close()


def test_the_service_serves_checkpoints_only(service: Callable[[], StoreService], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    store = RemoteStore(service().address, SECRET, ("server", 0), patience_s=PATIENCE_S)
    with pytest.raises(StoreError, match="no part of a checkpoint"):
        b"".join(store.get("run.json"))
    with pytest.raises(StoreError, match="no part of a checkpoint"):
        store.put("logs/server-0.log", [b"x"])
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_what_is_no_message_ends_that_link_only(service: Callable[[], StoreService]) -> None:
    link = connect(service().address, SECRET, peer="controller")
    link.send(Kind.HELLO, {"role": "server", "rank": 0})
    link.send(Kind.STORE_GET, {"key": 7})
    assert "STORE_GET" in link.receive().body["message"]
    link.close()
    store = RemoteStore(service().address, SECRET, ("server", 0), patience_s=PATIENCE_S)
    store.put(KEY, [b"x"])


def test_a_store_that_is_not_there_is_named(service: Callable[[], StoreService]) -> None:
    address = service().address
    service().close()
    store = RemoteStore(address, SECRET, ("server", 0), patience_s=1)
    with pytest.raises(StoreError, match="cannot write checkpoints/.*cannot connect to controller"):
        store.put(KEY, [b"x"])
