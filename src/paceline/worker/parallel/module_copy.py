"""Copies of a model's modules with parameters and buffers that the caller gives them."""

from collections.abc import Mapping

from torch import Tensor, nn

__all__ = ["copy_modules"]


def copy_modules(
    model: nn.Module, parameters: Mapping[int, nn.Parameter], buffers: Mapping[int, Tensor]
) -> dict[int, nn.Module]:
    """A copy of each module, by the id of the original; what else they hold is shared with the original.

    Args:
        parameters, buffers: what the copies have, by the id of the original's.
    """
    modules = {id(m): _bare_copy(m) for m in model.modules()}
    for module in model.modules():
        copy = modules[id(module)]
        own = vars(copy)
        for kind, known in (("_modules", modules), ("_buffers", buffers)):
            own[kind] = {n: None if v is None else known[id(v)] for n, v in vars(module)[kind].items()}
        own["_parameters"] = {}
        for name, p in vars(module)["_parameters"].items():
            if isinstance(module, nn.RNNBase) and p is not None:  # which has another list of them
                setattr(copy, name, parameters[id(p)])
            else:
                own["_parameters"][name] = None if p is None else parameters[id(p)]
    vars(modules[id(model)]).pop("forward", None)
    return modules


def _bare_copy(module: nn.Module) -> nn.Module:
    copy = type(module).__new__(type(module))
    vars(copy).update(vars(module))
    if isinstance(module, nn.RNNBase):
        vars(copy)["_flat_weights"] = list(vars(module)["_flat_weights"])
    return copy
