"""What a worker of a run says to the servers: pushes, requests for leases, votes, its part of a checkpoint.

On one host gradients lie in shared memory and, in bsp, parameters are read from the servers' memory in
place: a push is then a message of a few dozen bytes. Otherwise the slices travel behind the message, as
they are or compressed. A PipelinedExchange (`pipeline.py`) lets them travel while the worker computes.
"""

import contextlib
import time
from collections.abc import Sequence

from safetensors.torch import load as parse_tensors
from safetensors.torch import save
from torch import Tensor

from paceline.comm import Kind
from paceline.comm.device import SharedDevice
from paceline.comm.frames import field
from paceline.exceptions import LinkError
from paceline.observe.record.phase import Phase
from paceline.params import apart
from paceline.worker.exchange.direct_exchange import DirectExchange
from paceline.worker.exchange.grants import Grant, LeasesAhead
from paceline.worker.exchange.pipeline import PipelinedExchange
from paceline.worker.exchange.server_links import Body

__all__ = ["Client", "blob_of"]


class Client:
    """Talks to the servers for one worker that has joined the run. One thread at a time.

    Args:
        direct: the exchange that the worker has joined with.
        pipeline: takes over from it, if payloads travel while the worker computes.
        prefetch: number of steps that a reply is awaited later.
        mirrors: the device between which and the memory here slices are copied beside the script's own work.
    """

    def __init__(
        self,
        direct: DirectExchange,
        pipeline: PipelinedExchange | None = None,
        prefetch: int = 0,
        *,
        mirrors: SharedDevice | None = None,
    ) -> None:
        self.links = direct.links
        self.news = direct.news
        self.memory = direct.memory
        self.numbers = direct.numbers
        self.payloads = direct.payloads
        self.pipeline = pipeline
        self.mirrors = mirrors
        self._exchange: DirectExchange | PipelinedExchange = direct if pipeline is None else pipeline
        self._ahead = None if pipeline is None else LeasesAhead(pipeline, self.links, prefetch)
        # The script calls these in every step.
        self.exchange = self._exchange.exchange
        self.settle = self._exchange.settle
        self.save_due = self._exchange.save_due
        self.arrives_late = self._exchange.arrives_late
        """Whether parameters arrive after `exchange` has returned."""

    @property
    def version(self) -> int:
        """Version of the parameters that this worker has."""
        return self.news.version

    @property
    def wait_s(self) -> float:
        """Seconds in which this worker had nothing to do but wait for servers."""
        return self.links.wait_s

    @property
    def in_place(self) -> bool:
        """Whether this worker reads the servers' memory."""
        return self.memory.in_place(self.news.mode)

    @property
    def parameters(self) -> Tensor:
        """The bytes of the parameters in the present mode: the servers' memory, or this worker's copy."""
        return self.memory.parameters(self.news.mode)

    def private_pages(self) -> int:
        """Number of pages of the servers' memory that this worker has written to, in its own view only."""
        return self.memory.private_pages(self.news.mode)

    def forget_private_writes(self) -> None:
        """After an assign: see the servers' memory again where this worker wrote to its view of it."""
        self.memory.forget_private_writes(self.news.mode)

    # --- leases -----------------------------------------------------------------------------------

    def take(
        self,
        epoch: int,
        limit: int,
        *,
        wait: bool,
        give_back: Sequence[int] = (),
        carry: Sequence[int] = (),
        more: Body | None = None,
    ) -> Grant:
        """Leases of an epoch; with `wait` blocks until there are some or the epoch is over.

        Args:
            give_back: leases that this worker will not use.
            carry: leases it has used, whose gradient goes into a later push.
            more: fields of the message: batches that were skipped, as in a push; the order of the epoch.
        """
        if self._ahead is None:
            return self._take(epoch, limit, wait=wait, give_back=give_back, carry=carry, more=more or {})
        grant, unused = self._ahead.collect(epoch, wait=wait, more=more or {})
        if grant is None:
            if wait and len(self.links.each) > 1:
                self.settle()  # parked at the lead, it could not tell that another server is late
            give_back = [*give_back, *unused]
            more = self._ahead.take_unsaid()
            grant = self._take(epoch, limit, wait=wait, give_back=give_back, carry=carry, more=more)
        self._ahead.ask(epoch, limit, grant)
        return grant

    def _take(
        self,
        epoch: int,
        limit: int,
        *,
        wait: bool,
        give_back: Sequence[int],
        carry: Sequence[int],
        more: Body,
    ) -> Grant:
        links, lane = self.links, self.links.lane
        body: Body = {"epoch": epoch, "limit": limit, "wait": wait}
        if give_back:
            body["give_back"] = list(give_back)
        if carry:
            body["carry"] = list(carry)
        body |= more
        if ready := self._exchange.get_ready():
            body["ready"] = ready
        before, waited = time.perf_counter(), links.wait_s
        phase = lane.enter(Phase.WAIT if wait else Phase.LEASE)
        if links.replicated:
            self.numbers.takes += 1
            body["n"] = self.numbers.takes
        reply = self._exchange.ask_lead(Kind.TAKE, body, Kind.GRANT)
        self._blame(reply)
        lane.enter(phase)
        links.wait_s = waited + time.perf_counter() - before
        if self.news.hear_mode(reply):
            self._pull()  # into the memory of the new mode
        elif wait or self.news.mode.by_epoch:  # there, a worker that comes late may have missed the start
            self._catch_up(field(reply, "version", int))
        return Grant.of(reply)

    def _catch_up(self, version: int) -> None:
        """After a rest: the others may have gone on meanwhile.

        The lead woke us; other servers may still be at an update that it has ordered already. A pull is
        part of the order, so their answer comes behind it, also to a worker that reads in place.
        """
        self.settle()
        mode = self.news.mode
        if mode.serverless:
            return  # there are no fresher parameters than the workers' own
        if mode.local and mode.spare is None:
            return  # its own steps go on from what it fetched last; in rounds they would come too late
        if self.in_place and len(self.links.each) == 1:
            self.news.version = version
        elif self.news.version != version:
            self._pull()

    def _pull(self) -> None:
        self.exchange(Kind.PULL)
        self.settle()

    # --- votes and calls --------------------------------------------------------------------------

    def vote(self, who: str, wants: bool) -> bool:
        """Ask the lead whether the run ends early; blocks as long as the mode says.

        Args:
            who: whose condition counts, see `paceline.should_stop`.
            wants: this worker's condition.
        """
        self._ask_together(Kind.VOTE, {"who": who, "wants": wants}, Kind.VERDICT)
        return self.news.stop_due

    def call(self, place: str, value: str) -> list[str]:
        """The values of all workers that call at this place of the script; blocks until they do.

        Args:
            place: names it, the same on every worker.
        """
        reply = self._ask_together(Kind.CALL, {"place": place, "value": value}, Kind.ANSWER)
        return [str(each) for each in field(reply, "values", list)]

    def _ask_together(self, kind: Kind, body: Body, answer: Kind) -> Body:
        """Ask the lead a question that it may answer only when other workers have asked it, too."""
        links, lane = self.links, self.links.lane
        self.numbers.questions += 1
        body["n"] = self.numbers.questions
        if ready := self._exchange.get_ready():
            body["ready"] = ready
        before, waited = time.perf_counter(), links.wait_s
        phase = lane.enter(Phase.WAIT)
        reply = self._exchange.ask_lead(kind, body, answer)
        self._blame(reply)
        lane.enter(phase)
        links.wait_s = waited + time.perf_counter() - before
        self.news.hear_save(reply)
        if self.news.hear_mode(reply):
            self._pull()  # into the memory of the new mode
        return reply

    def _blame(self, reply: Body) -> None:
        """The lead says which worker it had to wait for, and how long."""
        if "on" in reply:
            self.links.lane.blame(field(reply, "on", int), field(reply, "held", float))

    # --- state ------------------------------------------------------------------------------------

    def optimizer_state(self) -> list[dict[str, Tensor]]:
        """Parameters and optimizer state of all servers, by StateBook's keys."""
        parts = self._exchange.ask_all(Kind.STATE, {})
        return [parse_tensors(blob) if blob else {} for blob in parts]

    def load_optimizer_state(self, tensors: dict[str, Tensor], optimizer: int = 0) -> None:
        """Give all servers the state of an optimizer; each takes what is in its shard, all at one place in
        the order.

        The state itself goes ahead; the pull behind it is what the lead orders.
        """
        self.settle()
        self._exchange.get_ready()  # servers that are new need it, too
        numbers = self.numbers
        numbers.loads += 1
        body = {"number": numbers.loads, **({"optimizer": optimizer} if optimizer else {})}
        blob = save(tensors)  # not empty, whatever there is in it: an empty payload asks for the state
        for link in self.links.each:
            self._exchange.send(link, Kind.STATE, body, [memoryview(blob)])
        numbers.loading = True
        self.exchange(Kind.PULL, fetch=False)
        self.settle()
        numbers.loading = False

    def save(self, tensors: dict[str, Tensor], cut: int = 0, *, buffers: bool = False) -> None:
        """Send this worker's part of a checkpoint (of version `cut`, if that is known).

        Args:
            buffers: these are the present buffers alone, for workers that join; no part of a checkpoint.
        """
        blob = memoryview(blob_of(tensors))
        body: Body = {"cut": cut} if cut else {}
        if buffers:
            body["buffers"] = True
        for link in self.links.each if self.links.replicated else [self.links.lead]:
            self._exchange.send(link, Kind.SAVED, body, [blob])

    def bye(self, last: Body | None = None, *, comes_back: bool = False) -> None:
        """Leave in order: the script has ended, or the run wanted it so.

        Args:
            last: fields of the message: what no push has told.
            comes_back: the script has not ended: it prepares more, and joins again.
        """
        last = last or {}
        if self._ahead is not None:
            last = self._ahead.take_unsaid(last)
        body = {"left": True} if self.news.leave_due or comes_back else last
        for link in reversed(self.links.each):
            with contextlib.suppress(LinkError):
                self._exchange.send(link, Kind.BYE, body)
        self._exchange.close()


def blob_of(tensors: dict[str, Tensor]) -> bytes:
    """Tensors in safetensors' format. Tensors that share memory (tied weights, say) are sent one by one."""
    return save(apart({k: v.contiguous() for k, v in tensors.items()})) if tensors else b""
