"""What prepare() talks to: the run this process is a worker of, or nobody.

A script that runs alone gets a Session too: it draws the same batches and uses the same optimizer kernels
as a run with one worker, so that both give bitwise the same result.
"""

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from paceline.comm import Connection, Kind
from paceline.data.leases import LeaseBook
from paceline.exceptions import LinkError, UsageError
from paceline.params import (
    Layout,
    OptimizerSpec,
    StateBook,
    bind,
    describe,
    settings_of,
    tensor_views,
)
from paceline.worker.client import Client, Grant
from paceline.worker.gradients import GradientMemory
from paceline.worker.loader import LeasedLoader, StreamLoader, data_facts, lease_loader
from paceline.worker.optimizer import make_exchanging, pack_state
from paceline.worker.state import (
    capture,
    epoch_of,
    extras_of,
    load_extras,
    restore_rng,
    restore_schedulers,
)

__all__ = [
    "AloneSession",
    "Prepared",
    "RunSession",
    "Session",
    "current_session",
    "enter_session",
]

LOG_S = 0.1
STATS_S = 0.5
"""How often a worker tells the controller how it does."""


class Session:
    """What a script sees of the run it is part of."""

    rank = 0
    world_size = 1
    prepared = False

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        """See `paceline.prepare`."""
        raise NotImplementedError

    def log(self, metrics: dict[str, float]) -> None:
        """Show metrics in the progress display and keep them in the run directory."""

    def assign(self) -> None:
        """Make the servers take over the model's present parameters."""


class Prepared:
    """The arguments of prepare(), sorted."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self.models = [o for o in objects if isinstance(o, nn.Module)]
        self.optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
        self.loaders = [o for o in objects if isinstance(o, DataLoader)]
        self.schedulers = [o for o in objects if isinstance(o, LRScheduler | ReduceLROnPlateau)]
        sorted_out = [*self.models, *self.optimizers, *self.loaders, *self.schedulers]
        for o in objects:
            if not any(o is s for s in sorted_out):
                raise UsageError(
                    f"prepare() got a {type(o).__name__}; it takes a torch model, its optimizer, the "
                    "training DataLoader, and learning-rate schedulers."
                )
        if len(self.models) != 1 or len(self.optimizers) != 1 or len(self.loaders) > 1:
            raise UsageError(
                f"prepare() got {len(self.models)} models, {len(self.optimizers)} optimizers and "
                f"{len(self.loaders)} loaders; it takes one model, one optimizer and at most one loader (the "
                "training data; evaluation data needs no preparing)."
            )
        self.model: nn.Module = self.models[0]
        self.optimizer: torch.optim.Optimizer = self.optimizers[0]
        self.loader: DataLoader[Any] | None = self.loaders[0] if self.loaders else None

    def give_back(self, objects: Sequence[Any], loader: Any) -> list[Any]:
        return [loader if o is self.loader and loader is not None else o for o in objects]


class AloneSession(Session):
    """`python train.py`: one process, no servers."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        if self.prepared:
            raise UsageError("prepare() was called twice in one script; prepare everything in one call.")
        got = Prepared(objects)
        self.prepared = True
        _use_fused(got.optimizer)
        loader: LeasedLoader | StreamLoader | None = None
        if got.loader is not None:
            facts = data_facts(got.loader)
            source = _AloneSource(facts)
            loader = lease_loader(got.loader, source, seed=self._seed, rank=0, world_size=1)
        _offer_no_sync(got.model)
        return got.give_back(objects, loader)


def _use_fused(optimizer: torch.optim.Optimizer) -> None:
    """Servers use torch's fused kernels; alone we do too, so that the results are the same bits."""
    if "fused" not in inspect.signature(type(optimizer)).parameters:
        return
    for group in optimizer.param_groups:
        if group.get("fused") is None and not group.get("foreach") and not group.get("differentiable"):
            group.update(fused=True, foreach=False)


