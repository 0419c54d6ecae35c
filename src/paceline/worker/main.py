"""Runs the user's program in a worker process."""

import contextlib
import functools
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

import torch

from paceline.causes import cause_of
from paceline.collective import GroupLinks
from paceline.comm import Address, Kind
from paceline.comm.compression import parse_compression
from paceline.comm.errors import error_body
from paceline.comm.faults import Faults
from paceline.comm.lasting import LastingLink
from paceline.comm.messages import FROM_CONTROLLER, ServerAddresses
from paceline.comm.transfer import Transfer
from paceline.core.local_spec import parse_local
from paceline.core.modes import parse_mode
from paceline.core.pipeline_spec import parse_pipeline
from paceline.exceptions import DeadlineError, LinkError, PacelineError, ScriptExit, UsageError
from paceline.observe.record.ledger import LedgerKeeper
from paceline.observe.record.spans import recorder_of
from paceline.observe.record.values import ValueWriter, steps_of
from paceline.worker.exchange.entry import Entry
from paceline.worker.exchange.server_links import LinkSettings
from paceline.worker.pinning import pin_to_cores
from paceline.worker.program_runner import begin_program, end_program, exit_code, run_program
from paceline.worker.run_settings import RunSettings
from paceline.worker.session import RunSession, enter_session
from paceline.worker.telemetry import Telemetry

__all__ = ["WorkerConfig", "run_worker"]


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
    local_rank: int = 0
    """Its number among the workers of its host."""
    local_workers: int = 1
    """Number of workers of its host."""
    host_rank: int = 0
    """Number of its host."""
    pin: bool = False
    """Stay on CPU cores of its own."""
    local: str = "none"
    """How a batch is computed: as it is, or in parts."""
    pipeline: int = 1
    microbatches: int | None = None
    pipeline_schedule: str = "auto"
    split_at: tuple[str, ...] = ()
    device: str | None = None
    """Where prepare() puts models; None: they stay where the script put them."""
    groups: tuple[Sequence[int], ...] = ()
    compress: str = "none"
    compress_replies: bool = False
    overlap: bool = False
    prefetch: int = 0
    tells_norms: bool = False
    """With every push the gradient's norm, because the run has a bound on it."""
    optimizers: tuple[str, ...] = ()
    eval_every: int | None = None
    """Updates between two evaluations, in place of the script's own interval."""
    spans_in: str | None = None
    """Directory for its spans; None records none."""
    values_in: str | None = None
    """Directory for the values that its script logs."""
    value_rows: int = 1 << 40
    """The most values that are kept."""
    attempt: int = 0
    """How often this worker was started before, in this run."""
    replaces: int | None = None
    """The attempt whose steps go on, because this process takes its place."""
    steps_before: int = 0
    """Its steps at the checkpoint that the run goes on from, if that does not tell them."""
    ledger_in: str | None = None
    """Directory for its own count of steps and bytes; None: it is in the reports only."""
    clock_ns: int = 0
    """From this host's monotonic clock to the run's time."""
    faults: str = ""
    """On purpose, for tests."""
    master: tuple[str, int] | None = None
    """Where processes of the script's own torch.distributed meet; None: torchrun's variables are not set."""
    script: str | None = None
    """Its path; or the name of a module."""
    module: bool = False
    search: str | None = None
    """What stands first in the program's `sys.path`."""
    args: tuple[str, ...] = ()


