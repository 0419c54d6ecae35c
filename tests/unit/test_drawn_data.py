"""Generated data sets, text, average precision, and the options that all examples have."""

import argparse
import math

import pytest
import torch

from paceline.data.accuracy import accuracy
from paceline.data.average_precision import average_precision, overlaps
from paceline.data.fire_scenes import FireScenes
from paceline.data.options import data_options, ends_with_message, marks_of, source_of
from paceline.data.street_scenes import StreetScenes
from paceline.data.text import generated_text, text_pieces
from paceline.exceptions import DataError


def test_a_street_scene_depends_on_its_seed_and_number_only():
    first, again, other = StreetScenes(30), StreetScenes(30), StreetScenes(30, seed=1)
    for number in (3, 0, 29):
        assert torch.equal(first[number][0], again[number][0])
        assert not torch.equal(first[number][0], other[number][0])
    with pytest.raises(IndexError):
        first[30]


def test_street_scenes_have_pedestrians_clutter_and_hidden_ones():
    scenes = [StreetScenes(60, height=48, width=96)[number] for number in range(60)]
    for image, target in scenes:
        assert image.shape == (3, 48, 96) and image.dtype == torch.float32
        boxes = torch.cat([target["boxes"], target["ignored"]])
        assert bool((boxes[:, 2:] > boxes[:, :2]).all())
        assert bool((boxes >= 0).all()) and bool((boxes <= torch.tensor([96, 48, 96, 48])).all())
        assert len(target["labels"]) == len(target["boxes"])
    counts = [len(target["boxes"]) for _, target in scenes]
    assert {0, 1, 2} <= set(counts)
    assert any(len(target["ignored"]) for _, target in scenes), "nobody is hidden"


def test_fire_scenes_have_three_classes_that_look_different():
    scenes = FireScenes(9, size=64)
    assert [scenes[number][1] for number in range(6)] == [0, 1, 2, 0, 1, 2]
    assert scenes[0][0].shape == (3, 64, 64) and scenes[0][0].dtype == torch.uint8
    assert torch.equal(scenes[4][0], FireScenes(9, size=64)[4][0])
    scenes.transform = lambda image: image[:, ::2]
    assert scenes[0][0].shape == (3, 32, 64)


def test_generated_text_keeps_its_rules():
    lines = generated_text(5000).splitlines()
    sums = [line.rstrip(".").split() for line in lines if line[0].isdigit()]
    assert len(sums) > 20
    for a, animal, _, b, same, _, total, last in sums:
        assert int(a) + int(b) == int(total) and animal == same == last


def test_text_is_cut_into_pieces_and_the_targets_are_one_further(tmp_path):
    (tmp_path / "b.txt").write_text("klmnopqrst")
    (tmp_path / "a.md").write_text("abcdefghij")
    train, test = text_pieces(tmp_path, 4, test_share=0.3)
    assert len(train) == 3 and len(test) == 1
    inputs, targets = train[1]
    assert bytes(inputs.tolist()) == b"efgh" and bytes(targets.tolist()) == b"fghi"
    with pytest.raises(IndexError):
        train[3]
    half, other = text_pieces(tmp_path / "a.md", 2, test_share=0.5)
    assert len(half) == len(other) == 2


def test_text_that_is_missing_or_too_short_is_said(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        text_pieces(tmp_path / "nowhere", 8)
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(DataError, match="no text files"):
        text_pieces(tmp_path, 8)
    (tmp_path / "short.txt").touch()
    with pytest.raises(DataError, match="0 bytes are too few"):
        text_pieces(tmp_path / "short.txt", 8)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(DataError, match="9 bytes are too few for pieces of 8"):
        text_pieces(tmp_path, 8)


BOX, OTHER, FAR = [0.0, 0.0, 10.0, 10.0], [20.0, 0.0, 30.0, 10.0], [50.0, 50.0, 60.0, 60.0]
NONE = torch.zeros(0, 4)


def boxes(*rows):
    return torch.tensor(rows).reshape(-1, 4)


@pytest.mark.parametrize(
    ("found", "scores", "ignored", "expected"),
    [
        ([BOX, OTHER], [0.9, 0.8], [], 1.0),
        ([BOX], [0.9], [], 0.5),  # half of them found, all right
        ([], [], [], 0.0),
        ([FAR, BOX, OTHER], [0.9, 0.8, 0.7], [], 2 / 3),  # one wrong before two right ones
        ([BOX, OTHER, FAR], [0.9, 0.8, 0.7], [], 1.0),  # one wrong behind them costs nothing
        ([FAR, BOX, OTHER], [0.9, 0.8, 0.7], [FAR], 1.0),  # the wrong one lies in an ignored region
        ([BOX, BOX, OTHER], [0.9, 0.85, 0.8], [], 0.5 + 0.5 * 2 / 3),  # found twice: the second is wrong
        ([[0.0, 0.0, 10.0, 4.0], OTHER], [0.9, 0.8], [], 0.5 * 0.5),  # overlaps by 0.4 only
    ],
)
def test_average_precision_of_cases_computed_by_hand(found, scores, ignored, expected):
    result = average_precision(
        [(boxes(*found), torch.tensor(scores))], [(boxes(BOX, OTHER), boxes(*ignored))]
    )
    assert result == pytest.approx(expected)


def test_average_precision_ranks_over_all_images():
    sure, unsure = torch.tensor([0.9]), torch.tensor([0.1])
    true = [(boxes(BOX), NONE), (boxes(BOX), NONE), (NONE, NONE)]
    found = [(boxes(BOX), sure), (boxes(BOX), unsure), (boxes(BOX), torch.tensor([0.5]))]
    assert average_precision(found, true) == pytest.approx(0.5 + 0.5 * 2 / 3)
    assert math.isnan(average_precision([(boxes(BOX), sure)], [(NONE, boxes(BOX))]))
    with pytest.raises(ValueError, match="1 images, but true boxes of 0"):
        average_precision([(NONE, sure)], [])


def test_overlaps():
    half = [5.0, 0.0, 15.0, 10.0]
    assert overlaps(boxes(BOX), boxes(BOX, half, FAR)).tolist() == [[1.0, pytest.approx(1 / 3), 0.0]]
    assert overlaps(boxes(BOX), boxes(half), of_first=True).tolist() == [[0.5]]


def test_accuracy_uses_evaluation_mode_and_puts_the_mode_back():
    model = torch.nn.Sequential(torch.nn.Dropout(1.0), torch.nn.Identity())
    inputs = torch.eye(4)
    data = torch.utils.data.TensorDataset(inputs, torch.tensor([0, 1, 2, 0]))
    assert accuracy(model, data, batch_size=3) == 0.75
    assert model.training


def test_options_refuse_what_is_not_a_count(capsys):
    parser = argparse.ArgumentParser()
    data_options(parser, epochs=3, batch_size=8, data="files", skip_broken=True)
    args = parser.parse_args(["--steps", "5", "--skip-broken"])
    assert (args.data, args.steps, args.epochs, args.batch_size) == ("synthetic", 5, 3, 8)
    assert args.skip_broken
    for wrong in ("0", "-3", "2.5", "many"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--steps", wrong])
        assert "is not a whole number of 1 or more" in capsys.readouterr().err
    assert source_of("synthetic") == "synthetic data" and source_of("/data") == "/data"
    assert marks_of("synthetic") == {"synthetic_data": 1.0} and marks_of("/data") == {}


def test_bad_data_ends_a_script_with_its_message():
    @ends_with_message
    def main() -> None:
        raise DataError("photo.jpg is broken")

    with pytest.raises(SystemExit, match="^error: photo.jpg is broken$"):
        main()
