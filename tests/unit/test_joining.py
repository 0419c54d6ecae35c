"""How a host joins a run, and how everything else is refused; on the loopback."""

import contextlib
import os
import random
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.causes import Cause
from paceline.comm import Certificate, Connection, Kind, new_secret
from paceline.comm.certificates import Certificates
from paceline.comm.handshake import Keys
from paceline.comm.pinned_tls import fingerprint_of, secure_pinned
from paceline.engines import LOCAL_HOST, EngineEvent, Exited, HostJoined, HostLost, JoinRefused, RoleSpec
from paceline.engines import admission as admission_module
from paceline.engines.admission import check_newcomer, join
from paceline.engines.agent_messages import HostAdmitted, HostHello, RoleEnded, StartRole
from paceline.engines.agent_process import HostAgent, working_directory
from paceline.engines.hosts_engine import HostsEngine
from paceline.engines.join_token import JoinToken
from paceline.engines.moved_paths import moved
from paceline.engines.program_files import ProgramFiles, checked_path
from paceline.engines.role_files import OutgoingFiles, ReceivedFiles
from paceline.exceptions import AuthError, DeadlineError, FrameError, LinkError, PlanError, UsageError
from paceline.testing.paper_engine import PaperAgent
from tests.joining import HOST, certificate, joined, listening

PATIENCE_S = 20.0


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[HostsEngine]:
    (tmp_path / "run").mkdir()
    with listening(tmp_path / "run") as made:
        yield made


def next_event(engine: HostsEngine) -> EngineEvent:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        select.select([engine], [], [], 0.1)
        if found := engine.events():
            return found[0]
    pytest.fail("nothing happened")


def wait_for(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


# --- the token ------------------------------------------------------------------------------------------


def test_a_token_is_for_its_owner_only_and_comes_back(tmp_path: Path) -> None:
    token = JoinToken("run-1", "ab" * 32, new_secret())
    token.write(tmp_path / "token")
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert JoinToken.read(tmp_path / "token") == token
    assert token.secret.hex() not in repr(token)
    token.write(tmp_path / "token")  # the run is started again


@pytest.mark.parametrize("text", ["", "token\n", "paceline-join-1 run ab cd\n", "x" * 10_000, "\0\xff"])
def test_what_is_no_token_is_refused_with_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="does not hold a token"):
        JoinToken.read(path)


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    JoinToken("run", "ab" * 32, new_secret()).write(path)
    path.chmod(0o640)
    with pytest.raises(UsageError, match="may be read by other users .mode 0640"):
        JoinToken.read(path)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        JoinToken.read(tmp_path / "none")


# --- joining --------------------------------------------------------------------------------------------


def test_a_host_joins_with_the_token_and_is_lost_when_its_agent_ends(
    engine: HostsEngine, tmp_path: Path
) -> None:
    told: list[str] = []
    with joined(engine, tmp_path, PaperAgent()):
        engine.gather(PATIENCE_S, told.append)
        assert [host.id for host in engine.hosts()] == [LOCAL_HOST, "host-1"]
        assert engine.hosts()[0].address == HOST  # as the newcomer reached it
        assert told and "joined" in told[0] and HOST in told[0]
    lost = next_event(engine)
    assert isinstance(lost, HostLost) and lost.host.id == "host-1"
    assert [host.id for host in engine.hosts()] == [LOCAL_HOST]
    with joined(engine, tmp_path, PaperAgent()):  # another one takes its place
        assert isinstance(next_event(engine), HostJoined)
        assert [host.id for host in engine.hosts()] == [LOCAL_HOST, "host-2"]


def test_hosts_that_do_not_come_are_counted(engine: HostsEngine) -> None:
    with pytest.raises(DeadlineError, match=r"1 of 2 hosts did not come within 0\.1 s \(--deadline\)"):
        engine.gather(0.1, lambda text: None)


