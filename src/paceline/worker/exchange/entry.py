"""How a worker joins a run: it offers its models to the lead server, and attaches to all servers."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from safetensors.torch import load as parse_tensors
from torch import Tensor

from paceline.comm import Access, Address, Kind, Region
from paceline.comm.connection import spin_for
from paceline.comm.device import SharedDevice
from paceline.comm.worker_messages import (
    OFFER_ANSWER,
    OfferIncomplete,
    OfferMessage,
    StartFrom,
    WeightsMessage,
)
from paceline.core.json_types import JsonObject
from paceline.core.modes import ModeSpec, parse_mode
from paceline.observe.record.spans import NO_SPANS, Recorder
from paceline.params import Layout, Numerics, OptimizerSpec, Placement, bytes_of
from paceline.worker.exchange.client import Client, blob_of
from paceline.worker.exchange.device_link import DeviceLink
from paceline.worker.exchange.device_memory import DeviceMemory
from paceline.worker.exchange.direct_exchange import DirectExchange
from paceline.worker.exchange.encoders import DifferenceReader, Encoders
from paceline.worker.exchange.exchange_memory import ExchangeMemory
from paceline.worker.exchange.inline_link import InlineLink
from paceline.worker.exchange.link_carrier import LinkCarrier
from paceline.worker.exchange.mirrored_link import MirroredLink
from paceline.worker.exchange.openmp import make_rest, no_rest
from paceline.worker.exchange.payloads import Payloads
from paceline.worker.exchange.pipeline import PipelinedExchange
from paceline.worker.exchange.placements import Placements
from paceline.worker.exchange.run_news import RequestNumbers, RunNews, new_pull
from paceline.worker.exchange.server_links import LinkSettings, ServerLink, ServerLinks
from paceline.worker.exchange.shared_link import SharedLink

__all__ = ["Adopted", "DataFacts", "Entry", "ModelOffer"]


class DataFacts(TypedDict, total=False):
    """What all workers must agree on about the training data."""

    stream: bool
    """The data set is an IterableDataset, of which nothing else is known."""
    samples: int
    batch_size: int
    drop_last: bool


def _as_json(facts: DataFacts) -> JsonObject:
    return {name: value for name, value in facts.items() if isinstance(value, int)}


@dataclass(frozen=True, kw_only=True)
class ModelOffer:
    """What a worker has prepared."""

    layout: Layout
    spec: OptimizerSpec
    data: DataFacts | None
    """Facts about the training data, see `data_facts`."""
    state_keys: Sequence[str]
    models: int = 1
    """Number of models."""
    calls: int = 1
    """Number of calls of prepare() that brought them."""
    device: SharedDevice | None = None
    """The device that the models are on, if processes can share its memory."""

    def message(self) -> OfferMessage:
        """For the lead."""
        return OfferMessage(
            layout=self.layout.to_json(),
            optimizer=self.spec.to_json(),
            data=None if self.data is None else _as_json(self.data),
            state_keys=tuple(self.state_keys),
            numerics=Numerics.here().to_json(),
            models=self.models,
            calls=self.calls,
            device=None if self.device is None else self.device.id,
        )


@dataclass(frozen=True)
class Adopted:
    """The run's answer to an offer."""

    epoch: int
    """The epoch the run is in: a replaced or resumed worker skips the ones before it."""
    mode: ModeSpec
    """The mode that the run is in: it may have been switched since it began."""
    resumed: bool
    tensors: dict[str, Tensor]
    """Frozen parameters and buffers to start from; on a resume also `rng:` and `user:` entries."""
    offer: ModelOffer
    placement: Placement
    shared: Region | None
    """The servers' memory, if all of them are on this host."""
    device: SharedDevice | None
    """The device that the servers' memory is on; None: it is in host memory."""


