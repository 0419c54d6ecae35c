"""Models beyond 4 GiB: offsets, counts and limits, without their memory."""

import numpy as np
import pytest
import torch
from torch import nn

from paceline.comm import Kind, frames
from paceline.comm.compression.message import Reader, positions_parts
from paceline.comm.transfer import encoded_sizes
from paceline.core.placement import Placement
from paceline.params import Layout, OptimizerSpec, describe
from paceline.ps.peers import MAX_STATE_BYTES

PARAMETERS = 2_300_000_000


class Large(nn.Module):
    """Of meta tensors, which have shapes and no memory."""

    def __init__(self, dtype: torch.dtype, tensors: int) -> None:
        super().__init__()
        size = PARAMETERS // tensors
        self.parts = nn.ParameterList(
            nn.Parameter(torch.empty(size, device="meta", dtype=dtype)) for _ in range(tensors)
        )


@pytest.mark.parametrize("whole_tensors", [False, True])
@pytest.mark.parametrize(("dtype", "tensors"), [(torch.float32, 4), (torch.bfloat16, 1)])
def test_a_layout_of_more_than_two_to_the_32_bytes(
    dtype: torch.dtype, tensors: int, whole_tensors: bool
) -> None:
    model = Large(dtype, tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layout, _ = describe(model, optimizer, servers=3, whole_tensors=whole_tensors)
    assert layout.numel == PARAMETERS
    assert layout.nbytes >= PARAMETERS * dtype.itemsize > 1 << 32
    assert layout.slices[-1].stop <= layout.nbytes
    assert all(a.stop <= b.start for a, b in zip(layout.slices, layout.slices[1:], strict=False))
    covered = sum(s.stop - s.start for piece in layout.slices for s in piece.segments)
    assert covered == PARAMETERS
    assert Layout.from_json(layout.to_json()) == layout
    # What is said about it fits into frames.
    frames.check(Kind.OFFER, {"layout": layout.to_json(), "optimizer": OptimizerSpec.of(optimizer).to_json()})
    indices = [piece.index for piece in layout.slices]
    frames.check(Kind.ATTACH, {"sends": indices})
    frames.check(Kind.PUSH, {"sizes": [piece.nbytes for piece in layout.slices], "slices": indices})
    sizes = [piece.nbytes for piece in layout.slices]
    assert encoded_sizes(sizes, sizes) == sizes
    placement = Placement.over(layout, [0, 1, 2], 1)
    assert sorted(i for rank in range(3) for i in placement.owned(rank)) == indices


WITH_STATE = [
    Kind.WEIGHTS,
    Kind.ADOPT,
    Kind.PUSH,
    Kind.ADMIT,
    Kind.ASSIGN,
    Kind.STATE,
    Kind.LOAD,
    Kind.SLICES,
]


@pytest.mark.parametrize("kind", [*WITH_STATE, Kind.PUSH, Kind.ADMIT, Kind.SAVED, Kind.BUFFERS])
def test_payloads_of_large_models_are_within_the_limits(kind: Kind) -> None:
    size = 12 * PARAMETERS * 4  # parameters, momentum, and then some
    data = frames.encode(kind, {}, sequence=1 << 40, payload_bytes=size, key=b"k" * 32)
    assert frames.parse_header(data[: frames.HEADER_BYTES]).payload_bytes == size
    assert size <= MAX_STATE_BYTES


def test_positions_in_a_slice_of_more_than_two_to_the_32_elements() -> None:
    n = 3 * PARAMETERS
    positions = np.array([0, 5, (1 << 32) + 1, n - 1], np.int64)
    data = b"".join(bytes(part) for part in positions_parts(positions, n))
    assert len(data) < 100
    assert Reader(data).positions(n).tolist() == positions.tolist()
    lone = np.array([n - 1], np.int64)
    data = b"".join(bytes(part) for part in positions_parts(lone, n))
    assert Reader(data).positions(n).tolist() == [n - 1]
