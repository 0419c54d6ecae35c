"""Every optimizer setting of PyTorch's own database: plain PyTorch, `prepare` alone and runs agree."""

import pytest
import torch
from torch.testing._internal.common_optimizers import optim_db

from tests.differential.databases import literal, optimizer_script
from tests.differential.harness import Disagreement, Harness
from tests.speed import first

SETTINGS = {info.optim_cls.__name__: range(len(info.optim_inputs_func(device="cpu"))) for info in optim_db}
REFUSED = {
    "LBFGS": "LBFGS cannot run on parameter servers",
    "SparseAdam": "SparseAdam cannot run on parameter servers",
}
"""What servers cannot do, and how a run says so. Alone it works."""
ROUNDED = {("Muon", 2, "bsp"): "torch computes with a learning rate that is a float32 tensor in float32"}
"""Settings that are the same only up to float32: not compared to 1e-10."""
EACH = [(name, number) for name, numbers in SETTINGS.items() for number in numbers]


def agree(harness: Harness, name: str, settings: list[int], way: str) -> None:
    source = optimizer_script(name, settings, way=way)
    world = 1 if way == "asp" else 2
    if (found := harness.disagreement(source, way=way, world=world, refused=REFUSED.get(name))) is not None:
        raise Disagreement(harness.keep(source, found))


def test_scripts_have_the_settings_of_the_database() -> None:
    for info in optim_db:
        for given in info.optim_inputs_func(device="cpu"):
            made = eval(literal(given.kwargs), {"torch": torch})
            assert made == given.kwargs
            assert [type(each) for each in made.values()] == [type(each) for each in given.kwargs.values()]


@pytest.mark.parametrize("way", first(1, ["asp", "bsp"]))
@pytest.mark.parametrize("name", SETTINGS)
def test_optimizer_with_all_its_settings_as_groups_agrees(harness: Harness, name: str, way: str) -> None:
    settings = [number for number in SETTINGS[name] if (name, number, way) not in ROUNDED]
    agree(harness, name, settings[:1] if name in REFUSED else settings, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["asp", "bsp"])
@pytest.mark.parametrize(("name", "number"), EACH)
def test_every_setting_of_every_optimizer_agrees(harness: Harness, name: str, number: int, way: str) -> None:
    if (name, number, way) not in ROUNDED:
        agree(harness, name, [number], way)
