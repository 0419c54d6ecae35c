"""The report in a real browser: nothing complains, every plot is drawn, it fits a phone, light and dark.

Needs Chromium (`make browser` installs Debian's). Screenshots go to $PACELINE_ARTIFACTS if it is set.
"""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.analyse.comparison import ComparedRun
from paceline.observe.analyse.run_data import RunData
from paceline.observe.show.comparison_page import comparison_page
from paceline.observe.show.run_report import write_html
from tests.synthetic_run import write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; `make browser` installs it"),
]

# Runs inside the page and tells whoever shows it what it looks like.
MEASURE = """<script>
addEventListener("load", () => {
  const seen = [...document.querySelectorAll("figure > div > svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    return {title: svg.getAttribute("aria-label"), width: box.width, height: box.height,
            shapes: svg.querySelectorAll("path,rect,polygon,circle").length};
  });
  const colour = name => getComputedStyle(document.querySelector(name));
  parent.postMessage({seen, width: innerWidth, needs: document.documentElement.scrollWidth,
    paper: colour("body").backgroundColor, ink: colour("body").color,
    line: colour(".line path") .stroke}, "*");
});
</script>"""

FRAME = """<!doctype html><html><body style="margin:0"><script>
addEventListener("message", event => document.body.setAttribute("data-seen", JSON.stringify(event.data)));
</script><iframe src="{page}" style="border:0;width:{width}px;height:{height}px"></iframe></body></html>"""

HEIGHT = 7000


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a small run, of a large one that goes on, and of a comparison."""
    root = tmp_path_factory.mktemp("pages")
    small = write_run(root / "small", workers=3, steps=600, name="small")
    large = write_run(root / "large", workers=64, servers=8, steps=60, state="running", name="large")
    pages = {"small": root / "small.html", "large": root / "large.html", "compared": root / "compared.html"}
    write_html(RunData(small), pages["small"])
    write_html(RunData(large), pages["large"])
    compared = [[ComparedRun.of(RunData(path))] for path in (small, large)]
    pages["compared"].write_text(comparison_page(compared))
    return pages


def chromium(tmp_path: Path, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    return subprocess.run(
        [
            CHROMIUM,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
            *("--disable-background-networking", "--disable-dev-shm-usage", "--virtual-time-budget=3000"),
            *("--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path / 'profile'}"),
            *options,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )


def complaints(stderr: str) -> list[str]:
    """What the page itself made the browser say."""
    return [line for line in stderr.splitlines() if "CONSOLE" in line]


def seen_in(tmp_path: Path, page: Path, *, width: int, dark: bool, keep: str) -> dict[str, Any]:
    """Show a page at a width, keep a picture of it, and return what MEASURE found."""
    copy, frame = tmp_path / "copy.html", tmp_path / "frame.html"
    text = re.sub('<meta http-equiv="Content-Security-Policy".*?>', "", page.read_text())
    copy.write_text(text.replace("</body>", f"{MEASURE}</body>"))
    # A window cannot be as narrow as a phone, a frame in it can.
    frame.write_text(FRAME.format(page=copy.name, width=width, height=HEIGHT))
    kept = Path(os.environ.get("PACELINE_ARTIFACTS") or tmp_path)
    kept.mkdir(parents=True, exist_ok=True)
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    window = f"--window-size={max(500, width)},{HEIGHT}"
    picture = kept / f"{keep}.png"
    chromium(tmp_path, frame, scheme, window, f"--screenshot={picture}")
    assert picture.stat().st_size > 20_000
    found = chromium(tmp_path, frame, scheme, window, "--dump-dom")
    assert complaints(found.stderr) == []
    match = re.search('data-seen="(.*?)"', found.stdout)
    assert match is not None, "the page did not report"
    seen = json.loads(html.unescape(match[1]))
    assert isinstance(seen, dict)
    return seen


@pytest.mark.parametrize("name", ["small", "large", "compared"])
def test_nothing_complains(pages: dict[str, Path], tmp_path: Path, name: str) -> None:
    found = chromium(tmp_path, pages[name], "--dump-dom")
    assert complaints(found.stderr) == []
    assert found.stdout.rstrip().endswith("</html>") and "<svg" in found.stdout


def test_a_complaint_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><script>console.error('surprise')</script>")
    assert any("surprise" in line for line in complaints(chromium(tmp_path, page, "--dump-dom").stderr))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["small", "large", "compared"])
def test_plots_are_drawn_and_fit(
    pages: dict[str, Path], tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    scheme = "dark" if dark else "light"
    seen = seen_in(tmp_path, pages[name], width=width, dark=dark, keep=f"{name}-{width}-{scheme}")
    assert seen["width"] == width
    assert seen["needs"] <= width, "the page is wider than the screen"
    assert len(seen["seen"]) >= 6
    for plot in seen["seen"]:
        assert plot["width"] > 100 and plot["height"] > 30 and plot["shapes"] > 0, plot
    assert (brightness(seen["paper"]) < 60) == dark
    assert abs(brightness(seen["paper"]) - brightness(seen["ink"])) > 150
    assert abs(brightness(seen["paper"]) - brightness(seen["line"])) > 60


def brightness(colour: str) -> float:
    """0 to 255, of `rgb(1, 2, 3)`."""
    red, green, blue = map(float, re.findall(r"[\d.]+", colour)[:3])
    return 0.3 * red + 0.59 * green + 0.11 * blue
