"""Settings of torch that change what an optimizer computes, carried from the script to the servers.

A script sets them for its process, and servers are other processes. Carried are the default dtype (optimizers
keep step counts and rates in float64 if it is that), the precision of float32 matrix products (whole-tensor
optimizers) and whether denormal numbers are flushed to zero. Not carried are deterministic algorithms and the
number of threads: neither changes an element of what the optimizers' CPU kernels compute.
"""

from dataclasses import dataclass
from typing import Any

import torch

from paceline.exceptions import FrameError

__all__ = ["Numerics"]

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_PRECISIONS = ("highest", "high", "medium")
_DENORMAL = 1e-40


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Settings of one process. Denormals are the calling thread's, and those of threads that it starts."""

    default_dtype: str = "float32"
    matmul_precision: str = "highest"
    flush_denormal: bool = False

    def __post_init__(self) -> None:
        if self.default_dtype not in _DTYPES or self.matmul_precision not in _PRECISIONS:
            raise FrameError(f"not settings of torch: {self}")

    @classmethod
    def here(cls) -> "Numerics":
        """Those of this process."""
        denormal = torch.full((1,), _DENORMAL, dtype=torch.float32, device="cpu")
        return cls(
            default_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
            matmul_precision=torch.get_float32_matmul_precision(),
            flush_denormal=(denormal * 1).item() == 0.0,
        )

    def apply(self) -> None:
        """Set them in this process, and for denormals in this thread."""
        torch.set_default_dtype(getattr(torch, self.default_dtype))
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.set_flush_denormal(self.flush_denormal)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON; `from_json` is its inverse."""
        return {
            "default_dtype": self.default_dtype,
            "matmul_precision": self.matmul_precision,
            "flush_denormal": self.flush_denormal,
        }

    @classmethod
    def from_json(cls, data: Any) -> "Numerics":
        """Read settings from the wire; anything odd is a FrameError."""
        try:
            return cls(
                default_dtype=data["default_dtype"],
                matmul_precision=data["matmul_precision"],
                flush_denormal=bool(data["flush_denormal"]),
            )
        except (KeyError, TypeError) as error:
            raise FrameError(f"not settings of torch: {error!r}") from error
