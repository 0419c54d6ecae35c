"""Average precision of a detector: the area under its curve of precision over recall."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["average_precision", "overlaps"]


def average_precision(
    found: Sequence[tuple[Tensor, Tensor]],
    true: Sequence[tuple[Tensor, Tensor]],
    *,
    overlap: float = 0.5,
) -> float:
    """Average precision over all images, for one class.

    Detections are judged from the highest score down. One is right if it overlaps a true box that no
    detection before it has taken. A detection is neither right nor wrong if it lies mostly within an ignored
    box, as KITTI judges its DontCare regions and objects that are too small or too hidden.

    Args:
        found: for every image the boxes (n × 4: left, top, right, bottom) and their scores (n).
        true: for every image the true boxes (m × 4) and the ignored ones (k × 4).
        overlap: intersection over union from which on a detection is right; KITTI takes 0.5 for pedestrians.

    Returns:
        From 0 to 1; nan if there is no true box at all.
    """
    if len(found) != len(true):
        raise ValueError(f"detections of {len(found)} images, but true boxes of {len(true)}")
    scores: list[float] = []
    right: list[bool] = []
    for (boxes, confidences), (expected, ignored) in zip(found, true, strict=True):
        shared = overlaps(boxes, expected)
        within = overlaps(boxes, ignored, of_first=True)
        taken: set[int] = set()
        for which in confidences.argsort(descending=True, stable=True).tolist():
            free = [
                (float(shared[which, other]), other) for other in range(len(expected)) if other not in taken
            ]
            best, match = max(free, default=(0.0, -1))
            if best >= overlap:
                taken.add(match)
            elif len(ignored) and float(within[which].max()) >= overlap:
                continue
            scores.append(float(confidences[which]))
            right.append(best >= overlap)
    total = sum(len(expected) for expected, _ in true)
    if not total:
        return float("nan")
    if not scores:
        return 0.0
    order = torch.tensor(scores).argsort(descending=True, stable=True)
    hits = torch.tensor(right)[order].double().cumsum(0)
    precision = hits / torch.arange(1, len(hits) + 1)
    # At a recall, the best precision that is reached at this recall or a higher one.
    best_precision = precision.flip(0).cummax(0).values.flip(0)
    recall = torch.cat([torch.zeros(1, dtype=torch.float64), hits / total])
    return float((recall.diff() * best_precision).sum())


def overlaps(first: Tensor, second: Tensor, *, of_first: bool = False) -> Tensor:
    """Intersection over union of every pair of boxes; with `of_first`, over the area of the first box."""
    low = torch.maximum(first[:, None, :2], second[None, :, :2])
    high = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(2)
    own = (first[:, 2:] - first[:, :2]).prod(1)[:, None]
    whole = own if of_first else own + (second[:, 2:] - second[:, :2]).prod(1)[None] - shared
    return shared / whole.clamp(min=1e-9)
