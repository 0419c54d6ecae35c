"""A push that servers refused or dropped leaves no trace in what its worker pushes next."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.comm.compression import parse_compression
from paceline.comm.compression.slice_codec import Decoder, Piece
from paceline.core.events import Push
from paceline.core.fates import Fates
from paceline.core.modes import PushId
from paceline.params import Layout, describe, flat_view, tensor_views
from paceline.worker.exchange.encoders import Encoders
from tests.unit.test_compression import FEEDBACK
from tests.unit.test_lead import Worker, lead_of


def layout_of() -> Layout:
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 3))
    return describe(model, torch.optim.SGD(model.parameters()), servers=2)[0]


class Side:
    """A worker's encoders, and the sum of what servers applied."""

    def __init__(self, text: str) -> None:
        self.layout = layout_of()
        self.encoders = Encoders(parse_compression(text), self.layout, seed=3)
        self.encoders.use_momentum([0.5])
        self.sequence = 0
        self.applied = [torch.zeros_like(v, dtype=torch.float64) for v in self.flats(self.memory())]

    def memory(self) -> Tensor:
        return torch.zeros(self.layout.nbytes, dtype=torch.uint8)

    def flats(self, base: Tensor) -> list[Tensor]:
        return [flat_view(base, s) for s in self.layout.slices]

    def gradient(self, seed: int) -> list[Tensor]:
        base = self.memory()
        generator = torch.Generator().manual_seed(seed)
        for view in tensor_views(base, self.layout):
            view.copy_(torch.randn(view.shape, generator=generator))
        return self.flats(base)

    def push(self, seed: int, *, scale: float = 1.0, counts: bool = True) -> list[bytes]:
        self.encoders.begin_push(self.sequence)
        self.sequence += 1
        messages = [self.encoders.encode(i, g * scale) for i, g in enumerate(self.gradient(seed))]
        if counts:
            for piece, message, total in zip(self.layout.slices, messages, self.applied, strict=True):
                pieces = [Piece.whole(*extent) for extent in self.layout.extents(piece)]
                out = torch.zeros_like(total, dtype=torch.float32)
                Decoder(self.encoders.spec, pieces).decode(message, out)
                total += out.double()
        return messages

    def residual(self) -> list[Tensor]:
        state = self.encoders.state()
        return [state[f"{i}:residual"].double() for i in range(len(self.layout.slices))]


@pytest.mark.parametrize("text", FEEDBACK)
def test_a_refused_push_is_as_if_it_had_not_been_made_to_the_bit(text: str) -> None:
    """An absurd gradient is refused, then another one dropped: the next messages are those without them."""
    ours, reference = Side(text), Side(text)
    assert ours.push(0) == reference.push(0)
    ours.encoders.settle(0, [])
    ours.push(1, scale=1e6)
    ours.encoders.settle(1, [1])
    ours.push(2)
    ours.encoders.settle(2, [2])
    for seed in (3, 4, 5):
        assert ours.push(seed) == reference.push(seed)
        ours.encoders.settle(seed, [])
    found, expected = ours.encoders.state(), reference.encoders.state()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("text", [text for text in FEEDBACK if not text.startswith("dgc")])
@given(fates=st.lists(st.booleans(), min_size=2, max_size=7), ahead=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_with_pushes_on_their_way_nothing_of_an_unapplied_one_is_applied_later(
    text: str, fates: list[bool], ahead: int
) -> None:
    """The worker hears of each push when `ahead` more are encoded. Applied + held back is the applied ones'
    sum."""
    side = Side(text)
    total = [torch.zeros_like(t) for t in side.applied]
    for n, applied in enumerate([*fates, *[True] * ahead]):
        side.push(n, counts=applied)
        if applied:
            for t, g in zip(total, side.gradient(n), strict=True):
                t += g.double()
        if n >= ahead:
            heard = n - ahead
            side.encoders.settle(heard, [] if fates[heard] else [heard])
    for residual, sent, whole in zip(side.residual(), side.applied, total, strict=True):
        torch.testing.assert_close(residual + sent, whole, rtol=0, atol=1e-3)


def test_tensors_without_a_gradient_are_skipped_again_if_the_only_push_with_one_was_dropped() -> None:
    side = Side("topk:0.1")
    every = range(len(side.layout.slices))
    assert side.encoders.still_missing([0], every) == [0]
    side.encoders.begin_push(0)
    assert side.encoders.still_missing([], every) == []
    side.encoders.settle(0, [0])
    assert side.encoders.still_missing([0], every) == [0]


def test_without_feedback_nothing_is_kept() -> None:
    side = Side("qsgd:4")
    side.push(0, counts=False)
    assert not side.encoders._before


# --- what the lead says -------------------------------------------------------------------------------


def push(worker: Worker, norm: float) -> Any:
    number = PushId(worker.rank, worker.incarnation, worker.sequence)
    worker.sequence += 1
    return worker.lead.push(Push(number, worker.lead.version, 1, (), False, norm))


def test_a_push_over_the_bound_on_norms_is_told_as_not_applied() -> None:
    lead = lead_of("asp", workers=1, norm_bound=10.0)
    worker = Worker(lead, 0)
    for _ in range(25):
        push(worker, 1.0)
    push(worker, 1000.0)
    assert lead.fates.settled(0) == 25 and lead.fates.take_unapplied(0) == [25]
    push(worker, 1.0)
    assert lead.fates.settled(0) == 26 and lead.fates.take_unapplied(0) == []


def test_a_late_push_of_backup_is_told_as_not_applied_and_a_repeated_one_is_not() -> None:
    lead = lead_of("backup:1", workers=3)
    workers = [Worker(lead, rank) for rank in range(3)]
    for worker in workers:
        worker.take()
    workers[0].push(version=0)
    assert lead.fates.settled(0) == -1, "its round is not over"
    workers[1].push(version=0)
    assert lead.fates.settled(0) == 0 and lead.fates.take_unapplied(0) == []
    workers[2].push(version=0)
    assert lead.fates.settled(2) == 0 and lead.fates.take_unapplied(2) == [0]
    workers[0].sequence = 0
    workers[0].push(version=0)
    assert lead.fates.take_unapplied(0) == [], "it was applied when it came first"


def test_held_pushes_are_open_until_their_update() -> None:
    fates = Fates()
    fates.begin(1)
    for sequence in range(3):
        fates.arrived(1, sequence)
    fates.decided(1, 2, applied=False)
    assert fates.settled(1) == -1
    fates.decided(1, 0, applied=True)
    assert fates.settled(1) == 0
    fates.decided(1, 1, applied=False)
    fates.decided(1, 1, applied=True)  # only the first counts
    assert fates.settled(1) == 2 and sorted(fates.take_unapplied(1)) == [1, 2]
    fates.begin(1)
    assert fates.settled(1) == -1 and fates.take_unapplied(1) == []
