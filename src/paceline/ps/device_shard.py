"""DeviceShard: a shard whose parameters are on a device, updated without a wait of the CPU.

Whether a gradient is finite is found out on the device, and decides there: the fused optimizers skip a step
whose `found_inf` is 1, and of several workers' gradients those that are not finite are left out of the mean.
The server reads the verdicts a little later. An update that overflows by itself is found some updates later,
too, and no checkpoint has it: before a snapshot the server waits, and looks at every parameter.

Slices that lie side by side are updated as one: a device has no cache that a slice would fit.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from paceline.comm.protection import protection
from paceline.core.layout import merge_slices
from paceline.params import GroupSettings, Layout, OptimizerSpec, Slice, StateBook
from paceline.ps.contributions import Contribution, Copy, Gradients, refresh, wide
from paceline.ps.device_reader import DeviceReader
from paceline.ps.flat_step import FlatStep
from paceline.ps.shard import Shard
from paceline.ps.slice_state import SliceState

__all__ = ["DeviceShard"]

_LOOK_EVERY = 8
"""Updates between two looks at the parameters."""


class DeviceShard(Shard):
    """See Shard.

    Args:
        reader: reads what the device computes.
    """

    def __init__(
        self,
        layout: Layout,
        spec: OptimizerSpec,
        slices: Sequence[Slice],
        base: Tensor,
        reader: DeviceReader,
        allowed: Collection[str] = (),
        damping: str = "none",
    ) -> None:
        suited = spec.for_device(base.device.type, layout)
        super().__init__(layout, suited, merge_slices(slices), base, allowed, damping=damping)
        self._reader = reader
        self._updates = 0
        self._overflowed_later = False
        self._due: tuple[Tensor, frozenset[int], Tensor | None] | None = None
        """Of the step that is being made: the gradient, tensors without one, and 1 if it is not finite."""
        self._flat_steps: list[FlatStep | None] = [None] * len(self._states)
        self._may_lie_flat = [FlatStep.suits(state) for state in self._states]
        self._plain_steps = [state.step for state in self._states]
        for i, state in enumerate(self._states):
            state.step = partial(self._make_step, i)

    # --- updates ----------------------------------------------------------------------------------

    @torch.no_grad()
    def update(
        self,
        contributions: Sequence[Contribution],
        settings: Sequence[GroupSettings] | None,
        copies: Sequence[Copy] = (),
        on_slice: Callable[[int], None] | None = None,
    ) -> None:
        """See Shard. The device is given the work; it may not be done when this returns."""
        if self._overflowed_later:
            self._reader.settle()
            for state in self._states:
                self._check_updated(state)
        bad = self._judge(contributions) if contributions else []
        for i, state in enumerate(self._states):
            mine = [(c, found) for c, found in zip(contributions, bad, strict=True) if c.touches(state.piece)]
            if mine:
                self._step_on_device(i, state, mine, settings)
            refresh(copies, i, state.flat)
            if on_slice is not None:
                on_slice(i)
        if contributions:
            self._updates += 1

    def _judge(self, contributions: Sequence[Contribution]) -> list[Tensor | None]:
        """For each contribution a number on the device: 1 if it is not finite, else 0."""
        if protection.resting:
            return [None] * len(contributions)
        bad: list[Tensor | None] = []
        found = []
        for c in contributions:
            flats = [
                flat
                for flat, state in zip(c.gradients.flat, self._states, strict=True)
                if c.touches(state.piece)
            ]
            found.append(_not_finite(flats))
            bad.append(found[-1])
        workers = [c.worker for c in contributions]
        values = found[0] if len(found) == 1 else torch.stack(found)
        self._reader.read_later(values, partial(self._hear_verdicts, workers))
        return bad

    def _hear_verdicts(self, workers: list[int], bad: list[float]) -> None:
        self._refusals += [worker for worker, found in zip(workers, bad, strict=True) if found]

    def _step_on_device(
        self,
        i: int,
        state: SliceState,
        mine: Sequence[tuple[Contribution, Tensor | None]],
        settings: Sequence[GroupSettings] | None,
    ) -> None:
        scale, contributions = self._scale_of([c for c, _ in mine])
        found = mine[0][1]
        if len(contributions) > 1:
            gradient = self._scratch.of(state.piece)
            found = _masked_mean(gradient, i, contributions, [bad for _, bad in mine])
        elif contributions[0].backup:
            gradient = self._scratch.of(state.piece)
            self._correct(state, contributions[0].gradients.flat[i], contributions[0].backup[i], gradient)
            if found is not None:
                found = torch.maximum(found, _not_finite([gradient]))
        else:
            gradient = contributions[0].gradients.flat[i]
        missing = frozenset.intersection(*(c.missing for c in contributions))
        self._due = gradient, missing, found
        self._apply(state, settings, scale)

    def _hand_over_mean(self, state: SliceState, mean: Tensor, contributions: Sequence[Contribution]) -> None:
        """Of an update in two halves, whose first has looked at the mean."""
        self._due = mean, frozenset.intersection(*(c.missing for c in contributions)), None

    def _make_step(self, i: int) -> None:
        """One step of a slice's optimizer."""
        assert self._due is not None
        state, (gradient, missing, found) = self._states[i], self._due
        lies_flat = self._flat_steps[i]
        if lies_flat is not None:
            if not missing and lies_flat.fits:
                lies_flat(gradient, found)
                return
            lies_flat.end()
            self._flat_steps[i], self._may_lie_flat[i] = None, False
        if found is not None and not self._skips_by_itself(state):
            # The optimizer cannot skip the step on the device: wait and see.
            if self._read(found):
                return
            found = None
        self._hand_over_flat(state, gradient, missing)
        state.optimizer.found_inf = found  # type: ignore[attr-defined]
        self._plain_steps[i]()
        if self._may_lie_flat[i] and not missing and FlatStep.can_begin(state):
            self._flat_steps[i] = FlatStep(state, self.layout)

    def _skips_by_itself(self, state: SliceState) -> bool:
        """Whether the optimizer makes no step where `found_inf` is 1, on the device."""
        group = state.optimizer.param_groups[0]
        if not group.get("fused") or not getattr(state.optimizer, "_step_supports_amp_scaling", False):
            return False
        if not isinstance(state.optimizer, torch.optim.SGD) or not group["momentum"]:
            return True
        # A first step that is skipped would leave a momentum buffer that nobody wrote to.
        return all("momentum_buffer" in state.optimizer.state.get(t, {}) for t in state.segments)

    def _look_after(self, state: SliceState, *, watched: bool) -> None:
        if self._updates % _LOOK_EVERY == 0 and not protection.resting:
            self._reader.read_later(_not_finite([state.flat]), self._hear_overflow)

    def _hear_overflow(self, bad: list[float]) -> None:
        self._overflowed_later = self._overflowed_later or bool(bad[0])

    def _read(self, value: Tensor) -> float:
        """A number that the device computes, now."""
        self._reader.settle()
        return float(value)

    @torch.no_grad()
    def mix(
        self,
        worker: int,
        values: Gradients | None,
        alpha: float,
        copies: Sequence[Copy] = (),
        on_slice: Callable[[int], None] | None = None,
        groups: Collection[int] | None = None,
    ) -> None:
        """See Shard."""
        bad = []
        for i, state in enumerate(self._states):
            centre = moved = state.flat
            if values is not None and (groups is None or state.piece.group in groups):
                mine, theirs = wide(centre), wide(values.flat[i])
                difference = torch.sub(theirs, mine).mul_(alpha)
                bad.append(_not_finite([difference]))
                finite = bad[-1].eq(0)
                difference = torch.where(finite, difference, torch.zeros_like(difference))
                mine.add_(difference)
                moved = torch.where(finite, torch.sub(theirs, difference), mine)
                if mine is not centre:
                    centre.copy_(mine)
                self._look_after(state, watched=False)
            refresh(copies, i, moved)
            if on_slice is not None:
                on_slice(i)
        if bad:
            values_read = torch.stack(bad).amax()
            self._reader.read_later(values_read, partial(self._hear_verdicts, [worker]))
            self._updates += 1

    # --- what the CPU waits for -------------------------------------------------------------------

    def reduce(self, contributions: Sequence[Contribution]) -> list[tuple[int, float]]:
        """See Shard. The norms are numbers of the CPU, which waits for them."""
        self._reader.settle()
        return super().reduce(contributions)

    def assign(self, values: Sequence[Tensor]) -> None:
        """See Shard."""
        self._reader.settle()
        super().assign(values)

    def snapshot(self, *, vectors: bool = False, indices: Collection[int] | None = None) -> dict[str, Tensor]:
        """See Shard. The copies are on the device, and whole when this returns."""
        self._reader.settle()
        found = super().snapshot(vectors=vectors, indices=indices)
        self._reader.settle()
        return found

    def restore(
        self,
        book: StateBook,
        *,
        parameters: bool = True,
        vectors: bool = False,
        groups: Collection[int] | None = None,
    ) -> None:
        """See Shard."""
        self._reader.settle()
        self._flat_steps = [None] * len(self._states)
        super().restore(book, parameters=parameters, vectors=vectors, groups=groups)

    def take_refusals(self) -> dict[int, int]:
        """See Shard. Of what the device has found so far."""
        self._reader.collect()
        return super().take_refusals()

    def close(self) -> None:
        """See Shard. The device has done all work on it when this returns."""
        self._reader.settle()
        super().close()

    @property
    def awaits_verdicts(self) -> bool:
        """Whether the device has yet to say whether something was finite."""
        return self._reader.awaits


