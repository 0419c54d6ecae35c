"""Plain files, JSON and typed data: what is read is what a reader is written for, or it is refused."""

import json
import math
import os
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

import pytest

from paceline.storage.json_files import MOST_DEPTH, parse_json, read_object
from paceline.storage.plain_files import (
    append_to,
    check_directory,
    open_plain,
    plain_size,
    read_bytes,
    reason_of,
)
from paceline.storage.typed_json import AnyFloat, checked

# Files


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link(path: Path) -> None:
    path.with_name("other").write_bytes(b"other")
    path.symlink_to(path.with_name("other"))


def a_device(path: Path) -> None:
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("making a device needs root")


def a_socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(path.parent)  # its whole path may be too long
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(before)


KINDS = [a_pipe, a_link, a_device, a_socket, Path.mkdir]


@pytest.mark.timeout(5)
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    "flags", [os.O_RDONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_APPEND]
)
def test_only_plain_files_are_opened(tmp_path: Path, make: Any, flags: int) -> None:
    path = tmp_path / "it"
    make(path)
    kind = make.__name__.removeprefix("a_") if make is not Path.mkdir else "directory"
    with pytest.raises(OSError, match=f"it is a {kind}, not a plain file") as caught:
        open_plain(path, flags)
    assert reason_of(caught.value) == f"it is a {kind}, not a plain file"
    with pytest.raises(OSError, match="not a plain file"):
        read_bytes(path, most=100)
    with pytest.raises(OSError, match="not a plain file"):
        plain_size(path)


def test_a_plain_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_bytes(b"0123456789")
    assert read_bytes(path, most=10) == b"0123456789"
    assert read_bytes(path, most=4, at=6) == b"6789"
    with pytest.raises(OSError, match="it has more than 9 bytes"):
        read_bytes(path, most=9)
    os.truncate(path, 1 << 40)  # takes no room on the disk
    with pytest.raises(OSError, match="it has more than 1,000,000 bytes"):
        read_bytes(path, most=1_000_000)
    with pytest.raises(OSError, match="more than 100 bytes"):
        read_bytes(Path("/proc/self/status"), most=100)  # says that it has none
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none", most=1)
    with pytest.raises(OSError, match="null"):
        read_bytes(tmp_path / "a\0b", most=1)


def test_a_file_with_a_second_name_is_not_written(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"precious")
    os.link(other, tmp_path / "it")
    for flags in (os.O_WRONLY | os.O_TRUNC, os.O_RDWR, os.O_WRONLY | os.O_APPEND):
        with pytest.raises(OSError, match="second name"):
            open_plain(tmp_path / "it", flags)
    assert other.read_bytes() == b"precious"
    assert read_bytes(tmp_path / "it", most=100) == b"precious"


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_what_is_appended_to_is_for_its_owner_only(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        (tmp_path / "old").write_bytes(b"a")
        (tmp_path / "old").chmod(0o666)
        for name in ("old", "new"):
            file = append_to(tmp_path / name)
            os.write(file, b"b")
            assert os.get_blocking(file)
            os.close(file)
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        assert (tmp_path / "old").read_bytes() == b"ab"
    finally:
        os.umask(before)


def test_a_link_to_a_directory_is_none(tmp_path: Path) -> None:
    check_directory(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="it is a link, not a directory"):
        check_directory(tmp_path / "link")
    with pytest.raises(FileNotFoundError):
        check_directory(tmp_path / "none")


# JSON


def nested(depth: int, mixed: bool = False) -> str:
    opening = ['{"a":' if mixed and n % 2 else "[" for n in range(depth)]
    closing = ["}" if mixed and n % 2 else "]" for n in reversed(range(depth))]
    return "".join([*opening, "1", *closing])


@pytest.mark.parametrize("mixed", [False, True])
def test_depth_is_bounded(mixed: bool) -> None:
    json.loads(nested(MOST_DEPTH, mixed))
    assert parse_json(nested(MOST_DEPTH, mixed)) is not None
    for depth in (MOST_DEPTH + 1, 700, 100_000):
        with pytest.raises(ValueError, match="nested deeper than"):
            parse_json(nested(depth, mixed))
    assert parse_json('{"a": "' + "[" * 1000 + '"}') == {"a": "[" * 1000}


@pytest.mark.parametrize("data", [b"", b"{", b'{"a": \xff}', b"\xff\xfe{\0}\0", b"1" * 5000, b"nul"])
def test_what_is_not_json_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(data)


def test_half_characters_are_replaced() -> None:
    found = parse_json('{"a\\ud800": ["\\udfff", "\\ud83d\\ude00", {"b": "x\\uDC00"}], "c": 1}')
    assert found == {"a\ufffd": ["\ufffd", "\U0001f600", {"b": "x\ufffd"}], "c": 1}
    json.dumps(found, ensure_ascii=False).encode()


def test_nan_is_a_number_as_python_writes_it() -> None:
    assert math.isnan(parse_json("[NaN]")[0])


def test_an_object_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "it").write_text("[1]")
    with pytest.raises(ValueError, match="not a JSON object"):
        read_object(tmp_path / "it", most=100)


