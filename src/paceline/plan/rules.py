"""The rules of combination: which settings of a job do not go together, and which do not go with a mode.

What a setting must be by itself is declared with it (`Job`). A rule returns why a combination is refused, or
None. A new option that does not go with everything gets its rule here, and in no other place.

JOB_RULES   settings among themselves; `Job` asks them when it is made
MODE_RULES  settings and the modes that the run goes through; `make_plan` asks them
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.core.local_spec import parse_local
from paceline.core.modes import ModeSpec, Schedule
from paceline.exceptions import UsageError
from paceline.plan.devices import host_memory_reason, on_cuda, transfer_reason

if TYPE_CHECKING:
    from paceline.comm.transfer import Transfer
    from paceline.plan.job import Job

__all__ = ["check_job", "check_modes", "check_switch"]


def check_job(job: "Job") -> None:
    """Raise UsageError for the first rule among settings that a job breaks."""
    for rule in JOB_RULES:
        if reason := rule(job):
            raise UsageError(reason)


def check_modes(job: "Job", schedule: Schedule) -> None:
    """Raise UsageError for the first rule that a job breaks in one of the modes it goes through."""
    for rule in MODE_RULES:
        if reason := rule(job, schedule):
            raise UsageError(reason)


def check_switch(job: "Job", mode: ModeSpec) -> None:
    """Raise UsageError if a run with these settings cannot be switched to a mode while it runs."""
    if reason := _transfer(job, Schedule(mode)):
        raise UsageError(reason)
    if reason := _modes_of_hosts(job, Schedule(mode)):
        raise UsageError(reason)
    if job.clip_norm is not None and not mode.averages_all:
        raise UsageError(f"clip_norm={job.clip_norm:g} clips the average gradient, which only bsp has")


# Among settings


def _replicas_need_servers(job: "Job") -> str | None:
    if job.replicas < job.servers:
        return None
    return (
        f"replicas={job.replicas} with servers={job.servers}: a copy is of use on another server "
        f"only, so give at least servers={job.replicas + 1}, or fewer replicas"
    )


def _local(job: "Job") -> str | None:
    local, stages = parse_local(job.local), job.stages
    if not (local.splits or stages.splits):
        return None
    setting = f"local={local}" if local.splits else f"pipeline={job.pipeline}"
    if local.splits and stages.splits:
        return (
            f"{setting} computes parts of a batch side by side, and pipeline={job.pipeline} stages of the "
            "model: leave one of the two out; more workers compute several batches at a time"
        )
    if on_cuda(job):
        return (
            f"{setting} computes on cores of the CPU, and device={job.device} puts the models on a GPU: "
            "leave one of the two out"
        )
    if job.overlap or job.prefetch:
        other = "overlap" if job.overlap else f"prefetch={job.prefetch}"
        return (
            f"{setting} reads all parameters when a batch begins, and with {other} they arrive while it "
            "is computed: leave one of the two out"
        )
    return None


def _hosts(job: "Job") -> str | None:
    if job.hosts == 1:
        if job.listen is not None:
            return (
                f"listen={job.listen} is where other hosts join, and hosts=1: give --hosts N, or leave it out"
            )
        return None
    what = f"hosts={job.hosts}"
    if job.script is None:
        return f"{what}: fit() runs functions of this process, which other hosts do not have: use a script"
    if job.listen is None:
        return f"{what}: say where the other hosts join, as in --listen 10.0.0.1:7711"
    if job.hosts > max(job.workers, job.servers):
        return (
            f"{what} with workers={job.workers} and servers={job.servers}: some hosts would have nothing to "
            "do; "
            "give at least one worker for each host"
        )
    if job.link == "shm":
        return f"{what}: link=shm shares memory, which hosts do not; use link auto or tcp"
    if job.replicas:
        return (
            f"{what} with replicas={job.replicas}: not yet, a server on another host cannot take the lead. "
            "Leave "
            "replicas out: when a host is lost, the run goes back to its last checkpoint (--checkpoint-every)"
        )
    if job.server_device == "cuda":
        return f"{what}: server_device=cuda shares a GPU's memory, which other hosts cannot; use auto or cpu"
    return None


# With the mode


def _modes_of_hosts(job: "Job", schedule: Schedule) -> str | None:
    if job.hosts == 1:
        return None
    for mode in schedule.modes:
        if mode.grouped:
            return (
                f"hosts={job.hosts} in mode {mode}: its groups reduce gradients with gloo, whose traffic "
                "between hosts would not be encrypted; use a mode that sends gradients to servers, such as "
                "bsp "
                "or asp"
            )
        if mode.needs_memory:
            return f"hosts={job.hosts} in mode {mode}: its workers share one memory; use asp or dogwild"
    return None


def _guard(job: "Job", schedule: Schedule) -> str | None:
    mode = schedule.start
    if not job.guard:
        return None
    if not mode.switchable:
        why = f"a run in {mode} cannot be switched"
    elif all(each.tighter() is None for each in schedule.modes):
        why = f"there is none tighter than {mode}"
    else:
        return None
    return f"guard falls back to a tighter mode, and {why}; leave guard out, or use asp, ssp or backup"


def _shared_memory(job: "Job", schedule: Schedule) -> str | None:
    mode = schedule.start
    if not (mode.needs_memory and job.link == "tcp"):
        return None
    return (
        f"mode {mode} lets all workers write into one memory, and link=tcp has none that they share; use "
        "link auto or shm, or a mode that sends messages, such as asp or dogwild"
    )


def _clip_norm(job: "Job", schedule: Schedule) -> str | None:
    if job.clip_norm is None or all(each.averages_all for each in schedule.modes):
        return None
    return (
        f"clip_norm={job.clip_norm:g} clips the average of all workers' gradients, which only "
        f"bsp has; got mode={schedule}. Use mode bsp, or leave clip_norm out and call "
        "torch.nn.utils.clip_grad_norm_ in the script, which clips each worker's own gradient"
    )


def _norm_bound(job: "Job", schedule: Schedule) -> str | None:
    mode = schedule.start
    if job.norm_bound is None or not (mode.payload in ("elastic", "none") or mode.serverless):
        return None
    return (
        f"norm_bound={job.norm_bound:g} judges the gradients that workers push, and mode {mode} pushes "
        "none; leave norm_bound out, or use another mode, such as bsp or asp"
    )


def _transfer(job: "Job", schedule: Schedule) -> str | None:
    transfer = job.transfer
    for mode in schedule.modes:
        for setting, reason in (
            (f"compress={transfer.compress}", _no_compression(transfer, mode)),
            ("overlap", _no_overlap(mode) if transfer.overlap else None),
            (f"prefetch={transfer.prefetch}", _no_prefetch(mode) if transfer.prefetch else None),
        ):
            if reason is not None:
                return f"{setting} in mode {mode}: {reason}"
    return None


def _inline_link(job: "Job", schedule: Schedule) -> str | None:
    if not (job.link == "shm" and job.transfer.inline):
        return None
    return (
        "link=shm shares memory, where nothing travels that could be compressed or hidden: leave out "
        "compress, overlap and prefetch, or use link auto or tcp"
    )


def _replicas(job: "Job", schedule: Schedule) -> str | None:
    if not job.replicas:
        return None
    for mode in schedule.modes:
        if reason := _no_replicas(mode):
            return f"replicas={job.replicas}: not in mode {mode}: {reason}. Leave replicas out"
    if job.transfer.pipelined or job.compress_replies:
        return (
            f"replicas={job.replicas} does not go with overlap, prefetch or compress_replies: what is under "
            "way could not be asked for again when a server is gone. Leave one of them out"
        )
    return None


def _groups(job: "Job", schedule: Schedule) -> str | None:
    mode = schedule.start
    if job.groups is None or mode.inner is not None:
        return None
    reason = (
        "is one group of all workers; for several, with a mode between them, use mode hybrid:MODE"
        if mode.serverless
        else "has none; use mode hybrid:MODE, in which workers all-reduce in groups and MODE runs "
        "between the groups"
    )
    return f"groups={job.groups}: mode {mode} {reason}, or leave groups out"


def _tls(job: "Job", schedule: Schedule) -> str | None:
    mode = schedule.start
    if job.tls and job.link == "shm":
        return (
            "tls protects TCP links, and link=shm has all roles share memory on one host: leave one of the "
            "two out"
        )
    if job.tls and job.link == "tcp" and mode.grouped:
        return (
            f"mode {mode} over link=tcp has gloo carry gradients, which tls does not cover: use link auto "
            "(shared memory on one host), another mode, or leave tls out"
        )
    return None


def _server_device(job: "Job", schedule: Schedule) -> str | None:
    if job.server_device != "cuda":
        return None
    reason = host_memory_reason(schedule.modes, servers=job.servers, replicas=job.replicas)
    reason = reason or transfer_reason(job)
    if reason is None and job.device == "cpu":
        reason = "device=cpu keeps the models in host memory"
    if reason is None:
        return None
    return (
        f"server_device=cuda: {reason}; leave server_device out, and the servers keep the parameters in host "
        "memory, or change that"
    )


JOB_RULES: tuple[Callable[["Job"], str | None], ...] = (_replicas_need_servers, _local, _hosts)

MODE_RULES: tuple[Callable[["Job", Schedule], str | None], ...] = (
    _guard,
    _shared_memory,
    _clip_norm,
    _norm_bound,
    _transfer,
    _inline_link,
    _replicas,
    _groups,
    _tls,
    _server_device,
    _modes_of_hosts,
)


# Why a mode does not go with something


def _no_replicas(mode: ModeSpec) -> str | None:
    if mode.serverless or mode.grouped:
        return "its workers hold parameters of their own, and go back together"
    if mode.needs_memory:
        return "its workers write to one memory, which outlives servers anyway"
    if mode.by_epoch:
        return "what its servers remember of L-BFGS has no copies"
    return None


def _no_compression(transfer: "Transfer", mode: ModeSpec) -> str | None:
    if not transfer.compresses:
        return None
    if mode.payload == "none":
        return "its workers send no gradients, so there is nothing to compress; leave compress out"
    if mode.payload == "elastic":
        return (
            "its workers send parameters, and parameters are not gradients: what compression leaves out "
            "would be missing from the model; leave compress out, or use a mode that sends gradients"
        )
    if mode.by_epoch:
        return "L-BFGS compares exact gradients; leave compress out"
    if transfer.compress_replies and mode.remembers_reads:
        return (
            f"damping={mode.damping} compares with the parameters that a worker was sent, and with "
            "compress_replies it has others; leave compress_replies out"
        )
    if transfer.compress.has_momentum and (mode.outer != "own" or mode.payload == "delta"):
        return (
            "dgc applies the momentum of the script's SGD, and here the servers step with another "
            f"optimizer; use topk:{transfer.compress.fraction}"
        )
    return None


def _no_overlap(mode: ModeSpec) -> str | None:
    if mode.payload != "gradient":
        return "its workers send nothing that is ready during backward; leave overlap out"
    if mode.inner is not None:
        return "groups reduce the gradient before it is sent; leave overlap out"
    if mode.by_epoch:
        return "the servers step when the batch is evaluated; leave overlap out"
    return None


def _no_prefetch(mode: ModeSpec) -> str | None:
    if mode.in_rounds:
        return (
            "it goes in rounds, whose next gradient is computed from the last reply, so a reply cannot "
            "be awaited later; use ssp:S or asp, or overlap, which hides a part of the wait in rounds too"
        )
    if not mode.sends_gradients:
        return (
            "its workers go on from what they exchanged, so a reply cannot be awaited later; leave "
            "prefetch out, or make its period longer"
        )
    if mode.inner is not None:
        return "a group goes on from one reply; leave prefetch out"
    if mode.by_epoch:
        return "a push of it fetches nothing, so there is no reply to hide; leave prefetch out"
    if mode.remembers_reads:
        return (
            f"damping={mode.damping} compares with the parameters that a worker was sent last, and with "
            "prefetch it computes from older ones; use damping=staleness or dynsgd"
        )
    return None
