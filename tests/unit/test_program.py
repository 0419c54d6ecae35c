"""Scripts and modules: found before anything starts, and run as Python itself would."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.exceptions import PacelineError
from paceline.plan import Job
from paceline.plan.program_check import check_program, search_path
from paceline.worker.program_runner import exit_code, run_program

SEES = """
import json, pathlib, sys
from {place} import NAME
seen = [NAME, sys.argv, sys.path[0], __name__, __package__, __spec__ and __spec__.name, __file__]
pathlib.Path("seen.json").write_text(json.dumps(seen))
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "vision" / "digits"
    package.mkdir(parents=True)
    (tmp_path / "vision" / "__init__.py").write_text("raise ImportError('imported to be looked at')")
    (package / "__init__.py").touch()
    (package / "names.py").write_text("NAME = 'digits'")
    (package / "train.py").write_text(SEES.format(place=".names"))
    (package / "__main__.py").write_text(SEES.format(place="vision.digits.names"))
    (package / "script.py").write_text(SEES.format(place="names"))
    return tmp_path


def run_here(monkeypatch: pytest.MonkeyPatch, script: str, *, module: bool) -> list[object]:
    """What the program sees, in this process; and alone, under Python."""
    Path("vision/__init__.py").write_text("")
    before = (list(sys.argv), list(sys.path), sys.modules["__main__"])
    job = Job(script=script, module=module)
    try:
        run_program(script, ["--lr", "0.1"], search=search_path(job) or "", module=module)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("vision", "names")]:
            del sys.modules[name]
    assert before == (sys.argv, sys.path, sys.modules["__main__"])
    found = json.loads(Path("seen.json").read_text())
    alone = [sys.executable, *(["-m"] if module else []), script, "--lr", "0.1"]
    subprocess.run(alone, check=True)
    plain = json.loads(Path("seen.json").read_text())
    return [found, plain]


@pytest.mark.parametrize("module", ["vision.digits.train", "vision.digits"])
def test_a_module_sees_what_python_shows_it(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    found, plain = run_here(monkeypatch, module, module=True)
    assert found == plain


def test_a_script_sees_what_python_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found, plain = run_here(monkeypatch, "vision/digits/script.py", module=False)
    # runpy differs in what is empty, None or absolute: nobody asks.
    assert found[:4] == plain[:4]


@pytest.mark.parametrize("name", ["vision.digits.train", "vision.digits", "json.tool"])
def test_a_module_is_found_without_being_imported(name: str) -> None:
    check_program(Job(script=name, module=True))
    assert not any(module.startswith("vision") for module in sys.modules)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "vision/digits/train.py",
            "-m vision/digits/train.py: give a module's name, as in package.train (or",
        ),
        ("train.py", "(or leave -m out: `paceline run train.py`)"),
        ("vision..digits", "give a module's name"),
        ("visoin.digits.train", "there is no module 'visoin' (looked in"),
        ("visoin.digits.train", "Did you mean vision.digits.train?"),
        ("vision.digits.trian", "Did you mean vision.digits.train?"),
        (
            "vision.digits.train.more",
            "there is no module 'vision.digits.train.more': vision.digits.train is",
        ),
        ("vision", "vision is a package without a __main__.py"),
    ],
)
def test_a_module_that_is_not_there(name: str, said: str) -> None:
    with pytest.raises(PacelineError) as caught:
        check_program(Job(script=name, module=True))
    assert said in str(caught.value)


def test_the_name_of_its_runs() -> None:
    assert Job(script="vision.digits.train", module=True).name == "train"
    assert Job(script="vision.digits.__main__", module=True).name == "digits"
    assert Job(script="vision.digits", module=True).name == "digits"


LEAVES = """
import atexit, multiprocessing, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from paceline.worker.program_runner import begin_program, end_program, run_program

atexit.register(print, "of who forked us")
begin_program()
atexit.register(print, "at exit")
pool = ThreadPoolExecutor(1)
pool.submit(print, "pooled")
started = threading.Event()
threading.Thread(target=lambda: (started.wait(), print("a thread"))).start()
multiprocessing.get_context("fork").Process(target=lambda: print("a process", flush=True)).start()
file = open("left.csv", "w")
file.write("not closed")
def refers_to_it():
    return file
with open("script.py", "w") as script:
    script.write("file = open('cycle.csv', 'w')\\nfile.write('in a cycle')\\ndef refers_to_it(): return file")
run_program("script.py", [], search=".", module=False)
threading.Timer(0.01, started.set).start()
end_program()
import os; os._exit(0)
"""


def test_a_program_ends_as_python_ends_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60)
    assert sorted(done.stdout.splitlines()) == ["a process", "a thread", "at exit", "pooled"], done.stderr
    assert (tmp_path / "left.csv").read_text() == "not closed"
    assert (tmp_path / "cycle.csv").read_text() == "in a cycle"


@pytest.mark.parametrize(
    ("raised", "code", "said"), [((), 0, ""), ((0,), 0, ""), ((259,), 3, ""), (("text",), 1, "text\n")]
)
def test_exit_codes(raised: tuple[object], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(SystemExit(*raised)) == code
    assert capsys.readouterr().err == said
