"""Mode texts that run directories hold, written when a mode had other defaults than now."""

from paceline.core.modes.parsing import parse_mode

__all__ = ["DEFAULTS", "as_first_stored"]

DEFAULTS = 2
"""Number of the present set of defaults, stored beside a mode's text. Texts without a number are of set 1:
ssp, asp, downpour and dogwild had no damping, and diloco had outer=nesterov."""


def as_first_stored(text: str) -> str:
    """Today's text of a mode that was stored with the first set of defaults.

    `asp` is `asp+damping=none` now, and `diloco:8` is `diloco:8+outer=nesterov`. Other texts stay the same.
    """
    spec = parse_mode(text)
    if "damping=" not in text and spec.damping != "none":
        text += "+damping=none"
    if "outer=" not in text and spec.outer == "fitted":
        text += "+outer=nesterov"
    return str(parse_mode(text))
