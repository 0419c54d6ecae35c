"""The wire format.

A frame is a header of fixed size, a JSON object, and (for some kinds) raw bytes:

    magic "PL" | kind u8 | zero u8 | body bytes u32 | sequence u64 | payload bytes u64 | tag (16)

The tag is a keyed BLAKE2b over the header and the body; each direction of a connection has its own
key, and the sequence counts its frames, so no header or body can be forged, replayed or reordered.
(Payloads are not under the tag, nor under a checksum: docs/security.md says why.) Lengths are checked
against the limits of the frame's kind before anything is allocated, the tag before the body is
parsed.
"""

import hashlib
import hmac
import json
import math
import struct
from enum import IntEnum
from typing import NamedTuple, TypeAlias, TypeVar

from paceline.core.json_types import JsonObject
from paceline.exceptions import FrameError, MessageError, PacelineError

__all__ = [
    "HEADER_BYTES",
    "WITH_DESCRIPTORS",
    "Body",
    "Header",
    "Kind",
    "check",
    "decode_body",
    "encode",
    "field",
    "parse_header",
    "tag_of",
    "verify",
    "whole",
    "wholes",
]

T = TypeVar("T")
_MOST = (1 << 53) - 1
"""Counts and indices in bodies are at most this: JSON readers elsewhere take such numbers for floats."""
Body: TypeAlias = JsonObject
"""The body of a frame: a JSON object."""
_HEADER = struct.Struct("<2sBBIQQ")
_MAGIC = b"PL"
_TAG_BYTES = 16
HEADER_BYTES = _HEADER.size + _TAG_BYTES

_SMALL = 64 << 10
_LARGE = 64 << 20
_MAX_PAYLOAD = 1 << 44