def test_a_wrong_secret_is_refused_on_both_sides(engine: HostsEngine) -> None:
    wrong = JoinToken("run", engine.token.fingerprint, new_secret())
    with pytest.raises(AuthError, match="is not the run of this token .* Copy the token of this start"):
        join(HOST, engine.port, wrong)
    refused = next_event(engine)
    assert isinstance(refused, JoinRefused) and "the secrets differ" in refused.reason
    assert len(engine.hosts()) == 1


def test_an_impostor_is_sent_nothing(engine: HostsEngine) -> None:
    """The certificate is another one than the token names: nothing goes through that link."""
    token = JoinToken("run", fingerprint_of(Certificates.for_run("run").by_role["controller"]), new_secret())
    with pytest.raises(AuthError, match="certificate shown there is not the one that the token names"):
        join(HOST, engine.port, token)
    assert isinstance(next_event(engine), JoinRefused)


def test_nothing_listens_there() -> None:
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    token = JoinToken("run", "ab" * 32, new_secret())
    with pytest.raises(LinkError, match=f"nothing answers at {HOST}:{port}: .*--listen"):
        join(HOST, port, token)


def test_an_agent_of_another_version_is_told_both(engine: HostsEngine, monkeypatch) -> None:
    monkeypatch.setattr(admission_module, "PROTOCOL", 99)
    with socket.create_connection((HOST, engine.port)) as sock:
        stream = secure_pinned(sock, engine.token.fingerprint, within_s=5)
        keys = admission_module.handshake.initiate(stream, engine.token.secret, within_s=5)
        link = Connection(stream, keys)
        link.send(Kind.HELLO, {"role": "agent", "version": "9.9.9", "protocol": 1})
        answer = link.receive()
    assert answer.kind is Kind.ERROR
    for part in ("Paceline 9.9.9 (protocol 1)", "(protocol 99)", "install the same version on both hosts"):
        assert part in answer.body["message"]
    refused = next_event(engine)
    assert isinstance(refused, JoinRefused) and "9.9.9" in refused.reason


def test_a_second_agent_of_one_host_is_refused_on_both_sides(engine: HostsEngine, tmp_path: Path) -> None:
    with joined(engine, tmp_path, PaperAgent(), identity="b"):
        engine.gather(PATIENCE_S, lambda text: None)
        with pytest.raises(UsageError, match="an agent of this run is on .* already"):
            join(HOST, engine.port, engine.token, identity="b")
        refused = next_event(engine)
        assert isinstance(refused, JoinRefused) and "already" in refused.reason
    with pytest.raises(UsageError, match="the controller runs on .* already"):
        join(HOST, engine.port, engine.token, identity="own")


def test_more_hosts_than_the_run_has_are_refused(engine: HostsEngine, tmp_path: Path) -> None:
    with (
        joined(engine, tmp_path, PaperAgent()),
        pytest.raises(UsageError, match=r"all 2 hosts of the run are here \(--hosts 2\)"),
    ):
        join(HOST, engine.port, engine.token, identity="c")


def hello(**changed: object) -> HostHello:
    usual = HostHello("b", "id", HOST, 1, cores=2, memory=1, unix_s=1e9)
    return usual._replace(**changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(("off_s", "words"), [(-7200, "2.0 hours behind"), (7200, "2.0 hours ahead")])
def test_a_clock_that_is_wrong_is_named(off_s: float, words: str) -> None:
    with pytest.raises(UsageError, match=f"the clock of b is {words}.*NTP"):
        check_newcomer(hello(unix_s=1e9 + off_s), HOST, 1e9)


def test_an_address_that_is_changed_on_the_way_is_named() -> None:
    with pytest.raises(UsageError, match=r"10\.0\.0\.7, and the controller sees it at 127\.0\.0\.1.*NAT"):
        check_newcomer(hello(address="10.0.0.7"), HOST, 1e9)


def test_a_host_that_cannot_be_reached_back_is_named() -> None:
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UsageError, match=f"b cannot be reached back at {HOST}, port {port}.*firewall"):
        check_newcomer(hello(port=port), HOST, 1e9)


