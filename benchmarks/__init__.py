"""Benchmarks: Paceline against its peers on the same machine, in one run.

Each prints our median, the peer's, the ratio and the least ratio that we promise::

    python -m benchmarks.exchange --quick
    python -m benchmarks.overhead --json overhead.json

exchange    push + SGD step + pull, against what else moves gradients on one host
overhead    a training step with Paceline, against the plain loop and DDP
tls         the same exchange and the same training with encrypted links
checksum    what a checksum of payloads would cost on TCP links without TLS
startup     command to first finished step, against torchrun
logging     a call of paceline.log, against TensorBoard's writer, csv and logging
protection  training with checks, spans and checkpoints, against the same without
chaos/      the fault matrix: what a death, a stop, a full disk, … costs; and what it costs peers
worktrees   old code against new code, in alternating blocks
table       the tables of figures in README.md and docs/benchmarks.md, from published/
harness     arguments, alternating blocks, medians, table, JSON
ours        the Paceline side of every case
peers/      the other side of every case, one file a peer, each in fresh processes
models      the models, their data, and the one training loop that all sides time
first_step  the script that `startup` launches
"""
