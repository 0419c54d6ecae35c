"""What `--local` and `--pipeline` do to the models that a script prepares."""

from collections.abc import Sequence

from torch import nn

from paceline.core.local_spec import LocalSpec
from paceline.core.pipeline_spec import PipelineSpec
from paceline.worker.parallel.pipeline_stages import PipelineStages
from paceline.worker.parallel.process_replicas import ProcessReplicas
from paceline.worker.parallel.split_model import Replicas, SplitForward, check_can_split
from paceline.worker.parallel.staged_forward import StagedForward
from paceline.worker.parallel.thread_replicas import ThreadReplicas

__all__ = ["LocalParallelism"]


class LocalParallelism:
    """Lets models compute their batches in parts, until it is closed.

    Args:
        local: which replicas share a batch …
        pipeline: … or which stages.
        models: those that were prepared, bound to the run's memory.

    Raises:
        UsageError: a model that cannot be computed in parts.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        local: LocalSpec | None = None,
        pipeline: PipelineSpec | None = None,
        deadline_s: float,
    ) -> None:
        local, pipeline = local or LocalSpec(), pipeline or PipelineSpec()
        option = str(pipeline) if pipeline.splits else f"--local {local}"
        check_can_split(models, option)
        self._replicas: Replicas
        self._forwards: Sequence[SplitForward | StagedForward]
        if pipeline.splits:
            stages = self._replicas = PipelineStages(models, pipeline, deadline_s=deadline_s)
            most = pipeline.most_microbatches
            self._forwards = [
                StagedForward(
                    model,
                    k,
                    stages,
                    pipeline,
                    SplitForward(model, k, stages, count=most, option=option),
                )
                for k, model in enumerate(models)
            ]
        elif local.kind == "threads":
            self._replicas = ThreadReplicas(models, local.count)
        else:
            self._replicas = ProcessReplicas(models, local.count, deadline_s=deadline_s)
        if local.splits:
            self._forwards = [
                SplitForward(model, k, self._replicas, count=local.count, option=option)
                for k, model in enumerate(models)
            ]
        for forward in self._forwards:
            forward.install()

    def most_held(self) -> list[int]:
        """Of each stage of a pipeline, the most micro-batches that the last batch had it hold at a time."""
        return self._replicas.most_held if isinstance(self._replicas, PipelineStages) else []

    def close(self) -> None:
        """The models compute as ever again; threads and processes end."""
        for forward in self._forwards:
            forward.remove()
        self._replicas.close()
