"""Options of the command line that are parts of `mode`, and no settings of their own."""

import dataclasses

from paceline.core.modes.presets import DAMPINGS
from paceline.plan.option import CONSISTENCY, EVERY_COMMAND, NEW_RUNS, Option

__all__ = ["KNOBS"]

KNOBS: tuple[Option, ...] = tuple(
    dataclasses.replace(knob, flags=(f"--{knob.name}",), panel=CONSISTENCY)
    for knob in (
        Option(
            name="staleness",
            kind=int | None,
            metavar="S",
            help="With --mode ssp: the same as --mode ssp:S.",
            commands=EVERY_COMMAND,
        ),
        Option(
            name="period",
            kind=int | None,
            metavar="N",
            help="With bsp, backup, ssp, asp: local steps between exchanges.",
            commands=NEW_RUNS,
        ),
        Option(
            name="quorum",
            kind=int | None,
            metavar="N",
            help="With asp, ssp: gradients that make one update.",
            commands=NEW_RUNS,
        ),
        Option(
            name="damping",
            kind=str | None,
            metavar="HOW",
            help="With asp, ssp, downpour: what is done about stale gradients: momentum (unless you say "
            f"otherwise), {', '.join(DAMPINGS[2:])}, or none, the papers' plain rule.",
            commands=NEW_RUNS,
        ),
    )
)
