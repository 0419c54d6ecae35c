"""paceline export: the model of a run as a file for plain PyTorch."""

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import parameters
from paceline.cli.printing import note, say
from paceline.exceptions import UsageError

__all__ = ["export"]


def export(
    run: Annotated[str, parameters.RUN],
    file: Annotated[
        Path,
        typer.Argument(
            help="The file to write: .safetensors, or .pt or .pth for torch.load.", show_default=False
        ),
    ],
    model: Annotated[
        int | None,
        typer.Option(
            help="Of a run with several models: which one, counted from 0. Without it the file holds all, "
            "with 0., 1., … before their keys.",
            show_default=False,
        ),
    ] = None,
    trust: Annotated[bool, parameters.TRUST] = False,
) -> None:
    """Write a run's trained model for load_state_dict in plain PyTorch.

    [dim]paceline export last model.safetensors[/dim]
    """
    from paceline.api.runs import find_run

    found = find_run(run, trust=trust)
    if file.is_dir():
        raise UsageError(f"{file} is a directory; name a file, as in {file / 'model.safetensors'}")

    from paceline import api
    from paceline.observe.analyse import wording

    checkpoint = api.export_run(found, file, model, say=note)
    models = int(checkpoint.meta.get("models", 1))
    size = wording.size(file.stat().st_size)
    version = wording.count(checkpoint.version)
    say(f"{file}: the model of run {found.id} at version {version}, {size}")
    if models > 1 and model is None:
        say(f"It holds {models} models: their keys begin with 0. to {models - 1}. (--model K: one of them)")
        return
    load = "safetensors.torch.load_file(%s)" if file.suffix == ".safetensors" else "torch.load(%s)"
    quoted = json.dumps(str(file), ensure_ascii=False)
    say(f"Load it:  model.load_state_dict({load % quoted})")
