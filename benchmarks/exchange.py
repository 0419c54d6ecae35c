"""Push + SGD step + pull of a model's parameters, one server, against what else does it.

resnet18 is 11,689,512 float32 (47 MB), small is 61,706. See benchmarks/peers/ for what a round of each peer
is. `ray` is measured after 20 rounds, when its object store reuses its pages, `ray-cold` after 3. The last
two cases have more workers: two in bsp against MPI's all-reduce, and four in asp against one, as rounds per
second of all workers together.
"""

from functools import partial

from benchmarks import ours
from benchmarks.harness import MS, RATE, Case, Side, Unit, measure, parse
from benchmarks.peers import floor, gloo, mpi, ray_actor, torch_rpc

SIZES = {"resnet18": 11_689_512, "small": 61_706}
ROUNDS = {"resnet18": 1, "small": 100}
"""A small round is shorter than a scheduler's tick: its median needs that many times more."""


def our(n: int, link: str, mode: str, workers: int = 1) -> Side:
    """Our side; with several asp workers, seconds per round of all of them together."""

    def side(rounds: int) -> list[float]:
        seconds = ours.exchange(n, link=link, mode=mode, workers=workers, rounds=rounds)
        return [s / workers for s in seconds] if mode == "asp" else seconds

    return side


def sides(size: str) -> dict[str, Side]:
    """All sides at one size; ours stand between the peers that they are compared with."""
    n = SIZES[size]
    found: dict[str, Side] = {
        "floor": partial(floor.rounds, n),
        "shm": our(n, "shm", "asp"),
        "shm-bsp": our(n, "shm", "bsp"),
        "torch-rpc": partial(torch_rpc.rounds, n),
        "torch-rpc-tuned": partial(torch_rpc.rounds, n, tuned=True),
        "gloo-allreduce": partial(gloo.rounds, n, "allreduce"),
        "gloo-sendrecv": partial(gloo.rounds, n, "sendrecv"),
        "tcp": our(n, "tcp", "asp"),
        "ray": partial(ray_actor.rounds, n),
        "ray-cold": partial(ray_actor.rounds, n, warm_up=3),
        "mpi-allreduce": partial(mpi.rounds, n),
        "shm-2workers-bsp": our(n, "shm", "bsp", workers=2),
        "shm-4workers": our(n, "shm", "asp", workers=4),
    }
    return {f"{size}/{name}": more_rounds(side, ROUNDS[size]) for name, side in found.items()}


def more_rounds(side: Side, factor: int) -> Side:
    """The side, with `factor` times the rounds it is asked for."""
    return lambda rounds: side(rounds * factor)


def case(size: str, mine: str, peer: str, target: float, unit: Unit = MS, most: float | None = None) -> Case:
    """The case `size/mine/peer`."""
    return Case(
        name=f"{size}/{mine}/{peer}",
        ours=f"{size}/{mine}",
        peer=f"{size}/{peer}",
        target=target,
        unit=unit,
        most=most,
    )


CASES = [
    case("resnet18", "shm", "floor", 0.77),
    case("resnet18", "shm-bsp", "floor", 1.3),
    case("resnet18", "shm", "torch-rpc-tuned", 1.6),
    case("resnet18", "shm", "torch-rpc", 2.0),
    case("resnet18", "shm", "gloo-allreduce", 2.5),
    case("resnet18", "shm", "ray", 5.0),
    case("resnet18", "shm", "ray-cold", 5.0),
    case("resnet18", "tcp", "gloo-sendrecv", 1.0),
    case("resnet18", "tcp", "ray", 2.4),
    case("resnet18", "tcp", "ray-cold", 2.4),
    case("small", "shm", "ray", 15.0),
    case("small", "shm", "gloo-sendrecv", 1.2, most=0.25),
    case("resnet18", "shm-2workers-bsp", "mpi-allreduce", 2.5),
    case("resnet18", "shm-4workers", "shm", 0.95, unit=RATE),
]


def main() -> None:
    """Measure and report."""
    measure(parse("exchange", __doc__, CASES), sides("resnet18") | sides("small"))


if __name__ == "__main__":
    main()
