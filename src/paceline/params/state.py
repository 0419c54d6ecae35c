"""Parameters and optimizer state as named pieces, independent of how the space is cut."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["StateBook"]


class StateBook:
    """Parameters and optimizer state of a whole model, gathered from pieces cut in any way."""

    def __init__(self, parts: Iterable[dict[str, Tensor]]) -> None:
        self._pieces: dict[tuple[str, str], list[tuple[int, int, Tensor]]] = {}
        for part in parts:
            for key, tensor in part.items():
                name, what, start, stop = key.rsplit("|", 3)
                pieces = self._pieces.setdefault((name, what), [])
                pieces.append((int(start), int(stop), tensor))
        self._kinds: dict[str, list[str]] = {}
        for (name, what), pieces in self._pieces.items():
            pieces.sort(key=lambda p: p[:2])
            if what:
                self._kinds.setdefault(name, []).append(what)

    @staticmethod
    def key(name: str, what: str, start: int, stop: int) -> str:
        """Key of a piece: `what` is empty for the parameter itself, else the optimizer's name for it."""
        return f"{name}|{what}|{start}|{stop}"

    def kinds(self, name: str) -> list[str]:
        """What the optimizer keeps for a parameter."""
        return self._kinds.get(name, [])

    def names(self) -> list[str]:
        """All parameters."""
        return [name for name, what in self._pieces if not what]

    def piece(self, name: str, what: str, start: int, stop: int) -> Tensor | None:
        """Elements start to stop in memory order, or the whole value if it is not element-wise."""
        pieces = self._pieces.get((name, what))
        if not pieces:
            return None
        first_start, first_stop, first = pieces[0]
        if first.numel() != first_stop - first_start or (first.dim() == 0 and len(pieces) == 1):
            return first  # a scalar such as `step`, or a factored statistic of a whole tensor
        whole = first if len(pieces) == 1 else torch.cat([p.reshape(-1) for _, _, p in pieces])
        if whole.numel() < stop:
            return None
        return whole.reshape(-1)[start:stop]
