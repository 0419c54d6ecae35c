"""What a prepared loader is to a script: a DataLoader with other batches."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["Wrapped"]


class Wrapped(DataLoader[Any]):
    """The user's DataLoader in all but iteration and length; `isinstance(…, DataLoader)` is true.

    DataLoader's own initialization is left out: every attribute is looked up in the user's loader, and what
    torch does not allow to change there cannot be changed here either.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def _seal(self) -> None:
        """The attributes of this object are set. From here on torch's rules for a DataLoader's hold."""
        self._DataLoader__initialized = True

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        raise NotImplementedError
