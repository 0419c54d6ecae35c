"""Shared memory: private, sealed, checked when it is received, and gone with its last holder."""

import fcntl
import mmap
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.comm import Access, Region
from paceline.exceptions import LinkError
from tests.links import open_descriptors

SIZE = 3 * mmap.PAGESIZE


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region.create(SIZE)
    yield made
    made.close()


@contextmanager
def attached(region: Region, access: Access = Access.SHARED) -> Iterator[Region]:
    found = Region.attach(os.dup(region.fd), region.size, access)
    yield found
    found.close()


def test_a_region_is_zeroed_private_and_without_a_name(region: Region) -> None:
    assert bytes(region.buffer) == bytes(SIZE)
    status = os.fstat(region.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert (status.st_size, status.st_uid, status.st_nlink) == (SIZE, os.geteuid(), 0)
    assert os.readlink(f"/proc/self/fd/{region.fd}") == "/memfd:paceline (deleted)"
    assert not os.get_inheritable(region.fd)


def test_nothing_appears_in_dev_shm() -> None:
    shm = Path("/dev/shm")
    before = set(shm.iterdir()) if shm.exists() else set()
    region = Region.create(1 << 20)
    region.buffer[:] = b"x" * (1 << 20)
    after = set(shm.iterdir()) if shm.exists() else set()
    region.close()
    assert after - before == set()


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1, 1 << 40])
def test_its_size_is_sealed(region: Region, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, size)
    assert os.fstat(region.fd).st_size == SIZE


@pytest.mark.parametrize("size", [0, 1 << 62, 1 << 63, 1 << 70])
def test_memory_that_cannot_be_had_is_a_link_error_and_leaves_no_descriptor(size: int) -> None:
    before = open_descriptors()
    with pytest.raises(LinkError, match=f"cannot make {size:,} bytes of shared memory"):
        Region.create(size)
    assert open_descriptors() == before


def test_pages_cost_nothing_until_they_are_touched() -> None:
    region = Region.create(1 << 36)
    region.buffer[1 << 35] = 1
    assert os.fstat(region.fd).st_blocks * 512 <= 4 << 20
    region.close()


def test_shared_mappings_see_each_other(region: Region) -> None:
    with attached(region) as other:
        other.buffer[5] = 7
        region.buffer[SIZE - 1] = 9
        assert (region.buffer[5], other.buffer[SIZE - 1]) == (7, 9)


def test_closing_twice_and_with_views_alive_is_fine() -> None:
    before = open_descriptors()
    region = Region.create(SIZE)
    view = memoryview(region.buffer)
    region.close()
    region.close()
    view[0] = 3
    assert view[0] == 3
    view.release()
    region.buffer.close()
    assert open_descriptors() == before


# --- what is refused ------------------------------------------------------------------------------


def refused(fd: int, size: int, message: str) -> None:
    """Attaching is refused, and the descriptor is not left open."""
    before = open_descriptors()
    with pytest.raises(LinkError, match=message):
        Region.attach(fd, size)
    assert open_descriptors() == before - 1


@pytest.mark.parametrize("size", [0, 1, SIZE - 1, SIZE + 1, 1 << 62])
def test_another_size_is_refused(region: Region, size: int) -> None:
    refused(os.dup(region.fd), size, f"has {SIZE:,} bytes.* expected {size:,} bytes")


def test_memory_without_seals_is_refused() -> None:
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    refused(os.dup(fd), SIZE, "seals 0x0; expected .* sealed size")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    refused(os.dup(fd), SIZE, "seals 0x4; expected .* sealed size")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    Region.attach(fd, SIZE).close()


def test_what_is_not_a_memfd_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    refused(os.open(path, os.O_RDWR), SIZE, "not a memfd|seals")
    read, write = os.pipe()
    os.close(write)
    refused(read, SIZE, "not a memfd")
    near, far = socket.socketpair()
    far.close()
    refused(near.detach(), SIZE, "not a memfd")
    with tempfile.TemporaryFile() as closed:
        number = closed.fileno()
    with pytest.raises(LinkError, match="cannot map the shared memory received"):
        Region.attach(number, SIZE)