def test_a_recorded_handshake_is_of_no_use(engine: HostsEngine, tmp_path: Path) -> None:
    """An eavesdropper sends again, byte by byte, what an agent sent."""
    heard = bytearray()

    class Recorded(socket.socket):
        def sendall(self, data, flags=0):
            heard.extend(data)
            return super().sendall(data, flags)

    with Recorded() as sock:
        sock.connect((HOST, engine.port))
        stream = secure_pinned(sock, engine.token.fingerprint, within_s=5)
        admission_module.handshake.initiate(stream, engine.token.secret, within_s=5)
    assert isinstance(next_event(engine), JoinRefused)  # it said nothing more
    with socket.create_connection((HOST, engine.port)) as again:
        again.settimeout(PATIENCE_S)
        again.sendall(heard)
        with contextlib.suppress(ConnectionResetError):
            while again.recv(4096):
                pass
    refused = next_event(engine)
    assert isinstance(refused, JoinRefused) and len(engine.hosts()) == 1


# --- strangers ------------------------------------------------------------------------------------------


def test_port_scans_and_half_open_connections_are_nothing_but_log_lines(
    engine: HostsEngine, tmp_path: Path
) -> None:
    draw = random.Random(0)
    with contextlib.ExitStack() as stack:
        for number in range(200):
            sock = stack.enter_context(socket.create_connection((HOST, engine.port)))
            with contextlib.suppress(OSError):
                if number % 4 == 1:
                    sock.sendall(draw.randbytes(draw.randrange(1, 300)))
                elif number % 4 == 2:
                    sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                elif number % 4 == 3:
                    sock.close()
        wait_for(lambda: [*engine.events()], "no refusal")
    # The half-open ones hold their places for 5 s at most, or until they end as here.
    wait_for(lambda: _joins(engine, tmp_path), "a host could not join any more")


def _joins(engine: HostsEngine, parent: Path) -> bool:
    with contextlib.suppress(LinkError), joined(engine, parent, PaperAgent()):
        return True
    return False


def test_messages_that_are_none_lose_that_host_only(engine: HostsEngine, tmp_path: Path) -> None:
    draw = random.Random(1)
    bodies = [
        (Kind.ROLE_EXITED, {"role": "worker"}),
        (Kind.ROLE_EXITED, {**RoleEnded("worker", 0, 0, "magic", "", "", 0)._asdict()}),
        (Kind.FILE, {"path": "../../etc/passwd", "at": 0}),
        (Kind.FILE, {"path": "logs/x", "at": -1}),
        (Kind.FILE, {"path": "run.json", "at": 0}),
        (Kind.ALIVE, {"usage": {"worker:0": [1]}}),
        (Kind.WELCOME, {"run": "x", "host": "y", "silence_s": 1.0}),
        (Kind.HELLO, {}),
    ]
    for kind, body in [*bodies, *((draw.choice([*Kind]), {}) for _ in range(8))]:
        if kind is Kind.ALIVE and not body:
            continue
        link, _ = join(HOST, engine.port, engine.token, identity=str(draw.random()))
        wait_for(lambda: len(engine.hosts()) == 2, "not joined")
        payload = [memoryview(b"x")] if kind is Kind.FILE else []
        link.send(kind, body, payload)
        wait_for(lambda: len(engine.hosts()) == 1, f"{kind.name} {body} was believed")
        link.close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == []


# --- a host that is lost ----------------------------------------------------------------------------------


def spec(run: Path, **config: object) -> RoleSpec:
    return RoleSpec(
        role="worker",
        rank=1,
        incarnation=0,
        log=str(run / "logs" / "worker-1.log"),
        secret="00",
        controller={},
        config={"run_dir": str(run), **config},
    )