class _AloneSource:
    """Leases for a script that runs alone."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._book: LeaseBook | None = None
        self._epoch = 0
        if "samples" in facts:
            self._book = LeaseBook(by_round=True, **facts)
            self._book.joined(0)

    def take(self, epoch: int, limit: int, *, wait: bool, give_back: Sequence[int]) -> Grant:
        if self._book is None:
            self._epoch = max(self._epoch, epoch + wait)
            return Grant([], self._epoch > epoch, False)
        self._book.give_back(0, give_back)
        leases = self._book.take(0, epoch, limit)
        if not leases and wait:
            self._book.turn_if_over({0})
            leases = self._book.take(0, epoch, limit)
        self._book.finish(0, [lease.id for lease in leases])
        found = [(lease.id, list(lease.ranges)) for lease in leases]
        return Grant(found, self._book.done(epoch), False)

    def used(self, lease: int | None, samples: int) -> None:
        pass

    def entering(self, epoch: int) -> None:
        pass

    def entered(self, epoch: int) -> None:
        pass

    def back(self) -> None:
        pass


class RunSession(Session):
    """A worker of a run."""

    def __init__(
        self,
        *,
        reach_servers: Callable[[], Client],
        controller: Connection,
        rank: int,
        world_size: int,
        servers: int,
        seed: int,
        optimizers: Sequence[str],
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._reach_servers = reach_servers
        self._controller = controller
        self._servers = servers
        self._seed = seed
        self._optimizers = tuple(optimizers)
        self._leases: list[int] = []
        self._samples = 0
        self._resume: dict[str, Tensor] = {}
        self._skipping: int | None = None
        self._replaying = False
        self._owes_save = False
        self._epoch = -1
        self._clock = 0
        self._wait_s = 0.0
        self._started = self._last_stats = time.monotonic()
        self._metrics: dict[str, float] = {}
        self._logged = 0.0

    # --- prepare ----------------------------------------------------------------------------------

    def prepare(self, objects: Sequence[Any]) -> list[Any]:
        """Offer the model, join the run, and make the objects work with it."""
        if self.prepared:
            raise UsageError("prepare() was called twice in one run; prepare everything in one call.")
        got = Prepared(objects)
        self._model, self._optimizer, self._schedulers = got.model, got.optimizer, got.schedulers
        spec = OptimizerSpec.of(got.optimizer, self._optimizers)
        layout, parameters = describe(
            got.model, got.optimizer, servers=self._servers, whole_tensors=spec.whole_tensors
        )
        self._layout, self._parameters = layout, parameters
        self._frozen = _frozen_of(got.model, got.optimizer)
        self._trained = {t.name for t in layout.tensors} | {alias for alias, _ in layout.aliases}
        data = data_facts(got.loader) if got.loader is not None else None
        keys = [k for k, v in got.model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)]
        self._client = self._reach_servers()
        adopted = self._client.offer(layout, spec, data, keys, self._weights)
        extras = {k: v for k, v in adopted.tensors.items() if not k.startswith(("rng:", "user:"))}
        load_extras(got.model, extras, self._trained)
        # What the script loads until it is in an epoch of its own is older than what the run has.
        self._replaying = adopted.resumed or self._client.incarnation > 0
        if adopted.resumed:
            self._resume = adopted.tensors
            self._skipping = adopted.epoch
            for scheduler in got.schedulers:
                self._quieten(scheduler)
        self._take_memory(layout, parameters)
        self._sent_settings: list[Any] = []
        make_exchanging(got.optimizer, self)
        _offer_no_sync(got.model)

        def loaded(module: nn.Module, keys: Any) -> None:
            if module is got.model:  # and not a copy of it (an average, say)
                self.assign()

        got.model.register_load_state_dict_post_hook(loaded)
        self.prepared = True
        loader = None
        if got.loader is not None:
            loader = lease_loader(
                got.loader, self, seed=self._seed, rank=self.rank, world_size=self.world_size
            )
        return got.give_back(objects, loader)

    def _weights(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Worker 0's initial weights, as the bytes of the whole space; and the rest of its model."""
        base = torch.zeros(self._layout.nbytes, dtype=torch.uint8)
        with torch.no_grad():
            for p, view in zip(self._parameters, tensor_views(base, self._layout), strict=True):
                view.copy_(p)
        return base, extras_of(self._model, self._trained)

    def _take_memory(self, layout: Layout, parameters: list[nn.Parameter]) -> None:
        """Join, and let parameters and gradients be views of the memory shared with the servers."""
        device = parameters[0].device
        on_host = device.type == "cpu"
        self._slot, self._fresh = self._client.attach(in_place=on_host)
        if on_host:
            self._near_slot, self._near = self._slot, self._fresh
        else:  # the servers' memory is on the host: keep flat mirrors on the device
            self._near_slot = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
            self._near = self._fresh.to(device)
            _pin(self._slot)
            _pin(self._fresh)
        bind(parameters, tensor_views(self._near, layout))
        self._gradients = GradientMemory(parameters, tensor_views(self._near_slot, layout))
        self._versions = _whereabouts(parameters)

    # --- the optimizer's side ---------------------------------------------------------------------

    def step(self) -> None:
        """One exchange: what optimizer.step() does."""
        self.back()
        self._check_untouched()
        self._replaying = False
        missing, finite = self._gradients.collect()
        body: dict[str, Any] = {"samples": self._samples, "leases": self._leases}
        if self._settings_changed():
            body["settings"] = _without_kernel_choice(settings_of(self._optimizer))
        if missing:
            body["missing"] = missing
        if not finite:
            body["void"] = True
        self._leases, self._samples = [], 0
        self._to_host()
        before = time.perf_counter()
        save_wanted = self._client.exchange(**body)
        now = time.perf_counter()
        self._wait_s += now - before
        self._from_host()
        self._clock += 1
        # Its part of a checkpoint is due between two batches: what the script still does after this step
        # (a scheduler's step, say) belongs to it.
        self._owes_save = save_wanted
        if time.monotonic() - self._last_stats > STATS_S:
            self._send_metrics()
            self._report()
            self._check_memory()

    def _settings_changed(self) -> bool:
        """Whether a setting differs from what was sent last. Every step asks, so it must be cheap."""
        values = [[v for k, v in g.items() if k != "params"] for g in self._optimizer.param_groups]
        if any(isinstance(v, Tensor) for group in values for v in group):
            values = [list(g.values()) for g in settings_of(self._optimizer)]
        if values == self._sent_settings:
            return False
        self._sent_settings = values
        return True

    def _to_host(self) -> None:
        if self._near_slot is not self._slot:
            self._slot.copy_(self._near_slot)

    def _from_host(self) -> None:
        if self._near is not self._fresh:
            self._near.copy_(self._fresh)

    def _check_untouched(self) -> None:
        """Writing into parameters behind the servers' back would be lost: say so."""
        for name, p in self._frozen:
            if p.grad is not None:
                raise UsageError(
                    f"parameter {name!r} got a gradient, but had requires_grad=False at prepare(), so the "
                    "servers do not hold it. Let it require a gradient before prepare(); to train it later "
                    "only, set its grad to None until then."
                )
        versions = _whereabouts(self._parameters)
        if versions == self._versions:
            return
        i = next(i for i, (a, b) in enumerate(zip(versions, self._versions, strict=True)) if a != b)
        raise UsageError(
            f"parameter {self._layout.tensors[i].name!r} was changed after prepare(). The servers own the "
            "parameters, so the change would be lost: call paceline.assign() right after it (on every "
            "worker), or change it before prepare()."
        )

    def _check_memory(self) -> None:
        """What no version counter sees (`p.data.clamp_()`), the kernel does. Looked at now and then."""
        if self._client.private_pages():
            raise UsageError(
                "a parameter was written to through .data or .numpy() after prepare(). The servers own the "
                "parameters, so the change would be lost: call paceline.assign() right after it (on every "
                "worker), or change it before prepare()."
            )

    def assign(self) -> None:
        """Make the servers take over the model's present parameters."""
        if self._replaying:
            self._client.exchange(Kind.PULL)
        else:
            with torch.no_grad():
                views = tensor_views(self._near_slot, self._layout)
                for p, view in zip(self._parameters, views, strict=True):
                    view.copy_(p)
            self._to_host()
            self._client.exchange(Kind.ASSIGN)
        self._client.forget_private_writes()
        self._from_host()
        bind(self._parameters, tensor_views(self._near, self._layout))
        self._versions = _whereabouts(self._parameters)
        self._gradients.overwritten()

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state_dict, with the state from the servers."""
        book = StateBook(self._client.optimizer_state())
        names = self._names_in_optimizer_order()
        infos = {t.name: t for t in self._layout.tensors}
        state: dict[int, dict[str, Any]] = {}
        for index, name in enumerate(names):
            if name not in infos:
                continue
            info = infos[name]
            kept: dict[str, Any] = {}
            for what in book.kinds(name):
                value = book.piece(name, what, 0, info.numel)
                assert value is not None
                if what[-2:] in ("#i", "#f"):
                    kept[what[:-2]] = int(value) if what.endswith("#i") else float(value)
                elif value.numel() == info.numel and value.dim():
                    kept[what] = value.reshape(-1).as_strided(info.shape, info.stride).clone()
                else:
                    kept[what] = value.clone()
            if kept:
                state[index] = kept
        groups, start = [], 0
        for group in self._optimizer.param_groups:
            count = len(group["params"])
            packed = {k: v for k, v in group.items() if k != "params"}
            groups.append({**packed, "params": list(range(start, start + count))})
            start += count
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Give the servers an optimizer state_dict."""
        if self._replaying:
            return
        names = self._names_in_optimizer_order()
        if sum(len(g["params"]) for g in state["param_groups"]) != len(names):
            raise UsageError(
                f"the optimizer state has {sum(len(g['params']) for g in state['param_groups'])} parameters, "
                f"this optimizer has {len(names)}."
            )
        infos = {t.name: t for t in self._layout.tensors}
        self._client.load_optimizer_state(pack_state(state, [infos.get(name) for name in names]))
        for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})
        self._sent_settings = []

    def _names_in_optimizer_order(self) -> list[str]:
        names = {id(p): n for n, p in self._model.named_parameters()}
        return [names[id(p)] for g in self._optimizer.param_groups for p in g["params"]]

    # --- the loader's side ------------------------------------------------------------------------

    def take(self, epoch: int, limit: int, *, wait: bool, give_back: Sequence[int]) -> Grant:
        """Leases from the lead server."""
        self.back()
        before = time.perf_counter()
        # The end of its epoch: batches that got no step yet (accumulation) must not hold it up.
        carry = self._leases if wait else ()
        grant = self._client.take(epoch, limit, wait=wait, give_back=give_back, carry=carry)
        if wait:
            self._wait_s += time.perf_counter() - before
        if grant.save:
            self._save()
        return grant

    def used(self, lease: int | None, samples: int) -> None:
        """The script got a batch."""
        if lease is not None:
            self._leases.append(lease)
        self._samples += samples

    def entering(self, epoch: int) -> None:
        """After a resume from between two epochs: all is put back before the epoch is begun."""
        if epoch_of(self._resume) != epoch:
            self._go_on(epoch)

    def entered(self, epoch: int) -> None:
        """After a resume: from this batch on everything is as it was at the checkpoint."""
        self._go_on(epoch)
        self._epoch = epoch

    def _go_on(self, epoch: int) -> None:
        if self._skipping is None or epoch < self._skipping:
            return
        self._skipping = None
        restore_schedulers(self._resume, self._schedulers, self._optimizer)
        restore_rng(self._resume)
        self._resume = {}

    def back(self) -> None:
        """The script is between two batches."""
        if self._owes_save:
            self._save()

    def _quieten(self, scheduler: Any) -> None:
        """A prepared scheduler is put where it was; what the skipped epochs do to it must not count."""
        step = scheduler.step

        def unless_skipping(*args: Any, **kwargs: Any) -> None:
            if self._skipping is None:
                step(*args, **kwargs)

        scheduler.step = unless_skipping

    # --- the run's side ---------------------------------------------------------------------------

    def _save(self) -> None:
        self._owes_save = False
        self._client.save(
            capture(
                self._model,
                self._trained,
                self._schedulers,
                self._optimizer,
                self._epoch,
                with_frozen=self.rank == 0,
            )
        )

    def log(self, metrics: dict[str, float]) -> None:
        """Show metrics in the progress display and keep them in the run directory."""
        self._metrics.update({str(k): float(v) for k, v in metrics.items()})
        if time.monotonic() - self._logged > LOG_S:
            self._send_metrics()

    def _send_metrics(self) -> None:
        """A fast loop logs more often than anybody reads: send the latest now and then."""
        self._logged = time.monotonic()
        if not self._metrics:
            return
        body = {"log": _json_safe(self._metrics), "clock": self._clock}
        self._metrics = {}
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, body)

    def _report(self) -> None:
        self._last_stats = time.monotonic()
        elapsed = self._last_stats - self._started
        body = {
            "clock": self._clock,
            "wait_s": round(self._wait_s, 6),
            "step_s": round(elapsed - self._wait_s, 6),
        }
        with contextlib.suppress(LinkError):
            self._controller.send(Kind.STATS, body)

    def finish(self) -> None:
        """The script ended in order."""
        if self.prepared:
            self._send_metrics()
            self._report()
            if self._skipping is None:  # else it found nothing left to do, and has nothing new to keep
                self._save()
            self._client.bye()


