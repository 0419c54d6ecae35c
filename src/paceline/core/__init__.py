"""The pure core: every decision of a run, without torch, sockets, clocks or threads.

Events in, instructions out. The live servers, the property tests and the simulated run execute this code.

* `server/`       what a parameter server decides, as a leader and as a follower.
* `modes/`        which worker waits for which: specifications, state machines, schedule, guard, L-BFGS.
* `leases.py`     LeaseBook: every sample of an epoch goes to exactly one worker, whatever dies.
* `layout.py`     Layout, Slice, Segment: which parameter lies where; fingerprint; partition over servers.
* `placement.py`  Placement: which servers hold which slices.
* `notes.py`      Notes: what a reply tells a worker beside its answer.
* `events.py`     everything that changes what the decider knows, as types.
* `steps.py`      everything that servers execute, as types.
* `json_types.py` Json, JsonObject: values that JSON can hold.
* `codec.py`      Codec: steps and events as JSON, checked when they are read.
* `decider.py`    Decider: turns what workers do into the run's one order of steps. Its parts:
* `decider_state.py`  DeciderState: all that it knows, as JSON, for a follower that joins later.
* `pushes.py`     Pushes: pushes on their way, and what becomes of each.
* `roster.py`     Roster: the processes that are attached as workers, and their last requests.
* `readers.py`    Readers: how far each worker is in the run's epochs; workers that wait for leases.
* `health.py`     Health: workers whose gradients are not finite again and again.
* `sampler_orders.py`  SamplerOrders: all workers draw the same order of an epoch's samples.
* `claims.py`     what a worker claims of its push, within what its leases allow.
* `limited_lines.py`  LimitedLines: a record that strangers cannot fill a disk with.
* `totals.py`     Totals: the counts of a run; Applied: the record of a push.
* `out_of_step.py` OutOfStep: workers that step the run's optimizers in different orders.
* `rulings.py`    Ruling: all that follows from an event.
* `state.py`      StateCodec: state as JSON, checked when it is read.
* `sequencer.py`  Sequencer: steps that wait for the second half of an update; OrderLog: catching up.
* `placement_changes.py`  PlacementChanges: servers that come and go, and the placement that follows.
* `dealing.py`    whether samples can be dealt out as a mode wants it.
* `local_spec.py` LocalSpec: how one worker computes a batch, in threads or processes.
* `pipeline_spec.py` PipelineSpec: models in stages, batches in micro-batches: schedules, where to cut.
* `rows.py`       Rows, Groups: the leases of a group of workers, of which every member reads its part.
* `norms.py`      NormBound: gradients that are absurd, though finite; SliceNorms: norm of a clipped update.
* `staleness.py`  RecentUpdates: how many versions an optimizer's parameters gained since a worker read them.
* `fates.py`      Fates: which pushes were applied, for workers that compress with error feedback.
* `descent.py`    Descent: sandblaster's sum of an epoch, and the iteration at its end.
* `ballot.py`     Ballot: whether the run ends early, by the workers' votes.
* `collective_calls.py`  CollectiveCalls: small values that workers gather, average or broadcast.
* `run_machine.py`  RunMachine: the life of a run, and what follows from the end of a process.
* `run_machine_state.py`  RunMachineState: all that it knows, as the controller's journal has it.
* `run_decisions.py`  RunState and the machine's decisions, one class each.
"""

__all__: list[str] = []
