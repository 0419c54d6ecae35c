"""Which stage computes what, when, and where models are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.pipeline_spec import PipelineSpec, bubble, cut_by_cost, stage_actions
from paceline.exceptions import UsageError
from paceline.plan import Job, make_plan


def played(schedule: str, stages: int, microbatches: int) -> int:
    """How long a step takes where every pass takes 1."""
    waiting = [stage_actions(schedule, s, stages, microbatches) for s in range(stages)]
    done: dict[tuple[str, int, int], int] = {}
    free = [0] * stages
    while any(waiting):
        before = len(done)
        for s, actions in enumerate(waiting):
            while actions:
                kind, m = actions[0]
                if kind == "F":
                    needs = done.get(("F", s - 1, m)) if s else 0
                else:
                    needs = done.get(("B", s + 1, m)) if s < stages - 1 else done.get(("F", s, m))
                if needs is None:
                    break
                free[s] = done[kind, s, m] = max(free[s], needs) + 1
                del actions[0]
        assert len(done) > before, "the stages wait for each other"
    return max(free)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(stages=st.integers(1, 7), microbatches=st.integers(1, 12))
def test_no_schedule_deadlocks_and_the_bubble_is_as_small_as_promised(schedule, stages, microbatches):
    took = played(schedule, stages, microbatches)
    assert took == 2 * (microbatches + stages - 1)
    assert bubble(stages, microbatches) == pytest.approx(1 - 2 * microbatches / took)


@given(
    costs=st.lists(st.integers(0, 20), min_size=1, max_size=9),
    stages=st.integers(1, 4),
    crossing=st.lists(st.integers(0, 5), min_size=9, max_size=9),
)
def test_the_slowest_stage_is_as_fast_as_it_can_be(costs, stages, crossing):
    stages = min(stages, len(costs))
    crossing = crossing[: len(costs)]

    def slowest(cuts: list[int]) -> float:
        ends = [0, *cuts, len(costs)]
        edge = [0.0, *crossing[1:], 0.0]
        return max(edge[a] + sum(costs[a:b]) + edge[b] for a, b in pairwise(ends))

    def all_cuts(count: int, start: int = 1) -> list[list[int]]:
        if not count:
            return [[]]
        return [[k, *rest] for k in range(start, len(costs)) for rest in all_cuts(count - 1, k + 1)]

    found = cut_by_cost(costs, crossing, stages)
    assert len(found) == stages - 1 and found == sorted(set(found))
    assert slowest(found) == min(map(slowest, all_cuts(stages - 1)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pipeline": 0}, "pipeline=0 is too small"),
        ({"pipeline": 65}, "at most 64 stages"),
        ({"microbatches": 4}, "microbatches=4 is about a pipeline"),
        ({"pipeline_schedule": "1f1b"}, "pipeline_schedule=1f1b is about a pipeline"),
        ({"split_at": ("a",)}, "split_at=a is about a pipeline"),
        ({"pipeline": 3, "split_at": ("a",)}, "names 1 modules, and pipeline=3 has 2 stages"),
        ({"pipeline": 3, "split_at": ("a", "a")}, "a is named twice"),
        ({"pipeline": 2, "microbatches": 5000}, "at most 1,024"),
        ({"pipeline": 2, "pipeline_schedule": "2f2b"}, "pipeline_schedule='2f2b'"),
        ({"pipeline": 2, "local": "threads:2"}, "leave one of the two out"),
        ({"pipeline": 2, "device": "cuda"}, "pipeline=2 computes on cores of the CPU"),
        ({"pipeline": 2, "device": "gpu"}, "device"),
        ({"pipeline": 2, "prefetch": 1, "mode": "asp"}, "pipeline=2 reads all parameters when a batch"),
    ],
)
def test_bad_settings_are_refused_with_the_reason(settings, said):
    with pytest.raises(UsageError) as caught:
        Job(script="a.py", **settings)
    assert said in str(caught.value)


def test_more_stages_than_threads_are_warned_of(tmp_path):
    (tmp_path / "a.py").touch()
    plan = make_plan(Job(script=str(tmp_path / "a.py"), workers=1, threads=1, pipeline=3))
    assert any("pipeline=3 in workers of 1 CPU threads" in said for said in plan.warnings)


def test_a_spec_says_how_many_micro_batches():
    assert PipelineSpec(stages=3).most_microbatches == 12
    assert PipelineSpec(stages=3, microbatches=5).most_microbatches == 5