def run_worker(
    config: WorkerConfig,
    secret: bytes,
    controller: LastingLink,
    program: Callable[[], None] | None = None,
    *,
    log: TextIO,
) -> int:
    """Run the script, or `program` when there is none. Returns the exit code of the process.

    Whatever the program raises is reported to the controller with its traceback.

    Args:
        log: Paceline's own, for what the controller shows in the script's place.
    """
    if config.pin:
        pin_to_cores(config.local_rank, config.threads)
    pipeline = parse_pipeline(config.pipeline, config.microbatches, config.pipeline_schedule, config.split_at)
    # Stages take turns and are measured against each other: they have one thread each, as forks have.
    threads = 1 if pipeline.splits else parse_local(config.local).threads_each(config.threads)
    torch.set_num_threads(threads)
    _set_environment(config)

    transfer = Transfer(
        compress=parse_compression(config.compress),
        compress_replies=config.compress_replies,
        overlap=config.overlap,
        prefetch=config.prefetch,
    )

    owner = f"worker-{config.rank}.{config.incarnation}"
    spans = recorder_of(config.spans_in, owner, clock_ns=config.clock_ns)
    values = _values(config)

    @functools.cache  # who prepares again finds the servers where they were
    def hear_start() -> ServerAddresses:
        controller.sock.settimeout(config.deadline_s)
        try:
            frame = controller.receive()
        except TimeoutError:
            raise DeadlineError(
                f"the servers were not ready within {config.deadline_s:g} s (--deadline)"
            ) from None
        said = FROM_CONTROLLER.read(frame.kind, frame.body)
        if not isinstance(said, ServerAddresses):
            raise LinkError(f"the controller sent {frame.kind.name}, expected START")
        return said

    settings = LinkSettings(
        rank=config.rank,
        incarnation=config.incarnation,
        secret=secret,
        link=config.link,
        deadline_s=config.deadline_s,
        patience_s=config.patience_s,
        transfer=transfer,
        worker_threads=config.workers * config.threads,
        seed=config.seed,
    )

    def reach_servers() -> Entry:
        servers, lead = hear_start()
        address = Address.from_json(servers[str(lead)])
        return Entry(settings, parse_mode(config.mode), lead=lead, address=address, spans=spans)

    ledger = LedgerKeeper(
        None if config.ledger_in is None else Path(config.ledger_in),
        config.rank,
        config.incarnation,
        clock_ns=config.clock_ns,
    )
    session = RunSession(
        RunSettings(
            rank=config.rank,
            local_rank=config.local_rank,
            world_size=config.workers,
            servers=config.servers,
            mode=config.mode,
            seed=config.seed,
            local=parse_local(config.local),
            pipeline=pipeline,
            deadline_s=config.deadline_s,
            device=config.device,
            optimizers=config.optimizers,
            transfer=transfer,
            tells_norms=config.tells_norms,
            eval_every=config.eval_every,
            faults=Faults.parse(config.faults),
        ),
        reach_servers,
        Telemetry(controller, transfer, spans, values, ledger),
        _group(config, secret),
    )
    enter_session(session)
    session.schedules.watch()
    begin_program()
    name = config.script or "the program"
    try:
        exited: int | None = None
        try:
            if program is not None:
                program()
            else:
                assert config.script is not None and config.search is not None
                run_program(config.script, config.args, search=config.search, module=config.module)
        except SystemExit as error:
            exited, said = exit_code(error), error.code
        finally:
            end_program()
        if exited:
            detail = f": {said}" if isinstance(said, str) else ""
            _report(controller, log, ScriptExit(f"{name} exited with code {exited}{detail}"), code=exited)
            return exited
        if session.prepared:
            session.finish()
            controller.say_last(Kind.BYE)
        elif exited == 0:  # `--help`, for one
            controller.say_last(Kind.BYE, {"untrained": True})
        else:
            raise UsageError(
                f"{name} ended without calling paceline.prepare(model, optimizer, loader): nothing was "
                "trained. Call it once before the training loop."
            )
    except BaseException as error:
        _report(controller, log, error, session.progress())
        return 1
    finally:
        spans.close()
        values.close()
        ledger.close()
    return 0


def _values(config: WorkerConfig) -> ValueWriter:
    where, began = None if config.values_in is None else Path(config.values_in), None
    if where is not None and config.replaces is not None:
        began = steps_of(where, config.rank, config.replaces)
    return ValueWriter(
        where,
        config.rank,
        config.attempt,
        began=config.steps_before if began is None else began,
        rows=config.value_rows,
        clock_ns=config.clock_ns,
    )


def _group(config: WorkerConfig, secret: bytes) -> GroupLinks | None:
    mine = next((group for group in config.groups if config.rank in group), None)
    if mine is None:
        return None
    return GroupLinks(
        ranks=mine, rank=config.rank, secret=secret, link=config.link, deadline_s=config.deadline_s
    )


def _report(
    controller: LastingLink,
    log: TextIO,
    error: BaseException,
    progress: Mapping[str, int] = MappingProxyType({}),
    *,
    code: int = 1,
) -> None:
    """Tell the controller what ended this worker.

    Args:
        progress: how far the run was: if a server died, some of what was applied is lost.
        code: what this process exits with.
    """
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError, ValueError):  # a full disk, a script that closed it
        sys.stdout.flush()
        log.write(text)
    # Our own errors say what to do; a traceback of our insides would bury it.
    trace = "" if isinstance(error, PacelineError) else _users_part(error)
    body = error_body(error, trace, cause=cause_of(error).value, code=code, **progress)
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


_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


def _set_environment(config: WorkerConfig) -> None:
    """What scripts written for torchrun look for; or none of it, also not what our own shell had set."""
    for name in _TORCHRUN:
        os.environ.pop(name, None)
    if config.master is None:
        return
    host, port = config.master
    values = (config.rank, config.local_rank, config.workers, config.local_workers, config.host_rank)
    os.environ.update(zip(_TORCHRUN, [*map(str, values), host, str(port)], strict=True))
