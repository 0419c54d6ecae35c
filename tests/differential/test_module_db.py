"""Every module of PyTorch's own database, trained: plain PyTorch, `prepare` alone and runs agree."""

import pytest
import torch
from torch.testing._internal.common_modules import module_db

from tests.differential.databases import module_script
from tests.differential.harness import Disagreement, Harness
from tests.speed import first

FIRST = [(info.name, 0) for info in module_db]


def every_input() -> list[tuple[str, int]]:
    found = []
    for info in module_db:
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
        )
        found += [(info.name, number) for number in range(len(inputs))]
    return found


def agree(harness: Harness, entries: list[tuple[str, int]], way: str) -> None:
    """All in one script; if that fails, the first entry that fails by itself is the one to look at."""
    world = 1 if way == "asp" else 2
    together = module_script(entries, way=way)
    if (found := harness.disagreement(together, way=way, world=world)) is None:
        return
    for entry in entries:
        single = module_script([entry], way=way)
        if (of_one := harness.disagreement(single, way=way, world=world)) is not None:
            raise Disagreement(harness.keep(single, f"{entry}: {of_one}"))
    raise Disagreement(harness.keep(together, found))


@pytest.mark.parametrize("way", first(1, ["asp", "bsp"]))
def test_every_module_agrees(harness: Harness, way: str) -> None:
    agree(harness, FIRST, way)  # all in one model: a run has to import module_db, which takes 2 s of CPU


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", ["asp", "bsp"])
@pytest.mark.parametrize("part", range(48))
def test_every_input_of_every_module_agrees(harness: Harness, part: int, way: str) -> None:
    agree(harness, every_input()[part::48], way)
