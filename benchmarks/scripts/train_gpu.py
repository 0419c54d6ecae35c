"""A worker that trains on a GPU: FOLDER MODEL BATCH ROUNDS."""

import sys

import paceline
from benchmarks import gpu_models, ours


def main() -> None:
    """Run the loop that every side times, prepared."""
    folder, name, batch, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    model = gpu_models.build(name)
    optimizer = gpu_models.optimizer(name, model)
    model, optimizer = paceline.prepare(model, optimizer)
    step = gpu_models.step_of(model, optimizer, *gpu_models.inputs(name, batch))
    seconds, ends = gpu_models.timed(step, rounds)
    ours.report(folder, paceline.rank(), seconds=seconds, ends=ends)


if __name__ == "__main__":
    main()
