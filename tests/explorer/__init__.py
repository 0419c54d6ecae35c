"""Small worlds, exhaustively: every order of messages, deaths and replacements of two workers and two
servers.

The processes of a world are the real ones without sockets and memory: the leader and the followers are the
core's LeadMachine and FollowerMachine with their decider and sequencer, the workers exchange through the
real Client, the controller decides with the core's RunMachine. The explorer chooses which message arrives
next and which process dies.

    python -m tests.explorer                       # all worlds, up to a cap each; `make explore`
    python -m tests.explorer --mode ssp:1 --cap 50000 --json seen.json
    python -m tests.explorer --world '…' --trace '…'   # run a fault's trace again (its command is printed)
    python -m tests.explorer --mistake NAME        # make a mistake on purpose, and see it found

In every state and at every end: something can happen until the run has ended (no deadlock, no failure); no
push and no sample is applied twice, and at the end each is applied once; the bound, quorum and drops of the
mode are kept; an answer comes with the parameters of its version; a checkpoint is a cut; what was
acknowledged is not lost where there are replicas; a follower that has heard everything knows what the
leader knows.

How the number of states is kept small, and why nothing is missed by it:

* Equal states are merged. What a process does depends on its state and on the message alone, so it is
  computed once
  for equal processes, in whichever worlds-wide states they occur.
* A worker that has its answer goes first, alone. It waits for one message of one process, so that no other
  event
  changes what it does, and what it sends can be delivered at any later time. If it dies, dying before the
  answer is the same as dying with none of what follows sent.
* Deaths: a process dies between two events, or when it has sent some of the messages that follow from one.
  What it
  had sent before arrives, since all processes are on one host.

Assumptions, each because of how long things take: what a dead process had sent arrives before its
replacement is heard of, and timers (the wait for a cause, a lost server that workers accuse) end when
nothing else can happen.

* `model.py`        processes, messages, World: one small run.
* `snapshots.py`    packed processes, and the form that equal ones share.
* `beginnings.py`   what servers begin with.
* `servers.py`      a server: the core's machines, and what `ps/` does around them. `shards.py` executes.
* `workers.py`      a worker's script on the real Client; `links.py` stands in for its sockets.
* `controllers.py`  the controller: the core's RunMachine.
* `world.py`        states, the events that may come next, and what must hold; `checks.py`: bounds of modes.
* `search.py`       breadth first up to a cap, then random walks; traces.
* `worlds.py`       which worlds there are: what the plan admits.
* `mistakes.py`     mistakes that the explorer must find.
"""