def _frozen_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """What the optimizer has of the model that requires no gradient, by name."""
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [(n, p) for n, p in model.named_parameters() if id(p) in given and not p.requires_grad]


def _whereabouts(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """Changes when a parameter is written to, or made to look at other memory."""
    return [(p._version, p.data_ptr()) for p in parameters]


def _without_kernel_choice(settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What OptimizerSpec chose for `fused` on the servers stays."""
    return [{k: v for k, v in group.items() if k not in ("fused", "foreach")} for group in settings]


def _json_safe(metrics: dict[str, float]) -> dict[str, Any]:
    """JSON has no NaN or infinity: send them as text."""
    return {k: v if v == v and abs(v) != float("inf") else str(v) for k, v in metrics.items()}


def _pin(memory: Tensor) -> None:
    """Let the GPU copy straight from and to shared memory."""
    torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)


@contextlib.contextmanager
def _no_sync() -> Iterator[None]:
    yield


def _offer_no_sync(model: nn.Module) -> None:
    """DDP's no_sync(): here an exchange happens at optimizer.step() only, so there is nothing to skip."""
    if not hasattr(model, "no_sync"):
        model.no_sync = _no_sync  # type: ignore[assignment]


_current: Session | None = None


def enter_session(session: Session) -> None:
    """This process is a worker from now on."""
    global _current
    _current = session


def current_session() -> Session:
    """The session of this process; a script that runs alone gets one too."""
    global _current
    if _current is None:
        _current = AloneSession()
    return _current
