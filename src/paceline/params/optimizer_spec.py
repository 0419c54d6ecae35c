"""An optimizer as plain data, so that a server can build it without unpickling anything."""

import importlib
import inspect
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.core.json_types import Json, JsonObject
from paceline.core.layout import Layout
from paceline.exceptions import FrameError, UsageError
from paceline.params.fused import allow_late_gradients, takes_fused

__all__ = ["GroupSettings", "OptimizerSpec", "Setting", "as_json", "checked_settings", "settings_of"]

Setting: TypeAlias = bool | int | float | str | Sequence["Setting"] | None
"""One setting of an optimizer, as JSON has it."""
GroupSettings: TypeAlias = dict[str, Setting]
"""The settings of one parameter group (learning rate, betas, …), by name."""

_ELEMENT_WISE = frozenset(
    ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
)
_REFUSED = {
    "LBFGS": "it evaluates the loss several times a step and mixes all parameters in one history; "
    "use mode sandblaster, which is L-BFGS on the servers, train with it alone, or choose an element-wise "
    "optimizer",
    "SparseAdam": "it needs sparse gradients, and the parameter space is dense; use Adam",
}
_HIDDEN = frozenset(["params", "param_names"])


def settings_of(optimizer: torch.optim.Optimizer) -> list[GroupSettings]:
    """Each parameter group's settings as plain JSON values (learning rate, betas, …)."""
    return [
        {key: _plain(key, value) for key, value in group.items() if key not in _HIDDEN}
        for group in optimizer.param_groups
    ]


