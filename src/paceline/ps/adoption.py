"""How a run gets its model: worker 0's offer, or a checkpoint, becomes what all servers hold.

Every worker offers its layout; worker 0 is asked for its weights (unless the run resumes), the others
must match or are refused with the first difference. Nobody is answered before all servers have it.
"""

import os

from safetensors.torch import save
from torch import Tensor

from paceline.comm import Connection, Region
from paceline.comm.frames import field, whole
from paceline.comm.hub import refuse
from paceline.comm.server_messages import ModelMessage
from paceline.comm.worker_messages import (
    OfferIncomplete,
    OfferMessage,
    PreparedModel,
    StartFrom,
    WeightsWanted,
)
from paceline.core.json_types import JsonObject
from paceline.core.modes import ModeSpec
from paceline.exceptions import CheckpointError, FrameError, LayoutMismatch, LinkError, PlanError
from paceline.params import Layout, Numerics, OptimizerSpec, Placement
from paceline.ps.device_parameters import DeviceParameters
from paceline.ps.peers import MAX_STATE_BYTES
from paceline.ps.saving import buffers_of, optimizer_state, ran_on_workers, read_blob, worker_state
from paceline.storage.checkpoint import Checkpoint

__all__ = ["Adoption", "Offer"]


class Offer:
    """What a worker offers, checked."""

    def __init__(self, connection: Connection | None, prepared: PreparedModel) -> None:
        self._connection = connection
        self._prepared = prepared
        self.layout = Layout.from_json(prepared.layout)
        self.spec = OptimizerSpec.from_json(prepared.optimizer)
        self.data = None if prepared.data is None else _checked(prepared.data)
        if self.layout.whole_tensors != self.spec.whole_tensors:
            raise FrameError(f"a layout that is cut otherwise than {self.spec.target} needs")
        if max(t.group for t in self.layout.tensors) >= len(self.spec.groups):
            raise FrameError("tensors in a parameter group that the optimizer does not have")
        self.numerics = Numerics.from_json(prepared.numerics)
        self.device = prepared.device if isinstance(prepared, OfferMessage) else None
        """The id of the device that its models are on, if processes can share that device's memory."""
        self.models = prepared.models
        self.calls = prepared.calls

    def facts(self) -> JsonObject:
        """What checkpoints must know of it, as JSON."""
        found: JsonObject = {
            "layout": self.layout.to_json(),
            "optimizer": self.spec.to_json(),
            "state_keys": [*self._prepared.state_keys],
            "data": self.data,
        }
        numbers = {"models": self.models, "calls": self.calls}
        return {**found, **{what: number for what, number in numbers.items() if number > 1}}

    def message(
        self, checkpoint: str | None, placement: Placement, extras_bytes: int, *, takes_part: bool
    ) -> ModelMessage:
        """For another server; see the fields there."""
        return ModelMessage(
            layout=self.layout.to_json(),
            optimizer=self.spec.to_json(),
            data=self.data,
            state_keys=self._prepared.state_keys,
            numerics=self.numerics.to_json(),
            models=self.models,
            calls=self.calls,
            checkpoint=checkpoint,
            placement=placement,
            takes_part=takes_part,
            extras_bytes=extras_bytes,
        )

    @property
    def connection(self) -> Connection:
        """Of who offered it. (One that another server was offered has none.)"""
        assert self._connection is not None
        return self._connection

    def difference(self, other: "Offer") -> str | None:
        """The first thing in which `other` differs, in words."""
        found = self.layout.first_difference(other.layout)
        if found is None and other.spec.targets != self.spec.targets:
            found = f"the optimizer is {_words(other.spec)}, expected {_words(self.spec)}"
        if found is None and other.spec.groups_of != self.spec.groups_of:
            found = "the optimizers have other numbers of parameter groups"
        if found is None and other.models != self.models:
            found = f"prepare() got {other.models} models, expected {self.models}"
        if found is None and other.numerics != self.numerics:
            found = f"torch's settings are {other.numerics}, expected {self.numerics}"
        if found is None and other.data != self.data:
            found = f"the loader gives {other.data}, expected {self.data}"
        return found


