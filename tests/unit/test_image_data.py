"""Image folders and KITTI, from small files in the real formats; all kinds of bad input name their file."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.data.image_folder import image_folder
from paceline.data.images import image_size, read_image
from paceline.data.kitti import KittiObject, kitti, read_labels
from paceline.data.options import left_out, vision
from paceline.data.pictures import save_boxes, save_predictions, save_text
from paceline.exceptions import DataError, UsageError

PERSON = "Pedestrian 0.00 0 -0.20 20.00 10.00 32.00 45.00 1.89 0.48 1.20 1.84 1.47 8.41 0.01"
FAR = "Pedestrian 0.00 0 -0.20 60.00 10.00 66.00 25.00 1.89 0.48 1.20 1.84 1.47 8.41 0.01"
HIDDEN = "Pedestrian 0.00 2 -0.20 40.00 10.00 52.00 45.00 1.89 0.48 1.20 1.84 1.47 8.41 0.01"
CAR = "Car 0.88 3 -0.69 0.00 19.20 40.00 49.00 1.60 1.57 3.23 -2.70 1.74 3.68 -1.29"
NOTHING = "DontCare -1 -1 -10 70.00 5.00 90.00 30.00 -1 -1 -1 -1000 -1000 -1000 -10"


def picture(
    file: Path, colour: tuple[int, int, int] = (200, 30, 60), size: tuple[int, int] = (96, 50)
) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 20, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise + np.array(colour, np.uint8)).save(file)
    return file


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(5):
        picture(tmp_path / "fire" / f"{number}.jpg")
        picture(tmp_path / "smoke" / f"{number}.png", (90, 90, 90), (50, 96))
    (tmp_path / "fire" / "Thumbs.db").write_bytes(b"not a photo")
    return tmp_path


def test_a_folder_of_photos_is_split_the_same_way_every_time(photos):
    train, test = image_folder(photos)
    assert train.classes == ("fire", "smoke") and (len(train), len(test)) == (8, 2)
    assert not {file for file, _ in train.files} & {file for file, _ in test.files}
    assert sorted(label for _, label in test.files) == [0, 1]
    again, _ = image_folder(photos)
    assert again.files == train.files
    image, label = train[0]
    assert image.dtype == torch.uint8 and image.shape == ((3, 50, 96) if label == 0 else (3, 96, 50))
    train.transform = lambda image: image[:, :2, :3].float()
    assert train[0][0].shape == (3, 2, 3)


def test_folders_named_train_and_test_are_used_as_they_are(tmp_path):
    for part, count in (("train", 3), ("val", 1)):
        for number in range(count):
            for name in ("a", "b"):
                picture(tmp_path / part / name / f"{number}.png")
    train, test = image_folder(tmp_path)
    assert (len(train), len(test)) == (6, 2)
    picture(tmp_path / "val" / "c" / "0.png")
    with pytest.raises(DataError, match="classes a, b, but .*val has a, b, c"):
        image_folder(tmp_path)


def test_a_directory_without_class_folders_says_what_is_expected(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        image_folder(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is empty"):
        image_folder(tmp_path)
    picture(tmp_path / "photo.jpg")
    with pytest.raises(DataError, match="has 0 folders. Put the photos of each class into a folder"):
        image_folder(tmp_path)


def test_a_class_with_one_photo_or_none_is_named(photos):
    picture(photos / "no_fire" / "0.jpg")
    with pytest.raises(DataError, match="no_fire has 1 readable image; it needs 2 or more, one to train on"):
        image_folder(photos)
    (photos / "no_fire" / "0.jpg").unlink()
    with pytest.raises(DataError, match="no_fire has 0 readable images"):
        image_folder(photos)


@pytest.mark.parametrize("name", ["fire/3.jpg", "smoke/2.png"])
def test_a_broken_photo_is_named_or_left_out_and_counted(photos, name):
    cut(photos / name)
    with pytest.raises(DataError, match=f"{name} is broken .*--skip-broken"):
        image_folder(photos)
    train, test = image_folder(photos, skip_broken=True)
    assert len(train) + len(test) == 9
    assert len(train.skipped) == 1 and name in train.skipped[0]
    assert all(len(item) == 2 for data in (train, test) for item in (data[n] for n in range(len(data))))


def test_a_photo_that_is_broken_inside_is_found_when_it_is_read_or_before(photos):
    """The header and the end are right; only decoding finds it."""
    file = photos / "smoke" / "1.png"
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 200] = bytes(200)
    file.write_bytes(content)
    image_size(file)
    train, test = image_folder(photos)
    with pytest.raises(DataError, match=r"smoke/1\.png is broken"):
        [data[n] for data in (train, test) for n in range(len(data))]
    train, test = image_folder(photos, skip_broken=True)
    assert len(train) + len(test) == 9


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b"\xff\xd8\xff\xe0" + bytes(40)])
def test_what_is_not_an_image_is_said_to_be_broken(tmp_path, content):
    file = tmp_path / "photo.jpg"
    file.write_bytes(content)
    for reader in (image_size, read_image):
        with pytest.raises(DataError, match=r"photo\.jpg is broken"):
            reader(file)


def test_outputs_count_the_files_that_were_left_out():
    assert left_out([]) == ""
    assert left_out(["a"]) == ", 1 broken file left out"
    assert left_out(["a", "b"]) == ", 2 broken files left out"


def test_too_many_broken_photos_leave_a_class_too_small(photos):
    for number in range(4):
        cut(photos / "fire" / f"{number}.jpg")
    with pytest.raises(DataError, match=r"fire has 1 readable image \(4 broken ones left out\)"):
        image_folder(photos, skip_broken=True)


def test_grey_and_transparent_images_become_colours(tmp_path):
    Image.new("L", (4, 3), 7).save(tmp_path / "grey.png")
    Image.new("RGBA", (4, 3), (1, 2, 3, 4)).save(tmp_path / "clear.png")
    assert read_image(tmp_path / "grey.png").tolist() == [[[7] * 4] * 3] * 3
    assert read_image(tmp_path / "clear.png")[:, 0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("module", ["torchvision.models", "PIL.Image"])
def test_a_missing_extra_names_the_command_that_installs_it(monkeypatch, module):
    name = module.partition(".")[0]
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=rf"needs {name}: pip install 'paceline\[vision\]'"):
        vision(module)


# --- KITTI ------------------------------------------------------------------------------------------


@pytest.fixture
def street(tmp_path: Path) -> Path:
    for number in range(5):
        picture(tmp_path / "training" / "image_2" / f"{number:06}.png")
        labels = tmp_path / "training" / "label_2" / f"{number:06}.txt"
        labels.parent.mkdir(exist_ok=True)
        labels.write_text("\n".join([PERSON, CAR, HIDDEN, FAR, NOTHING]) + "\n")
    return tmp_path


def labels_of(street: Path, number: int) -> Path:
    return street / "training" / "label_2" / f"{number:06}.txt"


@pytest.mark.parametrize("place", ["", "Kitti/raw"])
def test_kitti_is_read_and_judged_as_its_rules_say(street, tmp_path_factory, place):
    root = street
    if place:
        root = tmp_path_factory.mktemp("torchvision")
        (root / place).parent.mkdir(parents=True)
        (root / place).symlink_to(street)
    train, test = kitti(root)
    assert (len(train), len(test)) == (4, 1)
    image, target = train[0]
    assert image.shape == (3, 50, 96) and image.dtype == torch.float32 and float(image.max()) <= 1
    assert target["boxes"].tolist() == [[20, 10, 32, 45]] and target["labels"].tolist() == [1]
    assert target["ignored"].tolist() == [[40, 10, 52, 45], [60, 10, 66, 25], [70, 5, 90, 30]]


def test_an_image_without_objects_has_no_boxes(street):
    for number in range(5):
        labels_of(street, number).write_text("")
    _, target = kitti(street)[0][0]
    assert target["boxes"].shape == (0, 4) and target["ignored"].shape == (0, 4) and not len(target["labels"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (PERSON.replace("32.00", "98.00"), r"lies outside the image, which has 96 × 50 pixels"),
        (PERSON.replace("10.00", "-5.00"), r"the box from \(20, -5\) to \(32, 45\) lies outside"),
        (PERSON.replace("45.00", "inf"), r"lies outside"),
        (PERSON.replace("32.00", "20.00"), r"has no area"),
        (PERSON.replace("32.00", "nan"), r"has no area"),
        (PERSON.replace("32.00", "wide"), r"could not convert string to float: 'wide'"),
        (PERSON.rsplit(" ", 9)[0], r"6 columns, expected 15: 'Pedestrian"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(street, line, said):
    labels_of(street, 3).write_text(f"{CAR}\n{line}\n")
    with pytest.raises(DataError, match=rf"000003\.txt, line 2: .*{said}"):
        kitti(street)
    train, test = kitti(street, skip_broken=True)
    assert len(train) + len(test) == 4
    assert len(train.skipped) == 1 and "line 2" in train.skipped[0]


def test_a_box_that_ends_on_the_edge_is_cut_there(tmp_path):
    file = tmp_path / "0.txt"
    file.write_text(PERSON.replace("32.00", "96.60").replace("10.00", "-0.40"))
    assert read_labels(file, (96, 50)) == [KittiObject("Pedestrian", 0.0, 0, (20.0, 0.0, 96.0, 45.0))]


def test_a_half_downloaded_kitti_says_what_is_missing(street):
    labels_of(street, 2).unlink()
    with pytest.raises(DataError, match=r"the label file .*000002\.txt is missing"):
        kitti(street)
    cut(street / "training" / "image_2" / "000001.png")
    train, test = kitti(street, skip_broken=True)
    assert len(train) + len(test) == 3 and len(train.skipped) == 2
    for file in (street / "training" / "image_2").glob("*"):
        cut(file)
    with pytest.raises(DataError, match="only 0 of 5 images are usable"):
        kitti(street, skip_broken=True)
    for file in (street / "training" / "label_2").glob("*"):
        file.unlink()
    (street / "training" / "label_2").rmdir()
    with pytest.raises(DataError, match=r"no label_2\. Unpack data_object_label_2\.zip"):
        kitti(street)
    for file in (street / "training" / "image_2").glob("*"):
        file.unlink()
    (street / "training" / "label_2").mkdir()
    with pytest.raises(DataError, match="image_2 has 0 images"):
        kitti(street)
    (street / "training" / "image_2").rmdir()
    with pytest.raises(DataError, match="no image_2 in .*data_object_image_2.zip"):
        kitti(street)


# --- pictures ---------------------------------------------------------------------------------------


def test_pictures_show_what_a_model_does(tmp_path):
    class Second(torch.nn.Module):
        def forward(self, images):
            assert not self.training
            return torch.tensor([[0.0, 1.0]]).expand(len(images), 2)

    data = torch.utils.data.TensorDataset(torch.rand(30, 1, 8, 8), torch.arange(30) % 2)
    model = Second()
    save_predictions(str(tmp_path / "answers.png"), model, data, ("no", "yes"))
    assert model.training
    with Image.open(tmp_path / "answers.png") as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int)
    for colour in ((0, 120, 60), (200, 30, 30)):  # of right and of wrong answers; their text is antialiased
        assert np.abs(pixels - colour).sum(1).min() < 60
    scene = [torch.zeros(3, 20, 40)]
    box = torch.tensor([[2.0, 3.0, 12.0, 15.0]])
    save_boxes(str(tmp_path / "boxes.png"), scene, [box], [box[:0]])
    with Image.open(tmp_path / "boxes.png") as image:
        assert image.convert("RGB").getpixel((4 + 2 * 2, 4 + 2 * 3)) == (0, 255, 120)
    save_text(str(tmp_path / "text.png"), ["two", "lines"])
    assert (tmp_path / "text.png").stat().st_size < 5000
    with pytest.raises(DataError, match="--picture .*nowhere.* cannot be written"):
        save_text(str(tmp_path / "nowhere" / "text.png"), ["one"])
    with pytest.raises(DataError, match="ends in .png or .jpg"):
        save_text(str(tmp_path / "text.doc"), ["one"])
