"""What TLS costs: the same run over TCP with `--tls` and without.

exchange    push + SGD step + pull, one worker, one server, asp; nothing else, so nearly all is transfer.
            resnet18 is 11,689,512 float32 (47 MB each way), small is 61,706.
train       steps of a real training in bsp, one worker, one server: what is left of it in practice.
start       connecting, authenticating and closing a link, which a run does once a worker and server.

Ours is with TLS, the peer without, so a ratio below 1 is the cost. There is no target: encryption is chosen,
and its price is to be known.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks import ours
from benchmarks.harness import Case, Side, measure, parse
from paceline.comm import Listener, Secret, connect, new_secret
from paceline.comm.certificates import Certificates
from paceline.comm.meeting import accept

SIZES = {"resnet18": 11_689_512, "small": 61_706}
ROUNDS = {"resnet18": 1, "small": 20}
"""A small round is shorter than a scheduler's tick: its median needs that many times more."""
BATCH = {"resnet18": 16, "digits": 64}


def flags(on: bool) -> dict[str, bool]:
    """Options of `paceline run`."""
    return {"tls": True} if on else {}


def exchange(size: str, *, on: bool) -> Side:
    """Seconds of each round."""
    return lambda rounds: ours.exchange(
        SIZES[size], link="tcp", mode="asp", workers=1, rounds=rounds * ROUNDS[size], **flags(on)
    )


def train(model: str, *, on: bool) -> Side:
    """Seconds of each step."""
    return lambda rounds: ours.train(
        model, workers=1, servers=1, mode="bsp", batch=BATCH[model], steps=2 * rounds, link="tcp", **flags(on)
    )


def start(*, on: bool) -> Side:
    """Seconds of each link."""

    def side(rounds: int) -> list[float]:
        value = new_secret()
        made = Certificates.for_run("bench").by_role if on else {}
        mine, theirs = (Secret(value, made.get(role)) for role in ("worker", "server"))
        seconds = []
        with _accepting(theirs) as listener:
            for _ in range(10 * rounds):
                began = time.perf_counter()
                connect(listener.address, mine, peer="server:0", link="tcp").close()
                seconds.append(time.perf_counter() - began)
        return seconds

    return side


@contextlib.contextmanager
def _accepting(secret: bytes) -> Iterator[Listener]:
    listener = Listener()
    sock = listener.sockets[-1]
    sock.setblocking(True)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                accept(sock.accept()[0], secret).close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener
    finally:
        sock.shutdown(2)
        thread.join()
        listener.close()


KINDS: dict[str, Callable[..., Side]] = {
    **{f"exchange/{size}": partial(exchange, size) for size in SIZES},
    **{f"train/{model}": partial(train, model) for model in BATCH},
    "start": start,
}
# Each next to its peer, so that both meet the same neighbours on the machine.
SIDES = {f"{name}/{how}": make(on=how == "on") for name, make in KINDS.items() for how in ("on", "off")}
CASES = [Case(name=f"{name}/on/off", ours=f"{name}/on", peer=f"{name}/off") for name in KINDS]


def main() -> None:
    """Measure and report."""
    measure(parse("tls", __doc__, CASES, repeats=4, rounds=10), SIDES)


if __name__ == "__main__":
    main()
