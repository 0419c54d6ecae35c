"""Server 0: a server that also makes the run's order.

It runs the Lead (mode, leases), forwards what that decides to the other servers, sees that nobody waits
longer than the deadline, and gathers checkpoints.
"""

import contextlib
import logging
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from paceline.comm import Connection, Frame, Kind, Region
from paceline.comm.frames import field
from paceline.comm.lasting import LastingLink
from paceline.data.leases import Lease, LeaseBook
from paceline.exceptions import CheckpointError, DeadlineError, FrameError, LinkError, PlanError
from paceline.modes import parse_mode, parse_schedule
from paceline.modes.lbfgs import Answer
from paceline.params import bytes_of, partition
from paceline.ps.adoption import Adoption
from paceline.ps.descent import Descent
from paceline.ps.lead import QUARANTINE, EarlyExit, Lead, Push, Steps
from paceline.ps.peers import MAX_STATE_BYTES, ShmPeer, WorkerPeer
from paceline.ps.saving import Saver, read_blob, state_book, worker_state
from paceline.ps.server import TICK_S, Server, ServerConfig, rank_of
from paceline.storage.atomic import write_text_atomically
from paceline.storage.checkpoint import Checkpoint, FileInfo, load

__all__ = ["LeadServer", "serve"]

log = logging.getLogger("paceline.server")

_LEASES_AT_ONCE = 8
_HURRY_S = 0.8
"""How long a checkpoint that was asked for waits for the end of a round and for the workers' parts."""