class Entry:
    """A worker that has reached the lead server and not joined the run yet.

    Args:
        mode: the mode that the run began with.
        lead, address: the server that leads, and where it is. It knows the others.
    """

    def __init__(
        self,
        settings: LinkSettings,
        mode: ModeSpec,
        *,
        lead: int,
        address: Address,
        spans: Recorder = NO_SPANS,
    ) -> None:
        self.links = ServerLinks(settings, mode, lead=lead, address=address, lane=spans.main)
        self._settings = settings
        self._mode = mode
        self._spans = spans
        self._device: SharedDevice | None = None
        """The device that the models are on."""

    def offer(
        self, offer: ModelOffer, weights: Callable[[], tuple[Tensor, dict[str, Tensor]]]
    ) -> Adopted | None:
        """Offer the models; worker 0 is asked for its weights, all get what to start from.

        Args:
            weights: gives the whole parameter space as bytes, and frozen parameters and buffers.

        Returns:
            None: the run was prepared by more calls of prepare() than this worker has made yet.
        """
        links, lead = self.links, self.links.lead
        self._device = offer.device
        if not links.local:  # servers that payloads travel to are in host memory
            offer = replace(offer, device=None)
        links.send(lead, offer.message())
        frame = links.receive(lead, Kind.WANT_WEIGHTS, *OFFER_ANSWER.kinds)
        if frame.kind is Kind.WANT_WEIGHTS:
            base, extras = weights()
            blob = blob_of(extras)
            payload = [bytes_of(base), memoryview(blob)]
            links.send(lead, WeightsMessage(len(blob)), payload)
            frame = links.receive(lead, *OFFER_ANSWER.kinds)
        blob = lead.connection.read_blob(frame, frame.payload_bytes)
        start = OFFER_ANSWER.read(frame.kind, frame.body)
        if isinstance(start, OfferIncomplete):
            return None
        self._reach_all(start)
        mode = parse_mode(start.mode)
        shared = None
        if not links.local:
            for fd in frame.descriptors:
                os.close(fd)
        elif frame.descriptors:
            access = Access.SHARED if self._mode.payload == "none" else Access.PRIVATE
            shared = Region.attach(frame.descriptors[0], offer.layout.nbytes, access)
        return Adopted(
            epoch=start.epoch,
            mode=mode,
            resumed=start.resumed,
            tensors=parse_tensors(blob) if blob else {},
            offer=offer,
            placement=start.placement,
            shared=shared,
            device=offer.device if start.carrier == "device" else None,
        )

    def _reach_all(self, start: StartFrom) -> None:
        """Connect to the other servers."""
        self.links.replicated = start.replicated
        for server in sorted(start.placement.servers - {self.links.lead.server}):
            self.links.reach(server, Address.from_json(start.servers[server]))

    def attach(self, adopted: Adopted, *, in_place: bool, listens: JsonObject | None = None) -> Client:
        """Join the run.

        Args:
            in_place: read the servers' memory where the mode and the host allow it.
            listens: where this worker, the root of a group, listens for its members.
        """
        links, settings, transfer = self.links, self._settings, self._settings.transfer
        layout, spec = adopted.offer.layout, adopted.offer.spec
        memory: ExchangeMemory | DeviceMemory
        if adopted.device is not None:
            memory = there = DeviceMemory(layout, adopted.device)
            links.carry_with(lambda link: DeviceLink(link.connection, there))
        else:
            memory = here = ExchangeMemory(layout, adopted.shared, may_share=in_place)
            links.carry_with(self._carriers(here, adopted.placement))
        mirrors = self._mirrors(adopted.mode)
        if mirrors is not None:
            links.carry_with(lambda link: MirroredLink(link.connection, here, mirrors))
        computes_here = links.local and adopted.device is None
        """Whether servers update parameters with this host's cores."""
        news, numbers = RunNews(adopted.mode), RequestNumbers()
        placements = Placements(links, layout, adopted.placement)
        encoders = None
        if transfer.compresses:
            seed = (settings.seed << 32) + (settings.rank << 12) + settings.incarnation
            encoders = Encoders(transfer.compress, layout, seed)
        slices_of = [
            frozenset(s.index for s in layout.slices if s.group in groups) for groups in spec.groups_of
        ]
        direct = DirectExchange(
            links,
            memory,
            placements,
            Payloads(links, memory, slices_of, encoders),
            news,
            numbers,
            listens=listens,
            spin_s=spin_for(
                layout.nbytes, settings.worker_threads + len(links.each), on_device=adopted.device is not None
            ),
            rest=make_rest(layout.nbytes, torch.get_num_threads()) if computes_here else no_rest,
        )
        direct.attach_all()
        if settings.incarnation and len(links.each) > 1:
            direct.exchange(new_pull())  # it joined a run that goes on: have one version from all servers
        links.reset_byte_counts()
        if mirrors is not None or not transfer.pipelined:
            return Client(direct, mirrors=mirrors)
        return Client(direct, PipelinedExchange(direct, self._spans, transfer.prefetch), transfer.prefetch)

    def _mirrors(self, mode: ModeSpec) -> SharedDevice | None:
        """The models' device, if slices are copied between it and memory that the servers see, too."""
        transfer = self._settings.transfer
        near = all(link.connection.local for link in self.links.each)
        by_step = mode.payload == "gradient" and not mode.local
        return self._device if near and by_step and transfer.only_overlaps else None

    def _carriers(self, memory: ExchangeMemory, placement: Placement) -> Callable[[ServerLink], LinkCarrier]:
        """Makes the carrier of a link: payloads lie in shared memory where that can be had."""
        links, transfer, differences = self.links, self._settings.transfer, None
        if transfer.replies is not None:
            slices = memory.layout.slices
            shards = {server: [slices[i] for i in placement.held(server)] for server in placement.servers}
            differences = DifferenceReader(transfer.replies, memory.layout, shards)

        def make(link: ServerLink) -> LinkCarrier:
            if links.shares_memory(link):
                return SharedLink(memory)
            return InlineLink(link.connection, link.server, memory, transfer, differences)

        return make
