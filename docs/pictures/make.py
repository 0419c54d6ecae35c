"""Make the pictures of the README: `python docs/pictures/make.py` (needs Chromium and Pillow).

One real run with a slow worker: live.svg is what `--live` shows in its middle, report.png the report's top.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from paceline.control.rundir import find_run
from paceline.observe import RunStatus
from paceline.observe.analyse.window import Window
from paceline.observe.show.display import picture

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMAND = "paceline run --live --workers 3 --servers 2 --mode bsp examples/digits.py --epochs 20"
SLOW = "slow worker:1@1-100000:60ms"
SIZE = 1000, 1060


def main() -> None:
    """Run, draw, photograph."""
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(temporary) / "runs"
        os.environ["PACELINE_RUNS"] = str(runs)
        command = COMMAND.replace(" --live", "").split()[1:]
        with subprocess.Popen(
            [sys.executable, "-m", "paceline", *command],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PACELINE_FAULTS": SLOW},
        ) as run:
            draw_live(run)
        photograph(find_run("last").path / "report.html", Path(temporary))


def draw_live(run: "subprocess.Popen[bytes]") -> None:
    """Watch the run to its end; draw it when half of its epochs are over."""
    window = Window(5.0)
    drawn = False
    while run.poll() is None:
        time.sleep(0.2)
        try:
            status = RunStatus.from_json(find_run("last").read_status())
        except Exception:  # it has not begun
            continue
        window.see(status)
        if not drawn and status.epoch >= 10 and status.state == "running":
            console = Console(record=True, width=112, file=io.StringIO(), highlight=False)
            console.print(picture(status, window, width=112, height=40, full=True))
            svg = console.export_svg(title=COMMAND)
            svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S)  # no fonts from the network
            svg = svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
            (HERE / "live.svg").write_text(re.sub(r"[ \t]+\n", "\n", svg))
            drawn = True


def photograph(page: Path, temporary: Path) -> None:
    """The top of a page as a small PNG."""
    from PIL import Image

    raw = temporary / "raw.png"
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    size = f"--window-size={SIZE[0]},{SIZE[1]}"
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", size, f"--screenshot={raw}"]
    subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True)
    with Image.open(raw) as image:
        image.convert("RGB").quantize(200).save(HERE / "report.png", optimize=True)


if __name__ == "__main__":
    main()
