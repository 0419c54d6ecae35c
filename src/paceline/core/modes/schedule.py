"""A schedule: the modes that a run goes through by itself, by version."""

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.modes.mode_spec import ModeSpec
from paceline.core.modes.parsing import parse_mode
from paceline.exceptions import UsageError

__all__ = ["Schedule", "parse_schedule"]


@dataclass(frozen=True)
class Schedule:
    """From each of these versions on, a run that began in `start` goes on in the mode beside it.

    Schedule(parse_mode("bsp"), ((500, parse_mode("ssp:4")), (2000, parse_mode("asp"))))
    """

    start: ModeSpec
    turns: tuple[tuple[int, ModeSpec], ...] = ()

    def __post_init__(self) -> None:
        last = 0
        for version, mode in self.turns:
            turn = f"schedule {version}={mode}"
            if version < 1:
                raise UsageError(
                    f"{turn}: the first version is 1; to begin in {mode}, use it as the run's mode"
                )
            if version <= last:
                raise UsageError(
                    f"{turn}: it comes after {last}=…; put the versions in rising order, each once"
                )
            if reason := self.start.switch_refusal(mode):
                raise UsageError(
                    f"{turn}: a run that begins in {self.start} cannot go on in {mode}: {reason}"
                )
            last = version

    @property
    def modes(self) -> tuple[ModeSpec, ...]:
        """All that the run may go through by itself, in order."""
        return (self.start, *(mode for _, mode in self.turns))

    def check(self, workers: int) -> None:
        """Raise UsageError if this many workers cannot run in one of the modes."""
        for mode in self.modes:
            mode.check(workers)

    def due(self, version: int, *, since: int = 0) -> ModeSpec | None:
        """The mode of the latest turn up to `version`, or None if there is none yet.

        Args:
            since: pass over turns up to this version. A caller that remembers the version at which it last
                asked or switched lets a person's or the guard's choice stand until the next turn.
        """
        return next((mode for turn, mode in reversed(self.turns) if since < turn <= version), None)

    def __str__(self) -> str:
        return ", ".join([str(self.start), *(f"{version}={mode}" for version, mode in self.turns)])


def parse_schedule(start: ModeSpec, texts: Iterable[str]) -> Schedule:
    """The schedule that texts such as `500=ssp:4` and `2000=asp` mean, each a version and a mode.

    Raises:
        UsageError: with the text, what is wrong with it, and what would be right.
    """
    turns = []
    for text in texts:
        version, equals, mode = str(text).strip().partition("=")
        if not equals or not (version.isascii() and version.isdigit() and len(version) < 16):
            raise UsageError(
                f"schedule {text!r}: it needs a version and a mode, as in 500=ssp:4, which goes on in ssp:4 "
                "from the 500th update"
            )
        turns.append((int(version), parse_mode(mode)))
    return Schedule(start, tuple(turns))
