"""Attachments: how workers attach to a server, what they send, and links that break."""

import contextlib
import hmac
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from safetensors.torch import save
from torch import Tensor

from paceline.comm import Address, Connection, Frame, Hub
from paceline.comm.compression import parse_compression
from paceline.comm.frames import Body, field, whole
from paceline.comm.transfer import Transfer
from paceline.comm.worker_messages import (
    AssignMessage,
    AttachedReply,
    AttachMessage,
    LoadStateMessage,
    PushMessage,
    StateAsked,
)
from paceline.core.json_types import JsonObject
from paceline.core.modes import PushId
from paceline.exceptions import (
    CheckpointError,
    FrameError,
    LayoutMismatch,
    LinkError,
    UsageError,
)
from paceline.observe.record.spans import Recorder
from paceline.params import GroupSettings, StateBook, checked_settings
from paceline.ps.carriers import Attaching, make_carrier
from paceline.ps.carriers.link_thread import LinkThread
from paceline.ps.executor import Executor, Pushed
from paceline.ps.expected_roles import ExpectedRoles
from paceline.ps.peers import MAX_STATE_BYTES, WorkerPeer, has_ended
from paceline.ps.saving import for_others, read_blob

__all__ = ["Attachments", "rank_of", "saved_part"]

log = logging.getLogger("paceline.server")

BACK_S = 5.0
"""How long a worker whose link broke may take to come back, if we cannot see whether its process is there."""


