"""Between a torch model and flat memory: read the layout off a model, make views into memory."""

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from paceline.core.layout import ITEM_BYTES, Layout, Segment, Slice, TensorInfo, is_dense
from paceline.exceptions import UsageError

__all__ = [
    "HasParameters",
    "bind",
    "bytes_of",
    "describe",
    "dtype_named",
    "flat_view",
    "not_finite",
    "segment_view",
    "tensor_views",
]


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a layout's dtype name."""
    return cast(torch.dtype, getattr(torch, name))


class HasParameters(Protocol):
    """A model, or several."""

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterable[tuple[str, nn.Parameter]]: ...
    def named_buffers(self, *, remove_duplicate: bool = True) -> Iterable[tuple[str, Tensor]]: ...


def describe(
    model: HasParameters,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    servers: int = 1,
    whole_tensors: bool = False,
) -> tuple[Layout, list[nn.Parameter]]:
    """The layout of what `optimizer` trains in `model`, and the parameters in the layout's order.

    Trained is what is in the optimizer and requires a gradient; frozen parameters stay outside.
    Tied weights appear once, under the first of their names.

    Args:
        optimizer: one, or several; the groups of several are numbered on.

    Raises:
        UsageError: a parameter of the optimizer is not in the model, is in two optimizers, is on another
            device than the rest, is empty, sparse, of a dtype that cannot be trained, or shares memory with
            another tensor; or an optimizer has nothing to train.
    """
    several = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = _groups(names, several)
    infos: list[TensorInfo] = []
    parameters: dict[str, nn.Parameter] = {}
    for name, p in model.named_parameters():
        if id(p) not in groups:
            continue
        dtype = str(p.dtype).removeprefix("torch.")
        if p.layout != torch.strided or p.numel() == 0 or dtype not in ITEM_BYTES:
            raise UsageError(
                f"parameter {name!r} ({dtype}, {p.layout}, shape {list(p.shape)}) cannot be trained "
                f"with parameter servers: it must be dense, not empty, and {', '.join(ITEM_BYTES)}."
            )
        infos.append(
            TensorInfo(
                name=name,
                shape=tuple(p.shape),
                stride=tuple(_dense_stride(p)),
                dtype=dtype,
                group=groups[id(p)],
            )
        )
        parameters[name] = p
    devices = {p.device for p in parameters.values()}
    if len(devices) > 1:
        raise UsageError(f"the model's parameters are on several devices: {sorted(map(str, devices))}.")
    _check_apart(model, parameters)
    aliases = [
        (alias, names[id(p)])
        for alias, p in model.named_parameters(remove_duplicate=False)
        if alias != names[id(p)] and id(p) in groups
    ]
    layout = Layout.build(infos, servers=servers, whole_tensors=whole_tensors, aliases=aliases)
    return layout, [parameters[t.name] for t in layout.tensors]


def _groups(names: dict[int, str], optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, int]:
    """The group of every trained parameter, by its id; groups are counted through all optimizers."""
    found: dict[int, int] = {}
    before: dict[int, str] = {}
    first = 0
    for k, optimizer in enumerate(optimizers):
        this = "the optimizer" if len(optimizers) == 1 else f"optimizer {k} ({type(optimizer).__name__})"
        trained = 0
        for g, group in enumerate(optimizer.param_groups):
            for position, p in enumerate(group["params"]):
                if id(p) not in names:
                    raise UsageError(
                        f"parameter {position} of group {g} {list(p.shape)} of {this} is not in "
                        "the model given to prepare(). Build the optimizer from model.parameters() of that "
                        "same model."
                    )
                if p.requires_grad:
                    if id(p) in before:
                        raise UsageError(
                            f"parameter {names[id(p)]!r} is in {before[id(p)]} and in {this}. The servers "
                            "keep one optimizer state for every parameter: give each parameter to one "
                            "optimizer."
                        )
                    found[id(p)] = first + g
                    trained += 1
        if not trained:
            raise UsageError(f"{this} has no parameter that requires a gradient: nothing to train.")
        before |= {id(p): this for group in optimizer.param_groups for p in group["params"]}
        first += len(optimizer.param_groups)
    return found


def _check_apart(model: HasParameters, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse trained parameters that share memory with another tensor of the model.

    They would silently part ways when they are laid out. Frozen parameters and buffers stay where they are
    and may share memory among themselves.
    """
    trained = {id(p) for p in parameters.values()}
    others = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    extents = [(*_extent(p), name, True) for name, p in parameters.items() if not p.is_meta]
    extents += [
        (*_extent(t), name, False)
        for name, t in others
        if id(t) not in trained and t.layout == torch.strided and not t.is_meta and t.numel()
    ]
    # The furthest end so far, of trained ones and of any.
    reach: dict[bool, tuple[int, str]] = {True: (0, ""), False: (0, "")}
    for first, end, name, is_trained in sorted(extents):
        shared = [
            twin for stop, twin in (reach[True], *([reach[False]] if is_trained else [])) if first < stop
        ]
        if shared:
            raise UsageError(
                f"{shared[0]!r} and {name!r} share memory but are two tensors, and at least one of them is "
                "trained. To tie parameters, assign the very same Parameter to both."
            )
        reach[is_trained] = max(reach[is_trained], (end, name))


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte in memory and one past the last."""
    first = tensor.data_ptr()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (1 + last) * tensor.element_size()


def _dense_stride(p: Tensor) -> tuple[int, ...]:
    """The tensor's own strides if it fills its memory (channels_last, say), else contiguous ones."""
    if is_dense(p.shape, p.stride()):
        return p.stride()
    return torch.empty(p.shape, device="meta").stride()


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's memory, for sockets."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def flat_view(base: Tensor, piece: Slice) -> Tensor:
    """A slice as one flat tensor over `base`, the bytes of a whole parameter space."""
    return base[piece.start : piece.stop].view(dtype_named(piece.dtype))


def segment_view(base: Tensor, layout: Layout, segment: Segment) -> Tensor:
    """A segment over `base`: in its tensor's own shape when it is the whole tensor, else flat."""
    t = layout.tensors[segment.tensor]
    start, stop = layout.byte_of(segment)
    flat = base[start:stop].view(dtype_named(t.dtype))
    if segment.stop - segment.start == t.numel:
        return flat.as_strided(t.shape, t.stride)
    return flat


def tensor_views(base: Tensor, layout: Layout) -> list[Tensor]:
    """Every tensor of the layout as a view of `base`."""
    return [segment_view(base, layout, Segment(i, 0, t.numel)) for i, t in enumerate(layout.tensors)]


def not_finite(base: Tensor, layout: Layout) -> str | None:
    """The name of the first tensor in `base` that holds NaN or Inf; None if there is none."""
    views = tensor_views(base, layout)
    found = (t.name for t, view in zip(layout.tensors, views, strict=True) if not view.isfinite().all())
    return next(found, None)


def bind(parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
    """Make each parameter read from its view from now on. Values are not copied."""
    for p, view in zip(parameters, views, strict=True):
        p.data = view