class LeadServer(Server):
    """See the module."""

    def __init__(self, config: ServerConfig, secret: bytes, controller: LastingLink) -> None:
        super().__init__(config, secret, controller)
        schedule = parse_schedule(self.mode, config.schedule)
        self._lead = Lead(self.mode, clip_norm=config.clip_norm, schedule=schedule, groups=config.groups)
        self._listens: dict[int, Any] = {}
        """Where the roots of groups listen for their members."""
        self._request: str | None = None
        """Whose switch is to take effect, at the end of a round."""
        self._leaving: set[int] = set()
        """Workers that are to be told to leave."""
        self._untold: set[int] = set()
        """Workers that have not been told of the present mode."""
        self._followers: dict[int, Connection] = {}
        resumed: Checkpoint | None = load(Path(config.resume)) if config.resume else None
        self._adoption = Adoption(resumed, self.mode)
        self._adopting: set[int] | None = None
        self._gate: set[int] | None = set()
        self._gate_since: float | None = None
        self._held_since: dict[int, float] = {}
        self._acting = -1
        """The worker whose message is being dealt with."""
        self._norms: dict[int, float] = {}
        self._norms_due = 0
        self._after_norms: Steps = []
        self._answers: list[list[Answer]] = []
        self._saver: Saver | None = None
        self._save_flags: set[int] = set()
        self._save_again = False
        self._save_at_next = False
        self._asked = False
        self._hurry_at: float | None = None
        self._last_saved = -1
        # allreduce: the version that our parameters are of, the next one that needs them, and the versions
        # of the parts that workers sent.
        self._current = 0
        self._announced = -1
        self._cuts: dict[int, int] = {}
        self._unsaved = False  # something is newer than a checkpoint of this version would have it
        self._states: dict[str, dict[str, Tensor]] = {}
        self._last_stats = 0.0
        self._said: set[str] = set()
        applied = 0 if resumed is None else int(resumed.meta["lead"]["pushes"])
        self._pushes = _open_pushes(Path(config.run_dir) / "pushes.csv", applied)
        self._worker_handlers |= {
            Kind.OFFER: self._on_offer,
            Kind.TAKE: self._on_take,
            Kind.SAVED: self._on_saved,
        }

    def _close(self) -> None:
        if self._saver is not None:
            self._saver.join()
        for link in self._followers.values():
            link.close()
        super()._close()
        self._write_pushes()
        self._pushes.close()

    # --- connections ------------------------------------------------------------------------------

    def on_hello(self, connection: Connection, body: dict[str, Any]) -> None:
        """Workers and the other servers connect to the lead."""
        role, _, rank = connection.peer.partition(":")
        if role == "server":
            self._followers[int(rank)] = connection
            self._try_adopt()
        else:
            super().on_hello(connection, body)

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """As any server, and what followers report."""
        if connection in self._followers.values():
            self._on_follower(connection, frame)
            return
        try:
            super().on_frame(connection, frame)
        except EarlyExit as error:
            self._fail(error)
        except (PlanError, CheckpointError) as error:
            self._fail(error)
            raise

    def on_end(self, connection: Connection, reason: str) -> None:
        """As any server; without a follower the run cannot go on."""
        if connection in self._followers.values():
            if self._running:
                with contextlib.suppress(LinkError):  # the last that is known of what is lost
                    self._controller.send(Kind.STATS, self._stats())
                self._fail(LinkError(f"server:0 lost {connection.peer}: {reason}"))
            return
        self._adoption.gone(connection)
        super().on_end(connection, reason)

    def _on_controller(self, frame: Frame) -> None:
        if frame.kind is Kind.CHECKPOINT:
            self._asked = True
            self._save_now()
        elif frame.kind is Kind.SWITCH:
            self._switch(field(frame.body, "mode", str), field(frame.body, "request", str))
        elif frame.kind is Kind.LEAVE:
            self._leaving.add(field(frame.body, "worker", int))
        elif frame.kind is Kind.STOP:
            self._running = False

    def _controller_back(self, fresh: Connection) -> None:
        super()._controller_back(fresh)
        body = {"mode": str(self._lead.mode), "version": self._lead.version, "request": None}
        self._controller.send(Kind.STATS, body)

    def _switch(self, text: str, request: str) -> None:
        """The controller wants another mode, and has seen that the run can carry it."""
        mode = parse_mode(text)
        if reason := self._lead.mode.carries(mode):
            self._refuse_switch(request, reason)
            return
        if self._request is not None:
            self._refuse_switch(self._request, f"a switch to {mode} came before it took effect")
        self._request = request
        self._act(self._lead.switch(mode))
        if self._request == request and self._lead.mode == mode:
            self._tell_mode()  # it is in it already, and what was to come was taken back

    def _refuse_switch(self, request: str, reason: str) -> None:
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, {"refused_switch": reason, "request": request})

    def _tell_mode(self) -> None:
        request, self._request = self._request, None
        body = {"mode": str(self._lead.mode), "version": self._lead.version, "request": request}
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, body)

    def _on_follower(self, connection: Connection, frame: Frame) -> None:
        if frame.kind is Kind.ADOPTED and self._adopting is not None:
            self._adopting.discard(int(connection.peer.partition(":")[2]))
            self._try_answer()
        elif frame.kind is Kind.DONE and "norms" in frame.body:
            self._add_norms(frame.body["norms"])
        elif frame.kind is Kind.DONE and "answers" in frame.body:
            self._answered(frame.body["answers"])
        elif frame.kind is Kind.DONE:
            self._part_written(frame.body)

    # --- the model --------------------------------------------------------------------------------

    def _on_offer(self, connection: Connection, frame: Frame) -> None:
        if frame.payload_bytes:
            self._begin_adoption(self._adoption.take_weights(connection, frame))
        else:
            self._adoption.offered(rank_of(connection), connection, frame)
            self._gate_since = self._gate_since or time.monotonic()
            self._try_answer()
            self._try_adopt()

    def _try_adopt(self) -> None:
        if len(self._followers) == self.config.servers - 1 and self._adoption.ask_for_weights():
            assert self._adoption.model is not None
            self._begin_adoption(Region.create(self._adoption.model.layout.nbytes))

    def _begin_adoption(self, region: Region) -> None:
        """Take the model and hand it to the other servers."""
        model, saved = self._adoption.model, self._adoption.checkpoint
        assert model is not None
        self._lead.book = self._make_book(model.data)
        if self.mode.by_epoch:
            self._begin_descent(model.spec.groups[0])
        self._adopt(model.layout, model.spec, region)
        if saved is not None:
            self._lead.restore(saved.meta["lead"])
            self._last_saved = self._lead.version
            book = state_book(saved, optimizer=not self.mode.serverless)
            self._shard.restore(book, vectors=self.mode.by_epoch)
            # Until workers send newer ones, the next checkpoint keeps what this one has of them.
            for rank in range(self.config.workers):
                if kept := worker_state(saved, rank):
                    self._states[f"worker-{rank}.safetensors"] = kept
        self._adopting = set(self._followers)
        message = {
            "layout": model.layout.to_json(),
            "optimizer": model.spec.to_json(),
            "checkpoint": None if saved is None else str(saved.path),
        }
        assert self._base is not None
        shards = partition(model.layout, self.config.servers)
        for rank, link in self._followers.items():
            if link.local:
                link.send(Kind.ADOPT, message, descriptors=[region.fd])
            else:
                pieces = [bytes_of(self._base[s.start : s.stop]) for s in shards[rank]]
                link.send(Kind.ADOPT, message, pieces)
        self._try_answer()

    def _begin_descent(self, settings: dict[str, Any]) -> None:
        """Sandblaster: the settings are L-BFGS's."""
        self._lead.descent = Descent.of(settings)
        if "instead_of" in settings:
            self._say_once(
                f"in mode {self.mode} the servers step by L-BFGS with lr {settings['lr']:g}; nothing of the "
                f"script's {settings['instead_of']} is used, neither learning rate nor weight decay. Give "
                "the script torch.optim.LBFGS to choose L-BFGS's settings."
            )

    def _make_book(self, data: dict[str, Any] | None) -> LeaseBook | None:
        if data is None or "samples" not in data:
            return None
        samples = field(data, "samples", int)
        if samples < self.config.workers:
            raise PlanError(
                f"{self.config.workers} workers but only {samples} samples: every worker needs at least one. "
                "Use fewer --workers or more data."
            )
        return LeaseBook(
            samples=samples,
            batch_size=field(data, "batch_size", int),
            drop_last=field(data, "drop_last", bool),
            by_round=self.mode.by_round,
            duplicate=self.mode.by_epoch,
        )

    def _try_answer(self) -> None:
        """Once all servers have the model nobody else may write to it, and workers may come."""
        if self._adopting is None or self._adopting:
            return
        assert self._region is not None
        if not self.mode.needs_memory:
            self._region.seal_writes()
        self._adoption.answer(
            self._region,
            epoch=self._lead.epoch,
            share=self.mode.in_place or self.mode.needs_memory or self.mode.switchable,
            mode=str(self.mode),
            first=self._gate is not None,
        )

    # --- workers ----------------------------------------------------------------------------------

    def _on_attach(self, connection: Connection, frame: Frame) -> None:
        peer = self._attach(connection, frame)
        if "listens" in frame.body:
            self._listens[peer.worker] = frame.body["listens"]
        if self._gate is None:
            self._let_in([peer])
            return
        # The first step waits until all planned workers are here, so that a run is repeatable.
        self._gate.add(peer.worker)
        self._gate_since = self._gate_since or time.monotonic()
        if len(self._gate) == self.config.workers:
            self._gate = None
            self._let_in([self._peers[rank] for rank in sorted(self._peers)])

    def _let_in(self, peers: list[WorkerPeer]) -> None:
        for peer in peers:
            self._act(self._lead.join(peer.worker, peer.incarnation))
        self._current = self._lead.version
        for peer in peers:
            facts: dict[str, Any] = {"version": self._lead.version, "mode": str(self.mode)}
            if self.config.groups:
                facts["group"] = self._listens.get(self._lead.root_of(peer.worker))
            self._announce_cut(peer.worker, facts)
            self._welcome(peer, **facts)

    def _on_push(self, connection: Connection, frame: Frame) -> None:
        peer, body = self._peer(connection), frame.body
        push = Push(
            id=self._receive_push(peer, body),
            read_version=field(body, "read_version", int),
            samples=field(body, "samples", int, 0),
            leases=tuple(field(body, "leases", list, [])),
            void=field(body, "void", bool, False),
        )
        peer.residual = field(body, "residual", float, peer.residual)
        if "refused" in body:
            self._lead.refuse(peer.worker, field(body, "refused", list))
        if field(body, "carries", str, "slot") == "parameters":
            self._take_parameters(peer)
        if push.void:
            log.warning("%s pushed NaN or Inf at step %s: refused", peer.name, push.id.sequence + 1)
        self._acting = peer.worker
        if self._lead.descent is not None:
            self._unsaved = True  # it is in a sum, which has no version of its own
            if peer.settings is not None:
                self._lead.descent.driver.lr = float(peer.settings[0]["lr"])
        self._held_since[peer.worker] = time.monotonic()
        self._act(self._lead.push(push))
        if self._lead.sick:
            self._quarantine()

    def _take_parameters(self, peer: WorkerPeer) -> None:
        """allreduce: the root has made its step, and waits."""
        if not self.mode.serverless:
            raise FrameError(f"{peer.name} pushed parameters, and in mode {self.mode} servers have their own")
        assert peer.copy is not None
        self._shard.assign(peer.copy if isinstance(peer, ShmPeer) else peer.gradients.flat)
        self._current = self._lead.version + 1

    def _on_assign(self, connection: Connection, frame: Frame) -> None:
        peer = self._peer(connection)
        push = self._receive_push(peer, frame.body)
        self._unsaved = True
        self._current = self._lead.version
        self._held_since[peer.worker] = time.monotonic()
        self._acting = peer.worker
        self._act(self._lead.assign(push))

    def _on_pull(self, connection: Connection, frame: Frame) -> None:
        self._act([["admit", self._peer(connection).worker, self._lead.version, "fetch"]])

    def _on_take(self, connection: Connection, frame: Frame) -> None:
        peer, body = self._peer(connection), frame.body
        if self._adoption.model is None or self._adoption.model.data is None:
            raise FrameError("leases of a run without a prepared loader")
        self._acting = peer.worker
        self._lead.give_back(peer.worker, field(body, "give_back", list, []))
        self._lead.carry(peer.worker, field(body, "carry", list, []))
        epoch = field(body, "epoch", int)
        leases, steps = self._lead.take(
            peer.worker,
            epoch,
            min(_LEASES_AT_ONCE, max(0, field(body, "limit", int))),
            wait=field(body, "wait", bool),
        )
        if leases is None:
            self._held_since[peer.worker] = time.monotonic()
        else:
            self._grant(peer, leases, over=self._lead.over(epoch))
        self._act(steps)

    def _grant(self, peer: WorkerPeer, leases: tuple[Lease, ...], *, over: bool) -> None:
        body: dict[str, Any] = {
            "leases": [[lease.id, list(lease.ranges)] for lease in leases],
            "over": over,
            "version": self._lead.version,
        }
        self._released(peer.worker, body)
        self._flag(peer.worker, body)
        with contextlib.suppress(LinkError):
            peer.connection.send(Kind.GRANT, body)

    def _on_saved(self, connection: Connection, frame: Frame) -> None:
        rank = rank_of(connection)
        blob = connection.read_blob(frame, MAX_STATE_BYTES)
        self._states[f"worker-{rank}.safetensors"] = read_blob(blob, f"what worker:{rank} saved")
        self._cuts[rank] = field(frame.body, "cut", int, 0)
        if self._saver is None or rank not in self._saver.waits_for:
            self._unsaved = True  # unasked: the worker's end
        else:
            self._saver.worker_saved(rank)

    def _worker_left(self, peer: WorkerPeer, *, finished: bool) -> None:
        self._held_since.pop(peer.worker, None)
        self._acting = -1
        self._save_flags.discard(peer.worker)
        self._leaving.discard(peer.worker)
        if peer.residual and not finished:
            self._say_once(
                f"{peer.name} is gone, and with it a gradient of L2 norm {peer.residual:.3g} that "
                "compression had held back until later pushes"
            )
        super()._worker_left(peer, finished=finished)
        if self._gate is not None:
            self._gate.discard(peer.worker)
        else:
            self._act(self._lead.leave(peer.worker, peer.incarnation, finished=finished))
        if self._saver is not None:
            self._saver.worker_saved(peer.worker)
        elif self._save_at_next and not self._lead.machine.active:
            self._save_now()  # no round will end any more

    # --- the order --------------------------------------------------------------------------------

    def _act(self, steps: Steps) -> None:
        """Make steps part of the order, then answer whoever waits for leases."""
        self._order(steps)
        while True:
            answers, more = self._lead.granted(_LEASES_AT_ONCE)
            if not answers and not more:
                return
            self._order(more)
            for worker, leases, over in answers:
                if worker in self._peers:
                    self._grant(self._peers[worker], leases, over=over)

    def _quarantine(self) -> None:
        sick, self._lead.sick = self._lead.sick, []
        for worker in sick:
            self._replace(
                worker,
                f"worker:{worker} pushed NaN or Inf {QUARANTINE} times in a row while other workers did not: "
                "something is wrong with its process, its data or its device",
            )

    def _order(self, steps: Steps) -> None:
        """Forward steps to the followers, then execute them."""
        if not steps:
            return
        if self._norms_due:  # an update is half done: what follows in the order waits for its commit
            self._after_norms += steps
            return
        applies = [i for i, step in enumerate(steps) if step[0] in ("apply", "vectors")]
        if applies and self._save_is_due():
            at = applies[-1] + 1
            steps = [*steps[:at], *self._begin_save(), *steps[at:]]
        for i, step in enumerate(steps):
            if step[0] in ("reduce", "ask"):
                self._norms_due = self.config.servers
                steps, self._after_norms = steps[: i + 1], steps[i + 1 :]
                break
        self._forward(steps)
        self._orders.extend(steps)
        self._advance()
        if self._lead.descent is not None and self._lead.descent.news:
            self._say_once(self._lead.descent.news)

    def _forward(self, steps: Steps) -> None:
        for link in self._followers.values():
            with contextlib.suppress(LinkError):  # on_end says so
                link.send(Kind.ORDER, {"steps": steps})

    def _change_mode(self, text: str) -> None:
        super()._change_mode(text)
        self._untold = set(self._peers)
        self._tell_mode()

    def _admit_body(self, worker: int, version: int) -> dict[str, Any]:
        body = super()._admit_body(worker, version)
        self._released(worker, body)
        self._flag(worker, body)
        self._announce_cut(worker, body)
        return body

    def _released(self, worker: int, body: dict[str, Any]) -> None:
        """A worker is answered: if somebody else's message brought it about, it has waited for that one."""
        since = self._held_since.pop(worker, None)
        if since is not None and self._acting not in (-1, worker):
            body["on"], body["held"] = self._acting, round(time.monotonic() - since, 6)

    def _refused(self, worker: int) -> None:
        self._lead.spoiled(worker)

    def _reduced(self, norms: list[tuple[int, float]]) -> None:
        self._add_norms(norms)

    def _add_norms(self, norms: list[Any]) -> None:
        self._norms.update({int(i): float(x) for i, x in norms})
        self._norms_due -= 1
        if self._norms_due:
            return
        assert self.config.clip_norm is not None
        norm = sum(self._norms[i] for i in sorted(self._norms)) ** 0.5
        self._norms.clear()
        held, self._after_norms = self._after_norms, []
        # torch.nn.utils.clip_grad_norm_'s formula
        steps: Steps = [["commit", min(1.0, self.config.clip_norm / (norm + 1e-6))]]
        if self._save_is_due() and not any(step[0] == "reduce" for step in held):
            steps += self._begin_save()
        self._order([*steps, *held])

    def _answered(self, answers: list[Answer]) -> None:
        self._answers.append(answers)
        self._norms_due -= 1
        if self._norms_due:
            return
        parts, self._answers = self._answers, []
        held, self._after_norms = self._after_norms, []
        self._act([*self._lead.answered(parts), *held])

    # --- checkpoints ------------------------------------------------------------------------------

    def _save_is_due(self) -> bool:
        if self.mode.serverless:
            return self._lead.version == self._announced
        return self._save_at_next or self._is_periodic(self._lead.version)

    def _is_periodic(self, version: int) -> bool:
        return self.config.checkpoint_every > 0 and version % self.config.checkpoint_every == 0

    def _announce_cut(self, worker: int, body: dict[str, Any]) -> None:
        """allreduce: tell the root that the version which it makes next is to be kept. It then sends its
        parameters along, and tells its group, so that all parts are of one moment."""
        due = self._save_at_next or self._is_periodic(self._lead.version + 1)
        if self.mode.serverless and self._lead.speaks(worker) and self._saver is None and due:
            self._announced = self._lead.version + 1
            body["cut"] = True

    def _save_now(self) -> None:
        """The controller wants a checkpoint, soon."""
        self._hurry_at = self._hurry_at or time.monotonic() + _HURRY_S
        if self.shard is None:
            self._report({"checkpoint": None, "reason": "there is no model yet"})
        elif self._saver is not None:
            self._save_again = self._unsaved or self._saver.version < self._lead.version
        elif self._last_saved == self._lead.version and not self._unsaved:
            self._report({"checkpoint": "kept", "version": self._last_saved})
        elif (self.mode.by_round and self._lead.machine.active) or self._norms_due or not self._is_current():
            # Between two rounds every worker is between two batches, and a resume is bitwise.
            self._save_at_next = True
        else:
            self._order(self._begin_save())

    def _is_current(self) -> bool:
        """Whether our parameters are those of the present version. In allreduce they often are not."""
        return not self.mode.serverless or self._current == self._lead.version

    def _hurry(self) -> None:
        """A checkpoint was asked for and somebody takes his time: cut it here, commit what there is."""
        self._hurry_at = None
        if self._save_at_next and not self._norms_due and self._is_current():
            self._order(self._begin_save())
        if self._saver is not None:
            self._saver.stop_waiting()

    def _begin_save(self) -> Steps:
        """The step that cuts a checkpoint here; none if the one before is still being written."""
        if self._saver is not None:
            log.warning("checkpoint %s skipped: the one before is not finished", self._lead.version)
            return []
        self._save_at_next = self._unsaved = False
        self._write_pushes()  # who goes back to this checkpoint finds the record of all that is in it
        workers = {w for w in self._peers if self._lead.root_of(w) in self._lead.machine.members}
        if self.mode.serverless:  # they send their parts by themselves
            workers = {w for w in workers if self._cuts.get(w) != self._lead.version}
        try:
            self._saver = Saver(
                Path(self.config.run_dir) / "checkpoints",
                self._lead.version,
                parts=self.config.servers,
                workers=workers,
                keep=self.config.keep_checkpoints,
                post=lambda result: self._hub.post(lambda: self._saved(result)),
            )
        except CheckpointError as error:
            self._saved(error)
            return []
        # The root of a group tells the others.
        asked = set() if self.mode.serverless else {w for w in workers if self._lead.speaks(w)}
        self._save_flags = asked
        self._saver.attach_states(self._small_parts)
        model = self._adoption.model
        assert model is not None
        self._saver.describe(
            {
                "layout": model.layout.to_json(),
                "optimizer": model.spec.to_json(),
                "state_keys": model.state_keys,
                "data": model.data,
                "lead": self._lead.snapshot(),
                "servers": self.config.servers,
                "workers": self.config.workers,
            }
        )
        return [["checkpoint", self._lead.version, str(self._saver.directory)]]

    def _small_parts(self) -> dict[str, dict[str, Tensor]]:
        extras = self._adoption.extras
        return {**self._states, **({"extras.safetensors": extras} if extras else {})}

    def _flag(self, worker: int, body: dict[str, Any]) -> None:
        """With a reply it gets anyway, ask a worker for its part of the checkpoint in the making, and tell
        it of a new mode."""
        if worker in self._leaving:
            body["leave"] = True
        if worker in self._untold:
            self._untold.discard(worker)
            body["mode"] = str(self.mode)
        if worker in self._save_flags and self._saver is not None:
            self._save_flags.discard(worker)
            body["save"] = self._saver.version

    def _part_written(self, body: dict[str, Any]) -> None:
        if self._saver is None or body["directory"] != str(self._saver.directory):
            return  # of one that failed meanwhile
        if "failed" in body:
            self._saver.part_written(CheckpointError(body["failed"]))
        else:
            self._saver.part_written(FileInfo(name=body["name"], sha256=body["sha256"], bytes=body["bytes"]))

    def _saved(self, result: Path | CheckpointError) -> None:
        """A checkpoint is complete, or failed."""
        body: dict[str, Any]
        if isinstance(result, CheckpointError):
            log.error("checkpoint failed: %s", result)
            body = {"checkpoint": None, "reason": str(result)}
        else:
            assert self._saver is not None
            self._last_saved = self._saver.version
            log.info("checkpoint %s", result.name)
            body = {"checkpoint": str(result), "version": self._saver.version}
        self._saver = None
        self._save_flags.clear()
        again, self._save_again = self._save_again, False
        if again:
            self._save_now()
        else:
            self._hurry_at = None
            self._report(body)

    def _report(self, body: dict[str, Any]) -> None:
        """What became of a checkpoint; `asked`: it is the answer to the controller's wish for one."""
        asked, self._asked = self._asked, False
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, self._stats())
            self._controller.send(Kind.STATS, {**body, "asked": asked})

    # --- watching ---------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        super()._tick(now)
        if now - self._last_stats < TICK_S:
            return
        self._last_stats = now
        self._write_pushes()
        self._check_deadline(now)
        if self._hurry_at is not None and now > self._hurry_at:
            self._hurry()
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, self._stats())

    def _stats(self) -> dict[str, Any]:
        totals = self._lead.totals
        return {
            "version": self._lead.version,
            "epoch": self._lead.epoch,
            "samples": totals.samples,
            "pushes": totals.pushes,
            "dropped": totals.dropped,
            "refused": totals.refused,
            "lost": self.lost,
            "update_s": round(self.update_s, 6),
            "staleness": {str(k): totals.staleness[k] for k in sorted(totals.staleness)[:64]},
            "clocks": {str(k): v for k, v in self._lead.machine.clocks.items()},
            "data": self._adoption.model.data if self._adoption.model else None,
            "leases": self._lead.book.accounts()[-100:] if self._lead.book else [],
            "parameters": self.layout.numel if self.layout else 0,
        }

    def _write_pushes(self) -> None:
        lines = [
            f"{r.version + 1},{r.push.id.worker},{r.push.id.incarnation},{r.push.id.sequence},"
            f"{r.push.read_version},{r.staleness},{r.push.samples}\n"
            for r in self._lead.applied
        ]
        self._lead.applied.clear()
        try:
            self._pushes.write("".join(lines).encode())
        except OSError as error:
            self._say_once(
                f"pushes.csv in {self.config.run_dir} cannot be written: {error.strerror or error}. Training "
                "goes on, but this record has gaps: make room there, or use another --run-dir next time."
            )

    def _say_once(self, text: str) -> None:
        """Tell the user something that training does not stop for."""
        if text not in self._said:
            self._said.add(text)
            log.warning("%s", text)
            with contextlib.suppress(LinkError):
                self._controller.send(Kind.STATS, {"note": text})

    def _check_deadline(self, now: float) -> None:
        """Nobody waits for ever, and the error names who is missing."""
        limit = self.config.deadline_s
        advice = f"the deadline is {limit:g} s (--deadline)"
        if self._gate is not None and self._gate_since and now - self._gate_since > limit:
            missing = sorted(set(range(self.config.workers)) - self._gate - self._adoption.waiting)
            who = ", ".join(f"worker:{r}" for r in missing)
            self._fail(DeadlineError(f"{who} did not reach paceline.prepare() while others wait; {advice}."))
        for worker, since in self._held_since.items():
            if now - since > limit:
                blockers = self._blockers(worker)
                who = ", ".join(f"worker:{b}" for b in sorted(blockers))
                text = (
                    f"worker:{worker} has waited {now - since:.0f} s at version {self._lead.version} "
                    f"for {who or 'a server'}; {advice}. Look at its log, or raise the deadline if a "
                    "step may take this long."
                )
                if not blockers:
                    self._fail(DeadlineError(text))
                    return
                for blocker in blockers:
                    self._replace(blocker, f"DeadlineError: {text}")
                # Who waits, waits anew: for those that come instead.
                self._held_since = dict.fromkeys(self._held_since, now)
                return

    def _replace(self, worker: int, reason: str) -> None:
        """Have the controller put another process in a worker's place. This one can write no more then."""
        peer = self._peers.get(worker)
        body = {
            "replace": worker,
            "incarnation": peer.incarnation if peer is not None else None,
            "reason": reason,
        }
        log.warning("%s", reason)
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, body)

    def _blockers(self, worker: int) -> set[int]:
        waits_for = self._lead.machine.waiting.get(worker, set()) | self._lead.missing_assigns
        if not waits_for and self._lead.book:
            waits_for = set(self._lead.book.outstanding)
        # What nobody holds, somebody has still to take or to read to its end.
        waits_for = waits_for - {worker} or self._lead.machine.members - self._held_since.keys()
        return waits_for - {worker}


def serve(config: ServerConfig, secret: bytes, controller: LastingLink) -> None:
    """Be a server in this process until the controller stops it."""
    if config.import_from is not None:
        sys.path.insert(0, config.import_from)
    torch.set_num_threads(1)  # the shard has its own threads
    torch.set_grad_enabled(False)
    kind = LeadServer if config.rank == 0 else Server
    kind(config, secret, controller).run()


_PUSHES = "version,worker,incarnation,sequence,read_version,staleness,samples\n"


def _open_pushes(path: Path, applied: int) -> IO[bytes]:
    """The record of every applied push. Unbuffered: what a full disk refuses is not kept in memory.

    Args:
        applied: how many the run goes on from: what came after them is undone, and no part of the record.
    """
    kept: list[str] = []
    with contextlib.suppress(OSError):
        kept = path.read_text().splitlines(keepends=True)[1 : 1 + applied]
    write_text_atomically(path, "".join([_PUSHES, *kept]))
    return path.open("ab", buffering=0)
