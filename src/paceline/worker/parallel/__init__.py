"""What one worker does inside: batches in parts, side by side.

`--local threads:K` and `processes:K`, the same batch on several replicas of the model:

* `local_parallelism.py` LocalParallelism: makes prepared models compute in parts.
* `split_model.py`     SplitForward: a call of a model as one node of the script's graph.
* `batch_parts.py`     Batch, BatchPart: arguments cut along the samples; outputs put together again.
* `part_graph.py`      PartGraph: one replica's forward and backward pass.
* `thread_replicas.py` ThreadReplicas: replicas in threads.
* `process_replicas.py` ProcessReplicas: replicas in forked processes.

Processes that a worker forks:

* `helper_process.py`  HelperProcess: a fork that answers messages, and ends with its worker.
* `mailbox.py`         Mailbox: messages with tensors in shared memory.
* `handed_values.py`   values in such messages, as JSON.
* `shared_state.py`    SharedState: parameters and buffers in memory that forks map.
"""

from paceline.worker.parallel.local_parallelism import LocalParallelism

__all__ = ["LocalParallelism"]
