"""DeviceParameters: a server's parameters, and its workers' gradients and copies, on a device."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.device import DeviceBlock, SharedDevice, device_with_id
from paceline.core.modes import ModeSpec
from paceline.exceptions import PlanError
from paceline.params import Layout, OptimizerSpec
from paceline.plan.devices import host_memory_reason
from paceline.ps.config import ServerConfig

__all__ = ["DeviceParameters", "on_device"]

log = logging.getLogger("paceline.server")

_SPARE = 1.05
"""Memory that is asked for, as a multiple of what parameters, optimizer and gradients take."""
_STATES = {"SGD": 1, "Adagrad": 1, "RMSprop": 2, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2}
"""Numbers that an optimizer keeps for each parameter."""
_OTHER_STATES = 2


class DeviceParameters:
    """All memory on the device that roles of a run share is this server's: a worker that dies frees nothing,
    and what it had is given to the worker that takes its place.

    Args:
        weights: the initial parameters, as bytes of the host's memory.
    """

    def __init__(self, device: SharedDevice, weights: Tensor) -> None:
        self.device = device
        self._nbytes = weights.numel()
        self._parameters = device.allocate(self._nbytes)
        self.base = self._parameters.memory
        self.base.copy_(weights)
        self._unused: list[DeviceBlock] = []

    @property
    def handle(self) -> bytes:
        """Opens the parameters in a worker."""
        return self._parameters.handle

    def take(self) -> DeviceBlock:
        """Memory of the size of the parameters: a worker's gradients, or its copy of the parameters.

        Raises:
            torch.OutOfMemoryError: the device has too little.
        """
        return self._unused.pop() if self._unused else self.device.allocate(self._nbytes)

    def give_back(self, block: DeviceBlock) -> None:
        """The worker is gone. The block is not freed: freeing waits for all work of the device, and some of
        it may wait for another worker."""
        self._unused.append(block)

    def close(self) -> None:
        """Free all memory. No worker has any of it, and no work uses it."""
        for block in (self._parameters, *self._unused):
            block.close()
        self._unused.clear()


def on_device(
    id: str,
    config: ServerConfig,
    modes: Sequence[ModeSpec],
    layout: Layout,
    spec: OptimizerSpec,
    weights: Tensor,
) -> DeviceParameters | None:
    """The parameters of a run on the device where its models are; None: they stay in host memory.

    Args:
        id: of the device.
        modes: that the run goes through.
        weights: the initial parameters.

    Raises:
        PlanError: the job wants its servers on the GPU, and they cannot be there.
    """
    if config.server_device == "cpu":
        return None
    reason = host_memory_reason(modes, servers=config.servers, replicas=config.replicas)
    reason = reason or _several_gpus_reason(config)
    device = None
    if reason is None:
        device = device_with_id(id, config.device)
        if device is None:
            reason = f"this server does not see the workers' device {id}"
        else:
            needed = _bytes_needed(config, modes, layout, spec)
            if needed > (left := device.free_bytes()):
                reason = (
                    f"parameters, optimizer and gradients of {config.workers} workers need "
                    f"{needed / 1e9:,.1f} GB there, and {left / 1e9:,.1f} GB are left"
                )
    if reason is None:
        assert device is not None
        log.info("the parameters are on %s", device.where)
        return DeviceParameters(device, weights)
    if config.server_device == "cuda":
        raise PlanError(f"server_device=cuda: {reason}. Use server_device=auto or cpu, or change that.")
    log.warning("the servers stay in host memory, and models are on a GPU: %s", reason)
    return None


def _several_gpus_reason(config: ServerConfig) -> str | None:
    """Why a device is not that of all workers: see `DevicePlacement`."""
    if config.device != "cuda" or config.workers == 1 or (gpus := torch.cuda.device_count()) < 2:
        return None
    return (
        f"the {config.workers} workers are dealt out to {gpus} GPUs, and share memory on one only "
        "(device=cuda:0 puts all of them there)"
    )


def _bytes_needed(
    config: ServerConfig, modes: Sequence[ModeSpec], layout: Layout, spec: OptimizerSpec
) -> int:
    states = max(_STATES.get(target.partition(":")[2], _OTHER_STATES) for target in spec.targets)
    of_worker = 1 if all(mode.in_place for mode in modes) else 2
    return round(_SPARE * layout.nbytes * (1 + states + config.workers * of_worker))
