"""MNIST's and CIFAR-10's own formats, and what is said when a file is missing, incomplete or wrong."""

import gzip
import io
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.data.cifar10 import MEAN, cifar10, drawn_shapes
from paceline.data.digits import digits
from paceline.data.mnist import drawn_digits, mnist, read_idx
from paceline.data.plain_pickle import read_plain_pickle
from paceline.exceptions import DataError

COUNTS = {"train": 7, "t10k": 3}


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, *, zipped: bool = False) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    random, made = np.random.default_rng(0), {}
    for part, count in COUNTS.items():
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, count, dtype=np.uint8)
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            made[name] = array
            file = folder / f"{name}{'.gz' if zipped else ''}"
            file.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    return made


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", [".", "MNIST/raw"])
def test_mnist_files_are_read_as_they_are_downloaded(tmp_path, zipped, place):
    made = write_mnist(tmp_path / place, zipped=zipped)
    for part, count in COUNTS.items():
        images, labels = mnist(tmp_path, train=part == "train").tensors
        assert images.shape == (count, 1, 28, 28) and images.dtype == torch.float32
        assert ((images[:, 0] * 255).round().byte().numpy() == made[f"{part}-images-idx3-ubyte"]).all()
        assert (labels.numpy() == made[f"{part}-labels-idx1-ubyte"]).all()


def test_a_directory_without_the_data_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match="does not exist.*--data synthetic"):
        mnist(tmp_path / "nowhere", train=True)
    with pytest.raises(DataError, match="is empty"):
        mnist(tmp_path, train=True)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match="is a file"):
        mnist(tmp_path / "notes.txt", train=True)
    with pytest.raises(DataError, match="no train-images-idx3-ubyte or .*ubyte.gz in .*four files"):
        mnist(tmp_path, train=True)
    with pytest.raises(DataError, match="no data_batch_1.bin or data_batch_1 in .*cifar-10-binary.tar.gz"):
        cifar10(tmp_path, train=True)


def test_an_mnist_file_that_is_missing_is_named(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    mnist(tmp_path, train=True)
    with pytest.raises(DataError, match=r"no t10k-labels-idx1-ubyte and no t10k-labels-idx1-ubyte\.gz"):
        mnist(tmp_path, train=False)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "begins with nothing, expected 00 00 08 03"),
        (b"<html>not found", "begins with 3c 68 74 6d"),
        (idx(np.zeros((2, 28, 28), np.uint8))[:-5], "1,568 bytes, but it has 1,563"),
        (idx(np.zeros((2, 28, 28), np.uint8)) + b"x", "but it has more"),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, "more than a data set has"),
        (idx(np.zeros(5, np.uint8)), "expected 00 00 08 03"),
    ],
)
def test_a_broken_idx_file_is_named_with_the_reason(tmp_path, content, said):
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        read_idx(file, dimensions=3)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("cut", [5, -20])
def test_a_half_downloaded_gz_file_is_named(tmp_path, cut):
    write_mnist(tmp_path, zipped=True)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is incomplete or broken"):
        mnist(tmp_path, train=True)
    file.write_bytes(b"not gzip at all")
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is incomplete or broken"):
        mnist(tmp_path, train=True)


def test_images_and_labels_that_do_not_belong_together_are_refused(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(6, np.uint8)))
    with pytest.raises(DataError, match="7 images, but .* has 6 labels"):
        mnist(tmp_path, train=True)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.array([0, 1, 2, 77, 4, 5, 6], np.uint8)))
    with pytest.raises(DataError, match="label 3 is 77"):
        mnist(tmp_path, train=True)


# --- CIFAR-10 ---------------------------------------------------------------------------------------

PARTS = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
EACH = 4