def test_memory_of_another_user_is_refused(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.geteuid()
    monkeypatch.setattr("paceline.comm.memory.os.geteuid", lambda: mine + 1)
    refused(os.dup(region.fd), SIZE, f"owner {mine}, .*expected .* owner {mine + 1}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give memory away")
def test_memory_really_of_another_user_is_refused(region: Region) -> None:
    os.fchown(region.fd, 65_534, -1)
    refused(os.dup(region.fd), SIZE, "owner 65534")


# --- private mappings -----------------------------------------------------------------------------


def test_a_private_mapping_sees_the_server_and_keeps_its_writes_to_itself(region: Region) -> None:
    page = mmap.PAGESIZE
    with attached(region, Access.PRIVATE) as private:
        region.buffer[0] = 1
        assert private.buffer[0] == 1
        private.buffer[0] = 50
        assert (region.buffer[0], private.buffer[0]) == (1, 50)
        region.buffer[0], region.buffer[page] = 2, 3
        assert (private.buffer[0], private.buffer[page]) == (50, 3), "only a written page is own"
        private.forget_private_writes()
        assert private.buffer[0] == 2
        region.buffer[0] = 4
        assert private.buffer[0] == 4


def test_by_a_read_only_descriptor_nobody_can_map_it_for_shared_writing(region: Region) -> None:
    region.buffer[0] = 8
    private = Region.attach(region.read_only_fd(), SIZE, Access.PRIVATE)
    assert private.buffer[0] == 8
    region.buffer[0] = 9
    assert private.buffer[0] == 9, "who has the other descriptor goes on writing"
    private.buffer[0] = 7
    assert region.buffer[0] == 9
    private.close()
    refused(region.read_only_fd(), SIZE, "cannot map the shared memory received.*denied")
    fd = region.read_only_fd()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)


# --- between processes ----------------------------------------------------------------------------

_OWNER = """
    import array, os, socket, sys
    from paceline.comm import Region

    region = Region.create({size})
    region.buffer[:4] = b"mine"
    sock = socket.socket(socket.AF_UNIX)
    sock.connect("\\0" + sys.argv[1])
    rights = array.array("i", [region.fd])
    sock.sendmsg([str(region.fd).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    while sock.recv(1):
        region.buffer[0] += 1
        sock.sendall(b".")
"""


@contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[bytes], socket.socket, int, int]]:
    """Another process with a region: it, a socket to it, its descriptor's number, and ours."""
    name = f"paceline-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        listening.settimeout(30)
        code = textwrap.dedent(_OWNER).format(size=SIZE)
        process = subprocess.Popen([sys.executable, "-c", code, name])
        try:
            sock, _ = listening.accept()
            with sock:
                sock.settimeout(30)
                data, fds, _, _ = socket.recv_fds(sock, 100, 1)
                yield process, sock, int(data), fds[0]
        finally:
            process.kill()
            process.wait(10)


def test_a_descriptor_travels_between_processes() -> None:
    with owner() as (_, sock, _, fd):
        region = Region.attach(fd, SIZE)
        private = Region.attach(os.dup(fd), SIZE, Access.PRIVATE)
        assert region.buffer[:4] == b"mine"
        sock.sendall(b"?")
        sock.recv(1)
        assert region.buffer[:4] == private.buffer[:4] == b"nine"
        region.close()
        private.close()


def test_memory_is_gone_when_its_owner_is_killed() -> None:
    shm = Path("/dev/shm")
    before = set(shm.iterdir()) if shm.exists() else set()
    with owner() as (process, _, number, fd):
        link = Path(f"/proc/{process.pid}/fd/{number}")
        assert os.readlink(link).startswith("/memfd:paceline")
        inode = os.fstat(fd).st_ino
        assert inode in _mapped_memfds(process.pid)
        region = Region.attach(fd, SIZE)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert not os.path.lexists(link)
        # Who holds it keeps it; with the last holder the kernel frees it.
        assert region.buffer[:4] == b"mine"
        assert inode in _mapped_memfds(os.getpid())
        region.close()
        assert inode not in _mapped_memfds(os.getpid())
    assert (set(shm.iterdir()) if shm.exists() else set()) - before == set()


def _mapped_memfds(pid: int) -> set[int]:
    """Inodes of our memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "/memfd:paceline" in line}
