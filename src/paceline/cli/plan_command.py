"""paceline plan: what a run would do, before anything starts."""

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import parameters
from paceline.cli.printing import cell, note
from paceline.core.modes import in_words, parse_schedule
from paceline.plan import Job, ModelFacts, Plan, make_plan
from paceline.plan.capacity import BASE_BYTES, ROLE_BYTES, model_bytes
from paceline.plan.devices import host_memory_reason, on_cuda, transfer_reason
from paceline.plan.host import mps_program, mps_runs, read_limits

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["plan", "show_plan"]


@parameters.takes_job_options("plan")
def plan(
    ctx: typer.Context,
    script: Annotated[str, parameters.SCRIPT],
    args: Annotated[list[str] | None, parameters.ARGS] = None,
    *,
    quiet: Annotated[bool, parameters.QUIET] = False,
    **_: Any,
) -> None:
    """Show what run would do with the same options, and stop.

    The script is started once, up to its call of paceline.prepare, to see its model and its data.

    [dim]paceline plan --workers 4 --servers 3 train.py[/dim]
    """
    chosen = make_plan(parameters.job_from(ctx.params))
    parameters.note_late_flags(ctx)
    for warning in chosen.warnings:
        note(warning)

    from paceline import api

    show_plan(chosen, api.inspect_script(chosen))


