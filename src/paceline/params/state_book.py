"""Parameters and optimizer state as named pieces, independent of how the space is cut."""

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.exceptions import CheckpointError

__all__ = ["StateBook", "apart"]


class StateBook:
    """Parameters and optimizer state of a whole model, gathered from pieces cut in any way.

    Raises:
        CheckpointError: a key is not one of ours.
    """

    def __init__(self, parts: Iterable[dict[str, Tensor]]) -> None:
        self._pieces: dict[tuple[str, str], list[tuple[int, int, Tensor]]] = {}
        for part in parts:
            for key, tensor in part.items():
                try:
                    name, what, start, stop = key.rsplit("|", 3)
                    piece = int(start), int(stop), tensor
                except ValueError:
                    raise CheckpointError(f"{key!r} names no piece of optimizer state") from None
                self._pieces.setdefault((name, what), []).append(piece)
        self._kinds: dict[str, list[str]] = {}
        for (name, what), pieces in self._pieces.items():
            pieces.sort(key=lambda p: p[:2])
            if what:
                self._kinds.setdefault(name, []).append(what)

    @staticmethod
    def key(name: str, what: str, start: int, stop: int) -> str:
        """Key of a piece: `what` is empty for the parameter itself, else the optimizer's word."""
        return f"{name}|{what}|{start}|{stop}"

    def kinds(self, name: str) -> list[str]:
        """What the optimizer keeps for a parameter."""
        return self._kinds.get(name, [])

    def names(self) -> list[str]:
        """All parameters."""
        return [name for name, what in self._pieces if not what]

    def piece(self, name: str, what: str, start: int, stop: int) -> Tensor | None:
        """Elements start to stop in memory order, or the whole value if it is not element-wise.

        None if the book has not all of them.
        """
        found: list[Tensor] = []
        end = start
        for a, b, tensor in self._pieces.get((name, what), ()):
            if not a <= end < min(b, stop):
                continue
            if tensor.numel() != b - a or not tensor.dim():
                return tensor  # a number such as `step`, or a factored statistic of a whole tensor
            found.append(tensor.reshape(-1)[end - a : stop - a])
            end = min(b, stop)
        if end < stop or not found:
            return None
        return found[0] if len(found) == 1 else torch.cat(found)


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in memory of their own: where several share some, all but the first are copies."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return found
