"""Random histories of faults on real runs, judged by a witness that is not the run's own account.

A history is drawn from a seed: a mode, links, servers, replicas, checkpoints, and 3 to 12 events (kill, stop
and continue, scale, switch, Ctrl-C and resume, a machine that goes down) on workers, servers, the lead and
the controller, with injected faults of links and disks besides. It is played on a real `paceline run`.

    python -m tests.histories --seeds 0-49          # play these; `make chaos` plays 50, `make soak` 2,000
    python -m tests.histories --seeds 17 --keep     # replay one, and keep its run directory

`history.py` draws and prints histories (no processes), `script.py` is what the workers train, `witness.py`
judges the trained parameters, `player.py` plays a history, `__main__.py` is the command.
"""
