"""Copies of a prepared model, in memory or in a file, are plain PyTorch's.

`copy.deepcopy`, `pickle` and `torch.save` ask `copyreg` first how to take a class apart. What stands there
for the classes of prepared modules does it as ever, and leaves out what is ours: hooks that lead to
the run. So the copy of a model has nothing to do with the run, and a file is read where there is no Paceline.
"""

import contextlib
import copyreg
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

__all__ = ["copy_plainly"]

_HOOKS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_load_state_dict_post_hooks": (),
}
"""Where modules keep hooks, and what they keep of these elsewhere, by the same numbers."""


def copy_plainly(modules: Iterable[nn.Module]) -> None:
    """From here on, copies of these modules are without hooks of ours."""
    for kind in {type(module) for module in modules}:
        before = copyreg.dispatch_table.get(kind)
        if not isinstance(before, _TakenApart):
            copyreg.pickle(kind, _TakenApart(before))


class _TakenApart:
    def __init__(self, before: Callable[[Any], Any] | None) -> None:
        self._before = before

    def __call__(self, module: nn.Module) -> Any:
        found = module.__reduce_ex__(2) if self._before is None else self._before(module)
        if isinstance(found, tuple) and len(found) > 2 and isinstance(found[2], dict):
            return *found[:2], _without_ours(found[2]), *found[3:]
        return found


def _without_ours(state: dict[str, Any]) -> dict[str, Any]:
    state = dict(state)
    for name, companions in _HOOKS.items():
        ours = {number for number, hook in (state.get(name) or {}).items() if _is_ours(hook)}
        for each in (name, *companions) if ours else ():
            kept = state[each]
            state[each] = type(kept)((number, hook) for number, hook in kept.items() if number not in ours)
    if _is_ours(state.get("forward")):  # --local
        del state["forward"]
    if state.get("no_sync") is contextlib.nullcontext:
        del state["no_sync"]
    return state


def _is_ours(hook: Any) -> bool:
    # torch wraps load_state_dict's hooks in nothing, and forward's neither: they are as they were given.
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "paceline"
