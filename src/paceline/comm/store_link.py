"""RemoteStore: the store of the controller's host, used from another one; StoreService: the other end.

A role dials the service for each operation, and authenticates as on every link of the run. Bytes of a blob
come in frames of a megabyte at most, so neither side holds more than that. The service only serves
checkpoints.
"""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, assert_never

from paceline.comm.connection import Connection, Frame
from paceline.comm.errors import error_of
from paceline.comm.frames import Body, Kind
from paceline.comm.hub import Hub
from paceline.comm.meeting import Address, Listener, connect
from paceline.comm.message_codec import Catalogue, message
from paceline.exceptions import FrameError, LinkError, StoreError
from paceline.storage.manifest import FileInfo
from paceline.storage.store import CHUNK_BYTES, BlobWriter, LocalStore, check_key

__all__ = ["RemoteStore", "StoreService"]

M = TypeVar("M")
_SERVED = "checkpoints/"
_TURN_S = 0.5


@message(Kind.STORE_PUT)
class PutBytes(NamedTuple):
    """The next bytes of a new blob, as the payload."""

    key: str


@message(Kind.STORE_SEAL)
class SealBlob(NamedTuple):
    """The blob is complete."""

    key: str


@message(Kind.STORE_SEALED)
class BlobSealed(NamedTuple):
    """The blob is on the disk."""

    sha256: str
    size: int


@message(Kind.STORE_GET)
class GetBytes(NamedTuple):
    """Bytes of a blob, please."""

    key: str
    at: int
    size: int | None


@message(Kind.STORE_BYTES)
class BlobBytes(NamedTuple):
    """Bytes, as the payload."""

    last: bool


@message(Kind.STORE_LIST)
class ListBlobs(NamedTuple):
    """Which blobs are there?"""

    prefix: str


@message(Kind.STORE_NAMES)
class BlobNames(NamedTuple):
    """Their keys."""

    keys: tuple[str, ...]


ToStore = PutBytes | SealBlob | GetBytes | ListBlobs
TO_STORE: Final[Catalogue[ToStore]] = Catalogue(ToStore, "the store")
SEALED: Final[Catalogue[BlobSealed]] = Catalogue(BlobSealed, "a role that put a blob")
BYTES: Final[Catalogue[BlobBytes]] = Catalogue(BlobBytes, "a role that gets a blob")
NAMES: Final[Catalogue[BlobNames]] = Catalogue(BlobNames, "a role that lists blobs")


class RemoteStore:
    """A Store on the controller's host. Each method dials it. Thread-safe.

    Args:
        role: name and rank of the role that uses it.
        patience_s: how long it may say nothing.
    """

    def __init__(self, address: Address, secret: bytes, role: tuple[str, int], *, patience_s: float) -> None:
        self._address = address
        self._secret = secret
        self._role = role
        self._patience_s = patience_s

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> FileInfo:
        """See Store."""
        check_key(key)
        sha256, size = hashlib.sha256(), 0
        with self._dialled(f"write {key}") as link:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                for start in range(0, len(view), CHUNK_BYTES):
                    piece = view[start : start + CHUNK_BYTES]
                    sha256.update(piece)
                    size += len(piece)
                    link.tell(PutBytes(key), [piece])
            link.tell(SealBlob(key))
            told = _answer(link.receive(), SEALED)
        if (told.sha256, told.size) != (sha256.hexdigest(), size):
            raise StoreError(f"{key} was damaged on its way to the store: {told.size:,} of {size:,} bytes")
        return FileInfo(key.rpartition("/")[2], told.sha256, told.size)

    def get(self, key: str, at: int = 0, size: int | None = None) -> Iterator[bytes]:
        """See Store."""
        check_key(key)
        with self._dialled(f"read {key}") as link:
            link.tell(GetBytes(key, at, size))
            last = False
            while not last:
                frame = link.receive()
                last = _answer(frame, BYTES).last
                piece = link.read_blob(frame, CHUNK_BYTES)
                if piece:
                    yield piece

    def list(self, prefix: str) -> list[str]:
        """See Store."""
        with self._dialled(f"list {prefix}") as link:
            link.tell(ListBlobs(check_key(prefix)))
            return [*_answer(link.receive(), NAMES).keys]

    def local_path(self, key: str) -> Path | None:
        """See Store."""
        return None

    def close(self) -> None:
        """See Store."""

    @contextlib.contextmanager
    def _dialled(self, what: str) -> Iterator[Connection]:
        """Context manager: a link to the service. What breaks is a StoreError."""
        link = None
        try:
            link = connect(self._address, self._secret, peer="controller")
            link.peer = "the store"
            link.sock.settimeout(self._patience_s)
            role, rank = self._role
            link.send(Kind.HELLO, {"role": role, "rank": rank})
            yield link
        except StoreError:
            raise
        except LinkError as error:
            raise StoreError(f"cannot {what}: {_reason(link, error)}") from error
        except TimeoutError:
            raise StoreError(
                f"cannot {what}: the store did not answer within {self._patience_s:g} s"
            ) from None
        finally:
            if link is not None:
                link.close()


