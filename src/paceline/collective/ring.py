"""Members on several hosts, or with --link tcp: torch's own collectives (gloo)."""

import math
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from paceline.collective.group_messages import GroupMessages
from paceline.collective.reducer import Reducer, is_finite
from paceline.comm import Region
from paceline.exceptions import DeadlineError, LinkError
from paceline.observe.record.phase import Phase
from paceline.params import Layout, dtype_named

__all__ = ["RingReducer"]


class RingReducer(Reducer):
    """Members on several hosts, or with --link tcp: torch's own collectives (gloo)."""

    def __init__(self, group: GroupMessages, region: Region, layout: Layout) -> None:
        self._group = group
        memory = torch.frombuffer(region.buffer, dtype=torch.uint8)
        self._gradients = list(_runs(memory[: layout.nbytes], layout))
        self._parameters = memory[layout.nbytes :]
        hosts = [c.sock.getsockname()[0] for c in group.links.values() if not c.local]
        host = hosts[0] if hosts else "127.0.0.1"
        # Without torch's default process group, which is one for a process and the script's to use.
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=group.deadline_s)
        self._ring: Any = gloo(_addresses(group), group.place, group.size, options)

    def mean(self, weights: Sequence[float]) -> bool:
        """All-reduce the gradients, each weighed by its member."""
        mine, total = weights[self._group.place], math.fsum(weights)
        equal = len(set(weights)) == 1
        if not mine:
            torch._foreach_zero_(self._gradients)
        elif not equal:
            torch._foreach_mul_(self._gradients, mine / total)
        self._wait(self._ring.allreduce([flat]) for flat in self._gradients)
        if equal:
            torch._foreach_div_(self._gradients, len(weights))
        return all(map(is_finite, self._gradients))

    def share(self) -> None:
        """Broadcast the root's parameters."""
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._wait([self._ring.broadcast([self._parameters], options)])

    def close(self) -> None:
        """gloo's threads end with it."""
        del self._ring

    def _wait(self, works: Any) -> None:
        began = time.perf_counter()
        phase = self._group.lane.enter(Phase.WAIT)
        try:
            for work in list(works):
                work.wait()
        except RuntimeError as error:
            text = str(error).partition("]")[2].strip() or str(error)
            if "timed out" in text.lower():
                raise DeadlineError(
                    f"{self._group.name} did not finish its all-reduce within {self._group.deadline_s:g} s "
                    "(--deadline)"
                ) from None
            raise LinkError(f"{self._group.name} lost a member in its all-reduce: {text[:200]}") from None
        finally:
            self._group.waited_s += time.perf_counter() - began
            self._group.lane.enter(phase)


def _addresses(group: GroupMessages) -> Any:
    """A store in which gloo's members find where the others listen. Each sets its own address before it asks
    for another's, so one meeting at the first question does."""

    store: Any = distributed.Store  # type: ignore[attr-defined]

    class Addresses(store):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._mine: dict[str, str] = {}
            self._all: dict[str, str] = {}

        def set(self, key: str, value: bytes | str) -> None:
            raw = value.encode() if isinstance(value, str) else bytes(value)
            self._mine[key] = raw.hex()

        def get(self, key: str) -> bytes:
            if not self._all:
                for each in group.gather({"addresses": self._mine}):
                    self._all |= each["addresses"]
            return bytes.fromhex(self._all[key])

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            pass  # `get` does

    return Addresses()


def _runs(base: Tensor, layout: Layout) -> Iterator[Tensor]:
    """The space as few flat tensors: neighbours of one dtype together (what lies between them is zero)."""
    start = 0
    for piece, after in zip(layout.slices, [*layout.slices[1:], None], strict=True):
        if after is None or after.dtype != piece.dtype:
            yield base[start : piece.stop].view(dtype_named(piece.dtype))
            start = after.start if after is not None else 0
