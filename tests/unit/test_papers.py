"""`paceline bench`: its networks are the papers', its arithmetic is right, and a failed check shows."""

import json
import math
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.data.cifar10 import drawn_shapes
from paceline.exceptions import DataError, PacelineError, UsageError
from paceline.papers import accuracy_by_workers as emulated
from paceline.papers.bench import repeat
from paceline.papers.image_training import images_of
from paceline.papers.networks import NETWORKS, inception_v1, resnet18
from paceline.papers.photos import Preprocessing, write_photos
from paceline.papers.published import SPEEDUPS, TABLE_II
from paceline.papers.results import Chart, Check, Experiment, ResultRow, Results
from paceline.papers.results_page import cells, results_page, write_results
from paceline.papers.scales import PAPER1, PAPER4
from paceline.papers.speedups import rows_of_paper
from paceline.papers.step_times import StepTimes, Stopwatch, samples_per_s, score_of, step_times
from paceline.papers.trials import Trials
from tests.speed import first


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- networks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("alexnet", {}, 57_016_131),
        ("vgg16", {}, 134_272_835),
        ("resnet18", {"coarse": True}, 11_178_051),
        ("inception-v1", {"coarse": True}, 5_602_979),
    ],
)
def test_networks_have_the_parameters_of_torchvisions(name, settings, expected):
    with torch.device("meta"):
        assert parameters(NETWORKS[name](3, **settings)) == expected
        models = pytest.importorskip("torchvision.models")
        names = {"inception-v1": "googlenet"}
        more = {"aux_logits": False, "init_weights": False} if name == "inception-v1" else {}
        theirs = getattr(models, names.get(name, name))(num_classes=3, **more)
    assert parameters(theirs) == expected


@pytest.mark.parametrize(
    ("make", "coarse"),
    first(2, [(resnet18, False), (inception_v1, True), (resnet18, True), (inception_v1, False)]),
)
def test_narrow_networks_compute(make, coarse):
    model = make(10, width=0.0625, coarse=coarse)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.device("meta"):
        assert parameters(model) < parameters(make(10)) / 20


@pytest.mark.parametrize(("name", "size"), [("alexnet", 64), ("vgg16", 32)])
def test_networks_for_photos_take_small_ones(name, size):
    assert NETWORKS[name](3, hidden=8)(torch.randn(1, 3, size, size)).shape == (1, 3)


# --- data -------------------------------------------------------------------------------------------


def test_photos_are_written_and_cut_to_size(tmp_path):
    write_photos(tmp_path, 6, 28)
    files = sorted(tmp_path.rglob("*.jpg"))
    assert [file.parent.name for file in files] == ["fire"] * 2 + ["no_fire"] * 2 + ["smoke"] * 2
    with Image.open(files[0]) as image:
        assert image.size == (32, 32)
    torch.manual_seed(0)
    grey = torch.full((3, 40, 60), 128, dtype=torch.uint8)
    for size in (28, 64):
        square = Preprocessing(size)(grey)
        assert square.shape == (3, size, size)
        assert float(square[0].mean()) == pytest.approx((128 / 255 - 0.485) / 0.229, abs=1e-3)


def test_images_are_drawn_where_there_is_no_cifar():
    train, test = images_of("synthetic", 40)
    assert len(train) == 40 and len(test) == 1000
    assert torch.equal(train.tensors[1], drawn_shapes(40, seed=1).tensors[1])


# --- figures ----------------------------------------------------------------------------------------


def test_speed_is_counted_while_all_workers_train(tmp_path):
    workers = [
        StepTimes(0, ends=[1.0, 2.0, 3.0, 4.0], samples=[8, 8, 8, 8]),
        StepTimes(1, ends=[1.5, 2.5, 3.5], samples=[4, 4, 4]),
    ]
    # From 1.5 (the later first step) to 3.5 (the earlier last one): two steps of each.
    assert samples_per_s(workers) == pytest.approx((8 + 8 + 4 + 4) / 2.0)
    with pytest.raises(PacelineError, match="too few steps at the same time"):
        samples_per_s([StepTimes(0, ends=[1.0], samples=[8])])
    for rank, score in ((1, None), (0, 0.5)):
        watch = Stopwatch(tmp_path, rank)
        watch.step_ended(3)
        watch.write(score)
    read = step_times(tmp_path)
    assert [each.rank for each in read] == [0, 1] and read[1].samples == [3]
    assert score_of(read) == 0.5
    with pytest.raises(PacelineError, match="no worker measured"):
        score_of(read[1:])


def test_every_row_of_paper_1_is_measured_or_says_why_not():
    rows = rows_of_paper(cores=4)
    assert set(rows) == set(SPEEDUPS)
    for paper, ours in rows.items():
        assert ours, paper
    assert any("threads:4" in each for each in rows["CPU single-process"])


def test_table_ii_is_the_papers():
    """Read from the paper's text by hand, apart from the code."""
    assert TABLE_II["asp", "resnet18"] == (98, 96, 50, 2000, 32536, 9.279, 63, 104)
    assert [each.updates for each in TABLE_II.values()] == [931, 4067, 7448, 32536]
    assert {8 * TABLE_II["bsp", name].updates for name in ("resnet18", "inception-v1")} == {32536, 7448}


