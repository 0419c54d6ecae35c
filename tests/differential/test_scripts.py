"""Random training scripts: plain PyTorch, `prepare` alone and real runs agree.

The fast suite tries the same 200 scripts every time, and those that once failed. `make slow` tries 10,000
others, from a seed that it draws and prints; `make slow PACELINE_SEED=n` repeats it. A script that fails is
shrunk, printed, and kept as a file (under PACELINE_ARTIFACTS, else in the test's temporary directory).
"""

import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from paceline.params import fused
from tests.differential.description import NOT_YET, Case, cases
from tests.differential.harness import Disagreement, Harness, script_in_process
from tests.differential.records import different_bits, far_apart
from tests.differential.source import script_of

FAST_TESTS, FAST_CASES = 8, 25
SLOW_TESTS, SLOW_CASES = 200, 50

ROUNDING = Case(
    blocks=("parameter_list", "layernorm"),
    way="bsp",
    dtype="float64",
    optimizer="Adam(lr=0.01)",
    batch=1,
    epochs=2,
)

FOUND = (
    # Scripts that were invalid before the generator guarded these calls, as a user does.
    Case(accumulate=2, flush=True, clip="value", skip="empty"),
    Case(blocks=("late",), clip="value", second_optimizer=True),
    Case(accumulate=2, flush=True, scaler="plain", skip="empty"),
    # Skipped batches held the scheduler back: the run hears of them at the epoch's end.
    Case(
        way="bsp",
        dtype="float64",
        scheduler="one_cycle",
        skip="continue",
        drop_last=True,
        samples=23,
        batch=1,
        epochs=2,
    ),
    # A batch whose gradient stays goes into the next step, so both must have the same number of samples.
    Case(
        way="bsp",
        dtype="float64",
        zero_grad="end",
        skip="continue_late",
        drop_last=True,
        samples=23,
        epochs=2,
    ),
    # The embedding is none of the optimizer's: nothing sparse is pushed.
    Case(blocks=("sparse_embedding",), groups="partial"),
    # Buffers that share memory are a worker's own under both names.
    Case(blocks=("shared_buffer",), way="bsp", dtype="float64", samples=9, default_dtype=True),
    # Adagrad counts the steps of frozen parameters, too: in float32 where kernels are fused.
    Case(blocks=("frozen",), dtype="float64", optimizer="Adagrad(lr=0.1, lr_decay=0.01)", default_dtype=True),
    # Optimizer state from before prepare() keeps its dtypes: it was made, not loaded.
    Case(dtype="float64", optimizer="NAdam(lr=0.01)", before="steps"),
    Case(dtype="float64", optimizer="ASGD(lr=0.1, t0=3)", before="steps"),
    # One optimizer's gradients are zeros and the other's are gone: the batch before is in neither's step.
    Case(
        way="bsp",
        dtype="float64",
        zero_grad="zeros",
        skip="continue_late",
        samples=23,
        second_optimizer=True,
    ),
    # The gradient of a shift in front of a LayerNorm is 0 but for rounding, which Adam divides by 1e-8.
    ROUNDING,
    # A script that was invalid before the generator saw that its scaler had scaled nothing yet.
    Case(accumulate=2, flush=True, scaler="plain", skip="empty", second_optimizer=True, before="steps"),
    # A fused optimizer of which every step is skipped has a state of zeros; a server has none.
    Case(optimizer="AdamW(lr=0.01, fused=True)", accumulate=2, scaler="overflow"),
    Case(
        way="bsp",
        dtype="float64",
        optimizer="AdamW(lr=0.01, fused=True)",
        accumulate=2,
        scaler="overflow",
        drop_last=True,
        batch=2,
    ),
)
"""The smallest cases of what `make slow` found."""

SEED = int(os.environ.get("PACELINE_SEED", "0"))


def explore(harness: Harness, number: int, count: int) -> None:
    """Check so many cases of one seed."""

    @seed(number)
    @settings(
        max_examples=count,
        derandomize=False,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases())
    def agree(case: Case) -> None:
        harness.check(case)

    print(f"seed {number} (PACELINE_SEED={SEED}), {count} cases")
    agree()


@pytest.mark.timeout(400)  # for shrinking; a clean pass takes a tenth of it
@pytest.mark.parametrize("number", range(FAST_TESTS))
def test_generated_scripts_agree(harness: Harness, number: int) -> None:
    explore(harness, number, FAST_CASES)
    assert harness.checked >= FAST_CASES * 0.9, "too few of the cases are comparable"


