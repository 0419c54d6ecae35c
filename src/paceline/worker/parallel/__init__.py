"""What one worker does inside: batches in parts, side by side, and models in stages.

`--local threads:K` and `processes:K`, the same batch on several replicas of the model:

* `local_parallelism.py` LocalParallelism: makes prepared models compute in parts.
* `split_model.py`     SplitForward: a call of a model as one node of the script's graph.
* `batch_parts.py`     Batch, BatchPart: arguments cut along the samples; outputs put together again.
* `module_copy.py`     copies of modules that share all but parameters and buffers.
* `part_graph.py`      PartGraph: one replica's forward and backward pass.
* `thread_replicas.py` ThreadReplicas: replicas in threads.
* `process_replicas.py` ProcessReplicas: replicas in forked processes.

`--pipeline K`, the stages of a model in processes of their own:

* `staged_forward.py`  StagedForward: a call of a model, or of a model and its loss, as one node of the graph.
* `pipeline_stages.py` PipelineStages: a call of a model, as the worker sees it.
* `call_plans.py`      CallPlan: how a kind of call is cut; CallPlans: all of them.
* `model_graph.py`     what a model does in a call, as a graph (torch.fx).
* `stage_costs.py`     how long its operations take, and where it is cut because of that.
* `stage_program.py`   StageProgram: the part of the graph that a stage computes.
* `stage_models.py`    StageModel: the modules of a model on memory that all stages map.
* `stage_runner.py`    StageRunner: forward and backward passes of one stage, in the schedule's order.
* `stage_link.py`      StageLink: activations and gradients between neighbours.
* `stage_server.py`    StageServer: what the process of a stage answers to the worker.

Processes that a worker forks:

* `helper_process.py`  HelperProcess: a fork that answers messages, and ends with its worker.
* `mailbox.py`         Mailbox: messages with tensors in shared memory.
* `handed_values.py`   values in such messages, as JSON.
* `shared_state.py`    SharedState: parameters and buffers in memory that forks map.
"""

from paceline.worker.parallel.local_parallelism import LocalParallelism
from paceline.worker.parallel.staged_forward import loss_of

__all__ = ["LocalParallelism", "loss_of"]
