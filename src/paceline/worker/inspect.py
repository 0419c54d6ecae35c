"""Runs a script up to prepare() and tells what it would train: `paceline plan` asks.

`python -m paceline.worker.inspect SERVERS FD OPTIMIZERS COMPRESSION overlap|- script|module SEARCH PROGRAM
[ARGS…]` writes JSON to the descriptor FD. SEARCH is the program's first place to import from.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from paceline.comm.compression import parse_compression
from paceline.comm.transfer import Transfer
from paceline.params import OptimizerSpec, partition
from paceline.worker.exchange.encoders import lay_out
from paceline.worker.loader import data_facts
from paceline.worker.prepared import Models, Prepared
from paceline.worker.program_runner import run_program
from paceline.worker.session import Session, enter_session

__all__ = ["main"]


class InspectingSession(Session):
    """Its prepare() tells what it got and ends the process."""

    def __init__(self, servers: int, fd: int, optimizers: Sequence[str], transfer: Transfer) -> None:
        super().__init__()
        self._servers = servers
        self._transfer = transfer
        self._fd = fd
        self._optimizers = optimizers

    def prepare(self, objects: Sequence[Any]) -> NoReturn:
        """Tell, and end."""
        got = Prepared(objects)
        spec = OptimizerSpec.of_all(got.optimizers, self._optimizers)
        models = Models(got.models)
        _, layout, _ = lay_out(models, got.optimizers, spec, self._transfer, servers=self._servers)
        data = data_facts(got.loader) if got.loader is not None else {}
        facts = {
            "parameters": layout.numel,
            "nbytes": layout.nbytes,
            "tensors": len(layout.tensors),
            "slices": len(layout.slices),
            "samples": data.get("samples"),
            "batch_size": data.get("batch_size"),
            "optimizer": ", ".join(target.replace(":", ".") for target in spec.targets),
            "shards": [
                [len(shard), sum(s.nbytes for s in shard)] for shard in partition(layout, self._servers)
            ],
        }
        with os.fdopen(self._fd, "w") as out:
            json.dump(facts, out)
        raise SystemExit(0)


def main() -> None:
    """See the module."""
    servers, fd, optimizers, compress, overlap, kind, search, script, *args = sys.argv[1:]
    del sys.path[0]  # the present directory, by `python -m`
    allowed = [o for o in optimizers.split(",") if o]
    transfer = Transfer(compress=parse_compression(compress), overlap=overlap == "overlap")
    enter_session(InspectingSession(int(servers), int(fd), allowed, transfer))
    run_program(script, args, search=search, module=kind == "module")


if __name__ == "__main__":
    main()
