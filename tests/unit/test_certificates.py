"""A run's certificates: made, kept, read back; and every way in which they will not do."""

import shutil
import stat
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from paceline.comm import certificates as module
from paceline.comm.certificates import Authority, Certificates, make_directory
from paceline.comm.tls import ROLES, inspect
from paceline.exceptions import AuthError, PlanError, UsageError
from paceline.plan import Job, certificates_of, make_plan
from tests.certificates import RUN, certificate


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs") / "of a run"
    make_directory(directory, RUN)
    return directory


@pytest.fixture
def directory(made: Path, tmp_path: Path) -> Path:
    """Certificates to spoil."""
    return Path(shutil.copytree(made, tmp_path / "certs"))


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / f"{RUN}.py"
    path.touch()
    return str(path)


def test_certificates_carry_the_run_and_the_role() -> None:
    found = Certificates.for_run("20261115-081502-digits-4f2a").by_role
    assert sorted(found) == sorted(ROLES)
    for role, each in found.items():
        named = inspect(each)
        assert (named.run, named.role, named.hosts) == ("20261115-081502-digits-4f2a", role, ())
    assert len({each.key for each in found.values()}) == 3
    assert len({each.authority for each in found.values()}) == 1


def test_a_runs_own_are_of_one_authority_that_is_not_anothers() -> None:
    one, other = (Certificates.for_run("same-name").by_role["server"] for _ in range(2))
    with pytest.raises(AuthError, match="signed by another authority"):
        inspect(
            type(one)(run=one.run, role=one.role, authority=other.authority, chain=one.chain, key=one.key)
        )


def test_what_is_written_reads_back_and_keys_are_their_owners(made: Path) -> None:
    found = Certificates.read(made)
    assert found.run == RUN and sorted(found.by_role) == sorted(ROLES)
    assert timedelta(days=29) < found.expires - datetime.now(UTC) < timedelta(days=31)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()}
    assert {mode for name, mode in modes.items() if name.endswith(".key")} == {0o600}
    assert len(modes) == 8 and stat.S_IMODE(made.stat().st_mode) == 0o700


def test_one_role_is_made_anew_by_the_same_authority(directory: Path) -> None:
    before = {path.name: path.read_text() for path in directory.iterdir()}
    written = make_directory(directory, RUN, roles=["worker"], days=2, hosts=["node-1", "10.0.0.7", "::1"])
    assert sorted(path.name for path in written) == ["worker.key", "worker.pem"]
    changed = [path.name for path in directory.iterdir() if before.get(path.name) != path.read_text()]
    assert sorted(changed) == ["worker.key", "worker.pem"]
    found = Certificates.read(directory)
    assert inspect(found.by_role["worker"]).hosts == ("node-1", "10.0.0.7", "0:0:0:0:0:0:0:1")
    assert found.expires - datetime.now(UTC) < timedelta(days=2)


def test_an_authority_signs_for_no_longer_than_it_lasts_and_roles_sign_nothing() -> None:
    authority = Authority.new(RUN)
    far = authority.issue("worker", lasting=timedelta(days=100_000))
    assert inspect(far).expires_s < (datetime.now(UTC) + timedelta(days=3651)).timestamp()
    # Who has a worker's key signs a server's certificate with it.
    worker = authority.issue("worker", lasting=timedelta(days=1))
    impostor = Authority(
        RUN,
        x509.load_pem_x509_certificate(worker.chain.encode()),
        load_pem_private_key(worker.key.encode(), password=None),
    )
    forged = impostor.issue("server", lasting=timedelta(days=1))
    chain = forged.chain + worker.chain
    with pytest.raises(AuthError, match="the other side's certificate is"):
        inspect(type(forged)(run=RUN, role="server", authority=authority.pem, chain=chain, key=forged.key))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"run": "a b"}, "run 'a b' cannot stand in a certificate: use letters"),
        ({"run": "../x"}, "cannot stand in a certificate"),
        ({"days": 0}, "--days 0: give from 1 to 3650"),
        ({"roles": ["boss"]}, "--role 'boss': there is no such role. Valid: controller, server, worker"),
        ({"hosts": ["no good!"]}, "--host 'no good!' is neither a host's name nor an address"),
    ],
)
def test_bad_wishes_write_nothing(tmp_path: Path, settings: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_directory(tmp_path / "certs", **{"run": RUN, **settings})
    assert not (tmp_path / "certs").exists()


def test_a_directory_of_another_run_is_left_alone(directory: Path) -> None:
    before = {path.name: path.read_text() for path in directory.iterdir()}
    with pytest.raises(UsageError, match="holds the certificates of run 'a-run', not of 'b'"):
        make_directory(directory, "b")
    assert before == {path.name: path.read_text() for path in directory.iterdir()}


def test_an_authority_that_cannot_be_used_is_named(directory: Path) -> None:
    (directory / "ca.key").chmod(0o644)
    with pytest.raises(UsageError, match=r"ca\.key may be read by others \(mode 0644\)"):
        make_directory(directory, RUN)
    (directory / "ca.key").unlink()
    with pytest.raises(UsageError, match=r"has an authority \(ca.pem\) that cannot be used: .*No such file"):
        make_directory(directory, RUN)


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match="cannot write certificates to .*file: .* Name a directory"):
        make_directory(tmp_path / "file", RUN)