def test_roles_of_a_host_that_goes_silent_have_ended_by_its_loss(tmp_path: Path) -> None:
    """A host that is frozen says nothing, and closes nothing."""
    with listening(tmp_path, silence_s=0.4) as engine:
        link, _ = join(HOST, engine.port, engine.token, identity="frozen")
        engine.gather(PATIENCE_S, lambda text: None)
        agent = engine.agent("host-1")
        agent.start(spec(tmp_path))
        lost = next_event(engine)
        assert isinstance(lost, HostLost) and "said nothing for 0.4 s" in lost.reason
        found: list[object] = []
        wait_for(lambda: found.extend(agent.poll()) or found, "the role has not ended")
        (ended,) = found
        assert isinstance(ended, Exited) and ended.cause is Cause.LOST_HOST and ended.cause.may_pass
        assert "was lost with its host" in ended.how
        agent.start(spec(tmp_path))  # what is started there now ends at once
        wait_for(agent.poll, "a role runs on a host that is lost")
        link.close()


def test_an_agent_that_hears_nothing_ends_its_roles(tmp_path: Path) -> None:
    """What cannot be reached must not train on."""
    paper, told = PaperAgent(), []
    with working_directory(tmp_path) as directory:
        ours, theirs = (Connection(sock, Keys(b"k", b"k")) for sock in socket.socketpair())
        agent = HostAgent(ours, HostAdmitted("run", "host-1", 0.3), directory, told.append, agent=paper)
        with pytest.raises(LinkError, match="the controller has said nothing for 0.3 s"):
            agent.run()
        assert paper.closed
        theirs.close()


# --- what takes the place of a common disk ------------------------------------------------------------------


def test_the_program_is_sent_with_what_lies_beside_it(tmp_path: Path) -> None:
    code = tmp_path / "code"
    for path in ("train.py", "pkg/__init__.py", "pkg/deep/model.py", "pkg/config.yaml", "empty.py"):
        (code / path).parent.mkdir(parents=True, exist_ok=True)
        (code / path).write_text("" if path == "empty.py" else f"# {path}\n" * 40_000)
    for left_out in (".git/x.py", "venv/lib/y.py", "__pycache__/z.py", "data.bin", "runs/r/run.json"):
        (code / left_out).parent.mkdir(parents=True, exist_ok=True)
        (code / left_out).write_text("x")
    (code / "venv" / "pyvenv.cfg").touch()
    (code / "odd name").write_text("print()")
    program = ProgramFiles.below(code, code / "odd name")
    assert program.paths == (
        *("empty.py", "odd name", "pkg/__init__.py", "pkg/config.yaml", "pkg/deep/model.py", "train.py"),
    )
    (tmp_path / "run").mkdir()
    with (
        listening(tmp_path / "run", program=program) as engine,
        joined(engine, tmp_path, PaperAgent()) as host,
    ):
        engine.gather(PATIENCE_S, lambda text: None)
        there = host.program
        wait_for(lambda: (there / "train.py").exists() and not _differ(code, there, program), "not sent")
        assert (there / "train.py").stat().st_mode & 0o777 == 0o600


def _differ(code: Path, there: Path, program: ProgramFiles) -> bool:
    return any(
        not (there / path).exists() or (there / path).read_bytes() != (code / path).read_bytes()
        for path in program.paths
    )


def test_too_large_a_program_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.engines.program_files._MOST_FILES", 3)
    for number in range(4):
        (tmp_path / f"m{number}.py").touch()
    with pytest.raises(PlanError, match="give the script a directory of its own"):
        ProgramFiles.below(tmp_path, None)


@pytest.mark.parametrize("path", ["../x", "/x", "", "a/../../b", "a//b", "a\0b", "./a", "x" * 2000])
def test_a_path_of_the_program_leads_nowhere_else(path: str) -> None:
    with pytest.raises(FrameError, match="a file named"):
        checked_path(path)