def _not_finite(flats: Sequence[Tensor]) -> Tensor:
    """1 if there is a NaN or an infinity in any of them, else 0, as a number on their device."""
    norms = [torch.linalg.vector_norm(flat, float("inf")) for flat in flats]
    norm = norms[0]
    if len(norms) > 1:
        same = len({each.dtype for each in norms}) == 1
        norm = torch.stack([*norms] if same else [each.double() for each in norms]).amax()
    finite: Tensor = norm.le(torch.finfo(norm.dtype).max)  # False for NaN, too
    return finite.logical_not().float()


def _masked_mean(
    out: Tensor, i: int, contributions: Sequence[Contribution], bad: Sequence[Tensor | None]
) -> Tensor | None:
    """The weighted mean of slice `i` without the gradients that are not finite.

    Returns:
        1 if there is none, or the mean is not finite; None if nothing is to be checked.
    """
    equal = all(c.weight == contributions[0].weight and c.scale == 1.0 for c in contributions)
    narrow = out.element_size() == 2
    total: Tensor | None = None
    weight: Tensor | float = 0.0
    for c, found in zip(contributions, bad, strict=True):
        part = wide(c.gradients.flat[i])
        if found is not None:
            part = torch.where(found.eq(0), part, torch.zeros((), dtype=part.dtype, device=part.device))
        counts = 1.0 if equal else c.weight
        factor = 1.0 if equal else c.weight * c.scale
        weight = weight + (counts if found is None else (1.0 - found) * counts)
        if total is None:
            total = part if factor == 1.0 else part * factor
        else:
            total = torch.add(total, part, alpha=factor)
    assert total is not None
    if narrow:
        out.copy_(total / weight)
    else:
        torch.div(total, weight, out=out)
    if any(found is None for found in bad):
        return None
    assert isinstance(weight, Tensor)
    empty = weight.eq(0).float()
    return torch.maximum(empty, _not_finite([out])) if narrow else empty
