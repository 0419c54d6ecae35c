"""What Paceline adds to a training step on a GPU.

One worker and one server on one GPU against the plain loop; several workers on it, by NVIDIA MPS, against one
plain process with the whole batch, and against DDP with as many processes; the server in host memory.
All sides run the same loop (benchmarks/gpu_models.py). Needs a CUDA device and torchvision.
"""

import sys
from functools import partial

import torch

from benchmarks import ours
from benchmarks.harness import Case, Side, measure, parse
from benchmarks.peers import gpu_loop

BATCH = {"resnet50": 128, "vgg16": 64, "resnet18": 128, "gpt": 16}


def our(model: str, workers: int = 1, mode: str = "bsp", **settings: object) -> Side:
    """Our side, with one server."""

    def side(rounds: int) -> list[float]:
        return ours.train_gpu(
            model, workers=workers, mode=mode, batch=BATCH[model], rounds=rounds, **settings
        )

    return side


def plain(model: str, ranks: int = 1) -> Side:
    """One process, or DDP; the batch is of all together."""
    return partial(gpu_loop.steps, model, BATCH[model], ranks)


SIDES: dict[str, Side] = {
    **{f"{model}/plain": plain(model) for model in BATCH},
    **{f"{model}/1worker": our(model) for model in BATCH},
    **{f"{model}/1worker-asp": our(model, mode="asp") for model in ("resnet50", "gpt")},
    "resnet18/1worker-no-spans": our("resnet18", spans=False),
    "resnet50/host-overlap": our("resnet50", server_device="cpu", overlap=True),
    "resnet50/host": our("resnet50", server_device="cpu"),
    **{
        f"resnet50/{workers}workers-{mode}": our("resnet50", workers, mode)
        for workers in (2, 4)
        for mode in ("bsp", "asp")
    },
    **{f"gpt/2workers-{mode}": our("gpt", 2, mode) for mode in ("bsp", "asp")},
    "resnet50/ddp-2": plain("resnet50", 2),
}


def case(ours: str, target: float | None, peer: str | None = None) -> Case:
    """Ours against the plain loop, unless said otherwise."""
    peer = peer or f"{ours.partition('/')[0]}/plain"
    return Case(name=f"{ours}/{peer.partition('/')[2]}", ours=ours, peer=peer, target=target)


CASES = [
    case("resnet50/1worker", 0.97),
    case("vgg16/1worker", 0.97),
    case("resnet18/1worker", 0.93),
    case("gpt/1worker", 0.97),
    case("resnet50/1worker-asp", 0.97),
    case("gpt/1worker-asp", None),
    case("resnet50/host-overlap", 0.90),
    case("resnet50/host", None),
    case("resnet50/2workers-bsp", 0.97),
    case("resnet50/2workers-asp", 0.97),
    case("resnet50/4workers-bsp", 0.87),
    case("resnet50/4workers-asp", 0.93),
    case("gpt/2workers-bsp", 0.90),
    case("gpt/2workers-asp", None),
    case("resnet50/2workers-bsp", 1.0, "resnet50/ddp-2"),
    case(
        "resnet18/1worker", 0.99, "resnet18/1worker-no-spans"
    ),  # what recording costs, the device's lane too
]


def main() -> None:
    """Measure and report."""
    options = parse("overhead_gpu", __doc__, CASES, repeats=3, rounds=8)
    if not torch.cuda.is_available():
        sys.exit("benchmarks.overhead_gpu needs a CUDA device, and torch sees none here.")
    measure(options, SIDES)


if __name__ == "__main__":
    main()
