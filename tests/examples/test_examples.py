"""Every example runs as it is documented: alone, and as a run in bsp and in asp."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from paceline.data.fire_scenes import FireScenes

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOT_TRAINING_ALONE = {"early_stopping"}
"""Shows how a run ends early; tests/integration/test_ending.py runs it."""

# The example, its arguments, and what its last line says; `N` stands for a number.
CASES = {
    "mnist": ("mnist", (), "mnist, synthetic data: test accuracy N"),
    "cifar10": ("cifar10", (), "cifar10, resnet18, synthetic data: test accuracy N"),
    "cifar10-inception": (
        "cifar10",
        ("--model", "inception-v1", "--batch-size", "4"),
        "cifar10, inception-v1, synthetic data: test accuracy N",
    ),
    "fire": ("fire", ("--size", "64"), "fire, alexnet, synthetic data: test accuracy N"),
    "fire-vgg16": (
        "fire",
        ("--model", "vgg16", "--size", "64", "--batch-size", "4"),
        "fire, vgg16, synthetic data: test accuracy N",
    ),
    "pedestrians": (
        "pedestrians",
        ("--height", "64", "--batch-size", "2"),
        "pedestrians, synthetic data: average precision at IoU 0.5 N",
    ),
    "gpt": ("gpt", (), "gpt, synthetic data: perplexity N a byte"),
    "gan": ("gan", (), "gan, synthetic data: draws N of the 10 digits"),
    "digits": ("digits", (), "epoch 1, synthetic data: test accuracy N"),
}
MODES = ("alone", "bsp", "asp")

pytestmark = pytest.mark.examples


def paceline_run(*words: str) -> list[str]:
    return [sys.executable, "-m", "paceline", "run", *words]


def output_of(command: list[str], runs: Path, timeout: float) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PACELINE_RUNS": str(runs)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def test_every_example_is_tried():
    names = {file.stem for file in EXAMPLES.glob("*.py")} - NOT_TRAINING_ALONE
    assert names == {name for name, _, _ in CASES.values()}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_an_example_trains_for_twenty_steps(case, mode, tmp_path):
    name, args, said = CASES[case]
    script = [str(EXAMPLES / f"{name}.py"), "--data", "synthetic", "--steps", "20", *args]
    if mode == "alone":
        command = [sys.executable, *script]
    else:
        command = paceline_run("--workers", "2", "--mode", mode, *script)
    output = output_of(command, tmp_path, timeout=850)
    pattern = re.escape(said).replace("N", r"(?:\d+\.?\d*|nan)")
    assert re.search(f"^{pattern}$", output, re.MULTILINE), output[-2000:]
    if mode != "alone":
        assert "Succeeded after" in output and "synthetic_data 1" in output, output[-2000:]


@pytest.mark.timeout(300)
def test_a_broken_photo_ends_an_example_or_is_counted(tmp_path):
    """The message names the file; --skip-broken leaves it out, and the last line says so."""
    scenes = FireScenes(12, size=64)
    for number in range(12):
        image, label = scenes[number]
        file = tmp_path / scenes.classes[label] / f"{number}.jpg"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file)
    broken = tmp_path / "smoke" / "5.jpg"
    broken.write_bytes(broken.read_bytes()[:300])
    words = ["--data", str(tmp_path), "--size", "64", "--steps", "1", "--batch-size", "2"]
    command = [sys.executable, str(EXAMPLES / "fire.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert re.fullmatch(r"error: .*smoke/5\.jpg is broken \(.*\)\. .*--skip-broken\.\n", done.stderr)
    output = output_of([*command, "--skip-broken"], tmp_path, timeout=200)
    assert f"fire, alexnet, {tmp_path}, 1 broken file left out: test accuracy" in output


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_digits_learns(mode, tmp_path):
    """97 % of scikit-learn's digits, the one real data set that is always there."""
    script = [str(EXAMPLES / "digits.py")]
    command = (
        [sys.executable, *script]
        if mode == "alone"
        else paceline_run("--workers", "2", "--mode", mode, *script)
    )
    output = output_of(command, tmp_path, timeout=280)
    scores = [float(score) for score in re.findall(r"scikit-learn's digits: test accuracy (\d\.\d+)", output)]
    assert scores and scores[-1] >= 0.97, output[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pedestrians_are_detected(tmp_path):
    """Average precision of 0.8 on scenes with clutter, occlusion, posts and signs; in 600 s on two cores."""
    pytest.importorskip("torchvision")
    output = output_of([sys.executable, str(EXAMPLES / "pedestrians.py")], tmp_path, timeout=1700)
    found = re.search(r"synthetic data: average precision at IoU 0\.5 (\d\.\d+)", output)
    assert found and float(found[1]) >= 0.8, output[-2000:]
