"""The frame of our pages: one HTML file without scripts, fonts or anything else from outside."""

from collections.abc import Iterable, Sequence
from html import escape

from paceline.observe.show import plots

__all__ = ["box", "document", "paragraph", "plot_grid", "section", "table", "tiles"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may load for the page: nothing. A name or a log line that looks like a script stays text."""

_BEST = ' class="best"'

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b2126;--quiet:#56616b;--line:#dde3e8;--card:#f5f7f9;
--mark:#0b5c8f;--warn:#8a4b00;--warn-paper:#fff4e0}
@media (prefers-color-scheme:dark){:root{--paper:#14181c;--ink:#e6eaed;--quiet:#a3aeb8;--line:#343c44;
--card:#1d2328;--mark:#6cbcf0;--warn:#ffc46b;--warn-paper:#33270f}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main,header,footer{max-width:1120px;margin:0 auto;padding:0 1rem}
h1{font-size:1.05rem;font-weight:600;color:var(--quiet);margin:1.2rem 0 .3rem;overflow-wrap:anywhere}
.verdict{font-size:1.35rem;line-height:1.35;margin:0 0 1rem;padding-left:.9rem;max-width:56rem}
.verdict{border-left:5px solid var(--mark)}
h2{font-size:1.2rem;margin:2.4rem 0 .2rem;border-top:1px solid var(--line);padding-top:1.2rem}
.how{color:var(--quiet);margin:0 0 1rem;max-width:46rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(8.7rem,1fr));gap:.6rem;margin:0;padding:0}
.tiles div{background:var(--card);border-radius:8px;padding:.55rem .65rem;min-width:0}
.tiles dt{font-size:.8rem;color:var(--quiet)}
.tiles dd{margin:0;font-size:1.15rem;font-weight:600;overflow-wrap:anywhere}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,25rem),1fr));gap:1.4rem 2rem}
.plots>figure.alone,.plots>.alone{grid-column:1/-1}
.box{background:var(--warn-paper);color:var(--warn);border-radius:8px;padding:.7rem 1rem;margin:.8rem 0}
.box ul{margin:.3rem 0 0;padding-left:1.2rem}
.scroll{overflow-x:auto;margin:.6rem 0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.88rem}
th,td{text-align:right;padding:.25rem .5rem;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0}
thead th{color:var(--quiet);font-weight:600;vertical-align:bottom}
td.best{font-weight:700;color:var(--mark)}
table.words td{text-align:left;white-space:normal}
pre{background:var(--card);border-radius:8px;padding:.7rem .9rem;overflow-x:auto}
pre{font-size:.85rem;margin:.6rem 0}
code{font-size:.9em;overflow-wrap:anywhere}
details{margin:.6rem 0}summary{cursor:pointer;color:var(--mark)}
dl.words dt{font-weight:600;margin-top:.6rem}dl.words dd{margin:0;color:var(--quiet)}
footer{color:var(--quiet);font-size:.85rem;margin-top:2.5rem;padding-bottom:2rem}
@media (max-width:600px){td:first-child{white-space:normal;min-width:6rem}}
@media print{.box,.tiles div{border:1px solid #999}}
"""


def document(title: str, header: str, main: str, footer: str = "") -> str:
    """A whole page. `header`, `main` and `footer` are markup, `title` is text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{plots.STYLE}</style>\n</head>\n<body>\n"
        f"<header>\n{header}\n</header>\n<main>\n{main}\n</main>\n<footer>{footer}</footer>\n</body>\n</html>\n"
    )


def section(title: str, how: str, *parts: str) -> str:
    """A part of a page; `how` says how to read it. Nothing if there is nothing in it."""
    body = "\n".join(part for part in parts if part)
    if not body:
        return ""
    return f'<section>\n<h2>{escape(title)}</h2>\n<p class="how">{escape(how)}</p>\n{body}\n</section>'


def paragraph(text: str) -> str:
    """Plain text."""
    return f"<p>{escape(text)}</p>"


def plot_grid(*figures: str) -> str:
    """Plots beside each other, below each other on a phone."""
    found = [figure for figure in figures if figure]
    return f'<div class="plots">{"".join(found)}</div>' if found else ""


def box(title: str, lines: Iterable[str] = ()) -> str:
    """Something that must be seen."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="box">{escape(title)}{f"<ul>{items}</ul>" if items else ""}</div>'


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """The few numbers that matter most: name and value."""
    found = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)
    return f'<dl class="tiles">{found}</dl>'


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    best: Iterable[tuple[int, int]] = (),
    classes: str = "",
) -> str:
    """Rows of text. `best` are the cells (row, column) that are marked."""
    marked = set(best)
    body = ""
    for i, row in enumerate(rows):
        cells = "".join(
            f"<td{_BEST if (i, j) in marked else ''}>{escape(str(cell))}</td>" for j, cell in enumerate(row)
        )
        body += f"<tr>{cells}</tr>\n"
    if not body:
        return ""
    kind = f' class="{classes}"' if classes else ""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    top = f"<thead><tr>{top}</tr></thead>" if any(head) else ""
    return f'<div class="scroll"><table{kind}>{top}<tbody>\n{body}</tbody></table></div>'
