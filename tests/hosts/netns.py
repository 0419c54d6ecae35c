"""Hosts on one machine: network namespaces on a bridge, each with a name and a mount namespace of its own.

The bridge is in a namespace, too, so that nothing of the machine's own network is touched, and several test
runs do not meet. What a host's processes see of the test's directory is an empty file system of their own:
there is no common disk. Needs root.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

PATIENCE_S = 60.0


def unsupported_reason() -> str | None:
    """Why this machine cannot have such hosts; None: it can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    for program in ("ip", "unshare", "mount"):
        if shutil.which(program) is None:
            return f"needs the program {program}"
    name = f"pl{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"cannot make a network namespace: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


class Host:
    """One host.

    Args:
        private: directory that the other hosts do not see: an empty file system is mounted there. None: this
            host sees the machine's own.
    """

    def __init__(self, net: "Net", number: int, name: str, private: Path | None) -> None:
        self.name = name
        self.address = f"10.178.0.{10 + number}"
        self.space = f"{net.name}-{name}"
        self._net = net
        self._port = f"v{number}"
        self._private = private
        _ip("netns", "add", self.space)
        _ip("-n", net.switch, "link", "add", self._port, "type", "veth", "peer", "eth0", "netns", self.space)
        _ip("-n", net.switch, "link", "set", self._port, "master", "br0", "up")
        _ip("-n", self.space, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", self.space, "link", "set", device, "up")

    def start(
        self, command: Sequence[str], *, files: dict[str, str], output: Path
    ) -> "subprocess.Popen[bytes]":
        """Start a command on this host, in its private directory.

        Args:
            files: made there before, of mode 0600.
            output: of the command.
        """
        script = [f"hostname {self.name}", "set -e"]
        if self._private is not None:
            script += [f"mount -t tmpfs -o mode=700 tmpfs {self._private}", f"cd {self._private}"]
        script += [f"(umask 077; printf %s '{text}' > {name})" for name, text in files.items()]
        script.append('exec "$@"')
        where = [
            "ip",
            "netns",
            "exec",
            self.space,
            "unshare",
            "-m",
            "-u",
            "--",
            "bash",
            "-c",
            "\n".join(script),
        ]
        environment = {**os.environ, "TMPDIR": str(self._private or "/tmp"), "OMP_NUM_THREADS": "1"}
        with output.open("wb") as file:
            return subprocess.Popen(
                [*where, "bash", *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        """All processes of this host."""
        return [int(pid) for pid in _ip("netns", "pids", self.space).split()]

    def signal(self, number: int) -> None:
        """Send a signal to all processes of this host."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def cut(self) -> None:
        """Pull the cable."""
        _ip("-n", self._net.switch, "link", "set", self._port, "down")

    def heal(self) -> None:
        """Plug it in again."""
        _ip("-n", self._net.switch, "link", "set", self._port, "up")

    def run(self, *command: str) -> str:
        """Run a command in the host's network, to its end."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.space, *command], capture_output=True, text=True, check=True
        )
        return done.stdout

    def remove(self) -> None:
        """End all its processes and remove it."""
        deadline = time.monotonic() + PATIENCE_S
        while self.pids() and time.monotonic() < deadline:
            self.signal(signal.SIGKILL)
            time.sleep(0.02)
        _ip("netns", "delete", self.space)


class Net:
    """A switch and the hosts on it."""

    def __init__(self) -> None:
        self.name = f"pl{uuid.uuid4().hex[:8]}"
        self.switch = f"{self.name}-switch"
        self.hosts: list[Host] = []
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "br0", "up")

    def add(self, name: str, private: Path | None) -> Host:
        """Another host."""
        self.hosts.append(Host(self, len(self.hosts) + 1, name, private))
        return self.hosts[-1]

    def remove(self) -> None:
        """Remove all hosts."""
        for host in self.hosts:
            host.remove()
        _ip("netns", "delete", self.switch)


@contextlib.contextmanager
def network() -> Iterator[Net]:
    """Context manager: a network, removed at the end."""
    net = Net()
    try:
        yield net
    finally:
        net.remove()


def until(true: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    """Wait until something is true; fail with its name."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
        time.sleep(0.05)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout
