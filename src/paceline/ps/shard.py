"""The slices of one server: parameters, optimizer, updates.

The update is torch's own optimizer on each slice, one optimizer object a slice. Its parameters are the
slice's segments (the parts of tensors in it), so a tensor that got no gradient is skipped exactly as in a
plain loop. A slice is summed, checked, updated and copied while it is in the cache, by one of the lanes.

NaN and Inf never reach the parameters that workers read or checkpoints hold. What a worker pushed is refused
if it is not finite as it came, after averaging or after the damping's correction. An update that overflows
by itself raises UpdateOverflow before the slice is copied anywhere: the processor's flags tell of it, or a
sum over the slice. Two-byte floats are averaged, corrected and mixed in float32, because the steps in between
leave their range long before the result does.
"""

import collections
import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.comm.protection import protection
from paceline.core.modes.damping import damped_rates
from paceline.core.modes.lbfgs import Answer, Ops, merge_answers, num_answers
from paceline.exceptions import CheckpointError, UpdateOverflow
from paceline.params import (
    GroupSettings,
    Layout,
    OptimizerSpec,
    Slice,
    StateBook,
    flat_view,
    segment_view,
)
from paceline.ps.bare_step import bare_step
from paceline.ps.contributions import Contribution, Copy, Gradients, finite, refresh, sum_into, wide
from paceline.ps.float_flags import float_flags
from paceline.ps.lanes import Lanes
from paceline.ps.slice_state import Scratch, SliceState, detached, fill, for_kernel
from paceline.ps.vectors import run_on

__all__ = ["Contribution", "Copy", "Gradients", "Shard"]


DC_LAMBDA = 0.04
"""Delay compensation's strength (MXNet's default)."""
_TINY = 1e-12
_WITH_MOMENTUM = torch.optim.SGD, torch.optim.RMSprop
"""In these a gradient counts 1 / (1 - momentum) times in all (times a constant)."""
_SMALL_SHARD_BYTES = 1 << 20
"""Up to here handing slices to a second thread costs more than it saves."""
_MOST_ALARMS = 3
"""Updates in a row that raise the processor's flags for nothing, after which they are not asked again."""
_VECTOR = "lbfgs."
"""Before a vector's name, where it stands beside the optimizer's words for its state."""


