"""Present: the run as one server sees it now: its workers, and the mode and placement that it has come to."""

from dataclasses import dataclass, field

from paceline.core.layout import Layout
from paceline.core.modes.mode_spec import ModeSpec
from paceline.core.placement import Placement

__all__ = ["Present"]

_NOWHERE = Placement(0, frozenset(), ())


@dataclass
class Present:
    """One owner, a leader or a follower; its parts read it.

    The decider may be ahead: a step that it decided on may still wait to be executed.
    """

    mode: ModeSpec
    """The mode of the last executed step."""
    placement: Placement = _NOWHERE
    """The placement of the last executed step."""
    ordered: Placement = _NOWHERE
    """The last placement in the order, whether its step is executed yet or not. Only the leader keeps it."""
    layout: Layout | None = None
    """None: the run has no model yet."""
    optimizers: int = 1
    """Number of optimizers that the script has."""
    attached: dict[int, int] = field(default_factory=dict)
    """Incarnations of the attached workers."""