def _copy(source: str, target: str) -> Callable[[Path], object]:
    return lambda directory: [
        shutil.copy(directory / f"{source}{end}", directory / f"{target}{end}") for end in (".pem", ".key")
    ]


def _put(role: str, *, run: str = RUN, number: int = 0, hours: float = 24) -> Callable[[Path], object]:
    """Have a role's certificate be another one; with an authority that signed it if it is of number 0."""

    def spoil(directory: Path) -> None:
        each = certificate(role, run, number=number, hours=hours)
        (directory / f"{role}.pem").write_text(each.chain)
        (directory / f"{role}.key").write_text(each.key)
        if not number:
            (directory / "ca.pem").write_text(each.authority)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda d: shutil.rmtree(d),
            r"certs '.*' does not exist; name the directory that `paceline certs DIR",
        ),
        (lambda d: (d / "ca.pem").unlink(), r"lacks ca.pem; `paceline certs .* --run NAME` makes them"),
        (lambda d: (d / "worker.key").unlink(), r"lacks worker.key"),
        (
            lambda d: (d / "worker.key").chmod(0o640),
            r"worker.key may be read by others \(mode 0640\).*chmod 600",
        ),
        (
            lambda d: (d / "worker.pem").write_text("junk"),
            r"worker.pem cannot be used: it, .* is no PEM file",
        ),
        (lambda d: (d / "worker.pem").write_bytes(b"\xff\xfe"), r"worker.pem cannot be read: it is not text"),
        (lambda d: (d / "ca.pem").write_text("junk"), r"cannot be used: it, .* or ca.pem is no PEM file"),
        (lambda d: shutil.copy(d / "server.key", d / "worker.key"), r"worker.key is not its key"),
        (_copy("server", "worker"), r"worker.pem is a server's, not a worker's"),
        (_put("worker", number=1), r"worker.pem is signed by another authority than ca.pem"),
        (_put("controller", hours=-1), r"controller.pem has expired; `paceline certs .* makes them"),
    ],
    ids=[
        "no directory",
        "no ca",
        "no key",
        "mode",
        "junk",
        "binary",
        "junk ca",
        "key",
        "role",
        "ca",
        "expired",
    ],
)
def test_directories_that_will_not_do(directory: Path, spoil: Callable[[Path], object], message: str) -> None:
    Certificates.read(directory)
    spoil(directory)
    with pytest.raises(UsageError, match=message):
        Certificates.read(directory)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "certs").touch()
    with pytest.raises(UsageError, match="is not a directory"):
        Certificates.read(tmp_path / "certs")


# --- jobs and plans ---------------------------------------------------------------------------------


def test_a_job_with_certificates_has_tls() -> None:
    assert Job(certs="somewhere").tls and Job(tls=True).tls and not Job().tls
    assert Job.from_json(Job(certs="somewhere").to_json()).certs == "somewhere"
    with pytest.raises(UsageError, match="tls='yes' is neither True nor False"):
        Job(tls="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"link": "shm"}, "tls protects TCP links, and link=shm has all roles share memory"),
        ({"link": "tcp", "mode": "allreduce"}, "mode allreduce over link=tcp has gloo carry gradients"),
        ({"link": "tcp", "mode": "hybrid:asp"}, "over link=tcp has gloo carry gradients"),
        ({"certs": "nowhere"}, "certs 'nowhere' does not exist"),
    ],
)
def test_plans_that_contradict_themselves(script: str, settings: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_plan(Job(script=script, tls=True, **settings))


def test_a_plan_without_tcp_links_says_so(script: str) -> None:
    (warning,) = make_plan(Job(script=script, tls=True)).warnings
    assert "tls protects TCP links, and this run will have none" in warning
    assert make_plan(Job(script=script, tls=True, link="tcp")).warnings == ()


def test_certificates_name_the_script_the_run_directory_or_the_run(
    made: Path, script: str, tmp_path: Path
) -> None:
    other = tmp_path / "train.py"
    other.touch()

    def job(name: str, run_dir: str | None = None) -> Job:
        return Job(script=name, certs=str(made), link="tcp", run_dir=run_dir)

    assert make_plan(job(script)).warnings == ()
    make_plan(job(str(other), str(tmp_path / "runs" / RUN)))
    make_plan(job(str(other)), run_id=RUN)
    with pytest.raises(
        UsageError, match="name run 'a-run', and this run is 'train' or '1115-train'; `paceline"
    ):
        make_plan(job(str(other)), run_id="1115-train")
    assert certificates_of(make_plan(job(script)), "an-id")["worker"].run == RUN


def test_a_plan_says_that_certificates_end_soon(directory: Path, script: str) -> None:
    for role in ROLES:
        _put(role, hours=2)(directory)
    (warning,) = make_plan(Job(script=script, certs=str(directory), link="tcp")).warnings
    assert "expire at" in warning and "a role that is replaced after that is refused" in warning


def test_without_the_package_the_pip_command_is_named_and_given_certificates_work(
    made: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(PlanError, match=r"needs the package cryptography: pip install 'paceline\[tls\]'"):
        make_plan(Job(script=script, tls=True, link="tcp"))
    with pytest.raises(PlanError, match=r"pip install 'paceline\[tls\]'"):
        make_directory(made, RUN)
    plan = make_plan(Job(script=script, certs=str(made), link="tcp"))
    assert sorted(certificates_of(plan, "an-id")) == sorted(ROLES)