class Adoption:
    """Collects offers until there is a model, then answers them. Server 0's main thread only.

    Args:
        checkpoint: what a resumed run goes on from.
        mode: of the run.
    """

    def __init__(self, checkpoint: Checkpoint | None, mode: ModeSpec) -> None:
        self.checkpoint = checkpoint
        self._mode = mode
        self.model: Offer | None = None
        """The offer that the run adopted."""
        self.extras: dict[str, Tensor] = {}
        """Frozen parameters and initial buffers."""
        self._waiting: dict[int, Offer] = {}
        self._asked: Connection | None = None

    def offered(
        self, rank: int, connection: Connection, message: OfferMessage, *, begun: bool = True
    ) -> None:
        """A worker offers its layout.

        A script may call prepare() again. What it offers then holds what it offered before, and takes its
        place when all workers have offered it (`offered_anew`). A worker that joins a run which was prepared
        by several calls is told to go on until it has made as many.

        Args:
            begun: some worker has made a step or asked for a batch.

        Raises:
            LayoutMismatch: it is not the run's.
        """
        offer = Offer(connection, message)
        if offer.calls < self._calls:
            connection.tell(OfferIncomplete())
            return
        if begun or not self._is_more(offer):
            self._check(rank, offer)
        self._waiting[rank] = offer

    @property
    def _calls(self) -> int:
        """How many calls of prepare() brought the run's model, as far as known; 0: it has none yet."""
        if self.model is not None:
            return self.model.calls
        return 0 if self.checkpoint is None else int(self.checkpoint.meta.get("calls", 1))

    def _is_more(self, offer: Offer) -> bool:
        return self.model is not None and offer.calls > self.model.calls

    def offered_anew(self, workers: int) -> bool:
        """Whether all workers have prepared more. If so, their offers are collected as at the beginning."""
        if self.model is None or sum(map(self._is_more, self._waiting.values())) < workers:
            return False
        self.model, self._asked = None, None
        return True

    @property
    def waiting(self) -> set[int]:
        """Workers that offered and have no answer yet."""
        return set(self._waiting)

    def gone(self, connection: Connection) -> None:
        """A connection ended: forget its offer."""
        self._waiting = {r: o for r, o in self._waiting.items() if o.connection is not connection}
        if self._asked is connection:
            self._asked = None

    def ask_for_weights(self) -> bool:
        """Ask worker 0 for its weights if it is time to. True when no weights are needed (resume)."""
        first = self._waiting.get(0)
        if first is None or self.model is not None or self._asked is not None:
            return False
        if self.checkpoint is not None:
            self._check_checkpoint(first)
            self.model = first
            self.extras = self._saved("extras.safetensors")
            return True
        self._asked = first.connection
        first.connection.tell(WeightsWanted())
        return False

    def take_weights(self, connection: Connection, extras_bytes: int) -> Region:
        """Worker 0's weights, straight into the memory that they will live in."""
        first = self._waiting.get(0)
        if first is None or self._asked is not connection or self.model is not None:
            raise FrameError("weights that nobody asked for")
        if not 0 <= extras_bytes <= MAX_STATE_BYTES:
            raise FrameError(f"{extras_bytes:,} bytes of buffers are over the limit")
        region = Region.create(first.layout.nbytes)
        blob = bytearray(extras_bytes)
        connection.read_into([memoryview(region.buffer), memoryview(blob)])
        self.extras = read_blob(bytes(blob), f"what {connection.peer} sent as buffers")
        self.model = first
        return region

    def answer(
        self,
        region: Region | None,
        on_device: DeviceParameters | None,
        start: StartFrom,
        *,
        share: bool,
        writable: bool,
        first: bool,
        buffers: dict[str, Tensor],
    ) -> None:
        """Tell all workers that wait what to start from.

        Args:
            region: the parameters' memory; workers on this host get it if they may `share` it, and can
                write to it for all if it is `writable`.
            on_device: the parameters' memory, if that is a device's.
            start: the message, but for what differs from worker to worker.
            first: training has not begun, so a resumed run starts from its checkpoint. A worker that comes
                later joins the run as it is now, and that checkpoint may have been pruned.
            buffers: the newest that are known, for workers that come later.
        """
        assert self.model is not None
        waiting, self._waiting = self._waiting, {}
        for rank, offer in sorted(waiting.items()):
            if self._is_more(offer):
                self._waiting[rank] = offer
                continue
            try:
                self._check(rank, offer)
                start.resumed = first and self.checkpoint is not None
                if on_device is not None:
                    _check_device(rank, offer, on_device)
                    start.carrier = "device"
                blob = save(self._start_of(rank) if first else _contiguous({**self.extras, **buffers}))
                if offer.connection.local and share and region is not None:
                    fd = os.dup(region.fd) if writable else region.read_only_fd()
                    with os.fdopen(fd, "rb", buffering=0):
                        offer.connection.tell(start, [memoryview(blob)], [fd])
                else:
                    offer.connection.tell(start, [memoryview(blob)])
            except (LayoutMismatch, PlanError) as error:
                refuse(offer.connection, error)
            except LinkError:
                pass  # it died: its link says so by itself

    def _check(self, rank: int, offer: Offer) -> None:
        difference = self.model.difference(offer) if self.model is not None else None
        if difference is not None:
            raise LayoutMismatch(
                f"worker:{rank} prepared another model than worker:0: {difference}. Every worker must build "
                "the same model, optimizer and loader; check what in the script depends on the rank."
            )

    def _start_of(self, rank: int) -> dict[str, Tensor]:
        """Buffers and, of a resumed run, the random state of this worker."""
        start = dict(self.extras)
        if self.checkpoint is not None:
            mine = worker_state(self.checkpoint, rank)
            first = worker_state(self.checkpoint, 0)  # it has the frozen parameters
            shared = mine or first
            for saved in (first, shared):
                start.update(buffers_of(saved))
            own = ("rng:", "inner:", "stepper:", "encoder:")
            start.update({k: v for k, v in mine.items() if k.startswith(own)})
            if self._mode.serverless or ran_on_workers(self.checkpoint):
                state = optimizer_state(self.checkpoint)  # one for all, wherever it was
                start.update({f"inner:{k}": v for k, v in state.items()})
            start.update({k: v for k, v in shared.items() if k.startswith(("user:", "script:"))})
        return _contiguous(start)

    def _saved(self, name: str) -> dict[str, Tensor]:
        assert self.checkpoint is not None
        return self.checkpoint.tensors(name) if name in self.checkpoint.files else {}

    def _check_checkpoint(self, offer: Offer) -> None:
        """The checkpoint must be of this model; how it was cut does not matter."""
        assert self.checkpoint is not None
        name = self.checkpoint.path.name
        mine = {t.name: t for t in offer.layout.tensors}
        for t in Layout.from_json(self.checkpoint.meta["layout"]).tensors:
            twin = mine.pop(t.name, None)
            if twin is None or (twin.shape, twin.dtype) != (t.shape, t.dtype):
                got = "missing" if twin is None else f"{list(twin.shape)} {twin.dtype}"
                raise CheckpointError(
                    f"{name} is of another model: parameter {t.name!r} is {list(t.shape)} {t.dtype} there "
                    f"and {got} in the script."
                )
        if mine:
            raise CheckpointError(f"{name} is of another model: it has no parameter {min(mine)!r}.")
        spec = OptimizerSpec.from_json(self.checkpoint.meta["optimizer"])
        if spec.targets != offer.spec.targets:
            raise CheckpointError(
                f"{name} was trained with {_words(spec)}, the script has {_words(offer.spec)}."
            )


def _check_device(rank: int, offer: Offer, on_device: DeviceParameters) -> None:
    """PlanError if a worker cannot share the parameters' device."""
    if offer.device != on_device.device.id or not offer.connection.local:
        where = "in host memory, or reached over TCP" if offer.device is None else offer.device
        raise PlanError(
            f"the parameters are on {on_device.device.id}, and the models of worker:{rank} are {where}. Put "
            "the models of all workers on that device, or keep the servers in host memory (--server-device "
            "cpu)."
        )


def _checked(data: JsonObject) -> JsonObject:
    """Facts about training data, if they are such."""
    field(data, "stream", bool, False)
    field(data, "drop_last", bool, False)
    if "samples" in data and (whole(data, "samples") < 1 or whole(data, "batch_size") < 1):
        raise FrameError(f"a loader of {data['samples']} samples in batches of {data['batch_size']}")
    return data


def _words(spec: OptimizerSpec) -> str:
    return " and ".join(spec.targets)


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
