"""What a script records, and how two records differ."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["different_bits", "far_apart"]

Record = dict[str, Any]

_KERNELS = ("fused", "foreach")
"""Settings that say how to compute and not what: servers choose by themselves."""

TOLERANCE = 1e-10

AMPLIFIED = 10.0
"""How many times as far as nudged inputs move a value, two correct ways of rounding may move it."""


def different_bits(expected: Record, got: Record) -> str | None:
    """The first thing that differs in any bit; None if everything is the same."""
    mine, theirs = dict(_leaves(expected)), dict(_leaves(got))
    if mine.keys() != theirs.keys():
        missing, extra = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
        return f"missing: {missing[:8]}; extra: {extra[:8]}"
    for name, value in mine.items():
        if _bits(value) != _bits(theirs[name]):
            return f"{name}: expected {_shown(value)}, got {_shown(theirs[name])}"
    return None


def far_apart(expected: Record, got: list[Record], nudged: Sequence[Record] = ()) -> str | None:
    """How the workers of a run differ from one process with the whole batch; None if only by rounding.

    The mean of two halves' gradients is rounded differently from the gradient of the whole batch, by some
    1e-16. Most scripts keep that small. Adam does not where a gradient is 0 but for its rounding (a shift in
    front of a LayerNorm): it divides 1e-16 by 1e-8, and Rprop takes its sign. There, the right value is not
    known better than to how far it moves when the inputs change in their last bits.

    Args:
        got: the records of all workers.
        nudged: records of the same process with nudged inputs. Each value may differ by AMPLIFIED times what
            they differ from `expected`, beside TOLERANCE.
    """
    for rank, record in enumerate(got):
        for part in ("evaluations", "optimizers", "rates"):
            if found := _far(part, expected[part], record[part], [each[part] for each in nudged]):
                return f"worker {rank}: {found}"
        for name, value in expected["model"].items():
            if name in expected["buffers"]:
                continue  # a worker's own
            others = [each["model"][name] for each in nudged]
            if found := _far(f"model.{name}", value, record["model"][name], others):
                return f"worker {rank}: {found}"
    together = _together([record["losses"] for record in got])
    return _far("losses", expected["losses"], together, [each["losses"] for each in nudged])


def _together(losses: list[list[list[float]]]) -> list[list[float]]:
    """The losses of the whole batches, from those of their parts."""
    parts: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for of_worker in losses:
        for epoch, i, samples, loss in of_worker:
            parts[int(epoch), int(i)].append((int(samples), loss))
    found = []
    for (epoch, i), each in sorted(parts.items()):
        samples = sum(n for n, _ in each)
        found.append([epoch, i, samples, sum(n * loss for n, loss in each) / samples])
    return found


def _far(name: str, expected: Any, got: Any, nudged: list[Any]) -> str | None:
    mine, theirs = dict(_leaves(expected, name)), dict(_leaves(got, name))
    others = [dict(_leaves(each, name)) for each in nudged]
    if mine.keys() != theirs.keys():
        missing, extra = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
        return f"missing: {missing[:8]}; extra: {extra[:8]}"
    for key, value in mine.items():
        other = theirs[key]
        if isinstance(value, Tensor | float | int) and not isinstance(value, bool):
            a, b = _float64(value), _float64(other)
            if a.shape != b.shape:
                return f"{key}: expected shape {tuple(a.shape)}, got {tuple(b.shape)}"
            moved = max(((_float64(each[key]) - a).abs().max().item() for each in others), default=0.0)
            within = TOLERANCE + AMPLIFIED * moved
            close = torch.isclose(a, b, rtol=TOLERANCE, atol=within, equal_nan=True)
            if not close.all():
                by = (a - b).abs().max().item()
                return f"{key}: expected {_shown(value)}, got {_shown(other)} (differs by {by:.3g})"
        elif value != other:
            return f"{key}: expected {value!r}, got {other!r}"
    return None


def _float64(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key not in _KERNELS and not _has_made_no_step(each):
                yield from _leaves(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        yield f"{name}#", len(value)
        for number, each in enumerate(value):
            yield from _leaves(each, f"{name}[{number}]")
    else:
        yield name, value


def _has_made_no_step(value: Any) -> bool:
    """Whether this is an optimizer's state of a parameter that it has never stepped, and all zeros.

    torch's fused kernels make it before they see that a GradScaler has found the gradient not to be finite;
    other kernels, and servers, make it at the first step.
    """
    if not isinstance(value, dict) or "step" not in value:
        return False
    return all(not torch.as_tensor(each).any() for each in value.values())


def _bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        return str(plain.dtype), tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, float):
        return "float", value.hex()
    return type(value).__name__, value


def _shown(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return text if len(text) < 200 else text[:200] + "…"