def show_plan(plan: Plan, facts: ModelFacts) -> None:
    """Print a plan as tables."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    title = shlex.join([*(["-m"] if plan.job.module else []), plan.job.script or "", *plan.job.args])
    console.print(Text.assemble(("Plan", "bold"), " for ", cell(title), "\n"), soft_wrap=True)
    console.print(_settings(plan, facts))
    console.print()
    console.print(_roles(plan, facts))


def _settings(plan: Plan, facts: ModelFacts) -> "Table":
    from rich.table import Table

    from paceline.observe.analyse import wording

    job = plan.job
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    shares = [nbytes for _, nbytes in facts.shards]
    rows = {
        "mode": f"{plan.mode}: {in_words(plan.mode, len(plan.groups) or job.workers)}",
        "model": f"{wording.plural(facts.parameters, 'parameter')} "
        f"in {wording.plural(facts.tensors, 'tensor')}, {wording.size(facts.nbytes)}; "
        f"optimizer {facts.optimizer}",
        "partition": f"{wording.plural(facts.slices, 'slice')} "
        f"on {wording.plural(len(plan.servers), 'server')}{_balance(shares)}",
        "data": _data(plan, facts),
        "exchange": _exchange(plan, facts),
        **({"GPU": gpu} if (gpu := _gpu(plan)) else {}),
        "memory": _memory(plan, facts),
        "checkpoints": _checkpoints(job),
        "faults": f"{_replaced(plan)}; nobody waits longer than {wording.duration(job.deadline_s)}",
    }
    for name, text in rows.items():
        table.add_row(name, cell(text))
    return table


def _replaced(plan: Plan) -> str:
    from paceline.observe.analyse import wording

    most = f"{wording.plural(plan.job.max_restarts, 'dead role')} replaced at most"
    if plan.groups:
        return f"{most}, each sends the run back to its last checkpoint"
    if plan.job.replicas:
        return f"{most}, every parameter is on {plan.job.replicas + 1} servers"
    return f"{most}, a server sends the run back to its last checkpoint"


def _roles(plan: Plan, facts: ModelFacts) -> "Table":
    from rich.table import Table

    from paceline.observe.analyse import wording

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("role", no_wrap=True)
    table.add_column("host", no_wrap=True)
    table.add_column("threads", justify="right", no_wrap=True)
    table.add_column("holds")
    total = sum(nbytes for _, nbytes in facts.shards)
    for role in plan.roles:
        if role.role == "worker":
            size = wording.size(facts.nbytes)
            holds = f"{size} of gradients"
            holds += "; reads parameters in place" if plan.in_place else f", {size} of parameters"
        elif role.rank < len(facts.shards):
            slices, nbytes = facts.shards[role.rank]
            share = wording.percent(nbytes / max(1, total))
            holds = f"{wording.plural(slices, 'slice')}, {wording.size(nbytes)} ({share})"
        else:
            holds = "nothing: the model has too few slices"
        table.add_row(role.name, cell(role.host), str(role.threads), holds)
    return table


def _balance(shares: list[int]) -> str:
    if len(shares) < 2 or not sum(shares):
        return ""
    return f"; the fullest holds {max(shares) * len(shares) / sum(shares):.2f} × the mean"


def _data(plan: Plan, facts: ModelFacts) -> str:
    from paceline.observe.analyse import wording

    if facts.samples is None:
        return "an iterable data set: its length is not known, each worker reads its own"
    text = f"{wording.plural(facts.samples, 'sample')} per epoch"
    steps = facts.steps_per_epoch(plan.job.workers)
    if steps is None or facts.batch_size is None:
        return text
    about = "" if plan.mode.by_round else "about "
    text += f" in batches of {wording.count(facts.batch_size)}: "
    return f"{text}{about}{wording.plural(steps, 'step')} per worker and epoch"


def _exchange(plan: Plan, facts: ModelFacts) -> str:
    from paceline.observe.analyse import wording

    size = wording.size(facts.nbytes)
    if plan.mode.serverless:
        how = "through shared memory" if plan.shares_memory else "over TCP (gloo)"
        return f"{size} of gradients per worker and step, averaged among the workers {how}"
    if plan.in_place:
        return "shared memory, in place: 0 bytes moved per step"
    if plan.shares_memory:
        return f"shared memory: {size} copied per worker and step (parameters; gradients in place)"
    carrier = "TCP" if plan.job.link == "tcp" or not plan.one_host else "unix socket"
    if carrier == "TCP" and plan.job.tls:
        whose = f"those in {plan.job.certs}" if plan.job.certs else "made for the run"
        carrier = f"TCP under TLS 1.3 (certificates: {whose})"
    job, transfer = plan.job, plan.job.transfer
    if transfer.compresses:
        replies = "compressed too" if transfer.compress_replies else f"{size}"
        text = f"{carrier}: {size} of gradients, compressed by {job.compress}, and parameters ({replies})"
        text += " per worker and step"
    else:
        both = wording.size(2 * facts.nbytes)
        text = f"{carrier}: {both} sent per worker and step ({size} gradients, {size} parameters)"
    if transfer.overlap:
        text += "; gradients leave during backward"
    if transfer.prefetch:
        text += f"; replies awaited {wording.plural(transfer.prefetch, 'step')} later"
    return text


def _gpu(plan: Plan) -> str | None:
    """Where models and parameters are, of a job that puts them on a GPU."""
    job = plan.job
    if not on_cuda(job):
        return None
    modes = parse_schedule(plan.mode, job.schedule).modes
    reason = transfer_reason(job) or host_memory_reason(modes, servers=job.servers, replicas=job.replicas)
    if job.server_device == "cpu":
        reason = "server_device=cpu"
    text = f"models on {job.device}; "
    if reason is None:
        text += "parameters there, too, if its memory suffices: nothing leaves the device"
    else:
        text += f"parameters in host memory ({reason})"
    if not plan.uses_mps:
        return f"{text}; its processes use it in turn (no MPS)"
    if mps_runs():
        return f"{text}; its processes share it by the NVIDIA MPS that runs here"
    if mps_program() is None:
        return f"{text}; its processes use it in turn (this host has no NVIDIA MPS)"
    return f"{text}; its processes share it by NVIDIA MPS, which starts and ends with the run"


def _memory(plan: Plan, facts: ModelFacts) -> str:
    from paceline.observe.analyse import wording

    needed = BASE_BYTES + len(plan.roles) * ROLE_BYTES
    needed += model_bytes(
        facts.nbytes,
        workers=len(plan.workers),
        in_place=plan.in_place,
        shares_memory=plan.shares_memory,
    )
    text = f"{wording.size(needed)} for all roles, and what the optimizer's state and the activations take"
    limit = read_limits().memory
    if limit is None:
        return text
    text += f"; {wording.size(limit.left)} are left here ({limit.source})"
    if needed > limit.left:
        text += f": too little. Use fewer workers. {limit.remedy}"
    return text


def _checkpoints(job: Job) -> str:
    from paceline.observe.analyse import wording

    if not job.checkpoint_every:
        return "one, at the end"
    every = wording.plural(job.checkpoint_every, "update")
    return f"every {every} and at the end; the last {job.keep_checkpoints} stay"
