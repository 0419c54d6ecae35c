"""Runs the user's program in a worker process."""

import contextlib
import functools
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from paceline.causes import cause_of
from paceline.comm import Address, Frame, Kind
from paceline.comm.compression import parse_compression
from paceline.comm.errors import error_body
from paceline.comm.faults import Faults
from paceline.comm.frames import field
from paceline.comm.lasting import LastingLink
from paceline.comm.transfer import Transfer
from paceline.exceptions import DeadlineError, LinkError, PacelineError, UsageError
from paceline.modes import parse_mode
from paceline.observe import FAILURE_MARK
from paceline.observe.spans import recorder_of
from paceline.worker.client import Client
from paceline.worker.group import GroupLinks
from paceline.worker.pipeline import PipelinedClient
from paceline.worker.session import RunSession, enter_session

__all__ = ["WorkerConfig", "run_worker"]

"""Stands in a worker's log before a traceback: the controller shows that itself, and stops echoing here."""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What a worker must know before its program starts."""

    rank: int
    incarnation: int
    workers: int
    servers: int
    mode: str
    link: str
    deadline_s: float
    patience_s: float
    """How long it waits for the lead server, which notices before that who is missing."""
    seed: int
    threads: int
    groups: tuple[Sequence[int], ...] = ()
    compress: str = "none"
    compress_replies: bool = False
    overlap: bool = False
    prefetch: int = 0
    tells_norms: bool = False
    """With every push the gradient's norm, because the run has a bound on it."""
    optimizers: tuple[str, ...] = ()
    spans_in: str | None = None
    """Directory for its spans; None records none."""
    clock_ns: int = 0
    """From this host's monotonic clock to the run's time."""
    faults: str = ""
    """On purpose, for tests."""
    script: str | None = None
    args: tuple[str, ...] = ()


def run_worker(
    config: WorkerConfig,
    secret: bytes,
    controller: LastingLink,
    program: Callable[[], None] | None = None,
) -> int:
    """Run the script, or `program` when there is none. Returns the exit code of the process.

    Whatever the program raises is reported to the controller with its traceback.
    """
    torch.set_num_threads(config.threads)
    _set_environment(config)

    transfer = Transfer(
        compress=parse_compression(config.compress),
        compress_replies=config.compress_replies,
        overlap=config.overlap,
        prefetch=config.prefetch,
    )

    owner = f"worker-{config.rank}.{config.incarnation}"
    spans = recorder_of(config.spans_in, owner, clock_ns=config.clock_ns)

    @functools.cache  # who prepares again finds the servers where they were
    def hear_start() -> Frame:
        controller.sock.settimeout(config.deadline_s)
        try:
            frame = controller.receive()
        except TimeoutError:
            raise DeadlineError(
                f"the servers were not ready within {config.deadline_s:g} s (--deadline)"
            ) from None
        if frame.kind is not Kind.START:
            raise LinkError(f"the controller sent {frame.kind.name}, expected START")
        return frame

    def reach_servers() -> Client:
        frame = hear_start()
        lead = field(frame.body, "lead", int)
        address = Address.from_json(field(frame.body, "servers", dict)[str(lead)])
        make: Callable[..., Client] = Client
        if transfer.pipelined:
            make = functools.partial(PipelinedClient, spans=spans)
        return make(
            rank=config.rank,
            incarnation=config.incarnation,
            worker_threads=config.workers * config.threads,
            lead=lead,
            address=address,
            secret=secret,
            link=config.link,
            mode=parse_mode(config.mode),
            deadline_s=config.deadline_s,
            patience_s=config.patience_s,
            transfer=transfer,
            seed=config.seed,
            lane=spans.main,
        )

    session = RunSession(
        reach_servers=reach_servers,
        controller=controller,
        rank=config.rank,
        world_size=config.workers,
        servers=config.servers,
        mode=config.mode,
        seed=config.seed,
        optimizers=config.optimizers,
        transfer=transfer,
        group=_group(config, secret),
        spans=spans,
        faults=Faults.parse(config.faults),
        tells_norms=config.tells_norms,
    )
    enter_session(session)
    try:
        if program is not None:
            program()
        else:
            assert config.script is not None
            with _script_environment(config.script, config.args):
                runpy.run_path(config.script, run_name="__main__")
        if not session.prepared:
            raise UsageError(
                f"{config.script or 'the program'} ended without calling paceline.prepare(model, optimizer, "
                "loader): nothing was trained. Call it once before the training loop."
            )
        session.finish()
        controller.say_last(Kind.BYE)
    except SystemExit as error:
        return _exited(error, session, config, controller)
    except BaseException as error:
        _report(controller, error, session.progress())
        return 1
    finally:
        spans.close()
    return 0


def _group(config: WorkerConfig, secret: bytes) -> GroupLinks | None:
    mine = next((group for group in config.groups if config.rank in group), None)
    if mine is None:
        return None
    return GroupLinks(
        ranks=mine, rank=config.rank, secret=secret, link=config.link, deadline_s=config.deadline_s
    )


def _exited(error: SystemExit, session: RunSession, config: WorkerConfig, controller: LastingLink) -> int:
    """sys.exit() in the script: in order only with code 0 and after prepare()."""
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    name = config.script or "the program"
    if code == 0 and session.prepared:
        try:
            session.finish()
            controller.say_last(Kind.BYE)
        except PacelineError as failure:
            _report(controller, failure, session.progress())
            return 1
        return 0
    if code == 0:
        problem = f"{name} exited before it called paceline.prepare()"
    else:
        detail = f": {error.code}" if isinstance(error.code, str) else ""
        problem = f"{name} exited with code {code}{detail}"
    _report(controller, UsageError(problem))
    return code or 1


def _report(
    controller: LastingLink, error: BaseException, progress: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Tell the controller what ended this worker.

    Args:
        progress: how far the run was: if a server died, some of what was applied is lost.
    """
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError, ValueError):  # a full disk, a script that closed it
        sys.stdout.flush()
        sys.stderr.write(f"{FAILURE_MARK}\n{text}")
    # Our own errors say what to do; a traceback of our insides would bury it.
    trace = "" if isinstance(error, PacelineError) else _users_part(error)
    body = error_body(error, trace, cause=cause_of(error).value, **progress)
    with contextlib.suppress(LinkError):
        controller.say_last(Kind.ERROR, body)


def _users_part(error: BaseException) -> str:
    """The traceback from the user's script on, without the frames that started it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (os.path.dirname(__file__), runpy.__file__, "<frozen runpy>")
    while frames and frames[0].filename.startswith(ours):
        frames.pop(0)
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    return "".join([*lines, *traceback.format_exception_only(error)])


def _set_environment(config: WorkerConfig) -> None:
    """What scripts written for torchrun look for."""
    os.environ.update(
        RANK=str(config.rank),
        LOCAL_RANK=str(config.rank),
        WORLD_SIZE=str(config.workers),
        LOCAL_WORLD_SIZE=str(config.workers),
        GROUP_RANK="0",
    )


@contextlib.contextmanager
def _script_environment(script: str, args: tuple[str, ...]) -> Iterator[None]:
    """sys.argv and sys.path as `python script args` would have them."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *args]
    sys.path[0:0] = [str(Path(script).resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