class Shard:
    """Parameters and optimizer state of some slices. Methods are called by one thread.

    Args:
        base: the bytes of the whole parameter space; only this shard's slices of it are touched.
        allowed: optimizers beyond torch.optim that may be imported.
        lanes: threads that share the work of an update. A small shard uses one whatever this says.
        damping: "dc" and "gap" correct a gradient by what was read for it; "momentum" shortens an update by
            its momentum first and its learning rate second (`modes/damping.py`).
        owned: indices of the slices that it answers for; None: all. The others lie in memory of its own.
    """

    def __init__(
        self,
        layout: Layout,
        spec: OptimizerSpec,
        slices: Sequence[Slice],
        base: Tensor,
        allowed: Collection[str] = (),
        lanes: int = 1,
        damping: str = "none",
        owned: Collection[int] | None = None,
    ) -> None:
        self.layout = layout
        self.damping = damping
        self.slices = tuple(slices)
        self.spec = spec
        self.base = base
        self._flags = float_flags()
        self._refusals: list[int] = []
        self._states: list[SliceState] = []
        self._apart: Tensor | None = None
        for piece in self.slices:
            mine = owned is None or piece.index in owned
            memory = base if mine else self._memory_apart()
            flat = flat_view(memory, piece)
            if not mine:
                flat.copy_(flat_view(base, piece))
            segments = [segment_view(memory, layout, g) for g in piece.segments]
            optimizer = spec.build(piece.group, segments, allowed)
            state = SliceState(piece, mine, flat, segments, optimizer, bare_step(optimizer))
            state.regular = _regular(optimizer.param_groups[0])
            self._states.append(state)
        self._lanes = Lanes(min(lanes, len(self.slices)) if self.nbytes > _SMALL_SHARD_BYTES else 1)
        self._scratch = Scratch(max((piece.nbytes for piece in self.slices), default=0), base.device)
        self._means: list[Tensor] = []
        self._reduced: list[Sequence[Contribution]] = []
        self._reduced_scales: list[float] = []

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.slices)

    @property
    def owned(self) -> list[int]:
        """Positions of the slices that it answers for."""
        return [i for i, state in enumerate(self._states) if state.owned]

    def own(self, indices: Collection[int]) -> None:
        """Answer for exactly these slices from now on: they move to the common memory, others out of it."""
        for state in self._states:
            if state.owned == (state.piece.index in indices):
                continue
            state.owned = not state.owned
            memory = self.base if state.owned else self._memory_apart()
            state.flat = flat_view(memory, state.piece).copy_(state.flat)
            for g, tensor in zip(state.piece.segments, state.segments, strict=True):
                tensor.data = segment_view(memory, self.layout, g)

    def _memory_apart(self) -> Tensor:
        if self._apart is None:
            self._apart = torch.empty_like(self.base)  # what is not touched costs nothing
        return self._apart

    def take_refusals(self) -> dict[int, int]:
        """Slices refused for NaN or Inf since the last call, by worker."""
        if not self._refusals:
            return {}
        found, self._refusals = self._refusals, []
        return collections.Counter(found)

    def close(self) -> None:
        """End the lanes' threads."""
        self._lanes.close()

    def _each(self, work: Callable[[int], None]) -> None:
        """Call `work` with every slice's position, in any order and lane."""
        self._lanes.each(len(self._states), work)

    def flats(self, base: Tensor) -> list[Tensor]:
        """This shard's slices as flat tensors over another copy of the space."""
        return [flat_view(base, s) for s in self.slices]

    def copy_in(self, base: Tensor) -> list[Tensor | None]:
        """As `flats`, of the slices that it answers for only."""
        return [flat_view(base, s.piece) if s.owned else None for s in self._states]

    @property
    def parameters(self) -> list[Tensor]:
        """The slices themselves."""
        return [state.flat for state in self._states]

    def update(
        self,
        contributions: Sequence[Contribution],
        settings: Sequence[GroupSettings] | None,
        copies: Sequence[Copy] = (),
        on_slice: Callable[[int], None] | None = None,
    ) -> None:
        """Apply the weighted mean of the contributions as one update.

        Args:
            settings: of each parameter group; None keeps what was used last.
            copies: copies of this shard (see `flats`) to refresh slice by slice, while it is in the cache.
            on_slice: called with the position of each slice that is updated and copied, in any order and
                from any lane.
        """

        def work(i: int) -> None:
            state = self._states[i]
            if mine := [c for c in contributions if c.touches(state.piece)]:
                self._step(i, state, mine, settings)
            refresh(copies, i, state.flat)
            if on_slice is not None and state.owned:
                on_slice(i)

        self._each(work)

    def _step(
        self,
        i: int,
        state: SliceState,
        contributions: Sequence[Contribution],
        settings: Sequence[GroupSettings] | None,
    ) -> None:
        scale, contributions = self._scale_of(contributions)
        watched = self._watch(state)
        if len(contributions) == 1:
            only = contributions[0]
            if not only.checked and not finite(only.gradients.flat[i]):
                self._refusals.append(only.worker)
                return
            if only.backup:
                corrected = self._scratch.of(state.piece)
                self._correct(state, only.gradients.flat[i], only.backup[i], corrected)
                if not finite(corrected):
                    self._refusals.append(only.worker)
                    return
                self._hand_over_mean(state, corrected, contributions)
            elif state.holds is not only.gradients or only.missing:
                self._hand_over(state, only.gradients.segments[i], only.missing)
                state.holds = None if only.missing else only.gradients
            self._apply(state, settings, scale, watched=watched)
        else:
            mean = self._scratch.of(state.piece)
            good = self._mean(i, mean, contributions)
            if not good:
                return
            self._hand_over_mean(state, mean, good)
            self._apply(state, settings, scale, watched=watched)

    def _scale_of(self, contributions: Sequence[Contribution]) -> tuple[float, Sequence[Contribution]]:
        """Scale of a slice's update, and the contributions to it without what that covers.

        A single contribution's scale is the update's. With damping=momentum, so is the mean scale of
        several. Other dampings weigh each of several contributions by its own scale.
        """
        if len(contributions) == 1:
            scale = contributions[0].scale
        elif contributions and self.damping == "momentum":
            weights = math.fsum(c.weight for c in contributions)
            scale = math.fsum(c.scale * c.weight for c in contributions) / weights
        else:
            return 1.0, contributions
        if all(c.scale == 1.0 for c in contributions):
            return 1.0, contributions
        return scale, [replace(c, scale=1.0) for c in contributions]

    def _apply(
        self,
        state: SliceState,
        settings: Sequence[GroupSettings] | None,
        scale: float,
        *,
        watched: bool = False,
    ) -> None:
        """One step of the slice's optimizer, `scale` times as long.

        Args:
            watched: the processor's flags tell whether anything that this update is computed from, or the
                update itself, overflows.
        """
        group = state.optimizer.param_groups[0]
        if settings is not None and state.settings is not settings:
            group.update(settings[state.piece.group])
            state.settings = settings
            state.regular = _regular(group)
        before = None if state.gap is None else state.flat.clone()
        if scale == 1.0:
            state.step()
        else:
            rates = {name: rate for name, rate in group.items() if name in ("lr", "momentum")}
            if self.damping == "momentum" and isinstance(state.optimizer, _WITH_MOMENTUM):
                group["lr"], group["momentum"] = damped_rates(group["lr"], group["momentum"], scale)
            else:
                group["lr"] *= scale
            state.step()
            group.update(rates)
        self._look_after(state, watched=watched)
        if before is not None and state.gap is not None:
            state.gap_steps += 1
            moved = wide(before).sub_(state.flat).abs_()
            state.gap.lerp_(moved.clamp_(max=torch.finfo(moved.dtype).max), 1 / state.gap_steps)

    def _look_after(self, state: SliceState, *, watched: bool) -> None:
        """See that the update that was just made has not overflowed."""
        if watched and state.regular and not self._overflowed():
            state.alarms = 0
        else:
            self._check_updated(state)
            self._begin_watching(state)

    def _watch(self, state: SliceState) -> bool:
        """Begin to watch for an overflow, if the slice's numbers are known to be finite."""
        if self._flags is None or not state.sound or torch.get_num_threads() > 1:
            return False  # flags are a thread's own: torch must compute in this one
        self._flags.clear()
        return True

    def _overflowed(self) -> bool:
        return self._flags is None or self._flags.raised()

    def _begin_watching(self, state: SliceState) -> None:
        """The parameters were found to be finite. If the optimizer's state is, flags are enough from here on.

        They are not where every update raises one: then this is given up.
        """
        state.sound = False
        if self._flags is None or protection.resting or state.flat.element_size() == 2:
            return
        state.alarms += 1
        if state.alarms <= _MOST_ALARMS:
            values = (v for kept in state.optimizer.state.values() for v in kept.values())
            state.sound = all(finite(v) for v in values if isinstance(v, Tensor) and v.is_floating_point())

    def _check_updated(self, state: SliceState) -> None:
        """UpdateOverflow if a parameter of the slice is not finite."""
        if finite(state.flat):
            return
        for g, tensor in zip(state.piece.segments, state.segments, strict=True):
            if not bool(torch.isfinite(tensor).all()):
                rate = state.optimizer.param_groups[0].get("lr")
                raise UpdateOverflow(
                    f"an update of parameter {self.layout.tensors[g.tensor].name!r} ({state.piece.dtype}) "
                    f"overflowed: it would hold NaN or Inf. The learning rate is {rate}; lower it, clip the "
                    "gradients (--clip-norm, --norm-bound), or train in a wider dtype. Checkpoints written "
                    "so far are not affected."
                )

    def _correct(self, state: SliceState, gradient: Tensor, backup: Tensor, out: Tensor) -> None:
        """The gradient as it would be at the present parameters, as far as one can tell."""
        if out.element_size() == 2:
            gradient, wide = gradient.float(), torch.sub(state.flat.float(), backup.float())
        else:
            wide = torch.sub(state.flat, backup, out=out)
        if self.damping == "dc":  # g + λ·g⊙g⊙(w - w_bak)
            wide.mul_(gradient).mul_(gradient).mul_(DC_LAMBDA).add_(gradient)
        else:  # gap: g / (1 + |w - w_bak| / C), C the mean length of a step so far, element by element
            if state.gap is None:
                state.gap = torch.zeros_like(wide)
            torch.div(gradient, wide.abs_().div_(state.gap + _TINY).add_(1), out=wide)
        if wide is not out:
            out.copy_(wide)

    def mix(
        self,
        worker: int,
        values: Gradients | None,
        alpha: float,
        copies: Sequence[Copy] = (),
        on_slice: Callable[[int], None] | None = None,
        groups: Collection[int] | None = None,
    ) -> None:
        """The elastic update: the centre and a worker's parameters move towards each other by the same.

        Args:
            values: the worker's parameters; None leaves the centre as it is.
            copies: get the worker's moved parameters (the centre, if there are none).
            groups: parameter groups that this is done to; None: all.
        """

        def work(i: int) -> None:
            centre = self._states[i].flat
            moved = centre
            if values is not None and (groups is None or self._states[i].piece.group in groups):
                mine, theirs = wide(centre), wide(values.flat[i])
                scratch = self._scratch.of(self._states[i].piece)
                difference = torch.sub(theirs, mine, out=None if mine is not centre else scratch).mul_(alpha)
                if finite(difference):
                    mine.add_(difference)
                    # Not in the worker's memory: a server that holds a copy reads it, too.
                    moved = torch.sub(theirs, difference, out=difference)
                    if mine is not centre:
                        centre.copy_(mine)
                    self._check_updated(self._states[i])
                else:
                    self._refusals.append(worker)
            refresh(copies, i, moved)
            if on_slice is not None and self._states[i].owned:
                on_slice(i)

        self._each(work)

    def _mean(self, i: int, out: Tensor, contributions: Sequence[Contribution]) -> Sequence[Contribution]:
        """The weighted mean of slice `i` into `out`, in the order given; returns who is in it."""
        sum_into(out, i, contributions)
        # Only of two-byte floats are finite ones soon too large together.
        checked = out.element_size() > 2 and all(c.checked for c in contributions)
        if checked or finite(out):
            return contributions
        good = []
        for c in contributions:
            if finite(c.gradients.flat[i]):
                good.append(c)
            else:
                self._refusals.append(c.worker)
        if good:
            sum_into(out, i, good)
            if not finite(out):  # finite parts, but their sum is not
                for c in good:
                    self._refusals.append(c.worker)
                return []
        return good

    def _hand_over(self, state: SliceState, gradients: Sequence[Tensor], missing: Collection[int]) -> None:
        for g, tensor, gradient in zip(state.piece.segments, state.segments, gradients, strict=True):
            tensor.grad = None if g.tensor in missing else gradient

    def _hand_over_mean(self, state: SliceState, mean: Tensor, contributions: Sequence[Contribution]) -> None:
        """A tensor is skipped only if no worker had a gradient for it; absent ones count as zero."""
        self._hand_over_flat(state, mean, frozenset.intersection(*(c.missing for c in contributions)))

    def _hand_over_flat(self, state: SliceState, flat: Tensor, missing: Collection[int]) -> None:
        if state.holds == flat.data_ptr() and not missing:
            return
        views = [
            flat[extent].as_strided(tensor.shape, tensor.stride())
            for extent, tensor in zip(self._extents(state), state.segments, strict=True)
        ]
        self._hand_over(state, views, missing)
        # The views stay valid: means lie where they lie as long as the shard is there.
        state.holds = None if missing else flat.data_ptr()

    def reduce(self, contributions: Sequence[Contribution]) -> list[tuple[int, float]]:
        """First half of an update with a bound on the norm: means only. Returns (slice, sum of squares)."""
        if not self._means:
            self._means = [torch.empty_like(s.flat) for s in self._states]
        self._reduced = [()] * len(self._states)
        self._reduced_scales = [1.0] * len(self._states)
        norms = [(s.piece.index, 0.0) for s in self._states]

        def work(i: int) -> None:
            mine: Sequence[Contribution] = [c for c in contributions if c.touches(self._states[i].piece)]
            if mine:
                self._reduced_scales[i], mine = self._scale_of(mine)
                self._reduced[i] = self._mean(i, self._means[i], mine)
            if self._reduced[i]:
                norm = float(torch.linalg.vector_norm(self._means[i], dtype=torch.float64))
                # The norm of huge numbers does not fit: then the update is scaled down to nothing.
                norms[i] = (self._states[i].piece.index, min(norm * norm, sys.float_info.max))

        if contributions:
            self._each(work)
        return norms

    def commit(
        self,
        scale: float,
        settings: Sequence[GroupSettings] | None,
        copies: Sequence[Copy] = (),
        on_slice: Callable[[int], None] | None = None,
    ) -> None:
        """Second half: scale the means of the last `reduce` and apply them."""

        def work(i: int) -> None:
            state = self._states[i]
            if self._reduced[i]:
                if scale != 1.0:
                    self._means[i].mul_(scale)
                self._hand_over_mean(state, self._means[i], self._reduced[i])
                self._apply(state, settings, self._reduced_scales[i])
            refresh(copies, i, state.flat)
            if on_slice is not None and state.owned:
                on_slice(i)

        self._each(work)

    def add(self, contributions: Sequence[Contribution]) -> None:
        """Add up gradients, times their weights, in the vector g."""

        def work(i: int) -> None:
            vectors = self._states[i].vectors
            for c in contributions:
                if "g" in vectors:
                    vectors["g"].add_(c.gradients.flat[i], alpha=c.weight)
                else:
                    vectors["g"] = c.gradients.flat[i] * c.weight

        self._each(work)

    def spoil(self) -> None:
        """The sum in g lacks something: let nobody mistake it for whole."""
        for state in self._states:
            state.vectors["g"] = torch.full_like(state.flat, math.nan)

    def run(self, ops: Ops) -> list[Answer]:
        """Operations on all named vectors, slice by slice; what the reductions came to for this shard."""
        parts: list[list[Answer]] = [[] for _ in self._states]

        def work(i: int) -> None:
            state = self._states[i]
            vectors = {"w": state.flat, **state.vectors}
            parts[i] = run_on(vectors, ops)
            del vectors["w"]
            state.vectors = vectors
            state.sound = False  # what a line search tries may overflow

        self._each(work)
        return merge_answers(ops, parts) if parts else [0.0] * num_answers(ops)

    def move(self, ops: Ops, kept: Collection[str]) -> None:
        """Operations that nobody answers; of the vectors beside w, the named ones stay."""
        self.run(ops)
        for state in self._states:
            state.vectors = {name: state.vectors[name] for name in kept}

    def assign(self, values: Sequence[Tensor]) -> None:
        """Overwrite the parameters, slice by slice (see `flats`)."""
        for state, flat in zip(self._states, values, strict=True):
            state.flat.copy_(flat)
            self._check_updated(state)

    def snapshot(self, *, vectors: bool = False, indices: Collection[int] | None = None) -> dict[str, Tensor]:
        """A copy of parameters and optimizer state, by StateBook's keys. A consistent cut.

        Args:
            vectors: the named vectors, too.
            indices: of these slices; None: of those that it answers for.
        """
        found: dict[str, Tensor] = {}
        for state in self._states:
            if not (state.owned if indices is None else state.piece.index in indices):
                continue
            if not state.vectors:  # a line search may try what overflows, and goes back by itself
                self._check_updated(state)
            for g, tensor in zip(state.piece.segments, state.segments, strict=True):
                name = self.layout.tensors[g.tensor].name
                found[StateBook.key(name, "", g.start, g.stop)] = detached(tensor, g.stop - g.start)
                for what, value in state.optimizer.state.get(tensor, {}).items():
                    if isinstance(value, Tensor):
                        copy = detached(value, g.stop - g.start)
                        found[StateBook.key(name, what, g.start, g.stop)] = copy
                    elif isinstance(value, int | float):
                        kind = "#i" if isinstance(value, int) else "#f"
                        number = torch.tensor(float(value), dtype=torch.float64)
                        found[StateBook.key(name, what + kind, g.start, g.stop)] = number
            if vectors:
                for g, extent in zip(state.piece.segments, self._extents(state), strict=True):
                    name = self.layout.tensors[g.tensor].name
                    for what, vector in state.vectors.items():
                        key = StateBook.key(name, _VECTOR + what, g.start, g.stop)
                        found[key] = vector[extent].clone()
        return found

    def _extents(self, state: SliceState) -> list[slice]:
        """Where each segment lies in the slice, in elements."""
        start, item = state.piece.start, state.flat.element_size()
        bounds = [self.layout.byte_of(g) for g in state.piece.segments]
        return [slice((first - start) // item, (end - start) // item) for first, end in bounds]

    def restore(
        self,
        book: StateBook,
        *,
        parameters: bool = True,
        vectors: bool = False,
        groups: Collection[int] | None = None,
    ) -> None:
        """Take parameters (unless told not to), optimizer state and (if told to) vectors from a book.

        Args:
            groups: parameter groups that this is done to; None: all.
        """
        for state in self._states:
            if groups is not None and state.piece.group not in groups:
                continue
            state.sound, state.alarms = False, 0
            if vectors:
                self._restore_vectors(state, book)
            for g, tensor in zip(state.piece.segments, state.segments, strict=True):
                info = self.layout.tensors[g.tensor]
                if parameters:
                    value = book.piece(info.name, "", g.start, g.stop)
                    if value is None or value.numel() != tensor.numel():
                        raise CheckpointError(
                            f"parameter {info.name!r} is not in the checkpoint with {info.numel:,} elements"
                        )
                    fill(tensor, value)
                kept: dict[str, Any] = {}
                for what in book.kinds(info.name):
                    value = book.piece(info.name, what, g.start, g.stop)
                    if value is None or what.startswith(_VECTOR):
                        continue
                    if what[-2:] in ("#i", "#f"):
                        number = float(value)
                        kept[what[:-2]] = int(number) if what.endswith("#i") else number
                    elif value.numel() == tensor.numel() and value.dim():
                        kept[what] = torch.empty_like(tensor)
                        fill(kept[what], value)
                    else:
                        kept[what] = for_kernel(value, tensor, state.optimizer.param_groups[0])
                state.optimizer.state.pop(tensor, None)
                if kept:
                    state.optimizer.state[tensor] = kept

    def _restore_vectors(self, state: SliceState, book: StateBook) -> None:
        state.vectors = {}
        for g, extent in zip(state.piece.segments, self._extents(state), strict=True):
            name = self.layout.tensors[g.tensor].name
            for what in book.kinds(name):
                value = book.piece(name, what, g.start, g.stop)
                if what.startswith(_VECTOR) and value is not None:
                    whole = state.vectors.setdefault(what.removeprefix(_VECTOR), torch.zeros_like(state.flat))
                    whole[extent].copy_(value)


def _regular(settings: GroupSettings) -> bool:
    """Whether all numbers among an optimizer's settings are finite."""
    numbers = [settings, *(v for v in settings.values() if isinstance(v, tuple | list) and len(v) <= 4)]
    found = [n for each in numbers for n in (each.values() if isinstance(each, dict) else each)]
    return all(math.isfinite(n) for n in found if isinstance(n, float))