def samples(part: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(PARTS.index(part))
    return (
        random.integers(0, 256, (EACH, 3072), dtype=np.uint8),
        random.integers(0, 10, EACH, dtype=np.uint8),
    )


def write_binary(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        images, labels = samples(part)
        (folder / f"{part}.bin").write_bytes(np.concatenate([labels[:, None], images], 1).tobytes())


def text(value: str | bytes) -> bytes:
    """As Python 2 pickles a str."""
    content = value.encode() if isinstance(value, str) else value
    size = len(content)
    return (b"U" + bytes([size]) if size < 256 else b"T" + struct.pack("<I", size)) + content


def python_2_pickle(part: str) -> bytes:
    """The instructions that Python 2's cPickle (protocol 2) wrote into the files of CIFAR-10."""
    images, labels = samples(part)
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87Rq\x03"
    shape = b"K" + bytes([EACH]) + b"M\x00\x0c\x86"
    kind = b"cnumpy\ndtype\n" + text("u1") + b"K\x00K\x01\x87Rq\x05"
    kind += b"(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = empty + b"(K\x01" + shape + kind + b"\x89" + text(images.tobytes()) + b"tb"
    numbers = b"]q\x06(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    names = b"]q\x07(" + b"".join(text(f"photo_{n}.png") for n in range(EACH)) + b"e"
    items = text("batch_label") + text("batch 1 of 5") + text("labels") + numbers
    items += text("data") + array + text("filenames") + names
    return b"\x80\x02}q\x00(" + items + b"u."


def write_python(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        (folder / part).write_bytes(python_2_pickle(part))


def test_what_the_tests_write_is_what_unpickling_the_real_files_gives():
    found = pickle.loads(python_2_pickle("test_batch"), encoding="latin1")
    images, labels = samples("test_batch")
    assert (found["data"] == images).all() and found["labels"] == labels.tolist()


@pytest.mark.parametrize("write", [write_binary, write_python])
@pytest.mark.parametrize("place", [".", "folder"])
def test_both_versions_of_cifar_give_the_same_samples(tmp_path, write, place):
    names = {write_binary: "cifar-10-batches-bin", write_python: "cifar-10-batches-py"}
    write(tmp_path / (names[write] if place == "folder" else "."))
    for train, parts in ((True, PARTS[:5]), (False, PARTS[5:])):
        images, labels = cifar10(tmp_path, train=train).tensors
        expected = np.concatenate([samples(part)[0] for part in parts]).reshape(-1, 3, 32, 32)
        assert images.shape == expected.shape and images.dtype == torch.float32
        blue = (images[:, 2] * 0.2616 + MEAN[2]) * 255
        assert np.allclose(blue.numpy(), expected[:, 2], atol=0.01)
        assert (labels.numpy() == np.concatenate([samples(part)[1] for part in parts])).all()


def test_an_incomplete_file_of_cifar_is_named(tmp_path):
    write_binary(tmp_path)
    file = tmp_path / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"data_batch_3\.bin has 12,192 bytes, not a multiple of 3,073"):
        cifar10(tmp_path, train=True)
    file.unlink()
    with pytest.raises(DataError, match=r"no data_batch_3\.bin and no data_batch_3"):
        cifar10(tmp_path, train=True)


def test_a_label_of_cifar_that_is_out_of_range_is_named(tmp_path):
    write_binary(tmp_path)
    file = tmp_path / "test_batch.bin"
    content = bytearray(file.read_bytes())
    content[3073] = 10
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"test_batch\.bin: label 1 is 10"):
        cifar10(tmp_path, train=False)


@pytest.mark.parametrize("cut", [0, 1, 40, 3000, -1])
def test_an_incomplete_pickle_is_named(tmp_path, cut):
    file = tmp_path / "data_batch_1"
    file.write_bytes(python_2_pickle("data_batch_1")[:cut])
    with pytest.raises(DataError, match="data_batch_1 is not a complete pickle"):
        cifar10(tmp_path, train=True)


class Harmful:
    def __reduce__(self):
        return (exec, ("raise AssertionError('a pickle was executed')",))


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_code_is_refused(tmp_path, protocol):
    file = tmp_path / "data_batch_1"
    file.write_bytes(pickle.dumps({"labels": [1], "data": Harmful()}, protocol=protocol))
    with pytest.raises(DataError, match="exec|instruction"):
        read_plain_pickle(file)


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_are_read_from_every_protocol(tmp_path, protocol):
    shared = [1, 2]
    value = {
        "a": [1, -2, 300, 2**40, 2.5, None, "text é"],
        "b": ("x", ("y",), ()),
        "c": shared,
        "d": shared,
        "e": [],
        "f": {},
    }
    if protocol > 0:
        value["t"] = [True, False]
    file = tmp_path / "plain"
    file.write_bytes(pickle.dumps(value, protocol=protocol))
    assert read_plain_pickle(file) == value


def test_arrays_of_a_new_numpy_are_read(tmp_path):
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    file = tmp_path / "arrays"
    stream = io.BytesIO()
    pickle.Pickler(stream, protocol=4).dump({"data": array})
    file.write_bytes(stream.getvalue())
    assert read_plain_pickle(file) == {"data": array.tobytes()}


def test_a_small_pickle_of_a_huge_value_stays_small(tmp_path):
    value: list[object] = []
    for _ in range(100):
        value = [value, value]
    file = tmp_path / "nested"
    file.write_bytes(pickle.dumps({"labels": value}))
    assert isinstance(read_plain_pickle(file)["labels"], list)


# --- stand-ins --------------------------------------------------------------------------------------


def test_stand_ins_have_the_real_shape_and_are_always_the_same():
    first, again = (drawn_digits(100, seed=3).tensors for _ in range(2))
    assert first[0].shape == (100, 1, 28, 28) and set(first[1].tolist()) == set(range(10))
    assert torch.equal(first[0], again[0])
    assert float(first[0].min()) >= 0 and float(first[0].max()) <= 1
    assert len(mnist("synthetic", train=False)) == 1000
    shapes, same = (drawn_shapes(100, seed=3).tensors for _ in range(2))
    assert shapes[0].shape == (100, 3, 32, 32) and set(shapes[1].tolist()) == set(range(10))
    assert torch.equal(shapes[0], same[0])
    small = digits(train=False, data="synthetic").tensors
    assert small[0].shape == (359, 1, 8, 8)
    with pytest.raises(DataError, match="'embedded' or 'synthetic'"):
        digits(train=False, data="/somewhere")
