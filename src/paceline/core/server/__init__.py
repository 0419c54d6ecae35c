"""What a parameter server decides, as a leader and as a follower. The processes are in `paceline.ps`.

* `lead_machine.py`     LeadMachine: every decision of the server that leads. Its parts:
* `run_order.py`        RunOrder: makes the run's one order of steps from events.
* `start_gate.py`       StartGate: what the run's first step waits for.
* `waits.py`            Waits: unanswered requests of workers, and since when they wait.
* `deadlines.py`        Deadlines: workers that are waited for too long.
* `placer.py`           Placer: which servers take part, and which of them holds which slices.
* `accusations.py`      Accusations: workers that cannot reach a server which the leader still sees.
* `mode_switch.py`      ModeSwitch: a change of mode that the controller requested.
* `checkpoint_cuts.py`  CheckpointCuts: when a checkpoint is cut, whose parts it waits for, what became of it.
* `reply_notes.py`      ReplyNotes: what replies tell workers beside their answers.
* `follower_machine.py` FollowerMachine: what a follower knows and decides; what its promotion needs.
* `standby.py`          Standby: a follower's copy of the leader's decider.
* `step_needs.py`       can_execute: whether all that a step needs is at a server.
* `departures.py`       Departures: which process of a worker an answer is for.
* `slice_transfers.py`  SliceTransfers: slices that change hands between servers.

What goes in and what comes out:

* `worker_requests.py`  what workers ask, one class for each request.
* `lead_actions.py`     what the leader's process does, one class for each action.
* `lead_reports.py`     what the leader tells the controller, one class for each report.
* `lead_settings.py`    LeadSettings: the settings that the leader's decisions depend on.
* `present.py`          Present: the mode, placement and workers of one server at this moment.
"""

__all__: list[str] = []
