"""The short name of a job, for people."""

import re

__all__ = ["name_of"]


def name_of(script: str | None, *, module: bool) -> str:
    """The script without its directory and ending, the module's last part, or `fit`."""
    if script is None:
        return "fit"
    if module:
        return script.removesuffix(".__main__").rpartition(".")[2]
    return re.split(r"[/\\]", script)[-1].removesuffix(".py") or "script"
