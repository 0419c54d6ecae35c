"""Where models and servers go: the host's memory, or a GPU. Pure."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core.modes import ModeSpec
from paceline.exceptions import UsageError

if TYPE_CHECKING:
    from paceline.plan.job import Job

__all__ = ["SERVER_DEVICES", "check_device", "host_memory_reason", "on_cuda", "transfer_reason"]

SERVER_DEVICES = ("auto", "cpu", "cuda")


def check_device(name: str, value: object) -> str:
    """A device that models can be put on: `cpu`, `cuda` or `cuda:N`. For tests also `module:function`."""
    if not isinstance(value, str) or not re.fullmatch(r"cpu|cuda(:\d+)?|[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise UsageError(f"{name}={value!r}: give cpu, cuda or cuda:N, as torch names devices")
    return value


def on_cuda(job: "Job") -> bool:
    """Whether the job puts its models on a GPU. (Its script may do so by itself.)"""
    return job.device is not None and re.fullmatch(r"cuda(:\d+)?", job.device) is not None


def host_memory_reason(modes: Sequence[ModeSpec], *, servers: int, replicas: int) -> str | None:
    """Why the servers of a run stay in host memory although its models are on a GPU; None: they need not.

    Args:
        modes: that the run goes through.
    """
    for mode in modes:
        if mode.grouped:
            return f"in mode {mode} workers hold the parameters"
        if mode.by_epoch:
            return f"L-BFGS of mode {mode} runs on the CPU"
    if replicas:
        return "replicas on a GPU would be lost with it"
    if servers > 1:
        return "one server uses all of a GPU, and several could not share its memory with workers"
    return None


def transfer_reason(job: "Job") -> str | None:
    """Why a job's gradients cannot stay on the GPU on their way to the servers; None: they can."""
    if job.link == "tcp":
        return "link=tcp sends gradients over sockets"
    if job.transfer.inline:
        return "what is compressed, overlapped or prefetched travels through host memory"
    return None
