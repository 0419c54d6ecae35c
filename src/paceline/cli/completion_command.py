"""paceline completion: what makes a shell complete commands, options and runs."""

import os
from typing import Annotated

import typer

from paceline.cli.printing import say
from paceline.exceptions import UsageError

__all__ = ["COMPLETE_VARIABLE", "completion", "prepare_completion"]

COMPLETE_VARIABLE = "_PACELINE_COMPLETE"
"""In the environment of a command that only has to complete."""
_SHELLS = {
    "bash": 'eval "$(paceline completion bash)"    in ~/.bashrc',
    "zsh": 'eval "$(paceline completion zsh)"    in ~/.zshrc, behind compinit',
    "fish": "paceline completion fish | source    in ~/.config/fish/config.fish",
}


def prepare_completion() -> None:
    """Have the command complete instead of run, if a shell asks that."""
    if COMPLETE_VARIABLE in os.environ:
        # typer does this itself only for apps that have its own options --install-completion, ….
        from typer._completion_classes import completion_init

        completion_init()


def completion(
    shell: Annotated[
        str, typer.Argument(metavar="bash|zsh|fish", help="The shell that you use.", show_default=False)
    ],
) -> None:
    """Print what makes your shell complete commands, options and the names of runs.

    [dim]eval "$(paceline completion bash)"[/dim]
    """
    from typer._completion_shared import get_completion_script

    if shell not in _SHELLS:
        raise UsageError(f"completion {shell}: there is none for this shell. Valid: {', '.join(_SHELLS)}")
    script = get_completion_script(prog_name="paceline", complete_var=COMPLETE_VARIABLE, shell=shell)
    say(f"# {_SHELLS[shell]}\n{script}")