def test_what_roles_write_arrives_at_the_same_place(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    received = ReceivedFiles(here)
    outgoing = OutgoingFiles(there, received.write)
    (there / "logs" / "worker-1.out").write_bytes(b"a" * 700_000)
    (there / "raw" / "worker-1.0.spans").write_bytes(b"spans")
    (there / "raw" / "worker-1.0.ledger").write_bytes(b"in its reports")
    outgoing.send_new()
    with (there / "logs" / "worker-1.out").open("ab") as file:
        file.write(b"more")
    outgoing.send_new(all_of_it=True)
    assert (here / "logs" / "worker-1.out").read_bytes() == b"a" * 700_000 + b"more"
    assert sorted(path.name for path in (here / "raw").iterdir()) == ["worker-1.0.spans"]


def test_a_role_that_moves_goes_on_where_its_log_was(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "logs").mkdir(parents=True)
    there.mkdir()
    (here / "logs" / "worker-1.out").write_bytes(b"on the first host\n")
    received = ReceivedFiles(here)
    outgoing = OutgoingFiles(there, received.write)
    outgoing.begin_at(received.sizes([here / "logs" / "worker-1.out", here / "logs" / "worker-1.err"]))
    with (there / "logs" / "worker-1.out").open("ab") as file:
        file.write(b"on the second\n")
    outgoing.send_new()
    assert (here / "logs" / "worker-1.out").read_bytes() == b"on the first host\non the second\n"


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "x.log").symlink_to(tmp_path / "elsewhere")
    received = ReceivedFiles(tmp_path)
    received.write("logs/x.log", 0, b"x")
    assert received.broken is not None and not (tmp_path / "elsewhere").exists()


def test_paths_of_a_role_become_those_of_its_host() -> None:
    run, program = (Path("/a/run"), Path("/b/run")), (Path("/a/code"), Path("/b/code"))
    there = spec(
        Path("/a/run"),
        spans_in="/a/run/raw",
        values_in=None,
        ledger_in="/a/run/raw",
        resume="/a/run/checkpoints/version-1",
        script="/a/code/train.py",
        search="/a/code",
        module=False,
        lr="/a/run",
    )
    here = moved(there, run=run, program=program)
    assert here.log == "/b/run/logs/worker-1.log"
    assert here.config == {
        "run_dir": "/b/run",
        "spans_in": "/b/run/raw",
        "values_in": None,
        "ledger_in": None,
        "resume": "/b/run/checkpoints/version-1",
        "script": "/b/code/train.py",
        "search": "/b/code",
        "module": False,
        "lr": "/a/run",
    }
    with pytest.raises(ValueError, match="not in the subpath"):
        moved(spec(Path("/elsewhere")), run=run, program=program)


def test_what_an_agent_keeps_is_for_its_owner_and_removed(tmp_path: Path) -> None:
    with working_directory(tmp_path) as path:
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "x").touch()
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(OSError, match="none"), working_directory(tmp_path / "none"):
        pass


def test_a_start_goes_to_the_agent_with_the_sizes_of_its_logs(engine: HostsEngine, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir()
    (run / "logs" / "worker-1.out").write_bytes(b"123")
    link, _ = join(HOST, engine.port, engine.token, identity="b")
    engine.gather(PATIENCE_S, lambda text: None)
    engine.agent("host-1").start(spec(run))
    frame = link.receive()
    while frame.kind is Kind.ALIVE:
        frame = link.receive()
    assert frame.kind is Kind.ROLE_START
    assert frame.body["sizes"] == {"worker-1.out": 3} and frame.body["run_dir"] == str(run)
    assert StartRole(**frame.body).spec["rank"] == 1
    link.close()


def test_certificates_are_made_for_the_run(engine: HostsEngine) -> None:
    made: Certificate = certificate()
    assert engine.token.fingerprint == fingerprint_of(made) and len(engine.token.fingerprint) == 64
    assert os.path.basename(engine.token.run) == "run"