class Kind(IntEnum):
    """The kind of a frame. The comment names sender and receiver."""

    HELLO = 1  # any → any, first frame: who I am
    ERROR = 2  # any → any: what went wrong, then the connection closes
    BYE = 3  # role → controller: I leave in order
    OFFER = 4  # worker → lead: my layout and optimizer
    ADOPT = 5  # lead → follower: the run's layout and optimizer, and the weights of your shard
    ADOPTED = 6  # lead → worker: all servers have the model; start from this
    ATTACH = 7  # worker → server: my memory; I belong to this layout
    ATTACHED = 8  # server → worker: parameters of my shard
    PUSH = 9  # worker → server: a gradient
    ADMIT = 10  # server → worker: fresh parameters, go on
    TAKE = 11  # worker → lead: leases, please
    GRANT = 12  # lead → worker: here they are
    ASSIGN = 13  # worker → server: overwrite the parameters of your shard
    STATE = 14  # worker → server: the optimizer state of your shard, please; server → worker: here it is
    SAVED = 15  # worker → lead: my part of a checkpoint
    ORDER = 16  # lead → follower: the next instruction in the run's one order
    READY = 18  # role → controller: I listen here
    START = 19  # controller → role: the servers are there
    STATS = 20  # lead → controller: progress of the run
    CHECKPOINT = 21  # controller → lead: save now
    STOP = 22  # controller → role: end now
    PULL = 23  # worker → server: fresh parameters without a push (after a rest)
    SLICE = 24  # worker → server: a slice of the gradient that the next PUSH announces
    SWITCH = 25  # controller → lead: go on in another mode
    MEET = 26  # worker ↔ worker: members of a group tell each other what they do
    LEAVE = 28  # controller → lead: let this worker go
    PROBE = 30  # worker → server: I still wait; server → worker: behind all that I sent
    RESUMED = 31  # server → worker: the link goes on here; so many frames of yours have come
    SENDS = 29  # worker → server: the slices that my pushes bring from now on
    CLOCK = 27  # role → controller: what time is it?
    VOTE = 42  # worker → lead: does the run end early? and whether this worker wants it to
    VERDICT = 43  # lead → worker: the answer
    CALL = 44  # worker → lead: a small value for the others that call at the same place
    ANSWER = 45  # lead → worker: theirs
    HEARD = 40  # controller → role: your last message is journaled, you may end
    TIME = 50  # controller → role: the answer to CLOCK
    NOTE = 51  # role → controller: a message for the user
    WORKER_REPORT = 52  # worker → controller: its progress
    METRICS = 53  # worker → controller: values that its script has logged
    SERVER_REPORT = 54  # server → controller: its progress
    STRANGER = 55  # server → controller: a connection was refused
    SAVE_BEGUN = 56  # lead → controller: the checkpoint has begun
    SAVE_CUT = 57  # lead → controller: the checkpoint needs no worker any more
    SAVE_ENDED = 58  # lead → controller: the checkpoint is written, or failed
    REPLACE = 59  # lead → controller: restart a worker
    ENDS_EARLY = 60  # lead → controller: the run ends early
    REPLICATED = 61  # lead → controller: every slice has all its replicas
    EMPTIED = 62  # lead → controller: a server has handed over its slices
    UNREACHABLE = 63  # lead → controller: workers cannot reach a server
    MODE = 64  # lead → controller: the run's mode from a version on
    SWITCH_REFUSED = 65  # lead → controller: a switch is impossible
    SNAPSHOT = 66  # controller → lead: save at the next opportunity
    EMPTY = 67  # controller → lead: let this server go
    END_EARLY = 68  # controller → lead: end the run in order
    EXPECTED = 69  # controller → server: the processes that there are
    REDUCED = 70  # follower → lead: norms of its slices, after the first half of an update
    VECTOR_ANSWERS = 71  # follower → lead: results of operations on its part of vectors
    PLACED = 72  # follower → lead: it has all its slices of a placement
    PART_WRITTEN = 73  # follower → lead: its part of a checkpoint is written
    PART_FAILED = 74  # follower → lead: its part of a checkpoint could not be written
    LOAD = 75  # worker → server: take over this optimizer state when the order says so
    SLICES = 76  # server → server, by the lead: slices that change hands
    WEIGHTS = 77  # worker 0 → lead: the initial weights
    WANT_WEIGHTS = 78  # lead → worker 0: send them
    MODEL_HELD = 79  # follower → lead: it has the model
    INCOMPLETE = 80  # lead → worker: the run was prepared by more calls than the offer
    ENTER_ORDER = 81  # lead → new server: it takes part in the order from here on
    CATCH_UP = 82  # promoted lead → follower: steps and state that it lacks
    BUFFERS = 83  # worker → server: the present buffers, for workers that join later
    DETACH = 84  # worker → server: I leave in order
    EVALUATES = 85  # worker → controller: the script can evaluate its model
    TO_READ = 86  # controller → lead: write a snapshot of the model
    READ = 87  # lead → controller: the snapshot is written, or failed
    HOST = 100  # agent → controller: its host
    WELCOME = 101  # controller → agent: you belong to the run
    ROLE_START = 102  # controller → agent: start this role
    ROLE_END = 103  # controller → agent: end this role
    ROLE_STARTED = 104  # agent → controller: it runs
    ROLE_EXITED = 105  # agent → controller: it ended, and why
    ALIVE = 106  # agent ↔ controller: I am still there
    FILE = 107  # controller → agent: a part of the program; agent → controller: of what a role has written
    RUN_OVER = 108  # controller → agent: the run has ended
    STORE_PUT = 110  # role → store: the next bytes of a new blob
    STORE_SEAL = 111  # role → store: the blob is complete
    STORE_SEALED = 112  # store → role: it is on the disk
    STORE_GET = 113  # role → store: bytes of a blob, please
    STORE_BYTES = 114  # store → role: here they are
    STORE_LIST = 115  # role → store: which blobs are there?
    STORE_NAMES = 116  # store → role: these


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_KINDS = {int(kind): kind for kind in Kind}
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)  # made once: it is in every round
_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_BODY_LIMIT = {
    Kind.PUSH: 4 << 20,
    Kind.OFFER: _LARGE,
    Kind.ADOPT: _LARGE,
    Kind.ADOPTED: _LARGE,
    Kind.STATE: _LARGE,
    Kind.ORDER: _LARGE,
    Kind.ENTER_ORDER: _LARGE,
    Kind.CATCH_UP: _LARGE,
    Kind.REDUCED: 4 << 20,  # a norm for every slice
    Kind.DETACH: 4 << 20,  # names leases
    Kind.ADMIT: 4 << 20,
    Kind.GRANT: 4 << 20,
    Kind.VERDICT: 4 << 20,
    Kind.ATTACHED: 4 << 20,
    Kind.ATTACH: 4 << 20,
    Kind.SENDS: 4 << 20,
    Kind.MEET: _LARGE,
    Kind.CALL: _LARGE,
    Kind.ANSWER: _LARGE,
    Kind.START: 4 << 20,  # the address of every server
    Kind.STATS: 4 << 20,  # accounts of every epoch
    Kind.METRICS: 4 << 20,  # all that a script logs
    Kind.WORKER_REPORT: 4 << 20,
    Kind.NOTE: 4 << 20,  # may quote a script
    Kind.ENDS_EARLY: 4 << 20,  # may quote a script
    Kind.REPLACE: 4 << 20,  # names every worker that waits
    Kind.SAVE_ENDED: 4 << 20,
    Kind.READ: 4 << 20,
    Kind.STRANGER: 4 << 20,
    Kind.ROLE_START: 4 << 20,  # a role's configuration
    Kind.ALIVE: 4 << 20,  # what every role of a host uses
    Kind.STORE_NAMES: 4 << 20,
    Kind.EXPECTED: 4 << 20,  # names every process
}
_WITH_PAYLOAD = frozenset(
    [
        Kind.ADOPT,
        Kind.ADOPTED,
        Kind.ATTACHED,
        Kind.PUSH,
        Kind.ADMIT,
        Kind.ASSIGN,
        Kind.STATE,
        Kind.LOAD,
        Kind.SLICES,
        Kind.WEIGHTS,
        Kind.SAVED,
        Kind.BUFFERS,
        Kind.SLICE,
        Kind.FILE,
        Kind.STORE_PUT,
        Kind.STORE_BYTES,
    ]
)
WITH_DESCRIPTORS = frozenset([Kind.ADOPT, Kind.ADOPTED, Kind.ATTACH, Kind.MEET])
"""Kinds that may bring a file descriptor along."""


class Header(NamedTuple):
    """A header whose lengths are within bounds. Its tag is not verified yet."""

    kind: Kind
    body_bytes: int
    sequence: int
    payload_bytes: int
    raw: bytes
    tag: bytes


def encode(kind: Kind, body: Body, *, sequence: int, payload_bytes: int, key: bytes) -> bytes:
    """Header, tag and body of a frame, ready to send.

    Raises:
        MessageError: no role would accept it. It is no LinkError: reconnecting would not help.
    """
    text = _text(kind, body, payload_bytes)
    raw = _HEADER.pack(_MAGIC, kind, 0, len(text), sequence, payload_bytes)
    return raw + tag_of(key, raw, text) + text


def check(kind: Kind, body: Body) -> None:
    """Raise MessageError if a frame with this body could not be sent, as `encode` does."""
    _text(kind, body, 0)


def _text(kind: Kind, body: Body, payload_bytes: int) -> bytes:
    try:
        text = _ENCODER.encode(body).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError(f"a {kind.name} body that is not JSON: {error}") from None
    _bound(kind, len(text), payload_bytes, MessageError)
    return text


def parse_header(data: bytes) -> Header:
    """Parse and bound a header. Raises FrameError for anything that is not one."""
    if len(data) != HEADER_BYTES:
        raise FrameError(f"a header of {len(data)} bytes, expected {HEADER_BYTES}")
    magic, kind_number, zero, body_bytes, sequence, payload_bytes = _HEADER.unpack_from(data)
    if magic != _MAGIC or zero:
        raise FrameError("not a Paceline frame")
    kind = _KINDS.get(kind_number)
    if kind is None:
        raise FrameError(f"unknown kind of frame {kind_number}")
    _bound(kind, body_bytes, payload_bytes)
    raw, tag = data[: _HEADER.size], data[_HEADER.size :]
    return Header(kind, body_bytes, sequence, payload_bytes, raw, tag)


def verify(header: Header, body: bytes | bytearray, *, sequence: int, key: bytes) -> None:
    """Check tag and sequence. Raises FrameError; nothing of the body was parsed."""
    if not hmac.compare_digest(tag_of(key, header.raw, body), header.tag):
        raise FrameError(f"a {header.kind.name} frame with a wrong tag")
    if header.sequence != sequence:
        raise FrameError(f"frame {header.sequence} where {sequence} was due: replayed or lost")


def decode_body(body: bytes | bytearray) -> Body:
    """Parse a verified body: a JSON object. Raises FrameError."""
    try:
        value = _DECODER.decode(body.decode())  # of bytes it would guess the encoding first
        if b"\\ud" in body or b"\\uD" in body:  # half a character would fail later, where it is written
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a body that is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FrameError("a body that is not a JSON object")
    return value


def field(body: Body, name: str, kind: type[T], default: T | None = None) -> T:
    """A field of a body, of the right type; FrameError if it is absent or another type."""
    value = body.get(name, default)
    if not isinstance(value, kind) or (kind is int and not _is_number(value)):
        raise FrameError(f"field {name!r} is {_shown(value)}, expected {kind.__name__}")
    if kind is float and not math.isfinite(value):  # type: ignore[arg-type]
        raise FrameError(f"field {name!r} is {value}, expected a finite number")
    return value


def whole(body: Body, name: str, default: int | None = None) -> int:
    """As `field`: a count or an index, 0 or more, and no more than any count of ours."""
    value = field(body, name, int, default)
    if not 0 <= value <= _MOST:
        raise FrameError(f"field {name!r} is {value}, expected a whole number from 0 to {_MOST:,}")
    return value


def wholes(body: Body, name: str) -> list[int]:
    """As `whole`, for a list of them; none if the field is absent."""
    values = field(body, name, list, [])
    if not all(type(each) is int and 0 <= each <= _MOST for each in values):
        raise FrameError(f"field {name!r} has something else than whole numbers from 0 to {_MOST:,}")
    return values


def _is_number(value: object) -> bool:
    """Whether an integer fits into 64 bits; JSON's have no bound."""
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _shown(value: object) -> str:
    """For messages. Huge integers have no decimal form."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        return "a huge number"


def _bound(kind: Kind, body_bytes: int, payload_bytes: int, error: type[PacelineError] = FrameError) -> None:
    body_limit = _BODY_LIMIT.get(kind, _SMALL)
    if body_bytes > body_limit:
        raise error(f"a {kind.name} body of {body_bytes:,} bytes is over its limit of {body_limit:,}")
    payload_limit = _MAX_PAYLOAD if kind in _WITH_PAYLOAD else 0
    if payload_bytes > payload_limit:
        raise error(
            f"a {kind.name} payload of {payload_bytes:,} bytes is over its limit of {payload_limit:,}"
        )


def tag_of(key: bytes, raw: bytes, body: bytes | bytearray) -> bytes:
    """The tag of a frame with this header and body."""
    digest = hashlib.blake2b(raw, key=key, digest_size=_TAG_BYTES)
    digest.update(body)
    return digest.digest()