def _plain(key: str, value: Any) -> Setting:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, tuple | list):
        return [_plain(key, v) for v in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise UsageError(
        f"optimizer setting {key!r} is {type(value).__name__} {value!r:.80}; parameter servers take "
        "finite numbers, strings, booleans, None and lists of them."
    )


def checked_settings(given: Sequence[Any], known: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Settings that a worker sent for every parameter group, as an optimizer takes them.

    Raises:
        FrameError: the optimizer would stumble over them: another type than before, or no settings at all.
    """
    if len(given) != len(known) or not all(isinstance(group, dict) for group in given):
        raise FrameError("settings that do not fit the parameter groups")
    for group, before in zip(given, known, strict=True):
        for name, value in group.items():
            if not _is_like(value, before.get(name)):
                raise FrameError(
                    f"setting {name!r} is {value!r:.40}, expected one like {before.get(name)!r:.40}"
                )
    return [{name: _tupled(value) for name, value in group.items()} for group in given]


def _is_like(value: Any, before: Any, levels: int = 4) -> bool:
    """Whether a setting may take the place of another one: numbers stay numbers. What was None, or was not
    there, may become any plain value. Lists are in each other at most so many `levels`."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if type(value) is int and abs(value) >= 1 << 63:
        return False
    if isinstance(before, list | tuple):
        same = isinstance(value, list) and len(value) == len(before) and levels > 0
        return same and all(_is_like(*pair, levels - 1) for pair in zip(value, before, strict=True))
    if isinstance(before, bool):
        return isinstance(value, bool)
    if isinstance(before, int | float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(before, str):
        return isinstance(value, str)
    if isinstance(value, list):
        return levels > 0 and all(_is_like(each, None, levels - 1) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Which optimizer, with which settings for each parameter group.

    A run with several optimizers has one spec for all of them: their groups follow one another.
    """

    target: str
    """`module:ClassName` of the first optimizer."""
    groups: tuple[GroupSettings, ...]
    whole_tensors: bool
    """Must see tensors uncut, in their own shape."""
    more: tuple[tuple[str, int], ...] = ()
    """The optimizers after the first: `module:ClassName`, and the index of its first group."""

    @property
    def targets(self) -> tuple[str, ...]:
        """`module:ClassName` of every optimizer."""
        return (self.target, *(target for target, _ in self.more))

    @cached_property
    def groups_of(self) -> tuple[range, ...]:
        """The indices of each optimizer's groups."""
        bounds = [0, *(first for _, first in self.more), len(self.groups)]
        return tuple(range(a, b) for a, b in itertools.pairwise(bounds))

    def target_of(self, group: int) -> str:
        """`module:ClassName` of the optimizer that a group belongs to."""
        return next(t for t, own in zip(self.targets, self.groups_of, strict=True) if group in own)

    @classmethod
    def of_all(
        cls, optimizers: Sequence[torch.optim.Optimizer], allowed: Collection[str] = ()
    ) -> "OptimizerSpec":
        """One spec of several optimizers. Arguments and errors as in `of`."""
        first, *others = (cls.of(optimizer, allowed) for optimizer in optimizers)
        for other in others:
            first = replace(
                first,
                groups=first.groups + other.groups,
                whole_tensors=first.whole_tensors or other.whole_tensors,
                more=(*first.more, (other.target, len(first.groups))),
            )
        return first

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, allowed: Collection[str] = ()) -> "OptimizerSpec":
        """Read the spec off an optimizer.

        Args:
            allowed: `module:ClassName` of optimizers beyond torch.optim that servers may import.

        Raises:
            UsageError: servers cannot run this optimizer; the message says why.
        """
        kind = type(optimizer)
        name = kind.__name__
        if kind is getattr(torch.optim, name, None):
            if name in _REFUSED:
                raise UsageError(f"torch.optim.{name} cannot run on parameter servers: {_REFUSED[name]}.")
            target = f"torch.optim:{name}"
            # What we do not know may look at whole tensors: give it whole tensors.
            whole = name not in _ELEMENT_WISE
        else:
            target = f"{kind.__module__}:{kind.__qualname__}"
            whole = True
            if kind.__module__ == "__main__" or target not in allowed:
                where = (
                    f"move class {name} from the script into a module beside it and "
                    if kind.__module__ == "__main__"
                    else ""
                )
                shown = target.replace("__main__", "your_module")
                raise UsageError(
                    f"optimizer {name} is not from torch.optim, so servers do not import it unasked. "
                    f"To let them, {where}start the run with --optimizer {shown}."
                )
        return cls(
            target=target,
            groups=tuple(
                _with_fused(kind, {**g, **_set_when_made(optimizer)}, group["params"])
                for g, group in zip(settings_of(optimizer), optimizer.param_groups, strict=True)
            ),
            whole_tensors=whole,
        )

    def build(
        self, group: int, tensors: Sequence[Tensor], allowed: Collection[str] = ()
    ) -> torch.optim.Optimizer:
        """A fresh optimizer over `tensors` with the settings of one parameter group.

        Raises:
            UsageError: the optimizer may not be used, or refuses the settings.
        """
        if not 0 <= group < len(self.groups):
            raise FrameError(f"parameter group {group} of an optimizer with {len(self.groups)}")
        target = self.target_of(group)
        kind = _load(target, allowed)
        accepted = inspect.signature(kind).parameters
        settings = {k: _tupled(v) for k, v in self.groups[group].items()}
        passed = {k: v for k, v in settings.items() if k in accepted}
        try:
            optimizer: torch.optim.Optimizer = kind(list(tensors), **passed)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"optimizer {target} refused the settings {passed} of parameter group {group}: {error}"
            ) from error
        optimizer.param_groups[0].update(settings)
        allow_late_gradients(optimizer)
        return optimizer

    def for_device(self, device: str, layout: Layout) -> "OptimizerSpec":
        """The spec for servers on this kind of device: which fused kernels work is another question there.

        Args:
            layout: of the tensors that it is for.
        """
        groups = []
        for index, group in enumerate(self.groups):
            # `of` sets both together; what the script itself chose stays.
            chosen_here = group.get("fused") is True and group.get("foreach") is False
            bare = {**group, "fused": None, "foreach": None} if chosen_here else group
            dtypes = {t.dtype for t in layout.tensors if t.group == index}
            like = [torch.empty(0, dtype=getattr(torch, dtype)) for dtype in sorted(dtypes)]
            kind = getattr(torch.optim, self.target_of(index).partition(":")[2], None)
            groups.append(bare if kind is None else _with_fused(kind, bare, like, device))
        return replace(self, groups=tuple(groups))

    def to_json(self) -> JsonObject:
        """As plain JSON; `from_json` is its inverse."""
        groups: list[Json] = [
            {name: as_json(value) for name, value in group.items()} for group in self.groups
        ]
        found: JsonObject = {"target": self.target, "groups": groups, "whole_tensors": self.whole_tensors}
        return {**found, "more": [list(each) for each in self.more]} if self.more else found

    @classmethod
    def from_json(cls, data: Any) -> "OptimizerSpec":
        """Read a spec from the wire or a checkpoint; anything odd is a FrameError."""
        try:
            target, groups, whole = data["target"], data["groups"], data["whole_tensors"]
        except (KeyError, TypeError) as error:
            raise FrameError(f"not an optimizer: {error!r}") from error
        if not (
            isinstance(target, str)
            and isinstance(groups, list)
            and all(isinstance(g, dict) for g in groups)
            and isinstance(whole, bool)
        ):
            raise FrameError(f"not an optimizer: {data!r:.80}")
        more = data.get("more", [])
        if not isinstance(more, list) or not all(map(_is_another, more)):
            raise FrameError(f"not several optimizers: {more!r:.80}")
        firsts = [0, *(first for _, first in more), len(groups)]
        if more and any(a >= b for a, b in itertools.pairwise(firsts)):
            raise FrameError(f"optimizers whose first groups are {firsts[:-1]} of {len(groups)}")
        return cls(
            target=target, groups=tuple(groups), whole_tensors=whole, more=tuple((t, n) for t, n in more)
        )


def _is_another(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], int)
        and not isinstance(value[1], bool)
    )


def _load(target: str, allowed: Collection[str]) -> Any:
    """The class that `target` names, if it may be used."""
    module, _, name = target.partition(":")
    if module == "torch.optim" and name not in _REFUSED:
        kind = getattr(torch.optim, name, None)
    elif target in allowed:
        try:
            kind = reduce(getattr, name.split("."), importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"--optimizer {target} cannot be imported by the servers: {error}. "
                "It must be in a module that they find, too (PYTHONPATH)."
            ) from error
    else:
        raise UsageError(
            f"a worker offered optimizer {target!r}, which this run does not allow (--optimizer)."
        )
    if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
        raise UsageError(f"{target!r} is not a torch.optim.Optimizer class.")
    return kind


def _set_when_made(optimizer: torch.optim.Optimizer) -> GroupSettings:
    """Settings that the constructor takes from its arguments for all groups, whatever the groups say."""
    if isinstance(optimizer, torch.optim.Adagrad):
        name = "initial_accumulator_value"
        return {name: _plain(name, optimizer.defaults[name])}
    return {}


def _with_fused(
    kind: type, group: GroupSettings, parameters: Iterable[Tensor], device: str = "cpu"
) -> GroupSettings:
    """Servers use the fused kernel where torch has one that works, unless the user chose another."""
    fused = takes_fused(kind, group, parameters, device)
    return {**group, "fused": True, "foreach": False} if fused else group


def as_json(value: Setting) -> Json:
    """A setting as JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [as_json(each) for each in value]


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
