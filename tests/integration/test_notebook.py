"""The notebook of the examples, executed by a real Jupyter kernel."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(300)]
NOTEBOOK = Path(__file__).parents[2] / "examples" / "digits.ipynb"
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def test_the_notebook_runs_and_shows_a_table_and_plots(tmp_path: Path) -> None:
    if subprocess.run([sys.executable, "-c", "import nbclient, ipykernel"], capture_output=True).returncode:
        pytest.skip("Jupyter is not installed: pip install 'paceline[notebook]'")
    import json

    target = tmp_path / "executed.ipynb"
    environment = {**os.environ, "PACELINE_RUNS": str(tmp_path / "runs"), "JUPYTER_PLATFORM_DIRS": "1"}
    command = [sys.executable, "-c", EXECUTE, str(NOTEBOOK), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    cells: list[Any] = [
        each for each in json.loads(target.read_text())["cells"] if each["cell_type"] == "code"
    ]
    _, _, fitting, shown, plain = cells

    progress = [each for each in fitting["outputs"] if each["output_type"] == "display_data"]
    lines = "".join("".join(each["text"]) for each in fitting["outputs"] if each["output_type"] == "stream")
    assert len(progress) == 1, "one place, however long the run takes"
    assert "succeeded" in "".join(progress[0]["data"]["text/plain"])
    assert "running" not in lines, lines

    (result,) = shown["outputs"]
    table = "".join(result["data"]["text/plain"])
    assert re.search(r"^state +succeeded$", table, re.M) and "eval_accuracy" in table
    assert len(table) < 800 and "tensor(" not in table
    page = "".join(result["data"]["text/html"])
    assert page.startswith("<iframe") and "&lt;svg" in page and "eval_accuracy" in page
    accuracy = float("".join(plain["outputs"][0]["text"]).split()[1])
    assert accuracy >= 0.97
