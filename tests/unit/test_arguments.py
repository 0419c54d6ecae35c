"""Changed arguments of a script, for `paceline resume RUN -- --epochs 20`."""

import pytest

from paceline.cli.arguments import change_arguments


@pytest.mark.parametrize(
    ("before", "given", "now", "different"),
    [
        ("-l 1 -e 10", "-e 20", "-l 1 -e 20", ["-e 20 instead of -e 10"]),
        ("--lr 0.1", "--epochs 20", "--lr 0.1 --epochs 20", ["--epochs 20 is new"]),
        ("--lr=0.1 data", "--lr=1", "--lr=1 data", ["--lr=1 instead of --lr=0.1"]),
        ("--lr=0.1 data", "--lr 1", "--lr 1 data", ["--lr 1 instead of --lr=0.1"]),
        ("a --sgd --at -0.5", "--at -1", "a --sgd --at -1", ["--at -1 instead of --at -0.5"]),
        ("data --sgd", "other", "other --sgd", ["other instead of data"]),
        ("--sgd", "data", "data --sgd", ["data is new"]),
        ("--x 1 --lr 2 --x 3", "--x 4 5", "--x 4 5 --lr 2", ["--x 4 5 instead of --x 1 --x 3"]),
        ("--epochs 10", "--epochs 10", "--epochs 10", []),
        ("", "-e 3", "-e 3", ["-e 3 is new"]),
    ],
)
def test_an_option_takes_the_place_of_the_same_one(before, given, now, different):
    assert change_arguments(before.split(), given.split()) == (tuple(now.split()), different)
