"""Modes as values: the whole ladder of presets, their knobs, and what is refused and why."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.modes import ModeSpec, as_first_stored, parse_mode
from paceline.core.modes.presets import DAMPINGS
from paceline.exceptions import UsageError

# name, bound, spare, push_every, fetch_every, payload, outer
PRESETS = {
    "bsp": ("bsp", 0, 0, 1, 1, "gradient", "own"),
    "backup:2": ("backup", 0, 2, 1, 1, "gradient", "own"),
    "ssp:3": ("ssp", 3, None, 1, 1, "gradient", "own"),
    "asp": ("asp", None, None, 1, 1, "gradient", "own"),
    "downpour:4,2": ("downpour", None, None, 4, 2, "sum", "adagrad"),
    "easgd:4": ("easgd", None, None, 4, 4, "elastic", "own"),
    "eamsgd:16": ("eamsgd", None, None, 16, 16, "elastic", "own"),
    "local:8": ("local", 0, 0, 8, 8, "delta", "average"),
    "diloco:500": ("diloco", 0, 0, 500, 500, "delta", "fitted"),
    "hogwild": ("hogwild", None, None, 1, 1, "none", "own"),
    "dogwild": ("dogwild", None, None, 1, 1, "delta", "average"),
    "allreduce": ("allreduce", 0, 0, 1, 1, "none", "own"),
    "hybrid:asp": ("hybrid", None, None, 1, 1, "gradient", "own"),
    "hybrid:easgd:4": ("hybrid", None, None, 4, 4, "elastic", "own"),
    "hybrid:ssp:2+period=4": ("hybrid", 2, None, 4, 4, "sum", "own"),
    "sandblaster": ("sandblaster", None, None, 1, 1, "gradient", "own"),
}


@pytest.mark.parametrize("text", PRESETS)
def test_presets(text: str) -> None:
    spec = parse_mode(text)
    found = (spec.name, spec.bound, spec.spare, spec.push_every, spec.fetch_every, spec.payload, spec.outer)
    assert found == PRESETS[text]
    assert str(spec) == text
    assert parse_mode(str(spec)) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


def having(feature: str) -> set[str]:
    return {text for text in PRESETS if getattr(parse_mode(text), feature)}


def test_what_follows_from_the_fields() -> None:
    assert having("in_place") == {"bsp"}
    assert having("by_round") == {"bsp", "local:8", "diloco:500", "allreduce"}
    assert having("by_epoch") == {"sandblaster"}
    assert set(PRESETS) - having("local") == {
        *("bsp", "backup:2", "ssp:3", "asp", "hybrid:asp", "sandblaster"),
    }
    assert having("needs_memory") == {"hogwild"}
    assert having("serverless") == {"allreduce"}
    assert having("switchable") == {"bsp", "backup:2", "ssp:3", "asp"}
    damped = {text for text in PRESETS if parse_mode(text).damping != "none"}
    assert damped == {"ssp:3", "asp", "downpour:4,2", "dogwild", "hybrid:asp", "hybrid:ssp:2+period=4"}
    assert parse_mode("asp+quorum=2+damping=staleness").switchable
    assert not parse_mode("asp+period=2").switchable


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("downpour", "downpour:1,1"),
        ("downpour:4", "downpour:4,4"),
        ("easgd:4,0.9", "easgd:4"),
        ("easgd:4,.5", "easgd:4,0.5"),
        ("eamsgd:4,1", "eamsgd:4,1.0"),
        ("easgd:4,1e-5", "easgd:4,1e-05"),
        ("sandblaster:10", "sandblaster"),
        ("sandblaster:5", "sandblaster:5"),
        ("hybrid:0", "hybrid:bsp"),
        ("-1+damping=dc", "asp+damping=dc"),
        ("3+period=2", "ssp:3+period=2"),
        ("00", "bsp"),
        (" Asp + Quorum=4 +damping=STALENESS", "asp+quorum=4+damping=staleness"),
        ("ssp:2+quorum=3+period=4", "ssp:2+period=4+quorum=3"),
        ("bsp+period=1", "bsp"),
        ("asp+quorum=1", "asp"),
        ("bsp+damping=none", "bsp"),
        ("local:4+outer=average", "local:4"),
        ("local:4+outer=own", "local:4+outer=own"),
        ("downpour:2,2+outer=own+damping=dynsgd", "downpour:2,2+damping=dynsgd+outer=own"),
        ("bsp+period=4+outer=adagrad", "bsp+period=4+outer=adagrad"),
        ("asp+damping=gap+quorum=1", "asp+damping=gap"),
    ],
)
def test_canonical_texts(text: str, canonical: str) -> None:
    spec = parse_mode(text)
    assert str(spec) == canonical
    assert parse_mode(canonical) == spec


def test_knobs_reach_their_fields() -> None:
    spec = parse_mode("ssp:2+period=4+quorum=3")
    assert (spec.push_every, spec.fetch_every, spec.payload, spec.quorum) == (4, 4, "sum", 3)
    assert parse_mode("easgd:4,0.5").beta == 0.5
    assert parse_mode("sandblaster:7").history == 7
    inner = parse_mode("hybrid:ssp:2+quorum=2").inner
    assert inner == parse_mode("ssp:2+quorum=2")


@given(
    st.sampled_from(["bsp", "backup:3", "ssp:0", "asp", "downpour:3,2", "local:4", "easgd:2,0.3", "dogwild"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(list(DAMPINGS)),
    st.sampled_from(["own", "adagrad", "average", "nesterov", "fitted"]),
    st.booleans(),
)
def test_every_accepted_text_reads_back(
    head: str, period: int, quorum: int, damping: str, outer: str, hybrid: bool
) -> None:
    knobs = [f"damping={damping}", f"outer={outer}"]
    knobs += [f"period={period}"] * (period > 1) + [f"quorum={quorum}"] * (quorum > 1)
    try:
        spec = parse_mode("hybrid:" * hybrid + "+".join([head, *knobs]))
    except UsageError:
        return
    assert parse_mode(str(spec)) == spec
    assert str(parse_mode(str(spec))) == str(spec)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("easgd:0", "easgd needs a whole number of at least 1, got '0'"),
        ("downpour:-1", "downpour needs a whole number of at least 1, got '-1'"),
        ("downpour:2,x", "got 'x'"),
        ("downpour:2,", "got none"),
        ("downpour:", "got none"),
        ("downpour:1,2,3", "no more than 2 number(s), got 3"),
        ("local", "local needs a whole number of at least 1, got none"),
        ("diloco:", "got none"),
        ("hogwild:2", "hogwild takes no number"),
        ("hybrid", "hybrid needs the mode that runs between its groups, as in hybrid:asp"),
        ("hybrid:", "as in hybrid:asp"),
        ("hybrid+period=2", "as in hybrid:asp"),
        ("easgd:4,x", "beta must be a number, got 'x'"),
        ("easgd:4,nan", "beta must be a number"),
        ("easgd:4,-1", "beta must be a number"),
        ("eagsd:4", "no such mode; did you mean easgd?"),
        ("hogwld", "did you mean hogwild?"),
    ],
)
def test_refused_numbers_and_names_come_with_the_forms(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_mode(text)
    message = str(refused.value)
    assert message.startswith(f"mode {text!r}: ")
    assert reason in message
    assert "Valid modes: bsp, backup:B" in message
    assert "hybrid:MODE" in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hybrid:hybrid:asp", "groups are not nested"),
        ("hybrid:" * 5000 + "asp", "groups are not nested"),
        ("hybrid:allreduce", "allreduce cannot run between groups"),
        ("hybrid:hogwild", "do not share one memory"),
        ("hybrid:dogwild", "dogwild cannot run between groups"),
        ("hybrid:sandblaster", "sandblaster cannot run between groups"),
        ("hybrid:bsp+damping=dc", "in rounds none is stale"),
        ("asp+", "there is no knob ''. Knobs: period, quorum, damping, outer, batches"),
        ("asp+batches=speed", "nobody waits for a slow worker in asp"),
        ("bsp+batches=speed", "for single gradients under a bound, as in ssp:4+batches=speed"),
        ("ssp:2+period=2+batches=speed", "for single gradients under a bound"),
        ("hybrid:ssp:2+batches=speed", "for single gradients under a bound"),
        ("ssp:2+quorum=2+batches=speed", "use quorum=1"),
        ("ssp:2+batches=small", "batches is one of equal, speed, got 'small'"),
        ("asp+speed=3", "there is no knob 'speed'. Knobs:"),
        ("asp+perod=3", "there is no knob 'perod'; did you mean period? Knobs:"),
        ("asp+period=2+period=2", "period is given twice"),
        ("asp+period", "period must be a whole number of at least 1, got none"),
        ("asp+period=0", "period must be a whole number of at least 1, got '0'"),
        ("asp+quorum=0", "quorum must be a whole number of at least 1, got '0'"),
        ("asp+quorum=1.5", "got '1.5'"),
        (
            "asp+damping=delay",
            "is one of none, momentum, staleness, dynsgd, consgd, dc, gap, got 'delay'",
        ),
        ("local:2+outer=adam", "outer is one of own, adagrad, average, nesterov, fitted, got 'adam'"),
        ("local:4+period=2", "the number of local is its period: write local:2"),
        ("easgd:4+period=2", "write easgd:2"),
        ("downpour+period=3", "write downpour:3"),
        ("hogwild+period=2", "hogwild has no local steps between exchanges"),
        ("sandblaster+period=2", "leave period out"),
        ("sandblaster+quorum=2", "sandblaster needs every batch of an epoch"),
        ("sandblaster+damping=dc", "sandblaster takes in no stale one"),
        ("sandblaster+outer=average", "step by L-BFGS"),
        ("bsp+quorum=2", "use backup:B"),
        ("bsp+quorum=1", "use backup:B"),
        ("backup:1+quorum=2", "use backup:B"),
        ("bsp+period=4+quorum=2", "use backup:B"),
        ("local:4+quorum=1", "needs the part of every worker"),
        ("easgd:4+quorum=2", "easgd sends elastic differences"),
        ("hogwild+quorum=2", "hogwild sends nothing to servers"),
        ("bsp+damping=dc", "in rounds none is stale: leave it out, or use ssp:S or asp"),
        ("local:4+damping=gap", "local sends how far its workers have moved"),
        ("easgd:4+damping=staleness", "easgd sends elastic differences"),
        ("dogwild+damping=dc", "damping corrects gradients"),
        ("asp+quorum=2+damping=dc", "corrects one push at a time, got quorum=2"),
        ("asp+quorum=2+damping=gap", "or damping=staleness or dynsgd"),
        ("bsp+outer=adagrad", "or add period=N"),
        ("asp+outer=average", "the script's own optimizer"),
        ("easgd:4+outer=adagrad", "leave outer out"),
        ("hogwild+outer=nesterov", "leave outer out"),
        ("easgd:4,0", "beta must be above 0 and below 2, got 0"),
        ("easgd:4,2", "from 2 on it overshoots further each time"),
    ],
)
def test_refused_combinations_say_why(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=r"^mode '") as refused:
        parse_mode(text)
    assert reason in str(refused.value)


def test_values_are_as_coherent_as_texts() -> None:
    assert ModeSpec(bound=0, spare=0) == parse_mode("bsp")
    assert ModeSpec(bound=None, spare=None, quorum=2) == parse_mode("asp+quorum=2+damping=none")
    asp = parse_mode("asp")
    for wrong in (
        {"name": "nope"},
        {"name": "local"},
        {"name": "hybrid"},
        {"inner": asp},
        {"payload": "delta"},
        {"push_every": 2},
        {"payload": "sum", "push_every": 2},
        {"quorum": 0},
        {"name": "bsp"},
        {"outer": "adagrad"},
    ):
        with pytest.raises(UsageError):
            ModeSpec(**{"bound": None, "spare": None, **wrong})  # type: ignore[arg-type]


def test_check_of_the_number_of_workers() -> None:
    for text in PRESETS:
        parse_mode(text).check(4)
    parse_mode("ssp:2+quorum=4").check(4)
    with pytest.raises(UsageError, match=r"5 contributions, .* got workers=4; .* quorum=4 or less"):
        parse_mode("asp+quorum=5").check(4)
    with pytest.raises(UsageError, match=r"mode backup:4 "):
        parse_mode("hybrid:backup:4").check(4)
    parse_mode("easgd:4,1.5").check(2)
    with pytest.raises(UsageError, match=r"alpha = beta / workers = 1.5 .* Use beta <= 1"):
        parse_mode("easgd:4,1.5").check(1)
    with pytest.raises(UsageError, match=r"at least one worker, got workers=0"):
        parse_mode("hybrid:asp").check(0)


def ladder(text: str) -> list[str]:
    steps, mode = [], parse_mode(text).tighter()
    while mode is not None:
        steps.append(str(mode))
        mode = mode.tighter()
    return steps


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("asp", ["ssp:4", "ssp:1", "bsp"]),
        ("ssp:20", ["ssp:10", "ssp:5", "ssp:2", "ssp:1", "bsp"]),
        ("ssp:8", ["ssp:4", "ssp:1", "bsp"]),
        ("ssp:0", ["bsp"]),
        ("backup:2", ["bsp"]),
        ("bsp", []),
        (
            "asp+quorum=2+damping=staleness",
            ["ssp:4+quorum=2+damping=staleness", "ssp:1+quorum=2+damping=staleness", "bsp"],
        ),
        ("asp+period=4", []),
        ("easgd:4", []),
        ("hybrid:asp", []),
        ("allreduce", []),
    ],
)
def test_the_next_tighter_mode(text: str, steps: list[str]) -> None:
    assert ladder(text) == steps


def test_what_a_run_can_be_switched_to() -> None:
    plain = ["bsp", "backup:2", "ssp:3", "asp", "asp+damping=dc", "ssp:1+quorum=4"]
    for one in plain:
        for other in plain:
            assert parse_mode(one).switch_refusal(parse_mode(other)) is None
    for text in PRESETS:
        assert parse_mode(text).switch_refusal(parse_mode(text)) is None


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("local:8", "bsp", "workers of local:8 hold their own optimizer, which bsp's do not"),
        ("bsp", "local:8", "workers of local:8 hold their own optimizer, which bsp's do not"),
        ("asp", "asp+period=4", "workers of asp+period=4 hold their own optimizer, which asp's do not"),
        ("local:8", "local:16", "workers of local:8 hold their own optimizer, and so cannot change"),
        ("asp", "hybrid:asp", "workers of hybrid:asp reduce their gradients in groups"),
        ("hybrid:asp", "bsp", "workers of hybrid:asp reduce their gradients in groups"),
        ("bsp", "allreduce", "workers of allreduce do without servers"),
        ("hogwild", "asp", "workers of hogwild write into one memory themselves"),
        (
            "hogwild",
            "allreduce",
            "workers of hogwild write into one memory themselves, which allreduce's do not",
        ),
        ("bsp", "sandblaster", "L-BFGS"),
        ("dogwild", "asp", "threads of their own"),
    ],
)
def test_what_a_run_cannot_be_switched_to(before: str, after: str, reason: str) -> None:
    said = parse_mode(before).switch_refusal(parse_mode(after))
    assert said is not None
    assert reason in said
    assert said.endswith(f"start a new run in {after}")


@pytest.mark.parametrize(
    ("damping", "scales"),
    [
        ("none", [1, 1, 1]),
        ("momentum", [1, 0.5, 0.2]),
        ("staleness", [1, 1, 0.25]),
        ("dynsgd", [1, 0.5, 0.2]),
        ("consgd", [0.125, 0.125, 0.125]),
        ("dc", [1, 1, 1]),
    ],
)
def test_the_weight_of_a_stale_push(damping: str, scales: list[float]) -> None:
    spec = parse_mode(f"asp+damping={damping}")
    assert [spec.scale(staleness, workers=8) for staleness in (0, 1, 4)] == scales


@given(
    st.sampled_from(["asp", "ssp:2", "downpour:2,2", "dogwild", "asp+quorum=2", "asp+period=3", "easgd:4"]),
    st.sampled_from(DAMPINGS),
    st.integers(0, 10_000),
    st.integers(1, 10_000),
)
def test_no_push_makes_more_than_its_step_or_nothing(
    head: str, damping: str, staleness: int, workers: int
) -> None:
    try:
        spec = parse_mode(f"{head}+damping={damping}")
    except UsageError:
        return
    scale = spec.scale(staleness, workers)
    assert 0 < scale <= 1
    assert scale >= spec.scale(staleness + 1, workers)
    assert scale >= spec.scale(staleness, workers + 1)


@given(st.integers(1, 1000))
def test_consgd_makes_one_step_of_one_push_of_every_worker(workers: int) -> None:
    spec = parse_mode("asp+damping=consgd")
    assert sum(spec.scale(rank, workers) for rank in range(workers)) == pytest.approx(1)


def test_the_papers_rules_have_names_that_read_back() -> None:
    for text in (
        "asp+damping=none",
        "ssp:2+damping=none",
        "downpour:2,2+damping=none",
        "diloco:4+outer=nesterov",
    ):
        assert str(parse_mode(text)) == text
    assert str(parse_mode("asp+damping=momentum")) == "asp"
    assert str(parse_mode("diloco:4+outer=fitted")) == "diloco:4"


def test_outer_rates_grow_from_averaging_to_dilocos_with_the_local_steps() -> None:
    assert parse_mode("diloco:1").outer_rates == (1.0, 0.0)
    for steps in (500, 5000):
        assert parse_mode(f"diloco:{steps}").outer_rates == pytest.approx((0.7, 0.9))
    lengths = [
        lr / (1 - momentum)
        for lr, momentum in (parse_mode(f"diloco:{h}").outer_rates for h in (1, 4, 16, 64, 500))
    ]
    assert lengths == sorted(lengths)
    assert lengths[1] < 1.2
    assert parse_mode("diloco:4+outer=nesterov").outer_rates == (0.7, 0.9)


@pytest.mark.parametrize(
    ("stored", "now"),
    [
        ("asp", "asp+damping=none"),
        ("ssp:2+quorum=2", "ssp:2+quorum=2+damping=none"),
        ("asp+damping=dc", "asp+damping=dc"),
        ("downpour:2,2+outer=own", "downpour:2,2+damping=none+outer=own"),
        ("hybrid:asp", "hybrid:asp+damping=none"),
        ("diloco:8", "diloco:8+outer=nesterov"),
        ("diloco:8+outer=average", "diloco:8+outer=average"),
        ("hybrid:diloco:8", "hybrid:diloco:8+outer=nesterov"),
        ("local:8", "local:8"),
        ("dogwild", "dogwild+damping=none"),
        ("bsp", "bsp"),
    ],
)
def test_texts_of_older_runs_keep_their_meaning(stored: str, now: str) -> None:
    assert as_first_stored(stored) == now
