"""What a repetition of a paper's experiments found: rows, checks and charts, without any view of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

__all__ = ["Chart", "Check", "Experiment", "ResultRow", "Results"]


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One figure of the paper beside ours."""

    case: str
    unit: str
    paper: float | None = None
    """None: the paper's text has no number for it."""
    ours: float | None = None
    """None: it was not measured; `note` says why."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours / the paper's."""
        if self.ours is None or not self.paper:
            return None
        return self.ours / self.paper


@dataclass(frozen=True, kw_only=True)
class Check:
    """Something that the paper found and that must show here, too; or that must be better here."""

    text: str
    found: str
    ok: bool


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over a shared axis: name, x and y of each."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[tuple[str, Sequence[float], Sequence[float]], ...]


@dataclass(kw_only=True)
class Experiment:
    """A table or figure of the paper, and ours."""

    title: str
    """With the paper's own name for it: "Table 1. Speedup of Data Parallelism"."""
    how: str
    """What was run, and whether computing, links or time were emulated."""
    why: str
    """Why ours differs from the paper's, in one line."""
    emulated: bool = False
    rows: list[ResultRow] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)


@dataclass(kw_only=True)
class Results:
    """All of a paper's experiments that were repeated."""

    paper: str
    scale: str
    data: str
    """Where the data is from, as in "synthetic data"."""
    machine: str
    date: str
    seconds: float = 0.0
    experiments: list[Experiment] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all checks passed."""
        return all(check.ok for each in self.experiments for check in each.checks)

    def to_json(self) -> dict[str, object]:
        """Everything, with the ratios."""
        found: dict[str, object] = {**asdict(self), "ok": self.ok}
        found["experiments"] = [
            {**asdict(each), "rows": [{**asdict(row), "ratio": row.ratio} for row in each.rows]}
            for each in self.experiments
        ]
        return found