# Types


class Inner(TypedDict):
    text: str
    pair: tuple[int, int]


@dataclass(kw_only=True)
class Outer:
    number: int
    share: float = 0.5
    flag: bool = False
    value: AnyFloat = 0.0
    maybe: str | None = None
    word: Literal["a", "b"] = "a"
    by_rank: dict[int, Inner] = field(default_factory=dict)
    many: list[int] = field(default_factory=list)
    any_number: tuple[float, ...] = ()
    free: dict[str, Any] = field(default_factory=dict)


def test_plain_data_becomes_the_class() -> None:
    data = {
        "number": 3,
        "share": 1,
        "value": math.inf,
        "maybe": None,
        "word": "b",
        "by_rank": {"7": {"text": "x", "pair": [1, 2], "more": []}},
        "many": [1, 2],
        "any_number": [0.5],
        "free": {"a": [None]},
        "unknown": object(),
    }
    found = checked(Outer, data)
    assert found.number == 3 and found.share == 1 and found.value == math.inf and found.word == "b"
    assert found.by_rank == {7: {"text": "x", "pair": (1, 2), "more": []}}
    assert found.many == [1, 2] and found.any_number == (0.5,) and found.free == {"a": [None]}
    assert checked(Outer, {"number": 3}) == Outer(number=3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"number": "3"}, "number: '3' is not a whole number of at most 64 bits"),
        ({"number": True}, "number: True is not a whole number"),
        ({"number": 2**63}, "number: a number of too many digits is not"),
        ({"number": 10**4000}, "number: a number of too many digits is not"),
        ({"number": None}, "number: None is not"),
        ({"share": math.nan}, "share: nan is not a finite number"),
        ({"share": math.inf}, "share: inf is not a finite number"),
        ({"share": 10**400}, "share: a number of too many digits"),
        ({"value": "1"}, "value: '1' is not a finite number"),
        ({"flag": 1}, "flag: 1 is not true or false"),
        ({"maybe": 1}, "maybe: 1 is not text"),
        ({"word": "c"}, "word: 'c' is not one of"),
        ({"word": []}, "word: a list is not one of"),
        ({"by_rank": []}, "by_rank: a list is not an object"),
        ({"by_rank": {"x": {}}}, "by_rank: 'x' is not a whole number"),
        ({"by_rank": {"1": {"text": "x"}}}, "by_rank.1.pair: is missing"),
        ({"by_rank": {"1": {"text": "x", "pair": [1]}}}, "by_rank.1.pair: a list is not a list of 2"),
        ({"by_rank": {"1": {"text": "x", "pair": [1, "y"]}}}, "by_rank.1.pair.1: 'y' is not a whole number"),
        ({"many": {"0": 1}}, "many: an object is not a list"),
        ({"many": [1, None]}, "many.1: None is not a whole number"),
        ({"free": 5}, "free: 5 is not an object"),
        ({"maybe": {"x" * 1000: 1}}, "maybe: an object is not text"),
        ({"number": "x" * 1000}, "number: 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx… is not"),
    ],
)
def test_another_type_is_refused_with_its_place(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        checked(Outer, {"number": 3, **change})
    assert str(caught.value).startswith(said)
    with pytest.raises(ValueError, match="number: is missing"):
        checked(Outer, {})
    with pytest.raises(ValueError, match="5 is not an object"):
        checked(Outer, 5)


def test_a_type_that_cannot_be_checked_is_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError, match="does not know how to check"):
        checked(set, set())
