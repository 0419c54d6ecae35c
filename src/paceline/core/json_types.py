"""Json, JsonObject: values that JSON can hold, where their shape is another module's to know and to check."""

from typing import TYPE_CHECKING, Any, TypeAlias

__all__ = ["Json", "JsonObject"]

if TYPE_CHECKING:
    Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
    JsonObject: TypeAlias = dict[str, Json]
else:  # codecs read annotations when they are built, and cannot follow a type into itself
    Json = Any
    JsonObject = dict[str, Any]