def results(*, ok: bool) -> Results:
    experiment = Experiment(
        title="Figure 0. <b>Bold</b>",
        how="Emulated.",
        why="It is emulated.",
        emulated=True,
        rows=[
            ResultRow(case="speed", unit="s", paper=4.0, ours=3.0),
            ResultRow(case="gone", unit="s", paper=4.0, note="not run: no GPU"),
            ResultRow(case="new", unit="s", ours=1234.5),
        ],
        checks=[Check(text="It falls", found="3 → 2", ok=ok)],
        charts=[Chart(title="Falling", x_label="n", y_label="s", curves=(("ours", [1, 2], [3.0, 2.0]),))],
    )
    return Results(
        paper="Paper 0",
        scale="small",
        data="synthetic data",
        machine="a machine, 2 cores",
        date="2026-11-18",
        experiments=[experiment],
    )


def test_rows_have_the_papers_figure_ours_and_the_ratio():
    rows = results(ok=True).experiments[0].rows
    assert cells(rows[0]) == ("speed", "s", "4", "3", "0.75", "")
    assert cells(rows[1]) == ("gone", "s", "4", "–", "–", "not run: no GPU")
    assert cells(rows[2]) == ("new", "s", "–", "1,234", "–", "")
    every = [number for profile in TABLE_II.values() for number in profile]
    for number in (*every, *(number for pair in SPEEDUPS.values() for number in pair)):
        shown = cells(ResultRow(case="", unit="", paper=number))[2]
        assert float(shown.replace(",", "")) == number, "the paper's figure is rounded"


@pytest.mark.parametrize("ok", [True, False])
def test_the_page_says_what_is_emulated_and_synthetic_and_what_failed(tmp_path, ok):
    found = results(ok=ok)
    path = write_results(found, tmp_path / "new")
    page = path.read_text(encoding="utf-8")
    assert page == results_page(found)
    assert "· emulated" in page and "synthetic data" in page and "Why ours differs: It is emulated." in page
    assert "&lt;b&gt;Bold" in page and "<b>Bold" not in page
    assert (
        "<svg" in page
        and "prefers-color-scheme:dark" in page
        and "http" not in page.replace("http-equiv", "")
    )
    assert ("Checks that failed" in page) is (not ok)
    told = json.loads((tmp_path / "new" / "results.json").read_text(encoding="utf-8"))
    assert told["ok"] is ok and told["experiments"][0]["rows"][0]["ratio"] == 0.75


# --- figures 7 and 8, emulated ----------------------------------------------------------------------


def test_twelve_emulated_workers_have_the_staleness_of_twelve():
    amounts = PAPER4["tiny"]
    learned = {mode: emulated.learn(amounts, "synthetic", 12, mode, 0) for mode in ("bsp", "asp")}
    assert learned["bsp"].staleness == 0 and learned["asp"].staleness > 3
    assert all(len(each.accuracies) == amounts.accuracy_epochs for each in learned.values())
    assert all(0 <= score <= 1 for each in learned.values() for score in each.accuracies)
    again = emulated.learn(amounts, "synthetic", 12, "asp", 0)
    assert again == learned["asp"], "virtual time is not repeatable"


def learned(last: float, staleness: float = 0.0) -> list[emulated.Learned]:
    return [emulated.Learned(accuracies=[0.1, last], staleness=staleness, seconds=9.0, idleness=0.5)]


@pytest.mark.parametrize(
    ("few", "many", "ok"),
    [(0.9, 0.88, True), (0.9, 0.55, False), (0.1, 0.1, False), (math.nan, math.nan, False)],
)
def test_the_check_of_damping_fails_where_accuracy_falls_or_nothing_is_learned(few, many, ok):
    found = {
        (workers, mode): learned({4: few, 8: few, 12: many}[workers], workers)
        for workers in emulated.WORKERS
        for mode in emulated.MODES
    }
    experiment = emulated.figure_7(found, PAPER4["tiny"])
    assert experiment.checks[0].ok is ok


def test_the_check_of_staleness_fails_where_it_does_not_grow():
    for values, ok in (((1, 2, 3), True), ((1, 3, 3), False), ((3, 2, 1), False)):
        found = {
            (workers, emulated.PLAIN): learned(0.9, value)
            for workers, value in zip(emulated.WORKERS, values, strict=True)
        }
        assert emulated.figure_8(found).checks[0].ok is ok


# --- the command ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["paper2"], "paper2: give one of paper1, paper4"),
        (["paper4", "--scale", "huge"], "--scale huge: give small"),
        (["paper4", "--data", "nowhere"], "does not exist"),
        (["paper1", "--data", "nowhere"], "does not exist"),
        (["paper4", "--dir", "file/below"], "--dir file/below cannot be written"),
    ],
)
def test_bad_input_of_bench_is_refused_before_anything_starts(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())


def test_broken_data_of_bench_is_named(tmp_path):
    for name in ("fire", "smoke"):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.jpg").write_bytes(b"no photo")
    with pytest.raises(DataError, match=r"fire/0\.jpg is broken"):
        repeat("paper1", scale="tiny", data=str(tmp_path))
    with pytest.raises(UsageError, match="no data_batch_1"):
        repeat("paper4", scale="tiny", data=str(tmp_path))


def test_a_script_that_fails_alone_is_told_with_its_error(tmp_path):
    told: list[str] = []
    trials = Trials(tmp_path / "trials", told.append)
    with pytest.raises(PacelineError, match=r"vgg: the script failed alone[\s\S]*--network"):
        trials.alone("vgg", "paceline.papers.photo_training", [], threads=1)
    assert told == ["vgg"] and not list((tmp_path / "trials").iterdir())


def test_scales_train_whole_batches():
    for scale in ("tiny", "small", "full"):
        for case in PAPER1[scale].cases:
            assert case.photos >= 2 * case.batch_size
        assert PAPER4[scale].batch_images >= max(PAPER4[scale].batch_sizes)