@pytest.mark.parametrize("case", FOUND, ids=str)
def test_scripts_that_once_failed_agree(harness: Harness, case: Case) -> None:
    assert case == case.legal()
    harness.check(case)
    assert harness.checked


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(SLOW_TESTS))
def test_many_generated_scripts_agree(harness: Harness, number: int) -> None:
    explore(harness, SEED + 1000 + number, SLOW_CASES)


# --- the harness itself -------------------------------------------------------------------------------


def wrong_rate(optimizer: torch.optim.Optimizer) -> None:
    """Kernels chosen as they ought to be, and a learning rate that is wrong by one bit in the middle."""
    fused.use_fused(optimizer)
    for group in optimizer.param_groups:
        group["lr"] *= 1 + 2**-20


def test_harness_finds_a_wrong_learning_rate(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.worker.alone.use_fused", wrong_rate)
    with pytest.raises(Disagreement, match=r"alone differs from plain PyTorch: (losses|model)"):
        harness.check(Case(samples=12))


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (Case(samples=12, batch=2), "one asp worker differs"),
        (Case(way="bsp", samples=12, batch=2).legal(), "two bsp workers differ from the whole batch"),
        (ROUNDING, "two bsp workers differ from the whole batch"),
    ],
    ids=["asp", "bsp", "rounding"],
)
def test_harness_finds_a_run_that_computes_something_else(harness: Harness, case: Case, told: str) -> None:
    source = script_of(case).replace(
        "RANK = paceline.rank()",
        'RANK = paceline.rank()\n    model.head.bias.data[0] += 1e-6 * (HOW == "run")',
    )
    found = harness.disagreement(source, way=case.way, world=case.world)
    assert found is not None and told in found


def test_failing_script_is_kept_as_a_file_that_runs(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.worker.alone.use_fused", wrong_rate)
    with pytest.raises(Disagreement) as raised:
        harness.check(Case(blocks=("tied",), samples=12))
    kept = harness.kept.read_text()
    assert str(harness.kept) in str(raised.value)
    assert kept in str(raised.value)
    monkeypatch.undo()
    plain, alone = (script_in_process(kept, how)["RESULT"] for how in ("plain", "alone"))
    assert different_bits(plain, alone) is None


@pytest.mark.parametrize("change", [{"losses": [[0, 0, 4, 0.1]]}, {"random": torch.zeros(3)}, {"rates": []}])
def test_records_differ_in_any_part(change: dict[str, object]) -> None:
    record = {"losses": [[0, 0, 4, 0.2]], "random": torch.ones(3), "rates": [0.1]}
    assert different_bits(record, dict(record)) is None
    assert different_bits(record, {**record, **change}) is not None


def test_a_state_that_no_step_has_changed_is_as_good_as_none() -> None:
    def record(step: float, moment: float) -> dict[str, object]:
        state = {0: {"step": torch.tensor(step), "exp_avg": torch.full((2,), moment)}}
        return {"optimizers": [{"state": state}]}

    none: dict[str, object] = {"optimizers": [{"state": {}}]}
    assert different_bits(record(0.0, 0.0), none) is None
    assert different_bits(none, record(0.0, 0.0)) is None
    assert different_bits(record(1.0, 0.0), none) is not None
    assert different_bits(record(0.0, 0.1), none) is not None


def test_values_may_differ_by_what_the_script_makes_of_rounding() -> None:
    def record(shift: float, weight: float) -> dict[str, object]:
        model = {
            "shift": torch.tensor([shift], dtype=torch.float64),
            "weight": torch.tensor([weight], dtype=torch.float64),
        }
        return {"evaluations": [], "optimizers": [], "rates": [], "buffers": {}, "losses": [], "model": model}

    whole, nudged = record(0.1, 0.5), [record(0.1 + 1e-9, 0.5), record(0.1 - 2e-9, 0.5)]
    run = record(0.1 + 5e-9, 0.5)
    assert far_apart(whole, [run]) is not None
    assert far_apart(whole, [run], nudged) is None
    assert far_apart(whole, [record(0.1 + 5e-8, 0.5)], nudged) is not None
    assert far_apart(whole, [record(0.1, 0.5 + 5e-9)], nudged) is not None


def test_choices_that_are_left_out_are_not_generated() -> None:
    for left_out, reason in NOT_YET.items():
        name, _, value = left_out.partition("=")
        assert reason
        if name == "blocks":
            assert value not in Case(blocks=(value,)).legal().blocks
        else:
            kind: Callable[[str], object] = type(getattr(Case(), name))
            given = value == "True" if kind is bool else kind(value)
            assert str(getattr(Case(**{name: given}).legal(), name)) != value
