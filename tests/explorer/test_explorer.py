"""Small worlds keep what the core promises; and each deliberate mistake is found."""

import json
from pathlib import Path

import pytest

from tests.explorer.__main__ import main
from tests.explorer.mistakes import MISTAKES
from tests.explorer.model import Broken, World
from tests.explorer.search import explore, replay
from tests.explorer.worlds import MODES, OPTIONS, admitted, quick_worlds, worlds

AT_ONCE = (
    "bsp: an update lacks a worker",
    "backup: a late push is applied",
    "ssp: nobody waits",
    "asp: pushes are applied twice",
    "second halves are not waited for",
    "a checkpoint is cut between the halves",
    "the gate opens for the first worker",
    "skip: requests are never answered before",
    "replay: a follower misses an event",
)
"""Mistakes that are found in no time, for the fast suite; `make slow` finds the others."""


@pytest.mark.parametrize("world", [*quick_worlds()], ids=str)
def test_a_small_world_keeps_its_promises(world: World) -> None:
    result = explore(world, 1_200, walks=5)
    assert result.fault is None, str(result)
    assert result.ends > 0, "the properties of ends were checked"


def test_a_world_is_exhausted_and_counted() -> None:
    result = explore(World("bsp", servers=1, batches=2), 10_000)
    assert result.exhausted and result.fault is None
    assert 20 < result.states < 1_000 and result.transitions >= result.states - 1
    again = explore(World("bsp", servers=1, batches=2), 10_000)
    assert (again.states, again.transitions, again.ends) == (result.states, result.transitions, result.ends)
    capped = explore(World("bsp", servers=1, batches=2), 10)
    assert not capped.exhausted and "cap hit" in str(capped)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in AT_ONCE else pytest.mark.slow) for n in MISTAKES]
)
def test_a_mistake_is_found(name: str) -> None:
    mistake = MISTAKES[name]
    with mistake.made():
        result = explore(mistake.world, mistake.cap, walks=mistake.walks)
        assert result.fault is not None, str(result)
        with pytest.raises(Broken):
            [*replay(mistake.world, result.trace)]
    fine = explore(mistake.world, 300, walks=1)
    assert fine.fault is None, f"it is found without the mistake, too: {fine}"


def test_every_mode_and_every_rule_has_a_mistake() -> None:
    names = {name.partition(":")[0].partition("+")[0] for name in MISTAKES}
    assert {mode.partition(":")[0].partition("+")[0] for mode in MODES} <= names
    assert set(AT_ONCE) <= set(MISTAKES)


def test_the_worlds_are_those_that_the_plan_admits() -> None:
    assert admitted("asp", replicas=1) and not admitted("hogwild", replicas=1)
    assert admitted("bsp", clip_norm=1.0) and not admitted("asp", clip_norm=1.0)
    found = [*worlds()]
    assert {world.mode for world in found} == set(MODES)
    assert not any(world.replicas for world in found if world.mode in ("hogwild", "sandblaster", "allreduce"))
    assert {world.clip_norm for world in found if world.mode == "bsp"} == set(OPTIONS["clip_norm"])
    assert {world.crashes for world in found} == {0, 1, 2}


def test_a_trace_runs_again_from_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, seen = ["--mistake", "ssp: nobody waits"], tmp_path / "seen.json"
    assert main([*made, "--json", str(seen)]) == 1
    said = capsys.readouterr().out
    (facts,) = json.loads(seen.read_text())
    world, trace = json.dumps(facts["world"]), json.dumps(facts["trace"])
    assert f"again: python -m tests.explorer --world '{world}' --trace '{trace}' --mistake" in said
    assert main([*made, "--world", world, "--trace", trace]) == 1
    assert f"FAULT: {facts['fault']}" in capsys.readouterr().out
    assert main(["--world", world, "--cap", "50", "--walks", "1"]) == 0, "nothing is wrong with it"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_worlds_of_a_mode_keep_their_promises(mode: str) -> None:
    faults = []
    for world in worlds(mode, at_once=1):
        result = explore(world, 600, walks=4)
        if result.fault is not None:
            faults.append(str(result))
    assert not faults, "\n".join(faults)
