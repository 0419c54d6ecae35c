"""What a worker of a run says to the servers: pushes, requests for leases, votes, its part of a checkpoint.

On one host gradients lie in shared memory and, in bsp, parameters are read from the servers' memory in
place: a push is then a message of a few dozen bytes. Otherwise the slices travel behind the message, as
they are or compressed. A PipelinedExchange (`pipeline.py`) lets them travel while the worker computes.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import TypeVar

from safetensors.torch import load as parse_tensors
from safetensors.torch import save
from torch import Tensor

from paceline.comm.device import SharedDevice
from paceline.comm.message_codec import Catalogue
from paceline.comm.worker_messages import (
    CALL_REPLY,
    GRANT,
    VERDICT,
    BuffersMessage,
    CallMessage,
    DetachMessage,
    LeadNews,
    LoadStateMessage,
    SavedMessage,
    TakeMessage,
    VoteMessage,
)
from paceline.exceptions import LinkError
from paceline.observe.record.phase import Phase
from paceline.params import apart
from paceline.worker.exchange.direct_exchange import DirectExchange
from paceline.worker.exchange.grants import Grant, LeasesAhead
from paceline.worker.exchange.pipeline import PipelinedExchange
from paceline.worker.exchange.run_news import new_pull
from paceline.worker.exchange.sample_report import NOTHING_TO_REPORT, SampleReport

__all__ = ["Client", "blob_of"]

R = TypeVar("R", bound=LeadNews)


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
        report: SampleReport = NOTHING_TO_REPORT,
        order: tuple[str, str] | None = None,
    ) -> Grant:
        """Leases of an epoch; with `wait` blocks until there are some or the epoch is over.

        Args:
            give_back: leases that this worker will not use.
            carry: leases it has used, whose gradient goes into a later push.
            report: samples that no push accounts for.
            order: fingerprint of the epoch's order of samples, and the name of its sampler.
        """
        if self._ahead is None:
            message = TakeMessage(epoch=epoch, limit=limit, wait=wait, order=order)
            return self._take(message, give_back, carry, report)
        grant, unused = self._ahead.collect(epoch, wait=wait, report=report)
        if grant is None:
            if wait and len(self.links.each) > 1:
                self.settle()  # parked at the lead, it could not tell that another server is late
            give_back = [*give_back, *unused]
            message = TakeMessage(epoch=epoch, limit=limit, wait=wait, order=order)
            grant = self._take(message, give_back, carry, self._ahead.take_unsaid())
        self._ahead.ask(epoch, limit, grant)
        return grant

    def _take(
        self, message: TakeMessage, give_back: Sequence[int], carry: Sequence[int], report: SampleReport
    ) -> Grant:
        links, lane, wait = self.links, self.links.lane, message.wait
        message.give_back, message.carry = tuple(give_back), tuple(carry)
        report.complete(message)
        message.ready = self._exchange.get_ready()
        before, waited = time.perf_counter(), links.wait_s
        phase = lane.enter(Phase.WAIT if wait else Phase.LEASE)
        if links.replicated:
            self.numbers.takes += 1
            message.n = self.numbers.takes
        reply = self._exchange.ask_lead(message, GRANT)
        self._blame(reply)
        lane.enter(phase)
        links.wait_s = waited + time.perf_counter() - before
        if self.news.hear_mode(reply):
            self._pull()  # into the memory of the new mode
        elif wait or self.news.mode.by_epoch:  # there, a worker that comes late may have missed the start
            self._catch_up(reply.version)
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
        self.exchange(new_pull())
        self.settle()

    # --- votes and calls --------------------------------------------------------------------------

    def vote(self, who: str, wants: bool) -> bool:
        """Ask the lead whether the run ends early; blocks as long as the mode says.

        Args:
            who: whose condition counts, see `paceline.should_stop`.
            wants: this worker's condition.
        """
        self._ask_together(VoteMessage(who=who, wants=wants, n=self._next_question()), VERDICT)
        return self.news.stop_due

    def call(self, place: str, value: str) -> list[str]:
        """The values of all workers that call at this place of the script; blocks until they do.

        Args:
            place: names it, the same on every worker.
        """
        message = CallMessage(place=place, value=value, n=self._next_question())
        return [*self._ask_together(message, CALL_REPLY).values]

    def _next_question(self) -> int:
        self.numbers.questions += 1
        return self.numbers.questions

    def _ask_together(self, message: VoteMessage | CallMessage, answer: Catalogue[R]) -> R:
        """Ask the lead a question that it may answer only when other workers have asked it, too."""
        links, lane = self.links, self.links.lane
        message.ready = self._exchange.get_ready()
        before, waited = time.perf_counter(), links.wait_s
        phase = lane.enter(Phase.WAIT)
        reply = self._exchange.ask_lead(message, answer)
        self._blame(reply)
        lane.enter(phase)
        links.wait_s = waited + time.perf_counter() - before
        self.news.hear_save(reply)
        if self.news.hear_mode(reply):
            self._pull()  # into the memory of the new mode
        return reply

    def _blame(self, reply: LeadNews) -> None:
        """The lead says which worker it had to wait for, and how long."""
        if reply.on is not None and reply.held is not None:
            self.links.lane.blame(reply.on, reply.held)

    # --- state ------------------------------------------------------------------------------------

    def optimizer_state(self) -> list[dict[str, Tensor]]:
        """Parameters and optimizer state of all servers, by StateBook's keys."""
        parts = self._exchange.ask_state()
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
        message, blob = LoadStateMessage(number=numbers.loads, optimizer=optimizer), save(tensors)
        for link in self.links.each:
            self._exchange.send(link, message, [memoryview(blob)])
        numbers.loading = True
        self.exchange(new_pull(), fetch=False)
        self.settle()
        numbers.loading = False

    def save(self, tensors: dict[str, Tensor], cut: int = 0, *, buffers: bool = False) -> None:
        """Send this worker's part of a checkpoint (of version `cut`, if that is known).

        Args:
            buffers: these are the present buffers alone, for workers that join; no part of a checkpoint.
        """
        blob = memoryview(blob_of(tensors))
        message = BuffersMessage() if buffers else SavedMessage(cut)
        for link in self.links.each if self.links.replicated else [self.links.lead]:
            self._exchange.send(link, message, [blob])

    def bye(self, last: SampleReport = NOTHING_TO_REPORT, *, comes_back: bool = False) -> None:
        """Leave in order: the script has ended, or the run wanted it so.

        Args:
            last: samples that no push accounts for.
            comes_back: the script has not ended: it prepares more, and joins again.
        """
        if self._ahead is not None:
            last = self._ahead.take_unsaid(last)
        message = DetachMessage(left=self.news.leave_due or comes_back)
        if not message.left:
            last.complete(message)
        for link in reversed(self.links.each):
            with contextlib.suppress(LinkError):
                self._exchange.send(link, message)
        self._exchange.close()


def blob_of(tensors: dict[str, Tensor]) -> bytes:
    """Tensors in safetensors' format. Tensors that share memory (tied weights, say) are sent one by one."""
    return save(apart({k: v.contiguous() for k, v in tensors.items()})) if tensors else b""
