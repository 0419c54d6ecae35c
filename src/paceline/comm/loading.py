"""Loads what is named by text, `package.module:function`, when it is needed."""

import importlib
from typing import Any

__all__ = ["load"]


def load(name: str) -> Any:
    """The function or class of this name, as `package.module:function`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
