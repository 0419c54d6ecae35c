"""A Ray actor that holds the parameters; numpy arrays travel through the object store.

The gradient is an argument of the call and the parameters its result: a read-only view of the
store, which the worker (the driver) copies into its own, as a model's `set_weights` would.

How long Ray has been running matters: until the store has gone round its pages once, every process
takes page faults on new ones, and a 47 MB round costs about twice what it does later.
"""

import os
import sys
from typing import Any

from benchmarks import peers


def rounds(n: int, rounds: int, *, warm_up: int = peers.WARM_UP) -> list[float]:
    """Seconds of each push + step + pull of `n` float32, after `warm_up` untimed rounds."""
    peers.need("ray", "ray")
    return peers.spawn(__name__, n, rounds, warm_up, env={"RAY_USAGE_STATS_ENABLED": "0"})


def main(n: int, rounds: int, warm_up: int) -> None:
    """The child process: it starts a local Ray, is the worker, and stops Ray."""
    import numpy as np
    import ray

    class Server:
        def __init__(self) -> None:
            self.parameters = np.ones(n, dtype=np.float32)
            self.step = np.empty(n, dtype=np.float32)

        def push_pull(self, gradient: Any) -> Any:
            np.multiply(gradient, np.float32(peers.LEARNING_RATE), out=self.step)
            self.parameters -= self.step
            return self.parameters

    ray.init(
        num_cpus=2,
        object_store_memory=2**30,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        _temp_dir=os.environ["TMPDIR"],
    )
    try:
        server = ray.remote(Server).remote()
        gradient = np.full(n, 1e-3, dtype=np.float32)
        parameters = np.ones(n, dtype=np.float32)

        def one_round() -> None:
            np.copyto(parameters, ray.get(server.push_pull.remote(gradient)))

        peers.tell(peers.timed(one_round, rounds, warm_up))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