class Attachments:
    """The workers that are attached to a server: their links, and what they sent. The main thread only.

    It knows nothing of the server's role, so a follower that leads from now on takes it over as it is.

    Args:
        hub: reads links that have no thread of their own.
        spans: records what those threads do.
        expected: workers that may attach.
    """

    def __init__(
        self, executor: Executor, hub: Hub, spans: Recorder, expected: ExpectedRoles | None = None
    ) -> None:
        self.buffers: dict[str, Tensor] = {}
        """For workers that join later: the newest buffers (BatchNorm statistics, …) that any worker sent, and
        what worker 0's script keeps. Empty before the first."""
        self._executor = executor
        self._hub = hub
        self._spans = spans
        self._expected = expected or ExpectedRoles()

    # --- links that break -------------------------------------------------------------------------

    @property
    def broken(self) -> bool:
        """Whether a worker's link is broken, and may yet go on over another socket."""
        return any(peer.broken_since is not None for peer in self._executor.peers.values())

    def link_broke(self, peer: WorkerPeer) -> None:
        """A worker's link ended. Unless its process did, it may come back over another socket."""
        peer.broken_since = peer.broken_since or time.monotonic()

    def lost(self) -> list[WorkerPeer]:
        """Workers whose links are gone for good. Most likely their processes are, too."""
        found = []
        for peer in self._executor.peers.values():
            since = peer.broken_since
            if since is None:
                continue
            if not peer.connection.keeps or (
                has_ended(peer.pid) if peer.pid else time.monotonic() - since > BACK_S
            ):
                found.append(peer)
        return found

    def connection_ended(self, connection: Connection, reason: str) -> None:
        """A connection is over; perhaps a worker's."""
        for peer in list(self._executor.peers.values()):
            if peer.connection is connection:
                log.info("%s: %s", peer.name, reason)
                self.link_broke(peer)

    def resume(self, connection: Connection, body: Body) -> None:
        """A worker's link goes on over another socket."""
        peer = self._executor.peers.get(rank_of(connection))
        if peer is None or peer.incarnation != field(body, "incarnation", int) or not peer.connection.keeps:
            raise LinkError(f"{connection.peer} has no link here that could go on")
        if not hmac.compare_digest(
            peer.connection.token.encode(), field(body, "token", str).encode(errors="replace")
        ):
            raise FrameError(f"{connection.peer} would go on with a link that is not its own")
        self._hub.release(connection)
        self._hub.release(peer.connection)
        log.info("%s is back over another socket", peer.name)
        peer.broken_since = None
        try:
            peer.carrier.resume(connection, whole(body, "resume"))
        except LinkError as error:
            log.info("%s: %s", peer.name, error)
            self.link_broke(peer)
            return
        if not peer.carrier.has_thread:
            self._hub.add(peer.connection)

    # --- coming and going -------------------------------------------------------------------------

    def attach(
        self,
        connection: Connection,
        message: AttachMessage,
        descriptors: list[int],
        leave: Callable[[WorkerPeer], None],
    ) -> WorkerPeer:
        """A worker attaches.

        Args:
            descriptors: file descriptors that came with the message.
            leave: called with the process in whose place it comes, which is gone.
        """
        executor = self._executor
        if executor.layout is None or executor.shard is None or executor.base is None:
            raise FrameError("attached before the run has a model")
        rank = rank_of(connection)
        incarnation = message.incarnation
        self._expected.check(connection.peer, incarnation)
        if message.fingerprint != executor.layout.fingerprint:
            raise LayoutMismatch(f"worker:{rank} attached with another layout")
        transfer = self._transfer_of(rank, message)
        if message.listens is not None:
            Address.from_json(message.listens)  # its group will be told
        older = executor.peers.get(rank)
        if older is not None:
            if older.incarnation >= incarnation:
                raise FrameError(f"worker:{rank} is here already as incarnation {older.incarnation}")
            leave(older)
        mode = executor.mode
        in_place = mode.in_place or mode.needs_memory
        alone = executor.config.workers == 1 and not executor.peers and not mode.local
        attaching = Attaching(
            connection=connection,
            worker=rank,
            message=message,
            descriptors=descriptors,
            layout=executor.layout,
            shard=executor.shard,
            on_device=executor.on_device,
            transfer=transfer,
            in_place=in_place,
            sent_in_place=mode.in_place or alone,
            groups_of=executor.groups_of,
            release=self._hub.release,
            post=self._from_thread,
            spans=self._spans,
        )
        carrier, needs_fates = make_carrier(attaching), transfer.compress.has_feedback
        peer = WorkerPeer(connection, rank, incarnation, carrier, needs_fates=needs_fates)
        peer.told = executor.placement.number
        peer.pid = message.pid if connection.same_host else 0
        if message.keeps:
            connection.keep()
        executor.keep_backup(peer)
        for other in executor.peers.values():  # the only worker so far is no longer alone
            other.carrier.read_in_place(in_place)
        executor.peers[rank] = peer
        return peer

    def _transfer_of(self, rank: int, message: AttachMessage) -> Transfer:
        """How an attaching worker writes gradients, and how it wants replies."""
        try:
            return Transfer(
                compress=parse_compression(message.compress),
                compress_replies=message.compress_replies,
            )
        except UsageError as error:
            raise FrameError(
                f"worker:{rank} writes its gradients in a way that {self._executor.name} does not know: "
                f"{error}"
            ) from None

    def welcome(self, peer: WorkerPeer, reply: AttachedReply) -> None:
        """Send an attached worker the parameters."""
        assert self._executor.shard is not None and self._executor.base is not None
        copies = [c for c in (peer.carrier.copy, peer.backup) if c is not None]
        if copies:
            self._executor.shard.update((), None, copies)
        owned = self._executor.placement.owned(self._executor.config.rank)
        with contextlib.suppress(LinkError):  # it died: its link says so by itself
            peer.carrier.welcome(reply, owned)

    def _from_thread(self, link: LinkThread, frame: Frame | None, reason: str) -> None:
        if frame is None and link.connection.keeps:
            used = link.used
            self._hub.post(lambda: self._link_ended(link, used, reason))
        elif frame is None:
            self._hub.post(lambda: self._hub.end(link.connection, reason))
        else:
            received = frame
            self._hub.post(lambda: self._hub.handle(link.connection, received))

    def _link_ended(self, link: LinkThread, used: int, reason: str) -> None:
        """Its thread has given up on a socket; it may have been given another one since."""
        peer = self._executor.peers.get(link.worker)
        if link.given == used and peer is not None and peer.connection is link.connection:
            log.info("%s: %s", peer.name, reason)
            self.link_broke(peer)

    def detach(self, peer: WorkerPeer, *, finished: bool) -> None:
        """A worker is gone, in order (`finished`) or not."""
        self._hub.release(peer.connection)
        if self._executor.peers.get(peer.worker) is peer:
            del self._executor.peers[peer.worker]
        self._executor.departures.gone(peer.worker, peer.incarnation)
        log.info("%s %s", peer.name, "finished" if finished else "is gone")
        if any(pushed.peer is peer and not pushed.held for pushed in self._executor.pushed.values()):
            peer.connection.close()  # its gradient memory is still due
        else:
            peer.carrier.close()

    # --- what workers send ------------------------------------------------------------------------

    def peer_of(self, connection: Connection) -> WorkerPeer:
        peer = self._executor.peers.get(rank_of(connection))
        if peer is None or peer.connection is not connection:
            raise FrameError(f"{connection.peer} has not attached")
        return peer

    def skip(self, worker: int) -> None:
        """A worker's last request was answered without this server, before it was in the order."""
        if (peer := self._executor.peers.get(worker)) is not None:
            self._forget_pushes(peer)
            peer.carrier.skip()

    def _forget_pushes(self, peer: WorkerPeer) -> None:
        """Forget what a worker pushed, but for what is held."""
        here = self._executor.pushed
        for push in [p for p, pushed in here.items() if pushed.peer is peer and not pushed.held]:
            del here[push]

    def receive_push(self, peer: WorkerPeer, message: PushMessage | AssignMessage) -> None:
        """The gradient of a push, or the parameters of an assign, is here."""
        push = PushId(peer.worker, peer.incarnation, message.sequence)
        pushed = message if isinstance(message, PushMessage) else None
        if pushed is not None and pushed.settings is not None:
            peer.settings = self._checked_settings(pushed.settings)
        # A worker has one push under way: one that was dropped before it came is not kept. (What is left of
        # an earlier incarnation goes when the lead says that it is gone.)
        self._forget_pushes(peer)
        self._executor.pushed[push] = Pushed(
            peer,
            peer.carrier.gradients,
            pushed is not None and pushed.void,
            frozenset(() if pushed is None else pushed.missing),
            self._executor.groups_of(0 if pushed is None else pushed.optimizer),
            peer.carrier.ready(message),
        )
        if pushed is not None and pushed.residual is not None:
            peer.residual = pushed.residual

    def _checked_settings(self, settings: Sequence[JsonObject]) -> list[GroupSettings]:
        assert self._executor.spec is not None
        return checked_settings(settings, self._executor.spec.groups)

    def hear_buffers(self, part: Mapping[str, Tensor], worker: int) -> None:
        """Keep what others start from of a worker's part of a checkpoint, which may be nothing else."""
        self.buffers.update(for_others(part, worker))

    def send_state(self, connection: Connection) -> None:
        """A worker wants the optimizer state."""
        self.peer_of(connection)
        connection.tell(StateAsked(), [memoryview(save(self._executor.present_shard.snapshot()))])

    def receive_state(self, connection: Connection, frame: Frame, message: LoadStateMessage) -> None:
        """A worker gives an optimizer state (load_state_dict), to be taken over when the order says so."""
        executor, peer = self._executor, self.peer_of(connection)
        blob = connection.read_blob(frame, MAX_STATE_BYTES)
        load = PushId(peer.worker, peer.incarnation, message.number)
        try:
            book = StateBook([read_blob(blob, "the optimizer state")])
        except CheckpointError as error:  # of this worker's, so it does not concern the run
            raise FrameError(f"{peer.name} gave an optimizer state that is none: {error}") from error
        executor.loads[load] = (book, executor.groups_of(message.optimizer))


def saved_part(connection: Connection, frame: Frame) -> tuple[str, dict[str, Tensor]]:
    """A worker's part of a checkpoint, and the name of its file."""
    rank = rank_of(connection)
    blob = connection.read_blob(frame, MAX_STATE_BYTES)
    return f"worker-{rank}.safetensors", read_blob(blob, f"what worker:{rank} saved")


def rank_of(connection: Connection) -> int:
    """The rank of the worker at the other end; FrameError if it is none."""
    role, _, rank = connection.peer.partition(":")
    if role != "worker":
        raise FrameError(f"{connection.peer} is not a worker")
    return int(rank)