def _reason(link: Connection | None, error: LinkError) -> str:
    """What the store said before it closed the link, if it said something."""
    with contextlib.suppress(LinkError, TimeoutError, OSError):
        if link is not None and link.wait(0) and (frame := link.receive()).kind is Kind.ERROR:
            return str(error_of(frame.body))
    return str(error)


def _answer(frame: Frame, expected: "Catalogue[M]") -> M:
    if frame.kind is Kind.ERROR:
        raise StoreError(str(error_of(frame.body)))
    return expected.read(frame.kind, frame.body)


class StoreService:
    """Serves a LocalStore to the roles of a run, in a thread of its own.

    Args:
        root: the run directory.
        host: address to listen at.
        refused: called, in that thread, with the reason of a connection that was refused.
    """

    def __init__(
        self, root: Path, secret: bytes, *, host: str, patience_s: float, refused: Callable[[str], None]
    ) -> None:
        self._store = LocalStore(root)
        self._root = root
        self._refused = refused
        self._writers: dict[Connection, tuple[str, BlobWriter]] = {}
        self._links: set[Connection] = set()
        self._hub = Hub(self, Listener(host=host), secret, patience_s=patience_s)
        self._over = False
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    @property
    def address(self) -> Address:
        """Where roles of other hosts dial it."""
        return self._hub.listener.address

    def close(self) -> None:
        """Stop serving."""
        self._hub.post(self._end)
        self._thread.join(timeout=5)

    def _serve(self) -> None:
        while not self._over:
            with contextlib.suppress(OSError):  # no descriptors left for a connection that waits
                self._hub.poll(_TURN_S)
        for link in [*self._links]:
            self._hub.end(link, "the run has ended")
        self._hub.close()

    def _end(self) -> None:
        self._over = True

    # --- HubHandler, in the service's thread ----------------------------------------------------------

    def on_hello(self, connection: Connection, body: Body) -> None:
        """See HubHandler."""
        self._links.add(connection)

    def on_stranger(self, reason: str) -> None:
        """See HubHandler."""
        self._refused(reason)

    def on_end(self, connection: Connection, reason: str) -> None:
        """See HubHandler."""
        self._links.discard(connection)
        _, writer = self._writers.pop(connection, ("", None))
        if writer is not None:
            writer.close()

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """See HubHandler."""
        match TO_STORE.read(frame.kind, frame.body):
            case PutBytes(key):
                piece = connection.read_blob(frame, CHUNK_BYTES)
                self._writer(connection, key).write(piece)
            case SealBlob(key):
                info = self._writer(connection, key).seal()
                del self._writers[connection]
                connection.tell(BlobSealed(info.sha256, info.bytes))
            case GetBytes(key, at, size):
                if at < 0:
                    raise FrameError(f"position {at} of {key}")
                for piece in self._store.get(_served(key), at, size):
                    connection.tell(BlobBytes(False), [memoryview(piece)])
                connection.tell(BlobBytes(True))
            case ListBlobs(prefix):
                connection.tell(BlobNames(tuple(self._store.list(_served(f"{prefix}/").rstrip("/")))))
            case other:
                assert_never(other)

    def _writer(self, connection: Connection, key: str) -> BlobWriter:
        known, writer = self._writers.get(connection, (key, None))
        if known != key:
            raise FrameError(f"{key} before {known} is complete")
        if writer is None:
            writer = BlobWriter(self._root, _served(key))
            self._writers[connection] = key, writer
        return writer


def _served(key: str) -> str:
    """Raises StoreError for what the service does not serve."""
    if not key.startswith(_SERVED):
        raise StoreError(f"{key!r:.80} is no part of a checkpoint")
    return key
