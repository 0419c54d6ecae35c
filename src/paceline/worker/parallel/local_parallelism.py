"""What `--local` does to the models that a script prepares."""

from collections.abc import Sequence

from torch import nn

from paceline.core.local_spec import LocalSpec
from paceline.worker.parallel.process_replicas import ProcessReplicas
from paceline.worker.parallel.split_model import Replicas, SplitForward, check_can_split
from paceline.worker.parallel.thread_replicas import ThreadReplicas

__all__ = ["LocalParallelism"]


class LocalParallelism:
    """Lets models compute their batches in parts, until it is closed.

    Args:
        models: those that were prepared, bound to the run's memory.

    Raises:
        UsageError: a model that cannot be computed in parts.
    """

    def __init__(self, spec: LocalSpec, models: Sequence[nn.Module], *, deadline_s: float) -> None:
        check_can_split(models, f"--local {spec}")
        self._replicas: Replicas = (
            ThreadReplicas(models, spec.count)
            if spec.kind == "threads"
            else ProcessReplicas(models, spec.count, deadline_s=deadline_s)
        )
        self._forwards = [SplitForward(model, k, self._replicas, spec) for k, model in enumerate(models)]
        for forward in self._forwards:
            forward.install()

    def close(self) -> None:
        """The models compute as ever again; threads and processes end."""
        for forward in self._forwards:
            forward.remove()
        self._replicas.close()
